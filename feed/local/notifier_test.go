// SPDX-License-Identifier: Apache-2.0

//go:build linux && amd64

package local

import (
	"os/exec"
	"runtime"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

func openNotifier(t *testing.T) *feed.Watch {
	t.Helper()
	w, err := Open(Options{Tier: tracer.TierNotifierTracepoint})
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

// A watch that nothing would be told of any more is dead before that happens;
// the next one has a notifier of its own, and Close leaves alone what the
// program has put there meanwhile.
func TestNotifierPageUnmapped(t *testing.T) {
	machine.NeedKVM(t)
	w := openNotifier(t)
	at := unsafe.Add(nil, uintptr(shared.tiers[tracer.TierNotifierTracepoint].holder()))
	_, r := pages(t, 1)
	cache(t, w, r)
	if _, err := unix.MmapPtr(-1, 0, at, uintptr(mm.PageSize()), unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	mine := (*byte)(at)
	*mine = 42
	defer unix.MunmapPtr(at, uintptr(mm.PageSize()))
	if w.Valid() {
		t.Error("valid without a notifier")
	}
	if s := w.Drain(nil); s != feed.DeadState {
		t.Errorf("drain: %v", s)
	}
	next := openNotifier(t)
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
	other := exec.Command("sleep", "60")
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	defer other.Wait()
	defer other.Process.Kill()
	f, err := k.tracer.OpenFeed(tracer.PID(other.Process.Pid), tracer.FeedOptions{})
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
