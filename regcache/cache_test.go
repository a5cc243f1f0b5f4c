// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"context"
	"errors"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

func TestHitAndMiss(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		a := f.miss(pages(0, 4), LocalWrite, Cached)
		b := f.hit(pages(0, 4), LocalWrite)
		c := f.hit(pages(1, 2), LocalWrite) // contained
		d := f.hit(pages(0, 4), 0)          // fewer rights
		e := f.miss(pages(3, 5), LocalWrite, Cached)
		for _, ref := range []Ref[uint32]{a, b, c, d, e} {
			f.release(ref, false)
		}
		f.release(f.hit(bytes(5, 7), 0), false)
		s := f.c.Stats()
		hits, misses := uint64(4), uint64(2)
		if !f.live() {
			hits, misses = 0, 6
		}
		if s.Hits != hits || s.Misses != misses || s.InUse != 0 {
			t.Errorf("stats %+v", s)
		}
	})
}

// A Ref is a value whose zero refers to nothing.
func TestZeroRef(t *testing.T) {
	var ref Ref[string]
	if ref.Handle() != "" || !ref.Range().Empty() || ref.Access() != 0 || ref.Release() {
		t.Error("the zero Ref is something")
	}
	if ok, _ := ref.Cached(); ok {
		t.Error("the zero Ref is cached")
	}
}

func TestReleaseTwice(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		ref := f.miss(pages(0, 1), 0, Cached)
		copied := ref
		ref.Release()
		if ref.Release() {
			t.Error("a released Ref is the zero Ref")
		}
		if !f.live() {
			return // its registration is gone with the first
		}
		defer func() {
			if recover() == nil {
				t.Error("no panic")
			}
			// Undo the damage, for the checks at the end.
			copied.e = nil
			f.c.mu.Lock()
			f.c.idle.front.state.And(^(refMask | parked | changed | dropped))
			f.c.idle.front.state.And(^hitMask)
			f.c.mu.Unlock()
		}()
		copied.Release()
	})
}

// A missing right is no hit; the upgrade registers the union, and the entry
// with fewer rights leaves the index.
func TestUpgrade(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		old := f.miss(pages(0, 2), LocalWrite, Cached)
		up := f.miss(pages(0, 2), RemoteRead, Cached)
		if want := LocalWrite | RemoteRead; f.live() && up.Access() != want {
			t.Errorf("upgrade has %v, want %v", up.Access(), want)
		}
		f.entries(1)
		f.release(up, false)
		f.release(f.hit(pages(0, 2), LocalWrite), false)
		// The holder of the old one is still told of a change.
		f.change(mm.Zap, pages(1, 2))
		f.release(old, true)
		f.entries(0)
		if s := f.c.Stats(); f.live() && s.Replaced != 1 {
			t.Errorf("replaced %d, want 1", s.Replaced)
		}
	})
}

// Where the device refuses the union, the operation works with what it asked
// for, and the cached entry stays.
func TestUpgradeRefused(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.dev.onReg = func(_ mm.Range, a Access) error {
			if a == LocalWrite|RemoteAtomic {
				return errDevice
			}
			return nil
		}
		f.prime(pages(0, 1), LocalWrite)
		f.release(f.miss(pages(0, 1), RemoteAtomic, ReasonRights), false)
		f.release(f.hit(pages(0, 1), LocalWrite), false)
		f.entries(1)
	})
}

func TestEvictionOrder(t *testing.T) {
	forFeeds(t, Options{MaxEntries: 3}, func(t *testing.T, f *fixture) {
		if !f.live() {
			t.Log("nothing is cached, so nothing is evicted")
		}
		for i := range uint64(3) {
			f.prime(pages(10*i, 10*i+1), 0)
		}
		f.release(f.hit(pages(0, 1), 0), false) // spared once
		f.prime(pages(30, 31), 0)               // evicts 10
		f.prime(pages(40, 41), 0)               // evicts 20
		f.entries(3)
		if f.live() {
			want := []mm.Range{pages(10, 11), pages(20, 21)}
			if diff := cmp.Diff(want, f.dev.order); diff != "" {
				t.Errorf("evicted (-want +got):\n%s", diff)
			}
		}
		f.release(f.hit(pages(0, 1), 0), false)
		f.release(f.miss(pages(10, 11), 0, Cached), false)
	})
}

