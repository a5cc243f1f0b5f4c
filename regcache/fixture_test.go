// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// watchdog ends the test binary with all stacks if the test hangs.
func watchdog(t testing.TB) {
	timer := time.AfterFunc(60*time.Second, func() {
		buf := make([]byte, 1<<20)
		fmt.Fprintf(os.Stderr, "%s hangs:\n%s\n", t.Name(), buf[:runtime.Stack(buf, true)])
		os.Exit(2)
	})
	t.Cleanup(func() { timer.Stop() })
}

var errDevice = errors.New("device says no")

// device is a Registrar that checks its caller: each handle is deregistered
// once. The hooks run without the device's lock.
type device struct {
	t        testing.TB
	onReg    func(mm.Range, Access) error // nil error: go on
	onDereg  func(uint32) error
	captured func(mm.Range) []uint64 // what the device sees in the memory

	mu      sync.Mutex // guards what follows
	last    uint32
	live    map[uint32]registration
	pinned  uint64
	maxLive int
	tries   int // calls of Register
	regs    int
	deregs  int
	order   []mm.Range // deregistered, in order
	limit   uint64     // bytes; 0: none
	slots   int        // 0: no limit
}

type registration struct {
	r    mm.Range
	a    Access
	seen []uint64
}

func newDevice(t testing.TB) *device {
	return &device{t: t, live: make(map[uint32]registration)}
}

func (d *device) Register(r mm.Range, a Access) (uint32, error) {
	d.mu.Lock()
	d.tries++
	d.mu.Unlock()
	var seen []uint64
	if d.captured != nil {
		seen = d.captured(r)
	}
	if d.onReg != nil {
		if err := d.onReg(r, a); err != nil {
			return 0, err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	need := r.Pages().Len()
	switch {
	case d.limit > 0 && d.pinned+need > d.limit:
		return 0, syscall.ENOMEM
	case d.slots > 0 && len(d.live) == d.slots:
		return 0, fmt.Errorf("no slot: %w", ErrLimit)
	}
	d.last++
	d.live[d.last] = registration{r, a, seen}
	d.pinned += need
	d.maxLive = max(d.maxLive, len(d.live))
	d.regs++
	return d.last, nil
}

func (d *device) Deregister(h uint32) error {
	if d.onDereg != nil {
		if err := d.onDereg(h); err != nil {
			return err
		}
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	reg, ok := d.live[h]
	if !ok {
		d.t.Errorf("handle %d was deregistered twice", h)
		return syscall.EINVAL
	}
	delete(d.live, h)
	d.pinned -= reg.r.Pages().Len()
	d.deregs++
	d.order = append(d.order, reg.r)
	return nil
}

// Limit makes it a Limiter.
func (d *device) Limit() (limit, use uint64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.limit, d.pinned
}

func (d *device) registrations() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.regs
}

func (d *device) liveCount() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return len(d.live)
}

func (d *device) registration(h uint32) (registration, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r, ok := d.live[h]
	return r, ok
}

// fixture is a cache with a device, over a live or a dead feed. With the
// dead one nothing is ever cached, and what is expected changes accordingly.
type fixture struct {
	t   *testing.T
	p   *feedtest.Producer // nil: dead feed
	w   *feed.Watch
	dev *device
	c   *Cache[uint32]

	enomem uint64 // failures for want of memory that the model has seen
}

func newFixture(t *testing.T, o Options, live bool) *fixture {
	t.Helper()
	watchdog(t)
	f := &fixture{t: t, dev: newDevice(t), w: feed.Dead()}
	if live {
		p, err := feedtest.New(feedtest.Options{})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(p.Close)
		w, err := p.Watch()
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { w.Close() })
		f.p, f.w = p, w
	}
	c, err := New[uint32](f.w, f.dev, o)
	if err != nil {
		t.Fatal(err)
	}
	f.c = c
	t.Cleanup(func() {
		f.dev.onDereg = nil
		f.c.check(t)
		if err := c.Close(); err != nil {
			t.Errorf("close: %v", err)
		}
		if n := f.dev.liveCount(); n > 0 {
			t.Errorf("%d registrations left", n)
		}
		f.c.check(t)
		s := c.Stats()
		if s.Registrations != uint64(f.dev.regs) || s.Registrations != s.Deregistrations+uint64(s.Zombies) || s.RegisteredBytes != 0 {
			t.Errorf("device: %d registrations, cache: %+v", f.dev.regs, s)
		}
	})
	return f
}

// forFeeds runs a scenario with a live feed and without one.
//
// cases.md I12: every path works when the feed is not there.
func forFeeds(t *testing.T, o Options, scenario func(t *testing.T, f *fixture)) {
	t.Helper()
	t.Run("live", func(t *testing.T) { scenario(t, newFixture(t, o, true)) })
	t.Run("dead", func(t *testing.T) { scenario(t, newFixture(t, o, false)) })
}

func (f *fixture) live() bool { return f.p != nil }

// change makes a whole change, if there is a feed.
func (f *fixture) change(k mm.Kind, r mm.Range) {
	if f.p != nil {
		f.p.Change(k, r)
	}
}

func (f *fixture) acquire(r mm.Range, a Access) Ref[uint32] {
	f.t.Helper()
	ref, err := f.c.Acquire(r, a)
	if err != nil {
		f.t.Fatalf("acquire %v with %v: %v", r, a, err)
	}
	if !ref.Range().Contains(r) || !ref.Access().Has(a) {
		f.t.Fatalf("acquire %v with %v: got %v with %v", r, a, ref.Range(), ref.Access())
	}
	if reg, ok := f.dev.registration(ref.Handle()); !ok || reg.r != ref.Range() || reg.a != ref.Access() {
		f.t.Fatalf("handle of %v: device has %v %v", ref.Range(), reg, ok)
	}
	f.c.check(f.t)
	return ref
}

