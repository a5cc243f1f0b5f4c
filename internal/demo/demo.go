// SPDX-License-Identifier: Apache-2.0

// Package demo shows what a registration cache does when memory changes under
// it, with io_uring registered buffers or an RDMA device. A round maps memory,
// registers it through a cache, transfers known bytes into it, changes the
// mapping, maps again at the same address, transfers again, and looks at every
// page through the CPU. Once with a cache that nobody tells about changes, once
// with regcache over a feed.
package demo

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/ibv"
	"github.com/ummu/ummu/regcache/uring"
)

// Options of [Run]. The zero value works.
type Options struct {
	// Device is the name of an RDMA device, "rxe0". Empty: io_uring.
	Device string
	// Open opens the feed of this process. It is called after the rounds
	// without a feed, and Run closes it before it measures once more without.
	// Nil means a feed that is dead: nothing is ever cached.
	Open func() (*feed.Watch, error)
	// Threads is how many threads run rounds at once, after one alone has.
	// 0 means 8.
	Threads int
	// Rounds is the number of rounds per thread and kind of change. 0 means 100.
	Rounds int
	// Pages is the size of the memory of a round. 0 means 8.
	Pages int
}

// Validate reports the first field that is out of range.
func (o Options) Validate() error {
	for _, f := range []struct {
		name       string
		value, max int
	}{{"threads", o.Threads, 256}, {"rounds", o.Rounds, 1 << 20}, {"pages", o.Pages, 1 << 14}} {
		if f.value < 0 || f.value > f.max {
			return fmt.Errorf("%s %d: not in 0..%d", f.name, f.value, f.max)
		}
	}
	return nil
}

// Report is the result of [Run].
type Report struct {
	Device  string `json:"device"` // io_uring, or the name of an RDMA device
	Threads int    `json:"threads"`
	Rounds  int    `json:"rounds"`
	Pages   int    `json:"pages"`
	// WithoutFeed and WithFeed are the sums over all rows, and the costs.
	WithoutFeed Mode `json:"without_feed"`
	WithFeed    Mode `json:"with_feed"`
	// MunmapRatio is WithFeed.MunmapNS / WithoutFeed.MunmapNS.
	MunmapRatio float64 `json:"munmap_ratio"`
	Rows        []Row   `json:"rows"`
	// LeftOut says why rows are missing, empty if none is.
	LeftOut string `json:"left_out,omitempty"`
}

// Row is one kind of change, performed by a number of threads at once.
type Row struct {
	Change      string `json:"change"`
	Threads     int    `json:"threads"`
	WithoutFeed Counts `json:"without_feed"`
	WithFeed    Counts `json:"with_feed"`
}

// Counts are transfers and what came of them.
type Counts struct {
	Transfers uint64 `json:"transfers"`
	// Stale transfers reported success, but the program does not see the
	// bytes: they went to pages that it no longer has.
	Stale uint64 `json:"stale"`
	// Hits found their registration in the cache, Misses registered.
	Hits   uint64 `json:"hits"`
	Misses uint64 `json:"misses"`
}

func (c *Counts) add(d Counts) {
	c.Transfers += d.Transfers
	c.Stale += d.Stale
	c.Hits += d.Hits
	c.Misses += d.Misses
}

// Mode is one way of running: the sum of its rows, and what it costs.
type Mode struct {
	Counts
	HitRate float64 `json:"hit_rate"` // Hits / (Hits + Misses)
	// LookupNS is a hit of the cache, acquire and release, in nanoseconds, one
	// thread. With a feed that never gets valid it is a registration.
	LookupNS float64 `json:"lookup_ns"`
	// MunmapNS is a munmap of one touched page that nobody registered.
	MunmapNS float64 `json:"munmap_ns"`
	// Uncached counts registrations that the cache did not keep, by reason.
	Uncached map[string]uint64 `json:"uncached,omitempty"`
}

