// SPDX-License-Identifier: Apache-2.0

package coherence

import (
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

// hit brings b into the cache.
func (r *rig) hit(b block) {
	r.t.Helper()
	for range 10 { // a loss may come in between: some other process made the kernel skip a hook
		if r.acquire(b) {
			return
		}
	}
	r.t.Fatal("not cached")
}

// One change of the only entry of the cache: by another call, another way, or
// with bounds that only the kernel rounds.
func TestChange(t *testing.T) {
	for _, c := range []struct {
		name string
		do   func(*testing.T, *rig, block)
	}{
		{"munmap and mmap", func(t *testing.T, _ *rig, b block) { b.unmap(t); b.remap(t) }},
		{"mmap over", func(t *testing.T, _ *rig, b block) { b.remap(t) }},
		{"one byte", func(t *testing.T, _ *rig, b block) {
			if err := unix.Madvise(b[:1], unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
		}},
		{"mremap onto", func(t *testing.T, _ *rig, b block) {
			// from a place far from all that is registered
			area := mapBlock(t, 64<<20/page)
			defer area.unmap(t)
			far := area[32<<20:][:len(b)]
			far.touch()
			if _, err := unix.MremapPtr(ptr(far), uintptr(len(b)), ptr(b), uintptr(len(b)), unix.MREMAP_FIXED|unix.MREMAP_MAYMOVE); err != nil {
				t.Fatal(err)
			}
		}},
		{"last of a long vector", func(t *testing.T, _ *rig, b block) {
			others := mapBlock(t, 64)
			defer others.unmap(t)
			fd, err := unix.PidfdOpen(unix.Getpid(), 0)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			var v []unix.Iovec
			for i := range 63 {
				v = append(v, unix.Iovec{Base: &others[i*page], Len: uint64(page)})
			}
			v = append(v, unix.Iovec{Base: &b[0], Len: uint64(len(b))})
			n, _, e := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(fd), uintptr(unsafe.Pointer(&v[0])), uintptr(len(v)), unix.MADV_DONTNEED, 0, 0)
			// before 6.13 nobody may drop pages this way, and nothing changes
			if e != unix.EINVAL && int(n) != 63*page+len(b) {
				t.Fatalf("process_madvise: %d, %v", n, e)
			}
			if e == unix.EINVAL {
				b.zap(t)
			}
		}},
		{"io_uring", func(t *testing.T, r *rig, b block) {
			if err := r.ring.Madvise(b.span(), unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t, local.Options{})
			b := mapBlock(t, 1)
			defer b.unmap(t)
			r.hit(b)
			c.do(t, r, b)
			if r.acquire(b) {
				t.Error("hit after the change")
			}
		})
	}
}

// An entry that changes while it is in use: no further hit, though it is
// registered still, and its holder is told.
func TestChangeInUse(t *testing.T) {
	r := newRig(t, local.Options{})
	b := mapBlock(t, 1)
	defer b.unmap(t)
	r.hit(b)
	held, err := r.c.Acquire(b.span(), regcache.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	b.zap(t)
	if r.acquire(b) {
		t.Error("hit after the change")
	}
	if !held.Release() {
		t.Error("its holder was not told")
	}
}

// The watched process ends, by SIGKILL: nothing is valid any more.
func TestTargetDies(t *testing.T) {
	child := exec.Command("sleep", "1000")
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	w, err := local.Open(local.Options{PID: child.Process.Pid})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for !w.Valid() { // it may be starting still
		if s := w.Drain(nil); s == feed.DeadState {
			t.Fatal(s)
		}
	}
	child.Process.Kill()
	child.Wait()
	if w.Valid() {
		t.Error("valid though the address space is gone")
	}
	var last mm.Record
	if s := w.Drain(func(r *mm.Record) { last = *r }); s != feed.DeadState || last.Flags&mm.SpaceDeath == 0 {
		t.Errorf("%v, last record %+v", s, last)
	}
}

// Changes of what nobody registered do not fill the ring of a client that
// looks nothing up, nor make it drain.
func TestChangesOfOthersMakeNoRecord(t *testing.T) {
	r := newRig(t, local.Options{RingBytes: page})
	b := mapBlock(t, 1)
	defer b.unmap(t)
	r.hit(b)
	area := mapBlock(t, 64<<20/page)
	defer area.unmap(t)
	far := area[32<<20:][:page]
	before := r.w.Stats()
	for range 1000 {
		far.zap(t)
	}
	r.w.Drain(nil)
	if now := r.w.Stats(); now.Records-before.Records > 100 || now.Lost != before.Lost {
		t.Errorf("before %+v, now %+v", before, now)
	}
}

// While one thread changes memory another one drains whenever the watch is not
// valid. When a change has returned and the watch is valid, its record was
// drained.
func TestRaceValidMeansDrained(t *testing.T) {
	const changes = 25_000 // fewer than the ring has room for
	r := newRig(t, local.Options{RingBytes: 4 << 20})
	b := mapBlock(t, 1)
	defer b.unmap(t)
	r.hit(b)
	var made, drained atomic.Int64
	var done atomic.Bool
	var g sync.WaitGroup
	g.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		defer done.Store(true)
		for made.Load() < changes {
			b.zap(t)
			made.Add(1)
			if r.w.Valid() && drained.Load() < made.Load() {
				t.Errorf("valid after %d changes, %d of them drained", made.Load(), drained.Load())
				return
			}
		}
	})
	for !done.Load() {
		if r.w.Valid() {
			runtime.Gosched()
			continue
		}
		r.w.Drain(func(rec *mm.Record) {
			if rec.Kind == mm.Zap && rec.Range == b.span() {
				drained.Add(1)
			}
		})
	}
	g.Wait()
	// on some tiers the kernel may skip a program, which is a loss too
	if s := r.w.Stats(); s.Lost > changes/100 {
		t.Errorf("the ring should have room for all: %+v", s)
	}
}
