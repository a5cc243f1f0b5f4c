// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/mm"
)

// Registrar registers memory with a device. Its methods may be called from
// several goroutines at once, and may call the cache. H is the handle: a key,
// a buffer index, a pointer.
type Registrar[H any] interface {
	// Register registers exactly the bytes of r. An error that is
	// syscall.ENOMEM or [ErrLimit] makes the cache deregister idle
	// registrations and try once more.
	Register(r mm.Range, a Access) (H, error)
	// Deregister ends a registration. If it fails, the cache keeps h and
	// tries again later.
	Deregister(h H) error
}

// Limiter is implemented by a [Registrar] that knows the limit of what can be
// registered, for [LimitError].
type Limiter interface {
	// Limit returns the bytes that may be registered and those in use; 0
	// where not known.
	Limit() (limit, use uint64)
}

// Options of a cache. The zero value works.
type Options struct {
	// MaxEntries is the most registrations in the cache; 0 means 65536.
	// Registrations not (yet, or any more) in the cache come on top: one per
	// Acquire that is registering, and those that are in use but changed or
	// could not be cached.
	MaxEntries int
	// MaxBytes is the most bytes that registrations in the cache pin, in whole
	// pages of each; 0 means no limit but the Registrar's.
	MaxBytes uint64
}

const defaultMaxEntries = 1 << 16

// Validate reports options that make no sense.
func (o Options) Validate() error {
	if o.MaxEntries < 0 {
		return fmt.Errorf("MaxEntries %d is negative", o.MaxEntries)
	}
	return nil
}

const (
	// busyTries bounds how often a lookup tries to drain while another
	// thread does. It yields in between; the alternative is a registration,
	// 16 us and more.
	busyTries = 64
	// changedTries bounds the registrations of one Acquire: pinning itself may
	// change the range (COW break, migration, THP split), once or twice.
	changedTries = 3
	// reapBatch bounds the registrations one miss deregisters for others.
	reapBatch = 16
)

// Cache is a registration cache. Its methods may be called from several
// goroutines at once.
type Cache[H any] struct {
	w     *feed.Watch
	reg   Registrar[H]
	opt   Options
	apply func(*mm.Record) // c.applyRecord, made once: no allocation per drain
	ix    index[H]

	mu      sync.Mutex // the index lock: guards what follows and ix
	closed  bool
	pending int // Acquire calls that are registering
	nextID  uint64

	// Every entry is in one list, or is owned by the one who deregisters it.
	idle    list[H] // in the index; oldest first, the clock's order
	parked  list[H] // in the index; in use when a victim was looked for
	orphans list[H] // not in the index, in use
	dead    list[H] // not in use, to be deregistered
	zombies list[H] // Deregister failed

	registered uint64 // bytes pinned by everything registered
	count      counters

	reaping atomic.Bool   // a miss is deregistering for others
	kick    chan struct{} // wakes Run: dead or zombies grew
	done    chan struct{} // closed by Close
}

// New makes a cache of the registrations of reg in the address space that w
// watches. With [feed.Dead], or nil, nothing is ever cached and everything
// works. Nobody else may drain w: the cache would not learn what the records
// said. It does not own w; close the cache first, then w.
func New[H any](w *feed.Watch, reg Registrar[H], o Options) (*Cache[H], error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("make registration cache: %w", err)
	}
	if reg == nil {
		return nil, errors.New("make registration cache: no registrar")
	}
	if w == nil {
		w = feed.Dead()
	}
	if o.MaxEntries == 0 {
		o.MaxEntries = defaultMaxEntries
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = ^uint64(0)
	}
	c := &Cache[H]{
		w: w, reg: reg, opt: o,
		kick: make(chan struct{}, 1),
		done: make(chan struct{}),
	}
	c.apply = c.applyRecord
	c.ix.table.Store(newTable[H](minTable))
	c.count.failures = make(map[syscall.Errno]uint64)
	return c, nil
}

// Ref is a reference to a registration. The zero Ref refers to nothing; all
// methods work on it. A Ref must be released once: copies share one reference.
type Ref[H any] struct{ e *entry[H] }

// Handle is what the Registrar returned; the zero H for the zero Ref.
func (r Ref[H]) Handle() (h H) {
	if r.e != nil {
		h = r.e.handle
	}
	return h
}

// Range is the range that is registered: it contains what was asked for.
func (r Ref[H]) Range() mm.Range {
	if r.e == nil {
		return mm.Range{}
	}
	return r.e.span()
}

