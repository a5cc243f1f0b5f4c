// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// own makes a tracer whose hooks a test may take away.
func own(t *testing.T) *Tracer {
	t.Helper()
	tr, err := Open(Options{alone: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Errorf("close tracer: %v", err)
		}
	})
	return tr
}

// polled is one that reads the counters of skipped programs, though this
// kernel may never skip any.
func polled(t *testing.T) *Tracer {
	t.Helper()
	tr, err := Open(Options{poll: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Errorf("close tracer: %v", err)
		}
	})
	return tr
}

func openFeed(t *testing.T, tr *Tracer, target Target) *Feed {
	t.Helper()
	f, err := tr.OpenFeed(target, FeedOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Errorf("close feed: %v", err)
		}
	})
	return f
}

// shown maps a page as a client does, until the end of the test: longer than
// the feed lives.
func shown(t *testing.T, fd int) unsafe.Pointer {
	t.Helper()
	p, err := unix.MmapPtr(fd, 0, nil, uintptr(mm.PageSize()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.MunmapPtr(p, uintptr(mm.PageSize())) })
	return p
}

func statusOf(t *testing.T, f *Feed) *layout.Status {
	t.Helper()
	return (*layout.Status)(shown(t, f.StatusFD()))
}

func epochOf(t *testing.T, f *Feed) *layout.Epoch {
	t.Helper()
	return (*layout.Epoch)(shown(t, f.EpochFD()))
}

func interestOf(t *testing.T, f *Feed) *layout.Interest {
	t.Helper()
	page := uintptr(mm.PageSize())
	size := (unsafe.Sizeof(layout.Interest{}) + page - 1) &^ (page - 1)
	p, err := unix.MmapPtr(f.InterestFD(), 0, nil, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.MunmapPtr(p, size) })
	return (*layout.Interest)(p)
}

func inFlight(st *layout.Status) uint64 {
	var n uint64
	for i := range st.Begun {
		n += atomic.LoadUint64(&st.Begun[i]) - atomic.LoadUint64(&st.Ended[i])
	}
	return n
}

func begun(st *layout.Status) uint64 {
	return atomic.LoadUint64(&st.Begun[0]) + atomic.LoadUint64(&st.Begun[1])
}

func generation(st *layout.Status) uint64 { return atomic.LoadUint64(&st.Generation) }

// eventually waits for what another task does in its own time.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for start := time.Now(); !ok(); runtime.Gosched() {
		if time.Since(start) > 5*time.Second {
			t.Fatalf("not after 5 s: %s", what)
		}
	}
}

// zap makes the tracee drop a page; madvise has no partner hooks.
func (p *tracee) zap(t *testing.T, page int) {
	t.Helper()
	p.call(t, unix.SYS_MADVISE, fmt.Sprintf("A+%d", page), mm.PageSize(), unix.MADV_DONTNEED)
}

// freshMapping is a call that every hook sees and that changes nothing.
func (p *tracee) freshMapping(t *testing.T) {
	t.Helper()
	p.call(t, unix.SYS_MMAP, 0, mm.PageSize(), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1, 0)
}

// An end whose begin was missed is a loss: the change may be older than what
// the watch knows.
func TestFeedUnpairedEnd(t *testing.T) {
	tr, p := own(t), startTracee(t)
	tr.detach(t, "tp_btf/sys_enter")
	st := statusOf(t, openFeed(t, tr, PID(p.pid)))
	before := generation(st)
	p.zap(t, 1)
	if n := atomic.LoadUint64(&st.Unpaired); n != 1 {
		t.Errorf("%d unpaired, want 1", n)
	}
	if got, want := generation(st), before+layout.GenLoss; got != want {
		t.Errorf("generation %#x, want a loss: %#x", got, want)
	}
}

// A change whose end was missed is closed by the next call of its task.
func TestFeedMissedEndThenCall(t *testing.T) {
	tr, p := own(t), startTracee(t)
	tr.detach(t, "tp_btf/sys_exit")
	st := statusOf(t, openFeed(t, tr, PID(p.pid)))
	p.zap(t, 1)
	if n := inFlight(st); n != 1 {
		t.Fatalf("%d changes in flight, want the one whose end is missed", n)
	}
	p.freshMapping(t)
	if n := inFlight(st); n != 0 {
		t.Errorf("%d changes in flight for ever", n)
	}
}