// What is in use is never evicted, and full of it is a reason, not an error.
// A change of an uncached registration is reported all the same.
func TestFullOfEntriesInUse(t *testing.T) {
	forFeeds(t, Options{MaxEntries: 2}, func(t *testing.T, f *fixture) {
		a := f.miss(pages(0, 1), 0, Cached)
		b := f.miss(pages(10, 11), 0, Cached)
		for range 3 {
			f.release(f.miss(pages(20, 21), 0, ReasonFull), false)
		}
		c := f.miss(pages(20, 21), 0, ReasonFull)
		f.change(mm.Unmap, pages(20, 21))
		f.release(c, true)
		f.release(f.hit(pages(0, 1), 0), false)
		f.release(a, false)
		f.release(f.miss(pages(20, 21), 0, Cached), false) // a made room
		f.release(b, false)
		f.entries(2)
		if s := f.c.Stats(); f.live() && s.Evicted != 1 {
			t.Errorf("evicted %d, want 1", s.Evicted)
		}
	})
}

// cases.md I9: a full cache still hits.
func TestHitBeforeFull(t *testing.T) {
	forFeeds(t, Options{MaxEntries: 1}, func(t *testing.T, f *fixture) {
		a := f.miss(pages(0, 1), 0, Cached)
		f.release(f.hit(pages(0, 1), 0), false)
		f.release(f.miss(pages(5, 6), 0, ReasonFull), false)
		f.release(f.hit(pages(0, 1), 0), false)
		f.release(a, false)
	})
}

func TestLimitOfBytes(t *testing.T) {
	page := mm.PageSize()
	forFeeds(t, Options{MaxBytes: 8 * page}, func(t *testing.T, f *fixture) {
		f.prime(pages(0, 4), 0)
		f.prime(pages(10, 14), 0)
		f.prime(bytes(20*page, 1), 0) // pins a page: evicts the first
		f.entries(2)
		f.release(f.hit(pages(10, 14), 0), false)
		f.release(f.miss(pages(0, 9), 0, ReasonTooLarge), false)
		f.entries(2)
		f.prime(pages(30, 38), 0)
		f.entries(1)
	})
}

func TestInvalidationByKind(t *testing.T) {
	for _, kind := range []mm.Kind{mm.Unmap, mm.Replace, mm.Zap, mm.Move, mm.Protect} {
		t.Run(kind.String(), func(t *testing.T) {
			forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
				f.prime(pages(0, 4), 0)
				f.prime(pages(8, 9), 0)
				f.change(kind, pages(2, 3))
				f.release(f.miss(pages(0, 4), 0, Cached), false)
				f.release(f.hit(pages(8, 9), 0), false)
				if got := f.c.Stats().Invalidated; f.live() && !cmp.Equal(got, map[mm.Kind]uint64{kind: 1}) {
					t.Errorf("invalidated %v", got)
				}
			})
		})
	}
}

// A move kills what was at its destination as well.
func TestMoveDestination(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.prime(pages(0, 1), 0)
		f.prime(pages(10, 11), 0)
		f.prime(pages(20, 21), 0)
		if f.live() {
			f.p.Begin(mm.Move, pages(0, 1), pages(10, 11)).End()
		}
		f.release(f.miss(pages(0, 1), 0, Cached), false)
		f.release(f.miss(pages(10, 11), 0, Cached), false)
		f.release(f.hit(pages(20, 21), 0), false)
	})
}

func TestFalseInvalidations(t *testing.T) {
	f := newFixture(t, Options{}, true)
	for _, flags := range []mm.Flags{mm.Superset, mm.Maybe, 0} {
		f.prime(pages(0, 1), 0)
		c := f.p.Prepare(mm.Zap, pages(0, 1), mm.Range{})
		c.Flags = flags
		c.Start()
		if !c.Test() || !c.Reserve() {
			t.Fatal("no record")
		}
		c.Submit()
		c.Count()
		c.End()
	}
	f.prime(pages(0, 1), 0)
	f.p.Lose(1)
	f.prime(pages(0, 1), 0)
	s := f.c.Stats()
	if want := (map[Cause]uint64{CauseSuperset: 1, CauseMaybe: 1, CauseLost: 1}); !cmp.Equal(s.FalseInvalidated, want) {
		t.Errorf("false invalidations %v, want %v", s.FalseInvalidated, want)
	}
	if want := (map[mm.Kind]uint64{mm.Zap: 3, mm.Lost: 1}); !cmp.Equal(s.Invalidated, want) {
		t.Errorf("invalidated %v, want %v", s.Invalidated, want)
	}
	protect := mm.Record{Kind: mm.Protect, Arg: [2]uint64{3}}
	if got := causeOf(&protect); got != CauseRights {
		t.Errorf("mprotect to readable and writable: %v, want %v", got, CauseRights)
	}
}

