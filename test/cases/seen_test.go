// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"os/exec"
	"path/filepath"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/internal/conform"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// Case A2: the heap's end goes up, is asked for, is refused, and goes down to
// the middle of a page: one change, of whole pages, at the last of them.
// Case A1: its range needs the old end, which the call does not say.
func TestHeapEnd(t *testing.T) {
	for _, b := range builds {
		t.Run(b.name, func(t *testing.T) {
			p := start(t, b.name)
			s := watch(t, shared, p.pid, tracer.WatchOptions{})
			w := p.do("brk")
			want := mm.Range{Start: mm.Addr(w[0]), End: mm.Addr(w[1])}
			var got []mm.Record
			grown := false
			for _, r := range whole(t, s) {
				if r.Kind.IsChange() {
					got = append(got, r)
				} else if r.Kind == mm.Map && r.Range.Overlaps(want) {
					grown = len(got) == 0
				}
			}
			if len(got) != 2 || got[0].Kind != mm.Unmap || got[0].Phase != mm.PhaseBegin || got[1].Phase != mm.PhaseEnd || got[1].Range != want || got[0].Range != want {
				t.Errorf("want one unmap of %v:%s", want, show(got))
			}
			if !grown {
				t.Error("no map of the growth before it")
			}
		})
	}
}

// Case A3: large blocks that malloc maps inside of libc and free unmaps:
// each free is one unmap of the whole mapping, the header's page included,
// whoever made the call.
func TestMallocFree(t *testing.T) {
	const count, size = 20, 16 << 20
	for _, b := range builds {
		t.Run(b.name, func(t *testing.T) {
			p := start(t, b.name)
			s := watch(t, shared, p.pid, tracer.WatchOptions{Kinds: []mm.Kind{mm.Unmap}})
			w := p.do("alloc %d %d", count, size)
			records := whole(t, s)
			if len(w) != 2*count || len(records) != 2*count {
				t.Fatalf("%d blocks, %d records:%s", len(w)/2, len(records), show(records))
			}
			for i := range count {
				at := mm.Addr(w[2*i])
				want := mm.Range{Start: at, End: at + mm.Addr(w[2*i+1])}
				if want.Len() < size || uint64(want.End)%uint64(page) != 0 {
					t.Fatalf("block %d is %v", i, want)
				}
				for k, phase := range []mm.Phase{mm.PhaseBegin, mm.PhaseEnd} {
					if r := records[2*i+k]; r.Range != want || r.Phase != phase || r.Ret != 0 {
						t.Errorf("free %d: want %v of %v:%s", i, phase, want, show(records[2*i+k:2*i+k+1]))
					}
				}
			}
		})
	}
}

// Case A16: whatever the C library, how it is linked, and what is preloaded:
// the same calls make the same records.
func TestSameRecordsFromEveryProgram(t *testing.T) {
	type seen struct {
		Kind  mm.Kind
		Phase mm.Phase
		At    int64 // relative to the area
		Len   uint64
		To    int64
		Fails bool
		Flags mm.Flags
	}
	run := func(t *testing.T, build string, env ...string) []seen {
		p := start(t, build, env...)
		s := watch(t, shared, p.pid, tracer.WatchOptions{})
		p.do("ops")
		var all []seen
		for _, r := range whole(t, s) {
			if r.Kind.IsChange() {
				x := seen{Kind: r.Kind, Phase: r.Phase, At: int64(r.Range.Start - p.area), Len: r.Range.Len(), Fails: r.Ret < 0 && r.Ret > -4096, Flags: r.Flags}
				if !r.To.Empty() {
					x.To = int64(r.To.Start - p.area)
				}
				all = append(all, x)
			}
		}
		return all
	}
	want := run(t, "raw")
	// unmap, zap, protect twice, replace, shrink, move, unmap of two pages
	if len(want) != 16 {
		t.Fatalf("%d records of 8 changes: %+v", len(want), want)
	}
	for _, b := range builds[:2] {
		t.Run(b.name, func(t *testing.T) {
			if diff := cmp.Diff(want, run(t, b.name)); diff != "" {
				t.Error(diff)
			}
		})
	}
	for _, a := range preloads[1:] {
		t.Run(a.name, func(t *testing.T) {
			if diff := cmp.Diff(want, run(t, "dynamic", preload(t, a.lib, a.env)...)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// Case A4: three consumers of one process have the same records; one leaves
// in the middle, and the others miss nothing.
func TestThreeConsumers(t *testing.T) {
	const changes = 1000
	p := start(t, "dynamic")
	o := tracer.WatchOptions{Kinds: []mm.Kind{mm.Unmap}}
	other, err := tracer.Open(tracer.Options{}) // as another library would
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	streams := []*tracer.Stream{watch(t, shared, p.pid, o), watch(t, shared, p.pid, o), watch(t, other, p.pid, o)}
	type event struct {
		Seq   uint64
		Range mm.Range
		Phase mm.Phase
		TID   uint32
		Call  mm.Call
	}
	logs := make([][]event, len(streams))
	read := func(which ...int) {
		t.Helper()
		for _, i := range which {
			for _, r := range whole(t, streams[i]) {
				logs[i] = append(logs[i], event{r.Seq, r.Range, r.Phase, r.TID, r.Call})
			}
		}
	}
	p.do("random %d 7", changes)
	read(0, 1, 2)
	if err := streams[1].Close(); err != nil {
		t.Fatal(err)
	}
	p.do("random %d 11", changes)
	read(0, 2)
	if len(logs[0]) != 4*changes {
		t.Errorf("%d records, want %d", len(logs[0]), 4*changes)
	}
	if !slices.Equal(logs[0], logs[2]) {
		t.Error("two consumers saw different things")
	}
	if !slices.Equal(logs[0][:2*changes], logs[1]) {
		t.Error("the one that left saw something else until then")
	}
}

// Case A6: threads allocate and free under each allocator; what is recorded
// is what strace sees.
func TestThreadedAllocators(t *testing.T) {
	ummufeed := filepath.Join(t.TempDir(), "ummufeed")
	churn := filepath.Join(t.TempDir(), "churn")
	for _, c := range [][]string{
		{"go", "build", "-o", ummufeed, "github.com/ummu/ummu/cmd/ummufeed"},
		{"cc", "-O2", "-pthread", "-o", churn, "../programs/churn.c"},
	} {
		if out, err := exec.Command(c[0], c[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", c, err, out)
		}
	}
	for _, a := range preloads {
		t.Run(a.name, func(t *testing.T) {
			res, err := conform.Run(t.Context(), conform.Program{
				Name:    a.name,
				Command: func(string) []string { return []string{churn, "4", "400"} },
				Env:     preload(t, a.lib, a.env),
			}, conform.Options{Ummufeed: ummufeed})
			if err != nil {
				t.Fatal(err)
			}
			if !res.OK() {
				t.Errorf("%v: %q", res, res.Problems)
			}
			t.Log(res)
		})
	}
}
