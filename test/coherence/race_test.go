// SPDX-License-Identifier: Apache-2.0

package coherence

import (
	"runtime"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

// changesOf are ways to make a block another memory at the same address.
var changesOf = []struct {
	name string
	do   func(testing.TB, block)
}{
	{"munmap and mmap", func(t testing.TB, b block) { b.unmap(t); b.remap(t) }},
	{"mmap over", func(t testing.TB, b block) { b.remap(t) }},
	{"DONTNEED", func(t testing.TB, b block) { b.zap(t) }},
	{"mremap onto", func(t testing.TB, b block) {
		o := mapBlock(t, len(b)/page)
		o.touch()
		if _, err := unix.MremapPtr(ptr(o), uintptr(len(o)), ptr(b), uintptr(len(b)), unix.MREMAP_FIXED|unix.MREMAP_MAYMOVE); err != nil {
			t.Fatal(err)
		}
	}},
}

// A lookup right after the call has returned, by the thread that made it. No
// other thread does anything for the cache.
func TestRaceSameThread(t *testing.T) {
	r := newRig(t, local.Options{})
	b := mapBlock(t, 2)
	defer b.unmap(t)
	hits := 0
	for i := range *rounds {
		changesOf[i%len(changesOf)].do(t, b)
		r.acquire(b)
		if r.acquire(b) {
			hits++
		}
		if t.Failed() {
			t.Fatalf("after round %d (%s)", i, changesOf[i%len(changesOf)].name)
		}
	}
	if hits < enoughHits() {
		t.Errorf("%d hits in %d rounds: the cache does nothing", hits, *rounds)
	}
	t.Logf("%d rounds, %d hits, %+v", *rounds, hits, r.w.Stats())
}

// enoughHits of the rounds show that the cache does what it is for. On emulated
// processors (-short) a registration may wait too long to see that nothing is
// in flight, most of the time.
func enoughHits() int {
	if testing.Short() {
		return 1
	}
	return *rounds * 9 / 10
}

// A lookup by another thread as soon as it can know that the call returned.
func TestRaceOtherThread(t *testing.T) {
	r := newRig(t, local.Options{})
	b := mapBlock(t, 2)
	defer b.unmap(t)
	var turn atomic.Int64 // odd: the changer's, even: the looker's
	n := int64(*rounds)
	var g sync.WaitGroup
	g.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for i := range n {
			for turn.Load() != 2*i {
				runtime.Gosched()
			}
			changesOf[i%int64(len(changesOf))].do(t, b)
			turn.Store(2*i + 1)
		}
	})
	hits := 0
	for i := range n {
		for turn.Load() != 2*i+1 {
			runtime.Gosched()
		}
		if !t.Failed() {
			r.acquire(b)
			if r.acquire(b) {
				hits++
			}
		}
		turn.Store(2*i + 2)
	}
	g.Wait()
	if hits < enoughHits() {
		t.Errorf("%d hits in %d rounds; %+v; %+v", hits, *rounds, r.c.Stats(), r.w.Stats())
	}
}

// The kernel hands an address to one thread before another thread's munmap of
// it has returned.
func TestRaceAddressReuse(t *testing.T) {
	r := newRig(t, local.Options{})
	var g sync.WaitGroup
	var hits atomic.Int64
	const threads = 3
	for range threads {
		g.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			for range *rounds / threads {
				b := mapBlock(t, 2)
				r.acquire(b)
				if r.acquire(b) {
					hits.Add(1)
				}
				b.unmap(t)
				if t.Failed() {
					return
				}
			}
		})
	}
	g.Wait()
	t.Logf("%d hits", hits.Load())
	if hits.Load() == 0 {
		t.Error("no hit at all")
	}
}

// Registering while another thread drops the pages: whatever the
// interleaving, what is in the cache afterwards is true.
func TestRaceRegisterDuringDontneed(t *testing.T) {
	r := newRig(t, local.Options{})
	b := mapBlock(t, 1)
	defer b.unmap(t)
	var start, done atomic.Int64
	n := int64(*rounds)
	var g sync.WaitGroup
	g.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for i := range n {
			for start.Load() != i+1 {
				runtime.Gosched()
			}
			for range i % 64 { // another phase each time
				runtime.KeepAlive(i)
			}
			b.zap(t)
			done.Store(i + 1)
		}
	})
	hits := 0
	for i := range n {
		b.zap(t) // so that Acquire has to register
		start.Store(i + 1)
		ref, err := r.c.Acquire(b.span(), regcache.LocalWrite)
		if err != nil {
			t.Error(err)
		} else {
			ref.Release()
		}
		for done.Load() != i+1 {
			runtime.Gosched()
		}
		if !t.Failed() && r.acquire(b) {
			hits++
		}
	}
	g.Wait()
	t.Logf("%d rounds, %d hits after the race, %+v", n, hits, r.w.Stats())
}

// A ring so small that records are lost all the time.
func TestRaceLoss(t *testing.T) {
	r := newRig(t, local.Options{RingBytes: page})
	blocks := make([]block, 64)
	for i := range blocks {
		blocks[i] = mapBlock(t, 1)
		r.acquire(blocks[i])
	}
	for i := range *rounds / len(blocks) {
		for _, b := range blocks {
			b.zap(t)
		}
		for j, b := range blocks {
			r.acquire(b)
			if (i+j)%7 == 0 {
				b.zap(t)
			}
		}
		if t.Failed() {
			t.Fatalf("after round %d", i)
		}
	}
	if s := r.w.Stats(); s.Losses == 0 {
		t.Errorf("nothing was lost: %+v", s)
	}
	for _, b := range blocks {
		b.unmap(t)
	}
}

// A thread's drain is stuck in its callback: lookups by others miss or wait,
// they never hit.
func TestRaceStuckDrain(t *testing.T) {
	r := newRig(t, local.Options{})
	b := mapBlock(t, 1)
	defer b.unmap(t)
	r.acquire(b)
	r.acquire(b)
	b.zap(t)
	stuck, release := make(chan struct{}), make(chan struct{})
	var g sync.WaitGroup
	g.Go(func() {
		once := false
		r.w.Drain(func(*mm.Record) {
			if !once {
				once = true
				close(stuck)
				<-release
			}
		})
	})
	<-stuck
	for range 1000 {
		if r.w.Valid() {
			t.Fatal("valid during a drain")
		}
		if s := r.w.Drain(nil); s != feed.Busy {
			t.Fatalf("second drain: %v", s)
		}
	}
	r.acquire(b)
	close(release)
	g.Wait()
}