// cases.md B1: of three overlapping registrations exactly the two that a
// partial unmap touches die.
func TestPartialUnmapOfOverlapping(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.prime(pages(0, 4), 0)
		f.prime(pages(2, 8), 0)
		f.prime(pages(6, 12), 0)
		f.change(mm.Unmap, pages(3, 5))
		f.release(f.hit(pages(6, 12), 0), false)
		f.entries(1)
		f.release(f.miss(pages(0, 4), 0, Cached), false)
		f.release(f.miss(pages(2, 8), 0, Cached), false)
	})
}

// cases.md B3: two entries of 100 bytes in the page that is dropped die, the
// one in the next page lives.
func TestSmallEntriesShareAPage(t *testing.T) {
	page := mm.PageSize()
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.prime(bytes(100, 100), 0)
		f.prime(bytes(2000, 100), 0)
		f.prime(bytes(page+50, 100), 0)
		// The record's range is whole pages; byte ranges do not matter.
		f.change(mm.Zap, pages(0, 1))
		f.release(f.hit(bytes(page+50, 100), 0), false)
		f.entries(1)
		f.release(f.miss(bytes(100, 100), 0, Cached), false)
		f.release(f.miss(bytes(2000, 100), 0, Cached), false)
	})
}

// A record of a few bytes kills what shares its page.
func TestChangeOfAFewBytes(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.prime(bytes(100, 100), 0)
		f.change(mm.Zap, bytes(3000, 1))
		f.release(f.miss(bytes(100, 100), 0, Cached), false)
	})
}

// cases.md B4: a part of a registration in use changes: its holder is told,
// at each Release, and the rest of the cache is not concerned.
func TestPartOfEntryInUseChanges(t *testing.T) {
	for name, part := range map[string]mm.Range{
		"start": pages(10, 11), "middle": pages(14, 15), "end": pages(17, 18), "overhang": pages(17, 30), "before": pages(5, 11),
	} {
		t.Run(name, func(t *testing.T) {
			forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
				a := f.miss(pages(10, 18), LocalWrite, Cached)
				b := f.hit(pages(11, 12), LocalWrite)
				c := f.miss(pages(40, 41), 0, Cached)
				f.change(mm.Unmap, part)
				f.release(b, true)
				f.release(c, false)
				f.release(f.hit(pages(40, 41), 0), false)
				if f.dev.liveCount() != map[bool]int{true: 2, false: 1}[f.live()] {
					t.Errorf("deregistered while in use")
				}
				f.release(a, true)
			})
		})
	}
}

// cases.md B5: small buffers of one page have registrations of their own; one
// change of the page drops each of them, once.
func TestBuffersOfOnePage(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.prime(bytes(0, 256), 0)
		f.prime(bytes(256, 256), 0)
		f.prime(bytes(512, 256), 0)
		f.change(mm.Zap, pages(0, 1))
		f.release(f.miss(bytes(4096, 1), 0, Cached), false)
		f.entries(1)
		if s := f.c.Stats(); f.live() && (s.Invalidated[mm.Zap] != 3 || f.dev.deregs != 3) {
			t.Errorf("%v invalidated, %d deregistered, want 3", s.Invalidated, f.dev.deregs)
		}
	})
}

// cases.md B6: a range that two neighbours cover only together is no hit, so
// a dead neighbour is never merged with.
func TestNeighboursAreNotMerged(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.prime(pages(0, 16), 0)
		f.prime(pages(16, 32), 0)
		f.change(mm.Unmap, pages(0, 16))
		f.release(f.miss(pages(8, 24), 0, Cached), false)
		f.release(f.hit(pages(16, 32), 0), false)
	})
}

