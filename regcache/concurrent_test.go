// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"context"
	"errors"
	"math/rand/v2"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/ummu/ummu/mm"
)

// memory is address space in miniature: a change gives a page another version,
// a device sees the version that a page had when it was registered.
type memory struct {
	version   []atomic.Uint64 // moves while a change is in flight
	completed []atomic.Uint64 // version of the last change that has returned
}

func newMemory(n uint64) *memory {
	return &memory{version: make([]atomic.Uint64, n), completed: make([]atomic.Uint64, n)}
}

// index returns the numbers of the first page of r and of the one after the last.
func (m *memory) index(r mm.Range) (first, last uint64) {
	base := pages(0, 1).Start
	r = r.Pages()
	return uint64(r.Start-base) / mm.PageSize(), uint64(r.End-base) / mm.PageSize()
}

func load(words []atomic.Uint64, first, last uint64) []uint64 {
	seen := make([]uint64, 0, last-first)
	for i := first; i < last; i++ {
		seen = append(seen, words[i].Load())
	}
	return seen
}

func (m *memory) device(r mm.Range) []uint64 {
	first, last := m.index(r)
	return load(m.version, first, last)
}

// known is what everybody can know to have happened to r.
func (m *memory) known(r mm.Range) []uint64 {
	first, last := m.index(r)
	return load(m.completed, first, last)
}

// change is a change as the kernel makes it: record, page tables, return.
func (m *memory) change(f *fixture, k mm.Kind, r mm.Range) {
	var end func()
	if f.live() {
		end = f.p.Begin(k, r, mm.Range{}).End
	}
	first, last := m.index(r)
	versions := make([]uint64, 0, last-first)
	for i := first; i < last; i++ {
		versions = append(versions, m.version[i].Add(1))
	}
	if end != nil {
		end()
	}
	for i, v := range versions {
		c := &m.completed[first+uint64(i)]
		for old := c.Load(); old < v && !c.CompareAndSwap(old, v); old = c.Load() {
		}
	}
}

// stale reports whether a device that saw the versions of r at its
// registration misses one of known, of a part of r.
func (m *memory) stale(reg registration, part mm.Range, known []uint64) bool {
	first, _ := m.index(reg.r)
	from, _ := m.index(part)
	for i, v := range known {
		if reg.seen[from-first+uint64(i)] < v {
			return true
		}
	}
	return false
}