// Access are the rights that are registered: at least what was asked for.
func (r Ref[H]) Access() Access {
	if r.e == nil {
		return 0
	}
	return r.e.access
}

// Cached reports whether the registration was put into the cache, and if
// not, why. It does not change when the registration leaves the cache.
func (r Ref[H]) Cached() (bool, Reason) {
	if r.e == nil {
		return false, ReasonDead
	}
	return r.e.reason == Cached, r.e.reason
}

// Release gives the reference back and makes r the zero Ref. It reports
// whether the memory changed, or may have changed, while the reference was
// held: what the device transferred may have gone to or come from pages that
// are not at these addresses any more. The last Release of a registration that
// left the cache deregisters it.
//
// A registration that the feed cannot watch (Cached says ReasonBusy,
// ReasonTooLarge, ReasonRights, or one of the feed's verdicts) is never
// reported as changed.
func (r *Ref[H]) Release() bool {
	e := r.e
	if e == nil {
		return false
	}
	r.e = nil
	doubt := !e.c.w.Valid() && e.interest && e.c.refresh() == feed.Busy
	s := e.state.Add(^uint64(0))
	if s&lastSlow == 0 && s&refMask != refMask {
		return doubt
	}
	return e.c.released(e, s) || doubt
}

// released is the rest of a Release that left state s behind.
func (c *Cache[H]) released(e *entry[H], s uint64) bool {
	switch {
	case s&refMask == refMask:
		panic("regcache: Ref released twice")
	case s&refMask != 0:
	case s&dropped != 0:
		c.mu.Lock()
		c.orphans.remove(e)
		c.ix.unlink(e)
		c.mu.Unlock()
		c.deregister(e)
	default:
		c.mu.Lock()
		if e.in == &c.parked {
			c.parked.remove(e)
			e.state.And(^parked)
			c.idle.push(e)
		}
		c.mu.Unlock()
	}
	return s&changed != 0 && !guard.Off(guard.ChangedTold)
}

// Acquire returns a registration that contains r with at least the rights a,
// from the cache if there is one, else made now. The range is in exact bytes;
// rounding is the device's business. A hit of an exact range takes no lock
// and allocates nothing.
//
// A range that cannot be cached is registered all the same, see [Ref.Cached].
// Errors: those of the Registrar; [*LimitError]; [mm.ErrEmptyRange];
// [ErrAccess]; [ErrClosed].
func (c *Cache[H]) Acquire(r mm.Range, a Access) (Ref[H], error) {
	if c.w.Valid() || guard.Off(guard.ValidAsked) {
		if e := c.ix.exact(r); e != nil && e.access.Has(a) && e.take() {
			return Ref[H]{e}, nil
		}
	}
	return c.lookup(r, a)
}

// lookup is Acquire without its fast path.
func (c *Cache[H]) lookup(r mm.Range, a Access) (Ref[H], error) {
	if r.Empty() {
		return Ref[H]{}, fmt.Errorf("acquire %v: %w", r, mm.ErrEmptyRange)
	}
	if !allAccess.Has(a) {
		return Ref[H]{}, fmt.Errorf("acquire %v: %w: %#x", r, ErrAccess, uint8(a&^allAccess))
	}
	state := c.refresh()
	rights := a
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		return Ref[H]{}, fmt.Errorf("acquire %v: %w", r, ErrClosed)
	}
	if state == feed.Fresh {
		if e := c.ix.covering(r, a); e != nil && c.takeLocked(e) {
			c.mu.Unlock()
			return Ref[H]{e}, nil
		}
		if e := c.ix.exact(r); e != nil {
			rights |= e.access
		}
	}
	c.count.misses++
	c.pending++
	c.mu.Unlock()

	var ref Ref[H]
	var err error
	switch {
	case state == feed.Busy:
		ref, err = c.uncached(r, a, ReasonBusy)
	case state != feed.Fresh:
		ref, err = c.uncached(r, a, ReasonDead)
	case r.Pages().Len() > c.opt.MaxBytes:
		ref, err = c.uncached(r, a, ReasonTooLarge)
	default:
		ref, err = c.miss(r, a, rights)
	}
	c.mu.Lock()
	c.pending--
	c.mu.Unlock()
	c.reapSome()
	return ref, err
}

// takeLocked is take under the index lock, where hits can be folded.
func (c *Cache[H]) takeLocked(e *entry[H]) bool {
	if s := e.state.Load(); s&hitGuard != 0 {
		c.count.hits += e.state.And(^hitMask) >> hitShift
		e.seen = 0
	}
	return e.take()
}