// cases.md B9: any address and any length above 0.
func TestRangesAndRights(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.prime(bytes(0x780, 408), 0)
		f.prime(bytes(4095, 2), 0)
		f.prime(bytes(8192, 1), 0)
		for name, tt := range map[string]struct {
			r    mm.Range
			a    Access
			want error
		}{
			"empty":    {mm.Range{}, 0, mm.ErrEmptyRange},
			"reversed": {mm.Range{Start: 10, End: 5}, 0, mm.ErrEmptyRange},
			"rights":   {pages(0, 1), 1 << 7, ErrAccess},
		} {
			if _, err := f.c.Acquire(tt.r, tt.a); !errors.Is(err, tt.want) {
				t.Errorf("%s: %v, want %v", name, err, tt.want)
			}
		}
		if got := f.c.Stats().Misses; got != 3 {
			t.Errorf("%d misses, want 3", got)
		}
	})
}

// cases.md B13: two small changes, not one large: what lies between stays.
func TestVectorOfChanges(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		for i := range uint64(7) {
			f.prime(pages(i, i+1), 0)
		}
		f.change(mm.Zap, pages(0, 1))
		f.change(mm.Zap, pages(6, 7))
		for i := range uint64(5) {
			f.release(f.hit(pages(i+1, i+2), 0), false)
		}
		f.entries(5)
	})
}

// cases.md C5: what changed between reading the state and acting on it is
// noticed: a registration during which its range changes is repeated, and if
// it changes each time, used once and not cached.
func TestChangeDuringRegistration(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		changes := 0
		f.dev.onReg = func(r mm.Range, _ Access) error {
			if changes > 0 {
				changes--
				f.change(mm.Zap, mm.Range{Start: r.End - 1, End: r.End}.Pages())
			}
			return nil
		}
		for n := 1; n < changedTries; n++ {
			changes = n
			ref := f.acquire(pages(0, 4), 0)
			f.reason(ref, Cached)
			f.release(ref, false)
			if tries := f.dev.tries; f.live() && tries != n+1 {
				t.Errorf("%d registrations, want %d", tries, n+1)
			}
			f.release(f.hit(pages(0, 4), 0), false)
			f.change(mm.Zap, pages(0, 4))
			f.release(f.miss(pages(90, 91), 0, Cached), false)
			f.change(mm.Zap, pages(90, 91))
			f.dev.tries = 0
		}
		changes = changedTries
		ref := f.acquire(pages(0, 4), 0)
		f.reason(ref, ReasonChanged)
		f.release(ref, false)
		f.entries(0)
		changes = 0
		f.release(f.miss(pages(0, 4), 0, Cached), false)
	})
}

// A change that began before the registration and has not ended makes it
// unfit for the cache (C2).
func TestChangeInFlight(t *testing.T) {
	f := newFixture(t, Options{}, true)
	c := f.p.Begin(mm.Zap, pages(0, 4), mm.Range{})
	f.release(f.miss(pages(0, 4), 0, ReasonInFlight), false)
	c.End()
	f.release(f.miss(pages(0, 4), 0, Cached), false)
}

// cases.md C10: deregistration comes after the address was used again; it is by
// handle and concerns the old registration only.
func TestAddressReusedBeforeDeregistration(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		old := f.miss(pages(0, 4), 0, Cached)
		f.change(mm.Unmap, pages(0, 4))
		now := f.miss(pages(0, 4), 0, Cached)
		if old.Handle() == now.Handle() {
			t.Fatal("old and new registration are one")
		}
		f.release(old, true)
		f.release(f.hit(pages(0, 4), 0), false)
		f.release(now, false)
	})
}

// cases.md D1: after a loss there are hits only for what was registered later.
func TestLossEmptiesTheCache(t *testing.T) {
	for name, lose := range map[string]func(*feedtest.Producer){
		"watch":    func(p *feedtest.Producer) { p.Lose(3) },
		"unpaired": (*feedtest.Producer).Unpaired,
		"machine":  (*feedtest.Producer).LoseAll,
		"overflow": func(p *feedtest.Producer) {
			for range 100_000 {
				p.Change(mm.Zap, pages(0, 1))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, Options{}, true)
			for i := range uint64(10) {
				f.prime(pages(2*i, 2*i+1), 0)
			}
			held := f.hit(pages(4, 5), 0)
			lose(f.p)
			f.release(held, true)
			f.entries(0)
			for i := range uint64(10) {
				f.release(f.miss(pages(2*i, 2*i+1), 0, Cached), false)
				f.release(f.hit(pages(2*i, 2*i+1), 0), false)
			}
		})
	}
}