// C1 and C2 at the cache: what a hit returns was registered after each change
// that had completed when Acquire was called; and what completed while a
// reference was held is reported by its Release.
//
// cases.md C4: and each registration is deregistered exactly once.
func TestNoStaleHit(t *testing.T) {
	forFeeds(t, Options{MaxEntries: 24}, func(t *testing.T, f *fixture) {
		const space = 64
		m := newMemory(space)
		f.dev.captured = m.device
		var fails atomic.Uint64
		f.dev.onDereg = func(uint32) error {
			if fails.Add(1)%17 == 0 {
				return syscall.EBUSY
			}
			return nil
		}
		f.dev.onReg = func(mm.Range, Access) error {
			if fails.Add(1)%31 == 0 {
				return syscall.ENOMEM
			}
			return nil
		}
		stop := run(t, f.c)
		var hits, changes atomic.Uint64
		var lookups, changers sync.WaitGroup
		done := make(chan struct{})
		for i := range uint64(2) {
			changers.Go(func() {
				rng := rand.New(rand.NewPCG(i, 100))
				for {
					select {
					case <-done:
						return
					default:
					}
					first := rng.Uint64N(space)
					m.change(f, mm.Zap, pages(first, min(space, first+1+rng.Uint64N(3))))
					if n := changes.Add(1); n%512 == 0 && f.live() {
						f.p.Lose(1)
					}
					runtime.Gosched()
				}
			})
		}
		for i := range uint64(6) {
			lookups.Go(func() {
				rng := rand.New(rand.NewPCG(i, 7))
				for n := 0; n < 4000 || changes.Load() < 20_000; n++ {
					if n%16 == 0 {
						runtime.Gosched()
					}
					first := rng.Uint64N(space / 4)
					r := pages(first*4, first*4+1+rng.Uint64N(3))
					known := m.known(r)
					before := f.dev.registrations()
					ref, err := f.c.Acquire(r, Access(rng.IntN(3)))
					if errors.Is(err, ErrLimit) {
						continue
					}
					if err != nil {
						t.Errorf("acquire: %v", err)
						return
					}
					if before == f.dev.registrations() {
						hits.Add(1)
					}
					reg, ok := f.dev.registration(ref.Handle())
					if !ok {
						t.Errorf("%v: handle %d is not registered", r, ref.Handle())
						return
					}
					if m.stale(reg, r, known) {
						_, why := ref.Cached()
						t.Errorf("%v: stale (%v)", r, why)
					}
					whole, watched := ref.Range(), ref.e.interest
					known = m.known(whole)
					if stale := m.stale(reg, whole, known); !ref.Release() && stale && watched {
						t.Errorf("%v changed while in use, Release did not say so", whole)
					}
				}
			})
		}
		lookups.Wait()
		close(done)
		changers.Wait()
		stop(context.Canceled)
		f.c.check(t)
		s := f.c.Stats()
		if s.InUse != 0 {
			t.Errorf("%d in use at the end", s.InUse)
		}
		if s.Registrations != s.Deregistrations+uint64(s.Zombies+s.Stale+s.Entries) {
			t.Errorf("%d registrations, %d deregistrations, %d zombies, %d stale, %d entries",
				s.Registrations, s.Deregistrations, s.Zombies, s.Stale, s.Entries)
		}
		if f.live() && (s.Hits == 0 || s.Invalidated[mm.Zap] == 0) {
			t.Errorf("nothing was tested: %+v", s)
		}
		t.Logf("%d changes, %d hits, %d misses, invalidated %v, uncached %v", changes.Load(), s.Hits, s.Misses, s.Invalidated, s.Uncached)
	})
}

// Threads that miss one range at once: never two entries, each registration
// that was too much is taken back.
func TestMissesOfOneRangeAtOnce(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		const threads = 8
		for round := range uint64(100) {
			var inside sync.WaitGroup
			inside.Add(threads)
			f.dev.onReg = func(mm.Range, Access) error {
				inside.Done()
				inside.Wait() // all of them missed
				return nil
			}
			var all sync.WaitGroup
			refs := make([]Ref[uint32], threads)
			for i := range refs {
				all.Go(func() {
					var err error
					if refs[i], err = f.c.Acquire(pages(round, round+1), 0); err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			f.dev.onReg = nil
			first := refs[0].Handle()
			for i := range refs {
				if f.live() && refs[i].Handle() != first {
					t.Fatalf("two registrations of one range are in use")
				}
				refs[i].Release()
			}
			f.entries(int(round) + 1)
			f.c.check(t)
		}
	})
}

// The same with rights that differ: at most one entry of the range is found
// at any time, and each caller has the rights it asked for.
func TestUpgradesOfOneRangeAtOnce(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		for range 100 {
			var all sync.WaitGroup
			for i := range 8 {
				all.Go(func() {
					a := Access(1 << (i % 4))
					ref, err := f.c.Acquire(pages(0, 1), a)
					if err != nil || !ref.Access().Has(a) {
						t.Errorf("%v: %v with %v", a, err, ref.Access())
					}
					ref.Release()
				})
			}
			all.Wait()
			f.c.check(t)
			f.entries(1)
			f.change(mm.Zap, pages(0, 1))
		}
	})
}