// Run performs the rounds. Without a device it needs io_uring: its absence is
// an error that names the sysctl (uring.ErrDisabled). With one it needs RDMA
// (ibv.ErrNotBuilt, ibv.ErrNoLibrary, ibv.ErrNoDevice).
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	o = o.withDefaults()
	ring, err := uring.Open(uring.Options{})
	if o.Device == "" {
		if err != nil {
			return nil, fmt.Errorf("demo: %w", err)
		}
		defer func() { err = errors.Join(err, ring.Close()) }()
		return run(ctx, o, ring, "", func() (device[uring.Buf], error) { return newUring(ring, o.Pages) })
	}
	left := ""
	if err != nil { // needed for one kind of change only
		left = err.Error()
		ring = nil
	} else {
		defer func() { err = errors.Join(err, ring.Close()) }()
	}
	return run(ctx, o, ring, left, func() (device[*ibv.MR], error) { return newVerbs(o.Device, o.Pages, o.Threads) })
}

// device registers memory, and transfers the known bytes into it.
type device[H any] interface {
	regcache.Registrar[H]
	rights() regcache.Access // that transfer needs
	// transfer puts the bytes into m, the range that h was registered for.
	transfer(h H, m mm.Range) error
	close() error
}

// run performs the rounds with the device that open opens. ring is nil, with
// the reason, where there is no io_uring.
func run[H any](ctx context.Context, o Options, ring *uring.Ring, left string, open func() (device[H], error)) (_ *Report, err error) {
	dev, err := open()
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	defer func() { err = errors.Join(err, dev.close()) }()
	threads := []int{1}
	if o.Threads > 1 {
		threads = append(threads, o.Threads)
	}
	rep := &Report{Device: o.Device, Threads: o.Threads, Rounds: o.Rounds, Pages: o.Pages}
	if rep.Device == "" {
		rep.Device = "io_uring"
	}
	for _, c := range changes {
		if c.ring && ring == nil {
			rep.LeftOut = fmt.Sprintf("%s: %s", c.name, left)
			continue
		}
		for _, n := range threads {
			rep.Rows = append(rep.Rows, Row{Change: c.name, Threads: n})
		}
	}
	r := &runner[H]{o: o, dev: dev, ring: ring}

	before, err := munmapCost()
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	if err := r.withoutFeed(ctx, rep); err != nil {
		return nil, fmt.Errorf("demo: without feed: %w", err)
	}
	if err := r.withFeed(ctx, rep); err != nil {
		return nil, fmt.Errorf("demo: with feed: %w", err)
	}
	after, err := munmapCost()
	if err != nil {
		return nil, fmt.Errorf("demo: %w", err)
	}
	rep.WithoutFeed.MunmapNS = min(before, after)
	rep.MunmapRatio = rep.WithFeed.MunmapNS / rep.WithoutFeed.MunmapNS
	for i := range rep.Rows {
		rep.WithoutFeed.add(rep.Rows[i].WithoutFeed)
		rep.WithFeed.add(rep.Rows[i].WithFeed)
	}
	rep.WithoutFeed.HitRate = rate(rep.WithoutFeed.Counts)
	rep.WithFeed.HitRate = rate(rep.WithFeed.Counts)
	return rep, nil
}

func (o Options) withDefaults() Options {
	if o.Open == nil {
		o.Open = func() (*feed.Watch, error) { return feed.Dead(), nil }
	}
	if o.Threads == 0 {
		o.Threads = 8
	}
	if o.Rounds == 0 {
		o.Rounds = 100
	}
	if o.Pages == 0 {
		o.Pages = 8
	}
	return o
}

func rate(c Counts) float64 {
	if c.Hits+c.Misses == 0 {
		return 0
	}
	return float64(c.Hits) / float64(c.Hits+c.Misses)
}

type runner[H any] struct {
	o    Options
	dev  device[H]
	ring *uring.Ring
}

// acquire is what a round registers through: naive's or coherent's. The Ref
// gives the handle back; the zero Ref is that of a handle nobody counts.
type acquire[H any] func(mm.Range) (H, regcache.Ref[H], error)