// ... or by the exit of its task.
func TestFeedMissedEndThenExit(t *testing.T) {
	tr, p := own(t), startTracee(t)
	for _, hook := range []string{"tp_btf/sys_exit", "tracepoint/syscalls/sys_exit_munmap", "tracepoint/syscalls/sys_exit_mprotect"} {
		tr.detach(t, hook)
	}
	st := statusOf(t, openFeed(t, tr, PID(p.pid)))
	p.do(t, "threads 3 2")
	p.freshMapping(t) // the main thread is in nothing
	if n := begun(st); n < 6 {
		t.Fatalf("%d changes begun by 3 threads, want 2 each", n)
	}
	eventually(t, "no change in flight", func() bool { return inFlight(st) == 0 })
}

// A thread of io_uring that polls for submissions and never sleeps is in no
// change.
func TestFeedOpensDespitePolling(t *testing.T) {
	p := startTracee(t)
	p.do(t, "uring spin")
	openFeed(t, own(t), PID(p.pid))
}

// The entry of an address space goes with it, before its address is used for
// another one.
func TestDeadSpaceIsForgotten(t *testing.T) {
	tr, p := own(t), startTracee(t)
	st := statusOf(t, openFeed(t, tr, PID(p.pid)))
	count := func() (n int) {
		var key uint64
		value := make([]byte, tr.objs.Spaces.ValueSize())
		for it := tr.objs.Spaces.Iterate(); it.Next(&key, &value); n++ {
		}
		return n
	}
	if n := count(); n != 1 {
		t.Fatalf("%d spaces, want 1", n)
	}
	p.cmd.Process.Kill()
	p.end()
	eventually(t, "death", func() bool { return atomic.LoadUint64(&st.Deaths) == 1 || count() == 0 })
	eventually(t, "no space left", func() bool { return count() == 0 })
}

// The place of a closed watch is used for another process: changes of the old
// one do not reach it.
func TestClosedWatchIsNotTheNext(t *testing.T) {
	tr, a, b := own(t), startTracee(t), startTracee(t)
	old := openFeed(t, tr, PID(a.pid))
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	// A hook that looked at the references before the end still has it.
	if err := tr.control(ctlWatchSpace, old.space, 0, old.slot.ref); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the place is free", func() bool {
		tr.slots.mu.Lock()
		defer tr.slots.mu.Unlock()
		return !tr.slots.taken[old.slot.index]
	})
	f := openFeed(t, tr, PID(b.pid))
	if f.slot.index != old.slot.index {
		t.Fatalf("place %d, want %d", f.slot.index, old.slot.index)
	}
	st := statusOf(t, f)
	for i := range 10 {
		a.zap(t, i)
	}
	if n := begun(st); n != 0 {
		t.Errorf("%d changes of another process", n)
	}
	b.zap(t, 1)
	if n := begun(st); n != 1 {
		t.Errorf("%d changes, want 1", n)
	}
}

// What concerns all watches looks at the places in use, and no further.
func TestPlacesInUse(t *testing.T) {
	tr, p := own(t), startTracee(t)
	inUse := func(want uint32) {
		t.Helper()
		n := ^uint32(0)
		for start := time.Now(); n != want; runtime.Gosched() { // they are freed in the background
			if err := tr.objs.SlotsEnd.Get(&n); err != nil || time.Since(start) > 5*time.Second {
				t.Fatalf("%d places in use, want %d (%v)", n, want, err)
			}
		}
	}
	inUse(0)
	var feeds []*Feed
	for i := range 3 {
		feeds = append(feeds, openFeed(t, tr, PID(p.pid)))
		inUse(uint32(i + 1))
	}
	for _, c := range []struct {
		close int
		want  uint32
	}{{0, 3}, {2, 2}, {1, 0}} {
		if err := feeds[c.close].Close(); err != nil {
			t.Fatal(err)
		}
		inUse(c.want)
	}
	if f := openFeed(t, tr, PID(p.pid)); f.slot.index != 0 {
		t.Errorf("place %d, want the lowest", f.slot.index)
	}
}

// fillTasks leaves no room for a task that is not known yet.
func (t *Tracer) fillTasks(tb testing.TB) {
	tb.Helper()
	value := make([]byte, t.objs.Tasks.ValueSize())
	for tid := uint32(1 << 30); ; tid++ { // above any thread id
		if err := t.objs.Tasks.Put(tid, value); errors.Is(err, unix.E2BIG) {
			return
		} else if err != nil {
			tb.Fatal(err)
		}
	}
}

