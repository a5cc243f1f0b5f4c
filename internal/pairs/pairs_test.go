// SPDX-License-Identifier: Apache-2.0

package pairs

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ummu/ummu/mm"
)

func rng(from, to mm.Addr) mm.Range { return mm.Range{Start: from, End: to} }

var noCall = mm.Call{ABI: mm.ABINone}

// joined runs records through a Joiner.
func joined(rs []mm.Record) []Change {
	var out []Change
	p := New(false, func(c *Change) error { out = append(out, *c); return nil })
	for i := range rs {
		p.Add(&rs[i])
	}
	p.End()
	return out
}

func TestPairs(t *testing.T) {
	munmap, mremap, vec := mm.Call{NR: 11}, mm.Call{NR: 25}, mm.Call{NR: 440}
	uring := mm.Call{NR: 25, ABI: mm.ABIIOUring}
	b := func(seq uint64, tid uint32, k mm.Kind, r mm.Range, c mm.Call, f mm.Flags) mm.Record {
		return mm.Record{Seq: seq, Time: time.Duration(seq), PID: 1, TID: tid, Kind: k, Range: r, Call: c, Flags: f, Phase: mm.PhaseBegin}
	}
	e := func(seq uint64, tid uint32, k mm.Kind, r mm.Range, c mm.Call, f mm.Flags, ret int64) mm.Record {
		x := b(seq, tid, k, r, c, f)
		x.Phase, x.Ret = mm.PhaseEnd, ret
		return x
	}
	r1, r2, hull := rng(0x1000, 0x2000), rng(0x5000, 0x6000), rng(0x1000, 0x6000)
	for _, c := range []struct {
		name string
		in   []mm.Record
		want []string
	}{
		{"one", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), e(2, 1, mm.Unmap, r1, munmap, 0, 0)}, []string{"1 unmap 1000-2000 0"}},
		{"two threads", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), b(2, 2, mm.Unmap, r2, munmap, 0), e(3, 2, mm.Unmap, r2, munmap, 0, 0), e(4, 1, mm.Unmap, r1, munmap, 0, -22)},
			[]string{"2 unmap 5000-6000 0", "1 unmap 1000-2000 -22"}},
		{"end knows better", []mm.Record{b(1, 1, mm.Move, r1, mremap, mm.Maybe), e(2, 1, mm.Map, r2, mremap, 0, 0)}, []string{"1 map 5000-6000 0"}},
		{"vector", []mm.Record{b(1, 1, mm.Zap, r1, vec, mm.Vector), b(2, 1, mm.Zap, r2, vec, mm.Vector), e(3, 1, mm.Zap, hull, vec, mm.Vector, 8192)},
			[]string{"1 zap 1000-2000 8192", "2 zap 5000-6000 8192"}},
		{"unpaired end", []mm.Record{e(1, 1, mm.Unmap, r1, munmap, mm.Unpaired, 0)}, []string{"1 unmap 1000-2000 0"}},
		{"still open", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), b(2, 2, mm.Unmap, r2, munmap, 0)}, []string{"1 unmap 1000-2000 open", "2 unmap 5000-6000 open"}},
		{"end was lost", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), b(3, 1, mm.Unmap, r2, munmap, 0), e(4, 1, mm.Unmap, r2, munmap, 0, 0)},
			[]string{"1 unmap 1000-2000 open", "3 unmap 5000-6000 0"}},
		{"killed in the call", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), e(2, 1, mm.Exit, mm.Range{}, noCall, mm.LastTask, 0)},
			[]string{"1 unmap 1000-2000 open", "2 exit 0-0 0"}},
		{"region, with changes inside the library", []mm.Record{b(1, 1, mm.Register, r1, noCall, 0), b(2, 1, mm.Unmap, r2, munmap, 0), e(3, 1, mm.Unmap, r2, munmap, 0, 0), e(4, 1, mm.Register, r1, noCall, 0, 0)},
			[]string{"2 unmap 5000-6000 0", "1 register 1000-2000 0"}},
		{"buffers of one call", []mm.Record{b(1, 1, mm.Register, r1, vec, mm.Vector), b(2, 1, mm.Deregister, mm.Range{}, vec, mm.Vector), e(3, 1, mm.Register, r1, vec, mm.Vector, 2)},
			[]string{"1 register 1000-2000 2", "2 deregister 0-0 2"}},
		{"device closed", []mm.Record{e(1, 1, mm.Deregister, mm.Range{}, munmap, 0, 0)}, []string{"1 deregister 0-0 0"}},
		{"killed while registering", []mm.Record{b(1, 1, mm.Register, r1, noCall, 0), e(2, 1, mm.Exit, mm.Range{}, noCall, mm.LastTask, 0)},
			[]string{"1 register 1000-2000 open", "2 exit 0-0 0"}},
		{"lost between", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), e(9, 0, mm.Lost, mm.Whole, noCall, 0, 0), e(10, 1, mm.Unmap, r1, munmap, 0, 0)},
			[]string{"9 lost 0-ffffffffffffffff 0", "1 unmap 1000-2000 0"}},
		{"io_uring in a worker", []mm.Record{b(1, 1, mm.Zap, r1, uring, mm.Async), b(2, 1, mm.Zap, r2, uring, mm.Async), b(3, 1, mm.Unmap, r1, munmap, 0), e(4, 1, mm.Unmap, r1, munmap, 0, 0), e(5, 9, mm.Zap, r1, uring, mm.Async, 0), e(6, 8, mm.Zap, r2, uring, mm.Async, 0)},
			[]string{"3 unmap 1000-2000 0", "1 zap 1000-2000 0", "2 zap 5000-6000 0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, x := range joined(c.in) {
				end := fmt.Sprint(x.Ret)
				if x.Open {
					end = "open"
				}
				got = append(got, fmt.Sprintf("%d %v %v %s", x.Time, x.Kind, x.Range, end))
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// Whatever comes, no begin vanishes and none is shown twice: changes = begins
// + ends - joined, and each begin is part of exactly one change.
func TestPairsConserve(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 60).Draw(t, "n")
		var rs []mm.Record
		for i := range n {
			r := mm.Record{
				Seq: uint64(i + 1), Time: time.Duration(i + 1), PID: 1, TID: rapid.Uint32Range(1, 3).Draw(t, "tid"), Kind: mm.Zap,
				Call:  rapid.SampledFrom([]mm.Call{{NR: 11}, {NR: 28}, {NR: 25, ABI: mm.ABIIOUring}}).Draw(t, "call"),
				Range: rng(0x1000, mm.Addr(rapid.SampledFrom([]int{0x2000, 0x3000}).Draw(t, "end"))),
				Phase: rapid.SampledFrom([]mm.Phase{mm.PhaseBegin, mm.PhaseEnd}).Draw(t, "phase"),
			}
			if rapid.IntRange(0, 9).Draw(t, "exit") == 0 {
				r.Kind, r.Phase, r.Call = mm.Exit, mm.PhaseEnd, noCall
				r.Flags = rapid.SampledFrom([]mm.Flags{0, mm.LastTask, mm.SpaceDeath}).Draw(t, "flags")
			}
			rs = append(rs, r)
		}
		begins, seen := 0, map[time.Duration]int{}
		for _, r := range rs {
			if r.Phase == mm.PhaseBegin {
				begins++
			}
		}
		open, changes := 0, joined(rs)
		for _, c := range changes {
			seen[c.Time]++ // the time of the begin, if there was one
			if c.Open {
				open++
			}
		}
		for _, r := range rs {
			if r.Phase == mm.PhaseBegin && seen[r.Time] != 1 {
				t.Fatalf("begin %d is in %d changes", r.Seq, seen[r.Time])
			}
		}
		if ends := n - begins; len(changes) != open+ends {
			t.Fatalf("%d changes from %d ends and %d open begins", len(changes), ends, open)
		}
	})
}
