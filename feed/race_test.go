// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

// simpleCache has one possible entry for each page, found without a lock.
type simpleCache struct {
	w       *feed.Watch
	p       *feedtest.Producer
	version [256]atomic.Int64 // of the page tables
	entry   [256]atomic.Int64 // version registered + 1; 0: none
	drops   atomic.Int64
}

func (c *simpleCache) apply(r *mm.Record) {
	for i := range c.entry {
		if r.Kind == mm.Lost || r.Kind == mm.Exit || r.Touches(pages(i, i+1)) {
			if c.entry[i].Swap(0) != 0 {
				c.drops.Add(1)
				c.w.Forget(pages(i, i+1))
			}
		}
	}
}

// TestRaceNoStaleHit: producers change pages, consumers look up and
// register, with everything that can go wrong on the way: records left
// unfinished for a while, a ring that is too small, losses, slow changes. No
// lookup finds an entry older than a change that had happened before it.
func TestRaceNoStaleHit(t *testing.T) {
	for _, c := range []struct {
		name                string
		bytes, pages, drops int
	}{{"small ring", int(mm.PageSize()), 256, 500}, {"large ring", 1 << 20, 256, 500}, {"one page", 1 << 16, 1, 200}} {
		t.Run(c.name, func(t *testing.T) { raceNoStaleHit(t, c.bytes, c.pages, int64(c.drops)) })
	}
}

func raceNoStaleHit(t *testing.T, ringBytes, npages int, wantDrops int64) {
	p, w := pair(t, feedtest.Options{RingBytes: ringBytes})
	c := &simpleCache{w: w, p: p}
	const wantHits, maxLookups = 2000, 1_000_000
	var hits, inserted atomic.Int64
	var producers, consumers sync.WaitGroup
	var done atomic.Bool
	for n := range 3 {
		producers.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(n), 1))
			pause := func(most int) {
				for range rnd.IntN(most) {
					runtime.Gosched()
				}
			}
			for !done.Load() {
				first := rnd.IntN(npages)
				last := min(first+1+rnd.IntN(3), npages)
				ch := p.Prepare(mm.Unmap, pages(first, last), mm.Range{})
				ch.Start()
				if ch.Test() {
					if ch.Reserve() {
						if rnd.IntN(64) == 0 { // interrupted while writing
							pause(300)
						}
						ch.Submit()
					}
					ch.Count()
				}
				if rnd.IntN(16) == 0 {
					pause(20)
				}
				for i := first; i < last; i++ {
					c.version[i].Add(1)
				}
				if rnd.IntN(16) == 0 { // slow
					pause(20)
				}
				ch.End()
				if rnd.IntN(500) == 0 {
					p.Lose(1)
				}
				if rnd.IntN(500) == 0 {
					p.LoseAll()
				}
				if rnd.IntN(4) == 0 {
					pause(200)
				}
			}
		})
	}
	for n := range 2 {
		consumers.Go(func() {
			rnd := rand.New(rand.NewPCG(uint64(n), 2))
			for range maxLookups {
				if hits.Load() >= wantHits && c.drops.Load() >= wantDrops {
					return
				}
				if rnd.IntN(4) == 0 {
					runtime.Gosched()
				}
				i := rnd.IntN(npages)
				before := c.version[i].Load()
				if w.Valid() || w.Drain(c.apply) == feed.Fresh {
					if e := c.entry[i].Load(); e != 0 {
						hits.Add(1)
						if e-1 < before {
							t.Errorf("page %d: hit at version %d, was %d before the lookup", i, e-1, before)
							return
						}
						continue
					}
				}
				ticket := w.Begin(pages(i, i+1))
				registered := c.version[i].Load() + 1
				twice := false
				v := w.Commit(ticket, c.apply, func() { twice = !c.entry[i].CompareAndSwap(0, registered) })
				if v == feed.Cacheable {
					inserted.Add(1)
				}
				if twice {
					w.Forget(pages(i, i+1))
				}
			}
		})
	}
	consumers.Wait()
	done.Store(true)
	producers.Wait()
	if hits.Load() < wantHits || c.drops.Load() < wantDrops {
		t.Errorf("too little was tested: %d hits, %d entries dropped", hits.Load(), c.drops.Load())
	}
	t.Logf("%d hits, %d inserts, %d drops, %+v", hits.Load(), inserted.Load(), c.drops.Load(), w.Stats())

	// At rest each entry is right, and its interest is there exactly once.
	if s := w.Drain(c.apply); s != feed.Fresh || !w.Valid() {
		t.Fatalf("at rest: %v", s)
	}
	for i := range npages {
		if e := c.entry[i].Load(); e != 0 {
			if e-1 != c.version[i].Load() {
				t.Errorf("page %d: entry of version %d, is %d", i, e-1, c.version[i].Load())
			}
			w.Forget(pages(i, i+1))
		}
	}
	if p.Interesting(pages(0, npages), mm.Range{}) {
		t.Error("interest is left although every entry is gone")
	}
}