// hit expects a hit; without a feed a registration of its own.
func (f *fixture) hit(r mm.Range, a Access) Ref[uint32] {
	f.t.Helper()
	before := f.dev.registrations()
	ref := f.acquire(r, a)
	want := before
	if !f.live() {
		want++
	}
	if got := f.dev.registrations(); got != want {
		f.t.Fatalf("acquire %v with %v: registered %d times, want %d", r, a, got-before, want-before)
	}
	f.reason(ref, Cached)
	return ref
}

// miss expects one registration, cached or with the reason why not; without
// a feed the reason is that.
func (f *fixture) miss(r mm.Range, a Access, why Reason) Ref[uint32] {
	f.t.Helper()
	before := f.dev.registrations()
	ref := f.acquire(r, a)
	if got := f.dev.registrations(); got != before+1 {
		f.t.Fatalf("acquire %v with %v: registered %d times, want once", r, a, got-before)
	}
	f.reason(ref, why)
	return ref
}

func (f *fixture) reason(ref Ref[uint32], why Reason) {
	f.t.Helper()
	if !f.live() {
		why = ReasonDead
	}
	if ok, got := ref.Cached(); got != why || ok != (why == Cached) {
		f.t.Fatalf("%v: cached %v, %v; want %v", ref.Range(), ok, got, why)
	}
}

// release expects whether the memory changed; without a feed nobody knows.
func (f *fixture) release(ref Ref[uint32], changed bool) {
	f.t.Helper()
	r := ref.Range()
	if got := ref.Release(); got != (changed && f.live()) {
		f.t.Fatalf("release %v: changed %v, want %v", r, got, changed)
	}
	f.c.check(f.t)
}

// prime puts a range into the cache and leaves it idle.
func (f *fixture) prime(r mm.Range, a Access) {
	f.t.Helper()
	f.release(f.miss(r, a, Cached), false)
}

// stats compares some counters with a live feed.
func (f *fixture) entries(want int) {
	f.t.Helper()
	if !f.live() {
		want = 0
	}
	if got := f.c.Stats().Entries; got != want {
		f.t.Fatalf("%d entries in the cache, want %d", got, want)
	}
}

// check checks every invariant of the cache: index, lists and state words.
func (c *Cache[H]) check(t testing.TB) {
	t.Helper()
	c.mu.Lock()
	defer c.mu.Unlock()
	nodes := c.ix.check(t)
	indexed := make(map[*entry[H]]bool)
	for _, tree := range nodes[:watchOnly] {
		for _, e := range tree {
			indexed[e] = true
		}
	}
	watched := make(map[*entry[H]]bool)
	for _, e := range nodes[watchOnly] {
		watched[e] = true
	}
	var total uint64
	walk := func(l *list[H], f func(e *entry[H], s uint64) bool) {
		t.Helper()
		n := 0
		var prev *entry[H]
		for e := l.front; e != nil; prev, e = e, e.next {
			n++
			total += e.size()
			s := e.state.Load()
			if e.in != l || e.prev != prev || !f(e, s) {
				t.Fatalf("entry %v in a list where it should not be: state %#x", e.span(), s)
			}
		}
		if n != l.n || l.back != prev {
			t.Fatalf("list of %d entries, counted %d", n, l.n)
		}
	}
	walk(&c.idle, func(e *entry[H], s uint64) bool { return indexed[e] && s&(dropped|changed|parked) == 0 })
	walk(&c.parked, func(e *entry[H], s uint64) bool { return indexed[e] && s&(dropped|changed) == 0 && s&parked != 0 })
	if c.idle.n+c.parked.n != len(indexed) {
		t.Fatalf("%d entries in the index, %d in lists", len(indexed), c.idle.n+c.parked.n)
	}
	orphans := 0
	walk(&c.orphans, func(e *entry[H], s uint64) bool {
		if watched[e] {
			orphans++
			return !indexed[e] && s&changed == 0 && s&dropped != 0
		}
		return !indexed[e] && s&dropped != 0
	})
	if orphans != len(watched) {
		t.Fatalf("%d entries are watched, %d of them in use", len(watched), orphans)
	}
	gone := func(e *entry[H], s uint64) bool {
		return !indexed[e] && !watched[e] && s&dropped != 0 && s&refMask == 0
	}
	walk(&c.dead, gone)
	walk(&c.zombies, func(e *entry[H], s uint64) bool { return gone(e, s) && e.failure != nil })
	if c.ix.n > c.opt.MaxEntries || c.ix.bytes > c.opt.MaxBytes {
		t.Fatalf("%d entries of %d bytes, limits %d and %d", c.ix.n, c.ix.bytes, c.opt.MaxEntries, c.opt.MaxBytes)
	}
	if total > c.registered {
		t.Fatalf("lists hold %d bytes, %d registered", total, c.registered)
	}
}

// bytes is [start, start+n) above some base address.
func bytes(start, n uint64) mm.Range {
	const base = 0x10_0000_0000
	return mm.Range{Start: mm.Addr(base + start), End: mm.Addr(base + start + n)}
}

// pages is whole pages [first, last).
func pages(first, last uint64) mm.Range {
	return bytes(first*mm.PageSize(), (last-first)*mm.PageSize())
}