// The end of the feed, of the space, or of the watch: nothing is hit again, and
// everything works.
func TestFeedDies(t *testing.T) {
	for name, kill := range map[string]func(*fixture){
		"space":     func(f *fixture) { f.p.Kill() },
		"untracked": func(f *fixture) { f.p.Untracked() },
		"daemon":    func(f *fixture) { f.p.KillAll() },
		"closed":    func(f *fixture) { f.w.Close() },
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t, Options{}, true)
			held := f.miss(pages(0, 1), 0, Cached)
			f.prime(pages(1, 2), 0)
			kill(f)
			f.release(f.miss(pages(1, 2), 0, ReasonDead), false)
			f.release(held, true)
			f.release(f.miss(pages(0, 1), 0, ReasonDead), false)
			f.entries(0)
		})
	}
}

// cases.md D9: while a record is unfinished nothing is hit, and nobody waits
// for it; Release says that the memory may have changed.
func TestUnfinishedRecord(t *testing.T) {
	f := newFixture(t, Options{}, true)
	f.prime(pages(0, 1), 0)
	held := f.miss(pages(1, 2), 0, Cached)
	first := f.p.Prepare(mm.Zap, pages(0, 1), mm.Range{})
	first.Start()
	if !first.Test() || !first.Reserve() {
		t.Fatal("no record")
	}
	// A later one is counted, so the generation moves.
	f.p.Change(mm.Zap, pages(0, 1))
	f.release(f.miss(pages(0, 1), 0, ReasonBusy), false)
	f.release(held, true)
	first.Submit()
	first.Count()
	first.End()
	f.release(f.miss(pages(0, 1), 0, Cached), false)
	f.release(f.hit(pages(1, 2), 0), false)
}

// A lookup while another thread applies changes does not hit, and does not hang.
func TestLookupDuringDrain(t *testing.T) {
	f := newFixture(t, Options{}, true)
	f.prime(pages(0, 1), 0)
	f.p.Change(mm.Zap, pages(0, 1))
	f.w.Drain(func(*mm.Record) {
		f.release(f.miss(pages(0, 1), 0, ReasonBusy), false)
	})
}

// What the tier cannot see is registered and not cached.
func TestGapsOfTheTier(t *testing.T) {
	p, err := feedtest.New(feedtest.Options{Gaps: layout.GapFile})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	w, err := p.Watch()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	dev := newDevice(t)
	c, err := New[uint32](w, dev, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ref, err := c.Acquire(mm.Range{Start: 0x1000, End: 0x2000}, 0)
	if err != nil {
		t.Fatal(err)
	}
	if ok, why := ref.Cached(); ok || why != ReasonNoMapping {
		t.Errorf("cached %v, %v", ok, why)
	}
	ref.Release()
	if err := c.Close(); err != nil || dev.liveCount() != 0 {
		t.Errorf("close: %v, %d registrations left", err, dev.liveCount())
	}
}

// cases.md I3: an entry in use that died is not hit by anybody; the last
// Release deregisters it.
func TestHeldEntryDoesNotComeBack(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		a := f.miss(pages(0, 1), 0, Cached)
		b := f.hit(pages(0, 1), 0)
		f.change(mm.Zap, pages(0, 1))
		fresh := f.miss(pages(0, 1), 0, Cached)
		f.release(fresh, false)
		f.release(a, true)
		if _, ok := f.dev.registration(b.Handle()); !ok {
			t.Error("deregistered before the last release")
		}
		h := b.Handle()
		f.release(b, true)
		if _, ok := f.dev.registration(h); ok {
			t.Error("not deregistered at the last release")
		}
		f.release(f.hit(pages(0, 1), 0), false)
	})
}

// cases.md I4: a failure is not cached: once the memory is writable, it works.
func TestFailureIsNotCached(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		readOnly := true
		f.dev.onReg = func(_ mm.Range, a Access) error {
			if readOnly && a.Has(LocalWrite) {
				return syscall.EFAULT
			}
			return nil
		}
		f.prime(pages(0, 1), 0)
		for range 3 {
			if _, err := f.c.Acquire(pages(4, 5), LocalWrite); !errors.Is(err, syscall.EFAULT) {
				t.Fatalf("got %v, want EFAULT", err)
			}
		}
		readOnly = false
		f.change(mm.Protect, pages(4, 5))
		f.release(f.miss(pages(4, 5), LocalWrite, Cached), false)
		if got := f.c.Stats().Failures[syscall.EFAULT]; got != 3 {
			t.Errorf("%d failures, want 3", got)
		}
	})
}

