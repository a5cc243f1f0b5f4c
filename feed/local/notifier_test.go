// SPDX-License-Identifier: Apache-2.0

//go:build linux && amd64

package local

import (
	"errors"
	"os"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

func openNotifier(t *testing.T) *feed.Watch { return openTierHere(t, tracer.TierNotifierTracepoint) }

func openTierHere(t *testing.T, tier tracer.Tier) *feed.Watch {
	t.Helper()
	w, err := Open(Options{Tier: tier})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

func pages(t *testing.T, n int) ([]byte, mm.Range) {
	t.Helper()
	b, err := unix.Mmap(-1, 0, n*int(mm.PageSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(b) })
	start := mm.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	return b, mm.Range{Start: start, End: start + mm.Addr(len(b))}
}

// cache registers r; the pages must be cacheable within a few tries.
func cache(t *testing.T, w *feed.Watch, r mm.Range) {
	t.Helper()
	var v feed.Verdict
	for range 100 {
		if v = w.Commit(w.Begin(r), nil, func() {}); v == feed.Cacheable {
			return
		}
	}
	t.Fatalf("commit: %v", v)
}

// A call that changes nothing but the caller's own space says which it is.
func TestNotifierNamesTheCall(t *testing.T) {
	machine.NeedKVM(t)
	w := openNotifier(t)
	b, r := pages(t, 4)
	b[0] = 1
	cache(t, w, r)
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	if w.Valid() {
		t.Fatal("valid after DONTNEED")
	}
	var got []mm.Record
	w.Drain(func(rec *mm.Record) { got = append(got, *rec) })
	if len(got) != 1 || got[0].Kind != mm.Zap || got[0].Range != r || got[0].Call != (mm.Call{NR: unix.SYS_MADVISE}) {
		t.Fatalf("%+v", got)
	}
}

// notifierTiers are those that this machine must have.
func notifierTiers() []tracer.Tier {
	if machine.HasProbes() {
		return []tracer.Tier{tracer.TierNotifierTracepoint, tracer.TierNotifierProbe}
	}
	return []tracer.Tier{tracer.TierNotifierTracepoint}
}

// A watch that nothing would be told of any more is dead before that happens;
// the next one has a notifier of its own, and Close leaves alone what the
// program has put there meanwhile. The probes go on without the machine, but
// on a kernel that may skip them all nothing is behind them any more.
func TestNotifierPageUnmapped(t *testing.T) {
	machine.NeedKVM(t)
	for _, tier := range notifierTiers() {
		t.Run(tier.String(), func(t *testing.T) {
			dies := tier == tracer.TierNotifierTracepoint || tracer.Preemptible()
			w := openTierHere(t, tier)
			at := unsafe.Add(nil, uintptr(shared.tiers[tier].holder()))
			_, r := pages(t, 1)
			cache(t, w, r)
			if _, err := unix.MmapPtr(-1, 0, at, uintptr(mm.PageSize()), unix.PROT_READ|unix.PROT_WRITE,
				unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED); err != nil {
				t.Fatal(err)
			}
			mine := (*byte)(at)
			*mine = 42
			defer unix.MunmapPtr(at, uintptr(mm.PageSize()))
			if dies && w.Valid() {
				t.Error("valid without a notifier")
			}
			if s := w.Drain(func(*mm.Record) {}); (s == feed.DeadState) != dies {
				t.Errorf("drain: %v", s)
			}
			next := openTierHere(t, tier)
			b, r := pages(t, 1)
			cache(t, next, r)
			if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
			if next.Valid() {
				t.Error("the next watch does not see a change")
			}
			if err := next.Close(); err != nil {
				t.Error(err)
			}
			if err := w.Close(); err != nil {
				t.Error(err)
			}
			if *mine != 42 {
				t.Error("the page that took the place is gone")
			}
		})
	}
}

// What leaves the page that keeps the notifier where it is does not end the
// watch: its rights, advice about it, and what concerns all pages, as soft-dirty
// tracking that begins anew.
func TestNotifierPageStays(t *testing.T) {
	machine.NeedKVM(t)
	for _, tier := range notifierTiers() {
		t.Run(tier.String(), func(t *testing.T) {
			w := openTierHere(t, tier)
			at := unsafe.Add(nil, uintptr(shared.tiers[tier].holder()))
			b, r := pages(t, 1)
			cache(t, w, r)
			page := unsafe.Slice((*byte)(at), mm.PageSize())
			if err := unix.Madvise(page, unix.MADV_DONTNEED); err != nil {
				t.Errorf("drop the page: %v", err)
			}
			if err := os.WriteFile("/proc/self/clear_refs", []byte("4"), 0); err != nil {
				t.Errorf("clear soft-dirty bits: %v", err)
			}
			if s := w.Drain(func(*mm.Record) {}); s != feed.Fresh {
				t.Errorf("drain: %v", s)
			}
			cache(t, w, r)
			if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
			if w.Valid() {
				t.Error("a change is not seen any more")
			}
		})
	}
}

// Advice that takes no pinned page away invalidates nothing by process_madvise
// either.
func TestNotifierVectorAdvice(t *testing.T) {
	machine.NeedKVM(t)
	for _, tier := range notifierTiers() {
		t.Run(tier.String(), func(t *testing.T) {
			w := openTierHere(t, tier)
			b, r := pages(t, 4)
			self, err := unix.PidfdOpen(os.Getpid(), 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(self)
			vector := []unix.Iovec{{Base: &b[0], Len: uint64(len(b))}}
			advise := func(advice uintptr) unix.Errno {
				_, _, e := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(self), uintptr(unsafe.Pointer(&vector[0])), 1, advice, 0, 0)
				return e
			}
			done := 0
			for _, advice := range []uintptr{unix.MADV_COLD, unix.MADV_PAGEOUT, unix.MADV_FREE, unix.MADV_COLLAPSE} {
				for i := range b {
					b[i] = 1
				}
				cache(t, w, r)
				switch e := advise(advice); e {
				case 0:
					done++
				case unix.EINVAL, unix.EAGAIN: // not by this kernel, or nothing to collapse
				default:
					t.Errorf("advice %d: %v", advice, e)
				}
				w.Drain(func(rec *mm.Record) {
					if rec.Touches(r) {
						t.Errorf("advice %d: %+v", advice, *rec)
					}
				})
				w.Forget(r)
			}
			if done < 2 {
				t.Errorf("only %d kinds of advice were taken", done)
			}
			cache(t, w, r)
			if e := advise(unix.MADV_DONTNEED); e == 0 && w.Valid() { // from 6.13
				t.Error("valid after DONTNEED")
			}
		})
	}
}

// feedOfSelf opens a feed of this process, and the watch over it, by which a
// registration waits for changes in flight without asking where tasks are.
func feedOfSelf(t *testing.T) (*tracer.Feed, *feed.Watch) {
	t.Helper()
	k, err := acquire(tracer.TierNotifierTracepoint)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := release(tracer.TierNotifierTracepoint); err != nil {
			t.Error(err)
		}
	})
	f, w := watchOf(t, k.tracer, tracer.Self(), tracer.FeedOptions{}, false)
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return f, w
}

