// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"testing"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/machine"
)

// want is what a pair of records must say, or one if begin is false.
type want struct {
	kind  mm.Kind
	r, to mm.Range
	begin bool
	flags mm.Flags // all of them
}

// expect checks that records are exactly the wanted ones, in order.
func expect(t *testing.T, records []mm.Record, call mm.Call, wants ...want) {
	t.Helper()
	i := 0
	next := func() *mm.Record {
		if i++; i <= len(records) {
			return &records[i-1]
		}
		return &mm.Record{}
	}
	for _, w := range wants {
		if w.begin {
			if r := next(); r.Kind != w.kind || r.Phase != mm.PhaseBegin || r.Range != w.r || r.Call != call || r.Flags != w.flags || r.To != w.to {
				t.Errorf("begin of %+v, call %+v is missing in%s", w, call, show(records))
			}
		}
		if r := next(); r.Kind != w.kind || r.Phase != mm.PhaseEnd || r.Range != w.r || r.Call != call || r.Flags != w.flags || r.To != w.to {
			t.Errorf("end of %+v, call %+v is missing in%s", w, call, show(records))
		}
	}
	if len(records) > i {
		t.Errorf("%d records more than wanted:%s", len(records)-i, show(records))
	}
}

// Calls by int $0x80 from a 64-bit program: other numbers, other registers,
// and for the first mmap and ipc other places of the arguments.
func TestCompatABI(t *testing.T) {
	const (
		brk, oldMmap, munmap, ipc, mprotect = 45, 90, 91, 117, 125
		mremap, mmap2, madvise              = 163, 192, 219
		shmat, shmdt, shmget, shmctl        = 21, 22, 23, 24
		rw, fixed                           = 3, 0x32 // PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_ANONYMOUS|MAP_FIXED
	)
	machine.NeedCompat(t)
	page := mm.PageSize()
	p := startTracee(t)
	s := watch(t, shared, PID(p.pid), WatchOptions{})
	compat := func(format string, args ...any) int64 {
		t.Helper()
		ret := p.do(t, "compat "+format, args...)[0]
		if ret < 0 && ret > -4096 {
			t.Fatalf("compat "+format+" failed: %d", append(args, ret)...)
		}
		return ret
	}
	check := func(nr uint32, wants ...want) {
		t.Helper()
		expect(t, drain(t, s), mm.Call{NR: nr, ABI: mm.ABICompat}, wants...)
	}
	none := mm.Range{}

	compat("%d A+1 %d", munmap, page+1)
	check(munmap, want{mm.Unmap, p.page(1, 2), none, true, 0})

	compat("%d A+1 %d %d %d -1 0", mmap2, 2*page, rw, fixed)
	check(mmap2, want{mm.Replace, p.page(1, 2), none, true, 0})
	at := mm.Addr(uint32(compat("%d 0 %d %d %d -1 0", mmap2, page, rw, 0x22)))
	check(mmap2, want{mm.Map, mm.Range{Start: at, End: at + mm.Addr(page)}, none, false, 0})

	p.do(t, "poke A+5 %d %d %d 0xffffffff 0", 3*page, rw, fixed)
	compat("%d S", oldMmap)
	check(oldMmap, want{mm.Replace, p.page(5, 3), none, true, 0})

	compat("%d A+5 %d %d 3 A+10", mremap, page, page)
	check(mremap, want{mm.Move, p.page(5, 1), p.page(10, 1), true, 0})
	compat("%d A+20 %d %d 0", mremap, 3*page, page)
	check(mremap, want{mm.Unmap, p.page(21, 2), none, true, 0})

	compat("%d A+30 %d 1", mprotect, page)
	check(mprotect, want{mm.Protect, p.page(30, 1), none, true, 0})

	compat("%d A+31 1 4", madvise)
	check(madvise, want{mm.Zap, p.page(31, 1), none, true, 0})
	compat("%d A+31 %d 3", madvise, page) // WILLNEED
	check(madvise)

	end := mm.Addr(uint32(compat("%d 0", brk)))
	check(brk)
	top := (end + mm.Addr(page) - 1) &^ mm.Addr(page-1)
	if got := mm.Addr(uint32(compat("%d %d", brk, top+mm.Addr(3*page)))); got != top+mm.Addr(3*page) {
		t.Fatalf("break is %v after growing from %v", got, end)
	}
	check(brk, want{mm.Map, mm.Range{Start: top, End: top + mm.Addr(3*page)}, none, false, 0})
	compat("%d %d", brk, top+mm.Addr(page))
	check(brk, want{mm.Unmap, mm.Range{Start: top + mm.Addr(page), End: top + mm.Addr(3*page)}, none, true, 0})

	id := compat("%d %d 0 %d 0x3ff", ipc, shmget, 4*page)
	t.Cleanup(func() { p.do(t, "compat %d %d %d 0 0", ipc, shmctl, id) })
	check(ipc)
	// the address comes back through the third argument, here in the scratch page
	compat("%d %d %d 0 S 0", ipc, shmat, id)
	seg := mm.Addr(p.do(t, "peek")[0])
	check(ipc, want{mm.Map, mm.Range{Start: seg, End: seg + mm.Addr(page)}, none, false, mm.UnknownLength})
	compat("%d %d %d 040000 S A+50", ipc, shmat, id) // SHM_REMAP
	whole := mm.Range{Start: p.page(50, 1).Start, End: mm.MaxAddr}
	check(ipc, want{mm.Replace, whole, none, true, mm.Superset})
	compat("%d %d 0 0 0 A+50", ipc, shmdt)
	check(ipc, want{mm.Unmap, whole, none, true, mm.Superset})
}