// cases.md I1: many more buffers than the device has slots.
func TestManyBuffersFewSlots(t *testing.T) {
	for name, o := range map[string]Options{"unlimited": {}, "limited": {MaxEntries: 63}} {
		t.Run(name, func(t *testing.T) {
			forFeeds(t, o, func(t *testing.T, f *fixture) {
				f.dev.slots = 64
				for i := range uint64(10_000) {
					ref, err := f.c.Acquire(pages(i, i+1), 0)
					if err != nil {
						t.Fatal(err)
					}
					ref.Release()
				}
				f.c.check(t)
				if f.dev.maxLive > 64 {
					t.Errorf("%d slots used", f.dev.maxLive)
				}
				if s := f.c.Stats(); f.live() && s.Evicted != 10_000-uint64(s.Entries) {
					t.Errorf("%d evicted, %d left", s.Evicted, s.Entries)
				}
			})
		})
	}
}

// cases.md I10: out of locked memory: what is idle goes, one more attempt is
// made, and the error names limit, use and need.
func TestLockedMemoryLimit(t *testing.T) {
	page := mm.PageSize()
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.dev.limit = 256 * page
		f.prime(pages(0, 128), 0)
		f.release(f.miss(pages(200, 328), 0, Cached), false) // fits
		f.release(f.miss(pages(400, 464), 0, Cached), false) // evicts one
		a := f.hit(pages(400, 464), 0)
		tries := f.dev.tries
		_, err := f.c.Acquire(pages(1000, 1200), 0)
		var limit *LimitError
		if !errors.As(err, &limit) || !errors.Is(err, syscall.ENOMEM) || !errors.Is(err, ErrLimit) {
			t.Fatalf("got %v", err)
		}
		want := &LimitError{Range: pages(1000, 1200), Limit: 256 * page, Use: 64 * page, Need: 200 * page, Err: syscall.ENOMEM}
		if *limit != *want {
			t.Errorf("got %+v, want %+v", limit, want)
		}
		if !strings.Contains(err.Error(), "limit 1048576 bytes, in use 262144 bytes, need 819200 bytes") && page == 4096 {
			t.Errorf("message %q", err)
		}
		if got := f.dev.tries - tries; got != 2 {
			t.Errorf("tried %d times, want 2", got)
		}
		f.release(a, false)
		f.release(f.miss(pages(1000, 1200), 0, Cached), false)
		if got := f.c.Stats().Failures[syscall.ENOMEM]; got < 2 {
			t.Errorf("%d failures counted", got)
		}
	})
}

// plain hides Limit of a device.
type plain struct{ d *device }

func (p plain) Register(r mm.Range, a Access) (uint32, error) { return p.d.Register(r, a) }
func (p plain) Deregister(h uint32) error                     { return p.d.Deregister(h) }

func TestLimitErrorWithoutLimiter(t *testing.T) {
	dev := newDevice(t)
	dev.slots = 1
	c, err := New[uint32](nil, plain{dev}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	ref, err := c.Acquire(pages(0, 2), 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Acquire(pages(4, 5), 0)
	var limit *LimitError
	if !errors.As(err, &limit) || limit.Limit != 0 || limit.Use != 2*mm.PageSize() || limit.Need != mm.PageSize() {
		t.Errorf("got %+v", limit)
	}
	ref.Release()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// cases.md I13: a device that takes back only what it was given: after a part
// changed, the whole registration is deregistered by its handle, and the part
// is registered anew.
func TestPartRegisteredAnew(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		mapped := map[mm.Range]bool{}
		f.dev.onReg = func(r mm.Range, _ Access) error {
			for m := range mapped {
				if m.Overlaps(r) {
					return syscall.EEXIST
				}
			}
			mapped[r] = true
			return nil
		}
		f.dev.onDereg = func(h uint32) error {
			reg, _ := f.dev.registration(h)
			if !mapped[reg.r] {
				t.Errorf("unmap of %v, which is not mapped as such", reg.r)
			}
			delete(mapped, reg.r)
			return nil
		}
		ref := f.miss(pages(0, 8), 0, Cached)
		f.change(mm.Zap, pages(2, 4))
		if _, err := f.c.Acquire(pages(2, 4), 0); !errors.Is(err, syscall.EEXIST) {
			t.Errorf("the device still has it, got %v", err) // and success would go to old pages
		}
		f.release(ref, true)
		f.release(f.miss(pages(2, 4), 0, Cached), false)
	})
}

// A deregistration that fails is kept, counted and retried; it is never hit.
func TestZombies(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.dev.onDereg = func(uint32) error { return syscall.EBUSY }
		ref := f.miss(pages(0, 1), 0, Cached)
		f.change(mm.Zap, pages(0, 1))
		f.release(ref, true)
		if got := f.c.Stats(); got.Zombies != 1 || got.Failures[syscall.EBUSY] != 1 {
			t.Fatalf("zombies %d, failures %v", got.Zombies, got.Failures)
		}
		again := f.miss(pages(0, 1), 0, Cached)
		if again.Handle() == 1 {
			t.Fatal("hit a zombie")
		}
		var left *InUseError
		if err := f.c.Close(); !errors.As(err, &left) || len(left.Zombies) != 1 || len(left.Uses) != 1 || !errors.Is(err, syscall.EBUSY) {
			t.Fatalf("close: %v", err)
		}
		f.dev.onDereg = nil
		f.release(again, false)
		if err := f.c.Close(); err != nil {
			t.Fatalf("second close: %v", err)
		}
	})
}

