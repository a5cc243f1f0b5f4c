// SPDX-License-Identifier: Apache-2.0

package findings

import (
	"fmt"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ummu/ummu/mm"
)

// A program of one thread, against a list of live registrations that is
// searched from end to end.
func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type live struct {
			r     mm.Range
			stale bool
		}
		s := &stream{}
		model := map[uint64]*live{}
		var want []string
		next := uint64(0)
		draw := func(name string) mm.Range {
			a := mm.Addr(rapid.IntRange(0, 30).Draw(t, name))
			return pages(a, a+mm.Addr(rapid.IntRange(1, 6).Draw(t, name+" length")))
		}
		handles := func() []uint64 {
			var hs []uint64
			for h := range model {
				hs = append(hs, h)
			}
			slices.Sort(hs)
			return hs
		}
		hit := func(r mm.Range, kind mm.Kind) {
			for _, h := range handles() {
				if m := model[h]; m.r.Overlaps(r) && !m.stale {
					m.stale = true
					want = append(want, fmt.Sprintf("%d by %v at %d", h, kind, len(s.rs)+1))
				}
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"register": func(*rapid.T) {
				next++
				r := draw("buffer")
				s.reg(next, r, 1)
				model[next] = &live{r: r}
			},
			"deregister": func(t *rapid.T) {
				if hs := handles(); len(hs) > 0 {
					h := rapid.SampledFrom(hs).Draw(t, "handle")
					ret := int64(rapid.SampledFrom([]int{0, 0, 16}).Draw(t, "result"))
					s.dereg(h, ret)
					if ret == 0 {
						delete(model, h)
					}
				}
			},
			"unmap": func(t *rapid.T) {
				r := draw("range")
				ret := int64(rapid.SampledFrom([]int{0, 0, -22}).Draw(t, "result"))
				if ret == 0 {
					hit(r, mm.Unmap)
				}
				s.change(mm.Unmap, munmap, r, ret, nil)
			},
			"zap": func(t *rapid.T) {
				r := draw("range")
				hit(r, mm.Zap)
				s.change(mm.Zap, madvise, r, 0, func(r *mm.Record) { r.Arg[0] = 4 })
			},
			"move": func(t *rapid.T) {
				r, to := draw("range"), draw("to")
				hit(r, mm.Move)
				hit(to, mm.Move)
				s.change(mm.Move, mremap, r, int64(to.Start), func(r *mm.Record) { r.To = to })
			},
			"protect": func(t *rapid.T) { s.change(mm.Protect, mprotect, draw("range"), 0, nil) },
			"exit": func(t *rapid.T) {
				s.add(mm.Record{Kind: mm.Exit, Phase: mm.PhaseEnd, Range: mm.Whole, Call: noCall, Flags: mm.SpaceDeath})
				clear(model)
			},
			"": func(t *rapid.T) {
				e, _ := run(s, Options{})
				var got []string
				for _, f := range e.Findings() {
					got = append(got, fmt.Sprintf("%d by %v at %d", f.Registration.Registration.Handle, f.Change.Kind, f.Change.Seq))
				}
				sorted := slices.Sorted(slices.Values(want))
				slices.Sort(got)
				if d := cmp.Diff(sorted, got); d != "" {
					t.Fatalf("(-want +got):\n%s", d)
				}
				if n := e.Stats().Live; n != uint64(len(model)) {
					t.Fatalf("%d live, want %d", n, len(model))
				}
			},
		})
	})
}

// The set of ranges agrees with a set of addresses.
func TestRanges(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s ranges
		var model [64]bool
		t.Repeat(map[string]func(*rapid.T){
			"change": func(t *rapid.T) {
				a := rapid.IntRange(0, 60).Draw(t, "start")
				n := rapid.IntRange(0, 64-a).Draw(t, "length")
				on := rapid.Bool().Draw(t, "add")
				r := mm.Range{Start: mm.Addr(a), End: mm.Addr(a + n)}
				if on {
					s.add(r)
				} else {
					s.remove(r)
				}
				for i := a; i < a+n; i++ {
					model[i] = on
				}
			},
			"": func(t *rapid.T) {
				for i, r := range s {
					if r.Empty() || i > 0 && s[i-1].End > r.Start {
						t.Fatalf("not a set: %v", s)
					}
				}
				for a := range mm.Addr(64) {
					all := true
					for b := a; b < 64; b++ {
						all = all && model[b]
						if got := s.contains(mm.Range{Start: a, End: b + 1}); got != all {
							t.Fatalf("%v contains %v: %v", s, mm.Range{Start: a, End: b + 1}, got)
						}
					}
				}
			},
		})
	})
}