// A change that finds no room to be tracked ends the watch.
func TestFeedWithoutRoomToTrack(t *testing.T) {
	tr, p := own(t), startTracee(t)
	st := statusOf(t, openFeed(t, tr, PID(p.pid)))
	tr.fillTasks(t)
	before := generation(st)
	p.zap(t, 1)
	if n, g := atomic.LoadUint64(&st.Untracked), generation(st); n == 0 || g < before+layout.GenDeath {
		t.Errorf("%d untracked, generation %#x, was %#x", n, g, before)
	}
}

// brk tells the new end only; what is between it and the old end is known only
// if no other brk is in flight. Then it is the whole space.
func TestBrkDuringBrk(t *testing.T) {
	tr := own(t)
	tr.detach(t, "tp_btf/sys_exit") // a brk does not end
	s := watch(t, tr, Self(), WatchOptions{Kinds: []mm.Kind{mm.Unmap}})
	var gate [2]int
	if err := unix.Pipe2(gate[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	var inside atomic.Bool
	var g sync.WaitGroup
	g.Go(func() {
		runtime.LockOSThread() // and never unlocked: the thread ends
		unix.RawSyscall(unix.SYS_BRK, 0, 0, 0)
		inside.Store(true)
		// no call that would close the brk, and the runtime goes on
		var b [1]byte
		for {
			if _, err := unix.Read(gate[0], b[:]); err != unix.EINTR {
				return
			}
		}
	})
	for !inside.Load() {
		runtime.Gosched()
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	brk := func(a uintptr) uintptr { r, _, _ := unix.RawSyscall(unix.SYS_BRK, a, 0, 0); return r }
	tid, now := uint32(unix.Gettid()), brk(0)
	size := uintptr(mm.PageSize())
	if got := brk(now + 4*size); got != now+4*size {
		t.Fatalf("brk grew to %#x", got)
	}
	if got := brk(now); got != now {
		t.Fatalf("brk shrank to %#x", got)
	}
	unix.Close(gate[1])
	g.Wait()
	unix.Close(gate[0])
	mine := those(drain(t, s), func(r *mm.Record) bool { return r.TID == tid && r.Call.NR == unix.SYS_BRK })
	if len(mine) != 2 {
		t.Fatalf("%d records, want one per call:%s", len(mine), show(mine))
	}
	for i := range mine {
		if r := &mine[i]; r.Range != mm.Whole || r.Flags&mm.Superset == 0 {
			t.Errorf("want the whole space:%s", show(mine[i:i+1]))
		}
	}
}

// Whoever has the descriptors of the status and epoch pages cannot write them.
func TestPagesAreFrozen(t *testing.T) {
	f := openFeed(t, shared, Self())
	for name, m := range map[string]*ebpf.Map{"status": f.slot.status, "epoch": f.t.objs.Epoch} {
		p, err := unix.MmapPtr(m.FD(), 0, nil, uintptr(mm.PageSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err == nil {
			unix.MunmapPtr(p, uintptr(mm.PageSize()))
			t.Errorf("%s: mapped writable", name)
		}
		p, err = unix.MmapPtr(m.FD(), 0, nil, uintptr(mm.PageSize()), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if err := unix.Mprotect(unsafe.Slice((*byte)(p), mm.PageSize()), unix.PROT_READ|unix.PROT_WRITE); err == nil {
			t.Errorf("%s: made writable", name)
		}
		unix.MunmapPtr(p, uintptr(mm.PageSize()))
		value, err := m.LookupBytes(uint32(0))
		if err != nil {
			t.Fatal(err)
		}
		if err := m.Put(uint32(0), value); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s: update: %v, want EPERM", name, err)
		}
	}
}

// What the kernel skipped is a loss for everybody, counted on the epoch page.
func TestFeedSkippedPrograms(t *testing.T) {
	tr, p := polled(t), startTracee(t)
	ep := epochOf(t, openFeed(t, tr, PID(p.pid)))
	before := atomic.LoadUint64(&ep.Word)
	tr.mu.Lock()
	tr.skipped = func(*ebpf.Program) (uint64, error) { return 1 << 40, nil }
	tr.mu.Unlock()
	eventually(t, "a loss for everybody", func() bool { return atomic.LoadUint64(&ep.Word) >= before+layout.GenLoss })
	if n := atomic.LoadUint64(&ep.Misses); n < 1<<40 {
		t.Errorf("%d misses counted", n)
	}
}

// Whoever has the pages mapped learns that nobody writes them any more.
func TestFeedCloseMarks(t *testing.T) {
	p := startTracee(t)
	t.Run("feed", func(t *testing.T) {
		f := openFeed(t, shared, PID(p.pid))
		st := statusOf(t, f)
		before := generation(st)
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
		if g := generation(st); g < before+layout.GenDeath || atomic.LoadUint64(&st.Deaths) == 0 {
			t.Errorf("generation %#x, was %#x, deaths %d", g, before, atomic.LoadUint64(&st.Deaths))
		}
	})
	t.Run("tracer", func(t *testing.T) {
		tr := own(t)
		ep := epochOf(t, openFeed(t, tr, PID(p.pid)))
		before := atomic.LoadUint64(&ep.Word)
		if err := tr.Close(); err != nil {
			t.Fatal(err)
		}
		if e := atomic.LoadUint64(&ep.Word); e < before+layout.GenDeath || atomic.LoadUint64(&ep.Deaths) == 0 {
			t.Errorf("epoch %#x, was %#x, %d deaths", e, before, atomic.LoadUint64(&ep.Deaths))
		}
	})
}

// breakControl makes the control program fail until the result is called.
func breakControl(t *testing.T, tr *Tracer) (repair func()) {
	t.Helper()
	works := tr.objs.Control
	broken, err := works.Clone()
	if err != nil {
		t.Fatal(err)
	}
	if err := broken.Close(); err != nil {
		t.Fatal(err)
	}
	tr.ctl.Lock()
	tr.objs.Control = broken
	tr.ctl.Unlock()
	return func() {
		tr.ctl.Lock()
		tr.objs.Control = works
		tr.ctl.Unlock()
	}
}

// What cannot be marked dead is left alive in all respects: its client goes on
// hearing of changes. It is counted, and closed when it can be.
func TestCloseUnmarked(t *testing.T) {
	p := startTracee(t)
	tr := own(t)
	f := openFeed(t, tr, PID(p.pid))
	st, ep := statusOf(t, f), epochOf(t, f)
	interestOf(t, f).All = 1
	for _, c := range []struct {
		name  string
		close func() error
	}{{"feed", f.Close}, {"tracer", tr.Close}} {
		t.Run(c.name, func(t *testing.T) {
			repair := breakControl(t, tr)
			defer repair()
			err := c.close()
			if !errors.Is(err, ErrNotMarked) {
				t.Errorf("close: %v", err)
			}
			if tr.Unmarked() != 1 {
				t.Errorf("%d feeds could not be marked", tr.Unmarked())
			}
			if atomic.LoadUint64(&st.Deaths)|atomic.LoadUint64(&ep.Deaths) != 0 {
				t.Fatal("marked dead: what is tested?")
			}
			for range 3 {
				before := generation(st)
				p.call(t, unix.SYS_MADVISE, "A+1", int(mm.PageSize()), unix.MADV_DONTNEED)
				if generation(st) == before {
					t.Fatal("the watch is not dead and hears of nothing")
				}
			}
			if _, err := tr.OpenFeed(PID(p.pid), FeedOptions{}); errors.Is(err, os.ErrClosed) != (c.name == "tracer") {
				t.Errorf("open another: %v", err)
			}
		})
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
	if atomic.LoadUint64(&st.Deaths) == 0 || tr.Unmarked() != 0 {
		t.Errorf("%d deaths, %d unmarked", atomic.LoadUint64(&st.Deaths), tr.Unmarked())
	}
	if err := tr.Close(); err != nil || atomic.LoadUint64(&ep.Deaths) == 0 {
		t.Errorf("close tracer: %v, %d deaths", err, atomic.LoadUint64(&ep.Deaths))
	}
	if err := errors.Join(f.Close(), tr.Close()); err != nil {
		t.Errorf("again: %v", err)
	}
}

// Kill ends every watch, those that are opened afterwards too.
func TestKillEndsLaterOnes(t *testing.T) {
	p := startTracee(t)
	tr := own(t)
	before := epochOf(t, openFeed(t, tr, PID(p.pid)))
	if err := tr.Kill(); err != nil {
		t.Fatal(err)
	}
	if after := epochOf(t, openFeed(t, tr, PID(p.pid))); atomic.LoadUint64(&before.Deaths) == 0 || atomic.LoadUint64(&after.Deaths) == 0 {
		t.Errorf("deaths %d, seen by a later feed %d", before.Deaths, after.Deaths)
	}
}