func TestClose(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.prime(pages(0, 1), 0)
		a := f.miss(pages(10, 12), LocalWrite, Cached)
		b := f.hit(pages(10, 12), LocalWrite)
		err := f.c.Close()
		var left *InUseError
		if !errors.As(err, &left) {
			t.Fatalf("close: %v", err)
		}
		want := []Use{{pages(10, 12), LocalWrite, 2}}
		if !f.live() {
			want = []Use{{pages(10, 12), LocalWrite, 1}, {pages(10, 12), LocalWrite, 1}}
		}
		if diff := cmp.Diff(want, left.Uses); diff != "" {
			t.Errorf("in use (-want +got):\n%s", diff)
		}
		if !strings.Contains(err.Error(), pages(10, 12).String()) {
			t.Errorf("message %q", err)
		}
		if _, err := f.c.Acquire(pages(0, 1), 0); !errors.Is(err, ErrClosed) {
			t.Errorf("acquire after close: %v", err)
		}
		if err := f.c.Run(context.Background()); err != nil {
			t.Errorf("run after close: %v", err)
		}
		f.change(mm.Zap, pages(11, 12))
		f.release(a, true)
		f.release(b, true)
		if err := f.c.Close(); err != nil {
			t.Errorf("second close: %v", err)
		}
	})
}

// A cache that is closed while a registration is being made keeps nothing of it.
func TestCloseDuringRegistration(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		f.dev.onReg = func(mm.Range, Access) error {
			var left *InUseError
			if err := f.c.Close(); !errors.As(err, &left) || left.Pending != 1 {
				t.Errorf("close: %v", err)
			}
			return nil
		}
		if _, err := f.c.Acquire(pages(0, 1), 0); !errors.Is(err, ErrClosed) {
			t.Errorf("acquire: %v", err)
		}
	})
}

func TestOptions(t *testing.T) {
	if _, err := New[uint32](nil, newDevice(t), Options{MaxEntries: -1}); err == nil {
		t.Error("a negative limit was accepted")
	}
	if _, err := New[uint32](nil, nil, Options{}); err == nil {
		t.Error("no registrar was accepted")
	}
}

// Counters that fill up their part of the state word.
func TestStateWordLimits(t *testing.T) {
	f := newFixture(t, Options{}, true)
	ref := f.miss(pages(0, 1), 0, Cached)
	e := ref.e
	e.state.Or(hitGuard) // as after 2^35 hits
	for range 10 {
		f.release(f.hit(pages(0, 1), 0), false)
	}
	if got, want := f.c.Stats().Hits, uint64(1<<(63-hitShift)+10); got != want {
		t.Errorf("%d hits, want %d", got, want)
	}
	e.state.Add(refGuard - 1) // as with 2^23 references
	other := f.miss(pages(0, 1), 0, Cached)
	e.state.Add(^(refGuard - 1) + 1)
	f.release(other, false)
	f.release(ref, false)
	f.entries(1)
}

