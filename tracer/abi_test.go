// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// io_uring runs madvise in a worker: its begin comes before, its end after,
// and both belong to the space of the ring's owner.
func TestURing(t *testing.T) {
	const opMadvise = 25
	for _, mode := range []string{"inline", "async", "sqpoll", "linked"} {
		t.Run(mode, func(t *testing.T) {
			p := startTracee(t)
			s := watch(t, shared, PID(p.pid), WatchOptions{})
			p.call(t, unix.SYS_MADVISE, "A", mm.PageSize(), unix.MADV_DONTNEED) // to learn the space
			p.tell(t, "uring %s", mode)
			w := p.answer(t, "ok", 4)
			t0, t1 := time.Duration(number(t, w[0])), time.Duration(number(t, w[1]))
			if w[2] != "0" || w[3] != "0" {
				t.Fatalf("madvise by io_uring failed: %v", w)
			}
			records := drain(t, s)
			complete(t, records, 1)
			space := records[0].Space
			for _, r := range []mm.Range{p.page(1, 2), p.page(4, 1)} {
				pair := those(records, func(x *mm.Record) bool { return x.Range == r })
				if len(pair) != 2 {
					t.Fatalf("%d records of %v, want begin and end:%s", len(pair), r, show(records))
				}
				for i, phase := range []mm.Phase{mm.PhaseBegin, mm.PhaseEnd} {
					x := &pair[i]
					if x.Kind != mm.Zap || x.Phase != phase || x.Space != space || x.Call != (mm.Call{NR: opMadvise, ABI: mm.ABIIOUring}) ||
						x.Flags != mm.Async || x.Ret != 0 || x.Arg[0] != 4 || x.PID != uint32(p.pid) {
						t.Errorf("%v:%s", phase, show(pair[i:i+1]))
					}
				}
				if !(t0 <= pair[0].Time && pair[0].Time <= pair[1].Time && pair[1].Time <= t1) {
					t.Errorf("times %v %v are not in order within %v to %v", pair[0].Time, pair[1].Time, t0, t1)
				}
			}
			if mode == "linked" { // the second waits for the first: its begin may come early, its end not
				ends := those(records, func(x *mm.Record) bool { return x.Call.ABI == mm.ABIIOUring && x.Phase == mm.PhaseEnd })
				if len(ends) != 2 || ends[0].Range != p.page(1, 2) {
					t.Errorf("ends of linked requests:%s", show(ends))
				}
			}
			if n := len(those(records, func(x *mm.Record) bool { return x.Call.ABI == mm.ABIIOUring })); n != 4 {
				t.Errorf("%d records of io_uring, want 4:%s", n, show(records))
			}
		})
	}
}

// A madvise that waits in a chain of requests, submitted before the watch,
// begins for it when it is handed to a worker; it began for others before.
func TestURingWaitedSinceBefore(t *testing.T) {
	p := startTracee(t)
	early := watch(t, shared, PID(p.pid), WatchOptions{})
	p.tell(t, "uring held")
	for n := 0; n < 2; {
		var r mm.Record
		if err := early.Read(&r); err != nil {
			t.Fatal(err)
		}
		if r.Call.ABI == mm.ABIIOUring && r.Phase == mm.PhaseBegin {
			n++
		}
	}
	late := watch(t, shared, PID(p.pid), WatchOptions{})
	p.tell(t, "")
	if w := p.answer(t, "ok", 4); w[2] != "0" || w[3] != "0" {
		t.Fatalf("madvise by io_uring failed: %v", w)
	}
	records := drain(t, late)
	for _, r := range []mm.Range{p.page(1, 2), p.page(4, 1)} {
		pair := those(records, func(x *mm.Record) bool { return x.Range == r })
		if len(pair) != 2 || pair[0].Phase != mm.PhaseBegin || pair[1].Phase != mm.PhaseEnd || pair[1].Flags&mm.Unpaired != 0 {
			t.Errorf("%v: want a begin and its end:%s", r, show(records))
		}
	}
	again := those(drain(t, early), func(x *mm.Record) bool { return x.Call.ABI == mm.ABIIOUring && x.Phase == mm.PhaseBegin })
	if len(again) != 0 {
		t.Errorf("begun twice:%s", show(again))
	}
}