// cases.md H1, H2, H3, H4: a Registrar that allocates, frees and unmaps in each
// call, also what it is registering, and acquires and releases: no hang.
func TestRegistrarReenters(t *testing.T) {
	forFeeds(t, Options{MaxEntries: 4}, func(t *testing.T, f *fixture) {
		depth := 0
		reenter := func(r mm.Range) {
			if depth == 3 {
				return
			}
			depth++
			defer func() { depth-- }()
			block, err := syscall.Mmap(-1, 0, 1<<20, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
			if err != nil {
				t.Error(err)
				return
			}
			f.change(mm.Unmap, r.Pages())
			if err := syscall.Munmap(block); err != nil {
				t.Error(err)
			}
			for _, other := range []mm.Range{r, pages(100, 102), pages(uint64(200+depth), uint64(201+depth))} {
				ref, err := f.c.Acquire(other, 0)
				if err != nil {
					t.Errorf("acquire inside of a call to the registrar: %v", err)
				}
				ref.Release()
			}
			f.c.Stats()
		}
		f.dev.onReg = func(r mm.Range, _ Access) error {
			reenter(r)
			return nil
		}
		f.dev.onDereg = func(h uint32) error {
			reg, _ := f.dev.registration(h)
			reenter(reg.r)
			return nil
		}
		for i := range uint64(20) {
			ref, err := f.c.Acquire(pages(i, i+1), 0)
			if err != nil {
				t.Fatal(err)
			}
			f.change(mm.Zap, pages(i, i+1))
			ref.Release()
			f.c.check(t)
		}
		f.dev.onReg = nil
	})
}

// cases.md H6: very many entries below one unmapped range: each is dropped
// and deregistered once, and it ends.
func TestManyEntriesOneUnmap(t *testing.T) {
	forFeeds(t, Options{MaxEntries: 100_000}, func(t *testing.T, f *fixture) {
		n := 100_000
		if !f.live() {
			n = 1000
		}
		for i := range uint64(n) {
			// All of them overlap page 500.
			ref, err := f.c.Acquire(bytes((i%500)*mm.PageSize()+i/500, 501*mm.PageSize()), 0)
			if err != nil {
				t.Fatal(err)
			}
			ref.Release()
		}
		f.entries(n)
		f.change(mm.Unmap, pages(500, 501))
		f.c.refresh()
		f.entries(0)
		if s := f.c.Stats(); f.live() && (s.Invalidated[mm.Unmap] != uint64(n) || s.Stale != n) {
			t.Errorf("%v invalidated, %d stale, want %d", s.Invalidated, s.Stale, n)
		}
		stop := run(t, f.c)
		stop(context.Canceled)
		if err := f.c.Close(); err != nil {
			t.Error(err)
		}
		if f.dev.deregs != n {
			t.Errorf("%d deregistrations, want %d", f.dev.deregs, n)
		}
	})
}

// cases.md H8: every third registration fails, and every fifth deregistration:
// no hang, no entry without a registration.
func TestEveryThirdRegistrationFails(t *testing.T) {
	forFeeds(t, Options{MaxEntries: 50}, func(t *testing.T, f *fixture) {
		n, m := 0, 0
		f.dev.onReg = func(mm.Range, Access) error {
			if n++; n%3 == 0 {
				return syscall.ENOMEM
			}
			if n%7 == 0 {
				return syscall.EFAULT
			}
			return nil
		}
		f.dev.onDereg = func(uint32) error {
			if m++; m%5 == 0 {
				return syscall.EIO
			}
			return nil
		}
		rng := rand.New(rand.NewPCG(3, 4))
		failed, lookups := 0, 100_000
		if !f.live() {
			lookups = 10_000
		}
		for i := range lookups {
			first := rng.Uint64N(100)
			r := pages(first, first+1)
			ref, err := f.c.Acquire(r, 0)
			if err != nil {
				failed++
				if !errors.Is(err, syscall.EFAULT) && !errors.Is(err, syscall.ENOMEM) {
					t.Fatal(err)
				}
			} else if reg, ok := f.dev.registration(ref.Handle()); !ok || reg.r != r {
				t.Fatalf("%v: no such registration", r)
			}
			ref.Release()
			if i%1000 == 0 {
				f.c.check(t)
			}
		}
		if failed == 0 {
			t.Error("nothing failed")
		}
	})
}

// cases.md D10: a program that only changes its memory and looks nothing up:
// what the cache holds does not grow.
func TestChangesWithoutLookups(t *testing.T) {
	f := newFixture(t, Options{}, true)
	for i := range uint64(100) {
		f.prime(pages(i, i+1), 0)
	}
	stop := run(t, f.c)
	for i := range uint64(200_000) {
		f.p.Change(mm.Zap, pages(i%100, i%100+1))
	}
	stop(context.Canceled)
	f.release(f.miss(pages(0, 1), 0, Cached), false)
	f.entries(1)
	f.c.check(t)
}