// Run deregisters what changed while nobody looks anything up.
//
// cases.md I8: unmap, then idle: the pinned memory is back at its base.
func TestRunDeregistersStale(t *testing.T) {
	f := newFixture(t, Options{}, true)
	gone := make(chan uint32, 1000)
	f.dev.onDereg = func(h uint32) error { gone <- h; return nil }
	stop := run(t, f.c)
	for range 3 {
		cached := make(map[uint32]bool)
		for i := range uint64(10) {
			// Run may be draining still: then it is not cached at first.
			for ok := false; !ok; {
				ref, err := f.c.Acquire(pages(i, i+1), 0)
				if err != nil {
					t.Fatal(err)
				}
				if ok, _ = ref.Cached(); ok {
					cached[ref.Handle()] = true
				}
				ref.Release()
			}
		}
		f.p.Change(mm.Unmap, pages(0, 10))
		for len(cached) > 0 {
			delete(cached, <-gone)
		}
	}
	f.p.Kill()
	stop(context.Canceled)
	f.entries(0)
}

// run starts Run and returns what stops it and checks its error.
func run[H any](t *testing.T, c *Cache[H]) (stop func(want error)) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	once := sync.OnceValue(func() error { cancel(); return <-done })
	t.Cleanup(func() { once() })
	return func(want error) {
		t.Helper()
		if err := once(); !errors.Is(err, want) {
			t.Errorf("run: %v, want %v", err, want)
		}
	}
}

// Run retries deregistrations that failed.
func TestRunRetriesZombies(t *testing.T) {
	forFeeds(t, Options{}, func(t *testing.T, f *fixture) {
		gone := make(chan bool)
		var mu sync.Mutex
		failures := 2
		f.dev.onDereg = func(uint32) error {
			mu.Lock()
			defer mu.Unlock()
			if failures--; failures >= 0 {
				return syscall.EBUSY
			}
			close(gone)
			return nil
		}
		run(t, f.c)
		ref := f.miss(pages(0, 1), 0, Cached)
		f.change(mm.Zap, pages(0, 1))
		f.release(ref, true)
		<-gone
	})
}

// Run survives an unfinished record and the death of the feed, and ends with
// the cache.
func TestRunEndsWithTheCache(t *testing.T) {
	f := newFixture(t, Options{}, true)
	f.prime(pages(0, 1), 0)
	first := f.p.Prepare(mm.Zap, pages(0, 1), mm.Range{})
	first.Start()
	if !first.Test() || !first.Reserve() {
		t.Fatal("no record")
	}
	f.p.Change(mm.Zap, pages(0, 1))
	done := make(chan error, 1)
	gone := make(chan bool)
	f.dev.onDereg = func(uint32) error { close(gone); return nil }
	go func() { done <- f.c.Run(context.Background()) }()
	first.Submit()
	first.Count()
	first.End()
	<-gone
	var left *InUseError
	if err := f.c.Close(); err != nil && (!errors.As(err, &left) || len(left.Uses)+len(left.Zombies) > 0) {
		t.Errorf("close: %v", err) // Run may be in that call of Deregister still
	}
	if err := <-done; err != nil {
		t.Errorf("run: %v", err)
	}
}

// With nothing but a dead feed Run works, too.
func TestRunWithoutFeed(t *testing.T) {
	f := newFixture(t, Options{}, false)
	stop := run(t, f.c)
	f.release(f.miss(pages(0, 1), 0, ReasonDead), false)
	stop(context.Canceled)
}

// A nil watch is the dead feed.
func TestNilWatch(t *testing.T) {
	c, err := New[uint32](nil, newDevice(t), Options{})
	if err != nil {
		t.Fatal(err)
	}
	ref, err := c.Acquire(pages(0, 1), 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, why := ref.Cached(); why != ReasonDead {
		t.Errorf("reason %v", why)
	}
	ref.Release()
	if err := c.Close(); err != nil {
		t.Error(err)
	}
}

// Names of the public constants; every verdict has a reason of its own.
func TestNames(t *testing.T) {
	if got := (LocalWrite | RemoteAtomic).String(); got != "local-read|local-write|remote-atomic" {
		t.Error(got)
	}
	names := map[string]bool{}
	for r := range numReasons {
		names[r.String()] = true
	}
	for c := range numCauses {
		names[c.String()] = true
	}
	if len(names) != int(numReasons)+int(numCauses)-2 { // "lost" and "rights" are both
		t.Error(names)
	}
	reasons := map[Reason]bool{}
	for v := feed.Cacheable; v <= feed.Unclassified; v++ {
		reasons[reasonOf(v)] = true
	}
	if len(reasons) != int(feed.Unclassified)+1 {
		t.Error(reasons)
	}
}