// Every record is delivered exactly once, whoever drains.
func TestRaceConservation(t *testing.T) {
	p, w := pair(t, feedtest.Options{Everything: true, RingBytes: 1 << 16})
	const producers, each = 4, 20_000
	var received, lost, busy atomic.Int64
	count := func(r *mm.Record) {
		if r.Kind == mm.Lost {
			lost.Add(int64(r.Lost))
		} else {
			received.Add(1)
		}
	}
	var sending, draining sync.WaitGroup
	var done atomic.Bool
	for range producers {
		sending.Go(func() {
			for i := range each {
				p.Change(mm.Zap, pages(i%512, i%512+1))
			}
		})
	}
	for range 3 {
		draining.Go(func() {
			for !done.Load() {
				if w.Drain(count) == feed.Busy {
					busy.Add(1)
					runtime.Gosched()
				}
			}
		})
	}
	sending.Wait()
	done.Store(true)
	draining.Wait()
	if s := w.Drain(count); s != feed.Fresh || !w.Valid() {
		t.Fatalf("last drain: %v", s)
	}
	if received.Load()+lost.Load() != producers*each {
		t.Errorf("sent %d, received %d, lost %d", producers*each, received.Load(), lost.Load())
	}
	if s := w.Stats(); s.Records != uint64(received.Load()) || s.Lost != uint64(lost.Load()) {
		t.Errorf("stats %+v, received %d, lost %d", s, received.Load(), lost.Load())
	}
}

// Close while every method is in use: nothing crashes, nothing is valid
// afterwards, no callback runs afterwards, and Release is called once.
func TestRaceClose(t *testing.T) {
	for range 10 {
		p, err := feedtest.New(everything)
		if err != nil {
			t.Fatal(err)
		}
		m, err := p.Memory()
		if err != nil {
			t.Fatal(err)
		}
		released := 0
		m.Release = func() error { released++; return nil }
		w, err := feed.New(m)
		if err != nil {
			t.Fatal(err)
		}
		var closed, done atomic.Bool
		apply := func(*mm.Record) {
			if closed.Load() {
				t.Error("callback after Close")
			}
		}
		var wg, ready sync.WaitGroup
		loop := func(f func()) {
			ready.Add(1)
			wg.Go(func() {
				f()
				ready.Done()
				for !done.Load() {
					f()
				}
			})
		}
		loop(func() { w.Valid() })
		loop(func() { w.Drain(apply) })
		loop(func() { w.Commit(w.Begin(pages(1, 3)), apply, func() { w.Forget(pages(1, 3)) }) })
		loop(func() { p.Change(mm.Zap, pages(0, 1)) })
		wg.Go(func() {
			for w.Wait(t.Context()) == nil && !closed.Load() {
				w.Drain(apply)
			}
		})
		ready.Wait()
		var closing sync.WaitGroup
		for range 2 {
			closing.Go(func() {
				if err := w.Close(); err != nil {
					t.Error(err)
				}
				closed.Store(true)
				for range 100 {
					if w.Valid() {
						t.Error("valid after Close")
					}
				}
			})
		}
		closing.Wait()
		done.Store(true)
		wg.Wait()
		if released != 1 {
			t.Errorf("released %d times", released)
		}
		p.Close()
	}
}

// A closed watch that nobody can reach any more gives its memory back.
func TestCloseFreesWhenUnreachable(t *testing.T) {
	open := func() {
		p, err := feedtest.New(feedtest.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		w, err := p.Watch()
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if w.Valid() {
			t.Error("valid after Close")
		}
	}
	open()
	had := feed.SeenFree()
	for range 200 { // more than a page of lines
		open()
	}
	deadline := time.Now().Add(20 * time.Second)
	for feed.SeenFree() < had+1 {
		if time.Now().After(deadline) {
			t.Fatalf("free lines: %d, had %d", feed.SeenFree(), had)
		}
		runtime.GC()
		runtime.Gosched()
	}
}