// The thread that registers has made the last change itself: the zap of a page
// of the watch's own shows that it is over.
func TestNotifierMarker(t *testing.T) {
	machine.NeedKVM(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	debug.SetGCPercent(-1) // the runtime's other threads make no changes
	defer debug.SetGCPercent(100)
	b, r := pages(t, 2)
	for try := range 5 { // one change of another thread stays in flight for ever: then another feed
		f, w := feedOfSelf(t)
		page, err := unix.Mmap(f.StatusFD(), 0, int(unsafe.Sizeof(layout.Status{})), unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		status := (*layout.Status)(unsafe.Pointer(unsafe.SliceData(page)))
		inFlight := func() (n uint64) {
			for i := range status.Begun {
				n += atomic.LoadUint64(&status.Begun[i]) - atomic.LoadUint64(&status.Ended[i])
			}
			return n
		}
		over := 0
		for range 20 {
			b[0] = 1
			if err := unix.Madvise(b[:mm.PageSize()], unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
			if inFlight() == 0 {
				t.Fatal("the change is over before anybody knows")
			}
			w.Abandon(w.Begin(r))
			if inFlight() == 0 {
				over++
			}
		}
		if err := unix.Munmap(page); err != nil {
			t.Fatal(err)
		}
		if over >= 10 {
			return
		}
		t.Logf("feed %d: a change of the same thread was over %d times of 20", try, over)
	}
	t.Error("what the thread that registers has done stays in flight")
}

// A change of which nobody knows whose it is counts as begun for everybody.
func TestNotifierForeignCounts(t *testing.T) {
	machine.NeedKVM(t)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	f, _ := feedOfSelf(t)
	page, err := unix.Mmap(f.EpochFD(), 0, int(unsafe.Sizeof(layout.Epoch{})), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(page)
	epoch := (*layout.Epoch)(unsafe.Pointer(unsafe.SliceData(page)))
	inFlight := func() bool {
		return atomic.LoadUint64(&epoch.Begun[0]) != atomic.LoadUint64(&epoch.Ended[0]) ||
			atomic.LoadUint64(&epoch.Begun[1]) != atomic.LoadUint64(&epoch.Ended[1])
	}
	fd, err := unix.MemfdCreate("foreign", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	size := int(mm.PageSize())
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	for i := range 10 {
		b[0] = 1
		if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(size)); err != nil {
			t.Fatal(err)
		}
		if !inFlight() { // until the next change of this thread
			t.Errorf("hole %d: no change is in flight", i)
		}
	}
}

//go:norace
//go:noinline
func load(p *byte) byte { return *p }

//go:norace
//go:noinline
func storeUntil(stop *atomic.Bool, p *byte) {
	var slow atomic.Uint64
	for !stop.Load() {
		for range 16 {
			slow.Add(1)
			*p = 1
		}
	}
}

// A fault that replaces a page is a change in flight until its task is seen
// elsewhere. The loop's store faults, and is where the clock tick finds the
// thread: behind the slow instruction before it.
func TestNotifierFaultInFlight(t *testing.T) {
	machine.NeedKVM(t)
	k, err := acquire(tracer.TierNotifierTracepoint)
	if err != nil {
		t.Fatal(err)
	}
	defer release(tracer.TierNotifierTracepoint)
	// Of another process, so that nothing but faults of this one counts: it
	// cannot be known that they are none of that one's.
	f, err := k.tracer.OpenFeed(idleProcess(t), tracer.FeedOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b, _ := pages(t, 1)
	_ = *(*byte)(unsafe.Pointer(&b[0])) // the zero page, which the first store replaces
	var stop atomic.Bool
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		storeUntil(&stop, &b[0])
	}()
	busy := false
	for start := time.Now(); !busy && time.Since(start) < 20*time.Second; {
		// Again the zero page, unless the store is faster.
		if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		load(&b[0])
		for range 20 { // until a tick has come by
			busy = busy || !f.Settled()
		}
	}
	stop.Store(true)
	<-done
	if !busy {
		t.Error("a task at the instruction of its fault is never busy")
	}
}

// On a kernel that may skip all its probes there is no feed of that tier
// without KVM behind them.
func TestProbesNeedWitness(t *testing.T) {
	machine.NeedKVM(t)
	machine.NeedProbes(t)
	tr, err := tracer.Open(tracer.Options{Tier: tracer.TierNotifierProbe})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	f, err := tr.OpenFeed(tracer.Self(), tracer.FeedOptions{})
	if err == nil {
		f.Close()
	}
	if errors.Is(err, tracer.ErrNoWitness) != tracer.Preemptible() {
		t.Errorf("preemptible %v: %v", tracer.Preemptible(), err)
	}
	f, err = tr.OpenFeed(tracer.Self(), tracer.FeedOptions{Witness: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}