// refresh makes the index reflect every change that completed before the call.
// Unless it returns feed.Fresh, nothing in the index may be used.
func (c *Cache[H]) refresh() feed.State { return c.refreshIn(busyTries) }

func (c *Cache[H]) refreshIn(tries int) feed.State {
	for range tries {
		if c.w.Valid() {
			return feed.Fresh
		}
		switch s := c.w.Drain(c.apply); s {
		case feed.Fresh:
			return s
		case feed.Busy:
			runtime.Gosched()
		default:
			c.invalidate(mm.Whole, &mm.Record{Kind: mm.Lost, Phase: mm.PhaseEnd})
			return s
		}
	}
	return feed.Busy
}

// applyRecord drops what rec concerns. The feed calls it under its drain lock.
func (c *Cache[H]) applyRecord(rec *mm.Record) {
	if !rec.Kind.IsChange() {
		// A loss or the death of the space: nothing is known any more.
		if !guard.Off(guard.LossDrops) {
			c.invalidate(mm.Whole, rec)
		}
		return
	}
	c.invalidate(rec.Range, rec)
	c.invalidate(rec.To, rec)
}

// invalidate drops what overlaps r, in whole pages: entries that share a page
// with r are dropped with it.
func (c *Cache[H]) invalidate(r mm.Range, why *mm.Record) {
	if r.Empty() {
		return
	}
	r = r.Pages()
	c.mu.Lock()
	var n uint64
	for t := range c.ix.trees[:watchOnly] {
		for {
			e := c.ix.trees[t].overlapping(r)
			if e == nil {
				break
			}
			if guard.Off(guard.InUseLeaves) && e.state.Load()&refMask != 0 {
				c.ix.unlink(e)
				continue
			}
			c.drop(e, changed)
			n++
		}
	}
	for {
		e := c.ix.trees[watchOnly].overlapping(r)
		if e == nil {
			break
		}
		c.ix.unlink(e)
		e.state.Or(changed)
	}
	c.count.invalidate(n, why)
	wake := c.dead.n > 0
	c.mu.Unlock()
	if wake {
		c.wake()
	}
}

// drop takes e out of the index, under the index lock, with further bits set
// in its state. If it is in use, the last Release deregisters it.
func (c *Cache[H]) drop(e *entry[H], bits uint64) {
	s := e.state.Or(dropped | bits)
	c.unlinked(e, s)
}

// unlinked is drop once the bit is set; s is the state before.
func (c *Cache[H]) unlinked(e *entry[H], s uint64) {
	c.ix.remove(e)
	e.in.remove(e)
	c.count.hits += s >> hitShift
	if s&refMask == 0 {
		c.dead.push(e)
	} else {
		c.orphans.push(e)
	}
}

// miss registers r and enters it into the index. a is what was asked for,
// rights what is registered: with those of a cached registration of the same
// range, which this one will replace.
func (c *Cache[H]) miss(r mm.Range, a, rights Access) (Ref[H], error) {
	for try := 1; ; try++ {
		t := c.w.Begin(r)
		h, err := c.register(r, rights)
		if err != nil {
			c.w.Abandon(t)
			if rights != a && !isLimit(err) {
				return c.uncached(r, a, ReasonRights)
			}
			return Ref[H]{}, err
		}
		e := c.newEntry(r, rights, h)
		var out Ref[H]
		verdict := c.w.Commit(t, c.apply, func() { out = c.enter(e, a) })
		switch {
		case verdict == feed.Cacheable && out.e == e:
			return out, nil
		case verdict == feed.Cacheable:
			// Another thread was first, or the cache was closed.
			c.deregister(e)
			if out.e == nil {
				return out, fmt.Errorf("acquire %v: %w", r, ErrClosed)
			}
			return out, nil
		case verdict == feed.Changed && try < changedTries:
			c.deregister(e)
		default:
			return c.adopt(e, reasonOf(verdict))
		}
	}
}

// newEntry makes the entry of a registration, with one reference, in no list.
func (c *Cache[H]) newEntry(r mm.Range, a Access, h H) *entry[H] {
	e := &entry[H]{c: c, start: r.Start, end: r.End, access: a, handle: h, links: &links[H]{tree: noTree}}
	e.state.Store(refOne)
	return e
}