// io_destroy unmaps where the ring of its context was mapped, whatever is
// there by then.
func TestIODestroy(t *testing.T) {
	p := startTracee(t)
	p.do(t, "poke 0 0")
	p.call(t, unix.SYS_IO_SETUP, 8, fmt.Sprint(uint64(p.scratch)))
	ring := mapped(t, p.pid, func(line string) bool { return strings.Contains(line, "/[aio]") })
	size := ring.Len()
	if size == 0 {
		t.Fatal("no ring")
	}
	at := fmt.Sprint(uint64(ring.Start))
	p.call(t, unix.SYS_MUNMAP, at, size)
	p.call(t, unix.SYS_MMAP, at, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, -1, 0)
	s := watch(t, shared, PID(p.pid), WatchOptions{})
	p.call(t, unix.SYS_IO_DESTROY, at)
	here := func(line string) bool { return strings.HasPrefix(line, fmt.Sprintf("%x-", uint64(ring.Start))) }
	if r := mapped(t, p.pid, here); r.Len() != 0 {
		t.Fatalf("%v is still mapped: this kernel does otherwise", r)
	}
	records := drain(t, s)
	if len(records) != 2 || records[0].Phase != mm.PhaseBegin || records[0].Kind != mm.Unmap || !records[0].Range.Contains(ring) ||
		records[0].Call != (mm.Call{NR: unix.SYS_IO_DESTROY}) || records[1].Phase != mm.PhaseEnd {
		t.Errorf("want begin and end of an unmap of %v:%s", ring, show(records))
	}
}

// mapped is the range of the first line of a process's maps that is selected.
func mapped(t *testing.T, pid int, is func(string) bool) (r mm.Range) {
	t.Helper()
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(maps)) {
		if is(line) {
			if _, err := fmt.Sscanf(line, "%x-%x", &r.Start, &r.End); err != nil {
				t.Fatal(err)
			}
			return r
		}
	}
	return r
}

// A call that began before the watch ends in it, unpaired. The call cannot
// end before it is told to, so this needs no luck.
func TestInFlightAtWatch(t *testing.T) {
	p := startTracee(t)
	w := p.do(t, "block 1")
	tid, addr := uint32(w[0]), mm.Addr(w[1])
	s := watch(t, shared, PID(p.pid), WatchOptions{})
	if records := drain(t, s); len(records) != 0 {
		t.Fatalf("records of before:%s", show(records))
	}
	if ret := p.do(t, "release")[0]; ret != 0 {
		t.Fatalf("madvise returned %d", ret)
	}
	of := func(x *mm.Record) bool { return x.TID == tid && x.Range.Start == addr } // not its stack
	records := drain(t, s)
	complete(t, records, 1)
	ends := those(records, of)
	want := mm.Range{Start: addr, End: addr + mm.Addr(mm.PageSize())}
	if len(ends) != 1 || ends[0].Phase != mm.PhaseEnd || ends[0].Flags != mm.Unpaired || ends[0].Range != want {
		t.Errorf("want one unpaired end of %v:%s", want, show(records))
	}
	if n := s.Stats().Unpaired; n != 1 {
		t.Errorf("stats: %d unpaired, want 1", n)
	}

	// with the watch there, the same call is whole
	w = p.do(t, "block 1")
	tid, addr = uint32(w[0]), mm.Addr(w[1])
	begins := those(drain(t, s), of)
	if len(begins) != 1 || begins[0].Phase != mm.PhaseBegin {
		t.Errorf("want the begin while the call sleeps:%s", show(begins))
	}
	late := watch(t, shared, PID(p.pid), WatchOptions{})
	p.do(t, "release")
	for name, c := range map[string]struct {
		s     *Stream
		flags mm.Flags
	}{"early": {s, 0}, "late": {late, mm.Unpaired}} {
		if ends := those(drain(t, c.s), of); len(ends) != 1 || ends[0].Phase != mm.PhaseEnd || ends[0].Flags != c.flags {
			t.Errorf("%s watch: want one end with flags %#x:%s", name, c.flags, show(ends))
		}
	}
}

// The end of a call whose begin was not seen says its own range, also if the
// end of the task's call before was not seen either.
func TestUnpairedAfterStale(t *testing.T) {
	p := startTracee(t)
	all := watch(t, shared, All(), WatchOptions{RingBytes: 1 << 20})
	w := p.do(t, "block 2") // the begin of the first is seen
	tid, first, second := uint32(w[0]), mm.Addr(w[1]), mm.Addr(w[2])
	if err := all.Close(); err != nil {
		t.Fatal(err)
	}
	p.do(t, "release") // its end is not, nor the begin of the second
	s := watch(t, shared, PID(p.pid), WatchOptions{})
	p.do(t, "release")
	records := drain(t, s)
	ends := those(records, func(x *mm.Record) bool { return x.TID == tid && (x.Range.Start == first || x.Range.Start == second) })
	if len(ends) != 1 || ends[0].Phase != mm.PhaseEnd || ends[0].Flags != mm.Unpaired || ends[0].Range.Start != second {
		t.Errorf("want one unpaired end at %v:%s", second, show(records))
	}
}

