// SPDX-License-Identifier: Apache-2.0

package coherence

import (
	"runtime"
	"sync"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// The syscall tier sees a change from the entry of its call on. The notifier
// tiers see it when the kernel begins with it, which is after the place where
// hold stops it.
var syscallTier = local.Options{Tier: tracer.TierSyscall}

// hold stops changes of a block in the middle, so that a test can do what
// others would have to win a race for. A userfaultfd with EVENT_REMOVE makes
// madvise(DONTNEED) wait inside the call, before the pages are dropped, until
// somebody reads the event (userfaultfd_remove(), fs/userfaultfd.c).
type hold struct {
	t  testing.TB
	fd int
}

const (
	uffdioAPI        = 0xc018aa3f
	uffdioRegister   = 0xc020aa00
	uffdioUnregister = 0x8010aa01
	uffdAPI          = 0xaa
	uffdEventRemove  = 1 << 3
	uffdMissing      = 1
)

func ioctl(fd int, op uintptr, arg unsafe.Pointer) error {
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), op, uintptr(arg)); e != 0 {
		return e
	}
	return nil
}

func newHold(t testing.TB, b block) *hold {
	t.Helper()
	fd, _, e := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|unix.O_NONBLOCK, 0, 0) // without O_NONBLOCK poll says error at once
	if e != 0 {
		t.Fatalf("userfaultfd: %v", e)
	}
	h := &hold{t, int(fd)}
	t.Cleanup(h.close)
	api := [3]uint64{uffdAPI, uffdEventRemove, 0}
	if err := ioctl(h.fd, uffdioAPI, unsafe.Pointer(&api)); err != nil {
		t.Fatalf("UFFDIO_API: %v", err)
	}
	reg := [4]uint64{uint64(b.start()), uint64(len(b)), uffdMissing, 0}
	if err := ioctl(h.fd, uffdioRegister, unsafe.Pointer(&reg)); err != nil {
		t.Fatalf("UFFDIO_REGISTER: %v", err)
	}
	return h
}