func (r *runner[H]) withoutFeed(ctx context.Context, rep *Report) error {
	for i := range rep.Rows {
		n := &naive[H]{dev: r.dev, handles: map[mm.Range]H{}}
		c, err := r.row(ctx, rep.Rows[i], n.acquire)
		c.Hits, c.Misses = n.hits, n.misses
		rep.Rows[i].WithoutFeed = c
		if i == 0 && err == nil {
			rep.WithoutFeed.LookupNS, err = lookupCost(n.acquire)
		}
		if err := errors.Join(err, n.close()); err != nil {
			return fmt.Errorf("%s: %w", rep.Rows[i].Change, err)
		}
	}
	return nil
}

func (r *runner[H]) withFeed(ctx context.Context, rep *Report) (err error) {
	w, err := r.o.Open()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, w.Close()) }()
	if rep.WithFeed.MunmapNS, err = munmapCost(); err != nil {
		return err
	}
	c, err := regcache.New(w, r.dev, regcache.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.Close()) }()
	through := coherent[H]{c, r.dev.rights()}
	var last regcache.Stats
	for i := range rep.Rows {
		n, err := r.row(ctx, rep.Rows[i], through.acquire)
		s := c.Stats()
		n.Hits, n.Misses = s.Hits-last.Hits, s.Misses-last.Misses
		last = s
		rep.Rows[i].WithFeed = n
		if err != nil {
			return fmt.Errorf("%s: %w", rep.Rows[i].Change, err)
		}
	}
	for why, n := range last.Uncached {
		if n > 0 {
			if rep.WithFeed.Uncached == nil {
				rep.WithFeed.Uncached = map[string]uint64{}
			}
			rep.WithFeed.Uncached[why.String()] = n
		}
	}
	rep.WithFeed.LookupNS, err = lookupCost(through.acquire)
	return err
}

// naive is a cache without a feed: once registered, always believed.
type naive[H any] struct {
	dev device[H]

	mu           sync.Mutex // guards what follows; not held while registering
	handles      map[mm.Range]H
	hits, misses uint64
}

func (n *naive[H]) acquire(r mm.Range) (h H, none regcache.Ref[H], err error) {
	n.mu.Lock()
	h, ok := n.handles[r]
	if ok {
		n.hits++
	} else {
		n.misses++
	}
	n.mu.Unlock()
	if ok {
		return h, none, nil
	}
	if h, err = n.dev.Register(r, n.dev.rights()); err == nil {
		n.mu.Lock()
		n.handles[r] = h // nobody else has this range: each thread has its own
		n.mu.Unlock()
	}
	return h, none, err
}

func (n *naive[H]) close() error {
	var errs []error
	for _, h := range n.handles {
		errs = append(errs, n.dev.Deregister(h))
	}
	return errors.Join(errs...)
}

type coherent[H any] struct {
	c      *regcache.Cache[H]
	rights regcache.Access
}

func (c coherent[H]) acquire(r mm.Range) (H, regcache.Ref[H], error) {
	ref, err := c.c.Acquire(r, c.rights)
	return ref.Handle(), ref, err
}

const (
	lookupsPerBatch = 10000
	lookupBatches   = 5
	munmapsPerBatch = 64
	munmapBatches   = 100
)

// lookupCost and munmapCost return the best batch, which is the one that other
// processes disturbed least, in nanoseconds per call.

// lookupCost measures hits of one live range.
func lookupCost[H any](get acquire[H]) (ns float64, err error) {
	m, err := mapAnywhere(1)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, unmap(m)) }()
	best := math.Inf(1)
	for range lookupBatches {
		start := time.Now()
		for range lookupsPerBatch {
			_, ref, err := get(m)
			if err != nil {
				return 0, err
			}
			ref.Release()
		}
		best = min(best, float64(time.Since(start))/lookupsPerBatch)
	}
	return best, nil
}

func munmapCost() (float64, error) {
	best := math.Inf(1)
	var ms [munmapsPerBatch]mm.Range
	for range munmapBatches {
		for i := range ms {
			m, err := mapAnywhere(1)
			if err != nil {
				return 0, err
			}
			ms[i] = m
		}
		start := time.Now()
		for _, m := range ms {
			if err := unmap(m); err != nil {
				return 0, err
			}
		}
		best = min(best, float64(time.Since(start))/munmapsPerBatch)
	}
	return best, nil
}