// enter puts e into the index, or finds why not. The feed calls it under its
// drain lock, when nothing happened to the range since before it was
// registered. The Ref is to e; or to an entry that another thread was first
// with; or nothing, when the cache is closed.
func (c *Cache[H]) enter(e *entry[H], a Access) Ref[H] {
	c.mu.Lock()
	defer c.mu.Unlock()
	e.interest = true
	if c.closed {
		return Ref[H]{}
	}
	c.nextID++
	e.id = c.nextID
	old := c.ix.exact(e.span())
	switch {
	case old == nil && !c.room(1, e.size()):
		e.reason = ReasonFull
	case old == nil:
	case old.access.Has(a) && c.takeLocked(old):
		return Ref[H]{old}
	case e.access.Has(old.access):
		c.drop(old, 0)
		c.count.replaced++
		if old.in == &c.orphans {
			c.ix.link(old, watchOnly)
		}
	default:
		e.reason = ReasonRaced
	}
	if e.reason != Cached {
		// Not to be hit, but its user will be told of a change.
		e.state.Or(dropped)
		c.count.uncached[e.reason]++
		c.orphans.push(e)
		c.ix.link(e, watchOnly)
		return Ref[H]{e}
	}
	c.idle.push(e)
	c.ix.insert(e)
	return Ref[H]{e}
}

// uncached registers r for one use, without the feed.
func (c *Cache[H]) uncached(r mm.Range, a Access, why Reason) (Ref[H], error) {
	h, err := c.register(r, a)
	if err != nil {
		return Ref[H]{}, err
	}
	return c.adopt(c.newEntry(r, a, h), why)
}

// adopt makes e a registration that is only held by its reference.
func (c *Cache[H]) adopt(e *entry[H], why Reason) (Ref[H], error) {
	e.reason = why
	e.state.Or(dropped)
	c.mu.Lock()
	if c.closed {
		c.mu.Unlock()
		c.deregister(e)
		return Ref[H]{}, fmt.Errorf("acquire %v: %w", e.span(), ErrClosed)
	}
	c.count.uncached[why]++
	c.orphans.push(e)
	c.mu.Unlock()
	return Ref[H]{e}, nil
}

// register calls the Registrar; out of memory or keys, it deregisters what
// is stale, evicts as much as is needed, and calls it once more.
func (c *Cache[H]) register(r mm.Range, a Access) (H, error) {
	need := r.Pages().Len()
	h, err := c.reg.Register(r, a)
	if err != nil && isLimit(err) {
		c.fail(err)
		c.makeRoom(need)
		h, err = c.reg.Register(r, a)
	}
	if err != nil {
		c.fail(err)
		if isLimit(err) {
			return h, c.limitError(r, err)
		}
		return h, fmt.Errorf("register %v %v: %w", r, a, err)
	}
	c.mu.Lock()
	c.count.registrations++
	c.registered += need
	c.mu.Unlock()
	return h, nil
}

func (c *Cache[H]) limitError(r mm.Range, err error) error {
	e := &LimitError{Range: r, Need: r.Pages().Len(), Err: err}
	if l, ok := c.reg.(Limiter); ok {
		e.Limit, e.Use = l.Limit()
	}
	if e.Use == 0 {
		c.mu.Lock()
		e.Use = c.registered
		c.mu.Unlock()
	}
	return e
}

// room evicts until entries more entries of bytes together fit into the cache.
// It reports false if what is in use does not leave the room.
func (c *Cache[H]) room(entries int, bytes uint64) bool {
	for c.ix.n+entries > c.opt.MaxEntries || c.ix.bytes+bytes > c.opt.MaxBytes {
		if c.evict() == nil {
			return false
		}
	}
	return true
}

// evict drops the idle entry that is next in the clock's order, under the index
// lock. It returns nil when everything is in use.
//
// Each entry is spared once at most, however often others hit it meanwhile.
func (c *Cache[H]) evict() *entry[H] {
	for spare := c.idle.n; ; {
		e := c.idle.front
		if e == nil {
			return nil
		}
		s := e.state.Load()
		switch hits := s >> hitShift; {
		case s&refMask != 0:
			// In use: out of the way until its last release.
			if e.state.CompareAndSwap(s, s|parked) {
				c.idle.remove(e)
				c.parked.push(e)
			}
		case hits != e.seen && spare > 0:
			spare--
			e.seen = hits
			c.idle.remove(e)
			c.idle.push(e)
		case e.state.CompareAndSwap(s, s|dropped):
			c.unlinked(e, s)
			c.count.evicted++
			return e
		}
	}
}