// zap starts DONTNEED of b in a thread and returns when it waits inside the
// call. letGo lets it finish and waits for its return; b is an ordinary
// mapping again then.
func (h *hold) zap(b block) (letGo func()) {
	h.t.Helper()
	var g sync.WaitGroup
	g.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		b.zap(h.t)
	})
	// the descriptor polls readable as soon as the event is queued
	p := []unix.PollFd{{Fd: int32(h.fd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(p, 10_000)
		if err == unix.EINTR {
			continue
		}
		if n != 1 || p[0].Revents != unix.POLLIN {
			h.t.Fatalf("the change did not come: poll %d, %#x, %v", n, p[0].Revents, err)
		}
		break
	}
	return func() {
		var msg [32]byte
		if _, err := unix.Read(h.fd, msg[:]); err != nil {
			h.t.Fatal(err)
		}
		g.Wait()
		r := [2]uint64{uint64(b.start()), uint64(len(b))}
		if err := ioctl(h.fd, uffdioUnregister, unsafe.Pointer(&r)); err != nil {
			h.t.Fatalf("UFFDIO_UNREGISTER: %v", err)
		}
	}
}

func (h *hold) close() {
	if h.fd >= 0 {
		unix.Close(h.fd)
		h.fd = -1
	}
}

// A change that began before the range was interesting, and is in flight
// while it is registered: the registration is not kept.
func TestInFlightWhenInterestIsSet(t *testing.T) {
	r := newRig(t, syscallTier)
	b := mapBlock(t, 1)
	defer b.unmap(t)
	b.touch()
	h := newHold(t, b)
	letGo := h.zap(b)
	tk := r.w.Begin(b.span())
	p, err := r.Register(b.span(), 0)
	if err != nil {
		t.Fatal(err)
	}
	v := r.w.Commit(tk, nil, func() {})
	letGo()
	b.touch()
	if now := r.frame(b.start()); v == feed.Cacheable && now != p.frame {
		t.Errorf("stale: committed as cacheable, frame %#x is now %#x", p.frame, now)
	}
	if v != feed.InFlight {
		t.Errorf("verdict %v, want %v", v, feed.InFlight)
	}
	if err := r.Deregister(p); err != nil {
		t.Error(err)
	}
	if v := r.w.Commit(r.w.Begin(b.span()), nil, func() {}); v != feed.Cacheable {
		t.Errorf("after the change: %v", v)
	}
}

// A change that begins between Begin and the registration and ends after the
// commit.
func TestInFlightDuringRegistration(t *testing.T) {
	r := newRig(t, syscallTier)
	b := mapBlock(t, 1)
	defer b.unmap(t)
	b.touch()
	h := newHold(t, b)
	tk := r.w.Begin(b.span())
	letGo := h.zap(b)
	p, err := r.Register(b.span(), 0)
	if err != nil {
		t.Fatal(err)
	}
	v := r.w.Commit(tk, nil, func() {})
	letGo()
	if v != feed.Changed {
		t.Errorf("verdict %v, want %v", v, feed.Changed)
	}
	if err := r.Deregister(p); err != nil {
		t.Error(err)
	}
}

// An entry is not hit from the begin of a change on, though the call has not
// returned.
func TestNoHitWhileAChangeIsInFlight(t *testing.T) {
	r := newRig(t, syscallTier)
	b := mapBlock(t, 1)
	defer b.unmap(t)
	r.acquire(b)
	if !r.acquire(b) {
		t.Fatal("not cached")
	}
	h := newHold(t, b)
	letGo := h.zap(b)
	if r.w.Valid() {
		t.Error("valid while a change is in flight that began after the last drain")
	}
	if r.acquire(b) {
		t.Error("hit while a change of the range is in flight")
	}
	letGo()
	r.acquire(b)
}

// A change that was in flight when the watch was opened: opening waits for
// it, or fails.
func TestInFlightWhenTheWatchOpens(t *testing.T) {
	other := newRig(t, syscallTier) // keeps the kernel side loaded
	b := mapBlock(t, 1)
	defer b.unmap(t)
	b.touch()
	h := newHold(t, b)
	letGo := h.zap(b)
	type opened struct {
		w   *feed.Watch
		err error
	}
	c := make(chan opened)
	go func() {
		w, err := local.Open(syscallTier)
		c <- opened{w, err}
	}()
	o := <-c // the change is held until Open has given its answer
	if o.err == nil {
		// Then it must know that a change is in flight.
		tk := o.w.Begin(b.span())
		p, err := other.Register(b.span(), 0)
		if err != nil {
			t.Fatal(err)
		}
		v := o.w.Commit(tk, nil, func() {})
		letGo()
		b.touch()
		if now := other.frame(b.start()); v == feed.Cacheable && o.w.Valid() && now != p.frame {
			t.Errorf("stale: frame %#x registered, now %#x, valid", p.frame, now)
		}
		other.Deregister(p)
		o.w.Close()
		t.Fatal("a watch was opened in the middle of a change")
	}
	t.Logf("refused: %v", o.err)
	letGo()
	w, err := local.Open(syscallTier)
	if err != nil {
		t.Fatalf("after the change: %v", err)
	}
	w.Close()
}

// A change whose record is lost is in flight while its range is registered.
func TestInFlightWhenItsRecordIsLost(t *testing.T) {
	r := newRig(t, local.Options{RingBytes: page, Tier: tracer.TierSyscall})
	noise := mapBlock(t, 1)
	defer noise.unmap(t)
	b := mapBlock(t, 1)
	defer b.unmap(t)
	b.touch()
	if v := r.w.Commit(r.w.Begin(noise.span()), nil, func() {}); v != feed.Cacheable {
		t.Fatal(v)
	}
	h := newHold(t, b)
	tk := r.w.Begin(b.span())
	for range 2 * page / 136 { // fill the ring
		noise.zap(t)
	}
	letGo := h.zap(b)
	p, err := r.Register(b.span(), 0)
	if err != nil {
		t.Fatal(err)
	}
	var lost bool
	v := r.w.Commit(tk, func(rec *mm.Record) { lost = lost || rec.Kind == mm.Lost }, func() {})
	if v == feed.Cacheable {
		t.Errorf("cacheable though the record of a change was lost")
	}
	if !lost {
		t.Error("no loss was delivered")
	}
	// Nor does a second try while it is in flight.
	if v := r.w.Commit(r.w.Begin(b.span()), nil, func() {}); v != feed.InFlight {
		t.Errorf("second try: %v", v)
	}
	letGo()
	r.Deregister(p)
}