// The classic tracepoints stand in for the main hooks, and with all of them
// nothing is said twice.
func TestPartners(t *testing.T) {
	page := mm.PageSize()
	for _, c := range []struct {
		name        string
		enter, exit bool // main hooks attached
	}{{"all", true, true}, {"no enter", false, true}, {"no exit", true, false}, {"none", false, false}} {
		t.Run(c.name, func(t *testing.T) {
			tr, err := Open(Options{alone: true})
			if err != nil {
				t.Fatal(err)
			}
			defer tr.Close()
			if !c.enter {
				tr.detach(t, "tp_btf/sys_enter")
			}
			if !c.exit {
				tr.detach(t, "tp_btf/sys_exit")
			}
			p := startTracee(t)
			s := watch(t, tr, PID(p.pid), WatchOptions{})
			for i := range 3 { // again and again: the state of one call must not reach the next
				p.call(t, unix.SYS_MUNMAP, fmt.Sprintf("A+%d", 10*i), page)
				p.call(t, unix.SYS_MPROTECT, fmt.Sprintf("A+%d", 10*i+1), page, 1)
				p.call(t, unix.SYS_MREMAP, fmt.Sprintf("A+%d", 10*i+2), page, page, 3, fmt.Sprintf("A+%d", 10*i+4))
				records := drain(t, s)
				var got []string
				for k := range records {
					r := &records[k]
					main, flags := c.enter, mm.Flags(0)
					if r.Phase == mm.PhaseEnd {
						main = c.exit
						if !c.enter {
							flags = mm.Rescued
						}
					}
					if r.Flags != flags || !main && !strings.HasPrefix(HookName(r.Hook), "tracepoint/syscalls/") {
						t.Errorf("want flags %#x, main hook %v:%s", flags, main, show(records[k:k+1]))
					}
					got = append(got, fmt.Sprintf("%v %v", r.Kind, r.Phase))
				}
				want := []string{"unmap begin", "unmap end", "protect begin", "protect end", "move begin", "move end"}
				if fmt.Sprint(got) != fmt.Sprint(want) || len(records) == 6 &&
					(records[0].Range != p.page(10*i, 1) || records[2].Range != p.page(10*i+1, 1) || records[4].Range != p.page(10*i+2, 1) || records[5].To != p.page(10*i+4, 1)) {
					t.Errorf("round %d: want %v:%s", i, want, show(records))
				}
			}
		})
	}
}

// detach takes one hook away, as if the kernel skipped it from now on.
func (t *Tracer) detach(tb testing.TB, name string) {
	tb.Helper()
	i := 0
	for _, h := range t.coverage.Hooks {
		if h.Name == name && h.Attached {
			if err := t.links[i].Close(); err != nil {
				tb.Fatal(err)
			}
			return
		}
		if h.Attached {
			i++
		}
	}
	tb.Fatalf("hook %s is not attached", name)
}

// mremap of a hugetlb mapping rounds lengths to its page, though it is empty.
// Whether it is one cannot be seen: what may be one by its addresses is
// reported so, and only that.
func TestMremapOntoByHugePages(t *testing.T) {
	const huge = 2 << 20
	const from, to = 64<<30 + 3*huge, 128<<30 + 5*huge
	page := mm.Addr(mm.PageSize())
	span := func(at, n mm.Addr) mm.Range { return mm.Range{Start: at, End: at + n} }
	for _, c := range []struct {
		name       string
		flags      int // of the source
		old, onto  mm.Addr
		source, to mm.Range
	}{
		{"hugetlb", unix.MAP_HUGETLB, from, to, span(from, page), span(to, huge)},
		{"aligned", 0, from, to, span(from, page), span(to, huge)},
		{"source not", 0, from + page, to, span(from+page, page), span(to, page)},
		{"destination not", 0, from, to + page, span(from, page), span(to+page, page)},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := startTracee(t)
			const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_NORESERVE | unix.MAP_FIXED
			p.call(t, unix.SYS_MMAP, from, huge, prot, flags|c.flags, -1, 0)
			p.call(t, unix.SYS_MMAP, to, 2*huge, prot, flags, -1, 0)
			s := watch(t, shared, PID(p.pid), WatchOptions{})
			p.call(t, unix.SYS_MREMAP, uint64(c.old), page, page, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, uint64(c.onto))
			records := drain(t, s)
			if len(records) != 2 || records[0].Kind != mm.Move || !records[0].Range.Contains(c.source) || records[0].To != c.to ||
				(records[0].Flags&mm.Superset != 0) != (c.to.Len() != uint64(page)) {
				t.Errorf("want a move of %v onto %v:%s", c.source, c.to, show(records))
			}
			moved := mapped(t, p.pid, func(line string) bool { return strings.HasPrefix(line, fmt.Sprintf("%x-", uint64(c.onto))) })
			if c.flags != 0 && moved.Len() != huge {
				t.Errorf("%v is at the destination: this kernel does otherwise", moved)
			}
		})
	}
}
