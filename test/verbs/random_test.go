// SPDX-License-Identifier: Apache-2.0

//go:build linux

package verbs

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strconv"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/ibv"
)

// What a round may do to some of the pages: changes without forks, which take
// longer than all the rest, and those that leave pages read-only.
func randomChanges() []change {
	var list []change
	for _, c := range changes {
		if c.stale != nothing || c.name == "mprotect NONE and back" {
			list = append(list, c)
		}
	}
	return list
}

// Rounds of transfers by the cache and a random change of some of the pages
// behind them. Every byte must be where the processor looks. Where the device
// has on-demand regions, one of them is the second oracle: it must see what
// the cache's registration wrote, and the other way round.
func TestRandomChanges(t *testing.T) {
	const blockPages = 8
	r := newRig(t)
	cache := newCache(t, openFeed(t), r.pd, regcache.Options{})
	rng := rand.New(rand.NewPCG(*seed, 6))
	list := randomChanges()
	private, privatePart, _ := list[0].prepare(t)
	_ = privatePart
	shared, _, fd := changes[5].prepare(t)
	blocks := []block{private, shared}
	var odp [2]*ibv.MR
	if r.onDemand() {
		for i, b := range blocks {
			var err error
			odp[i], err = r.pd.RegisterAt(b.span(), odpRights, uint64(b.span().Start), ibv.Options{OnDemand: true})
			must(t, err)
			defer func() { must(t, r.pd.Deregister(odp[i])) }()
		}
	}
	var written, lost, odpLost uint64
	start := time.Now()
	for round := range *rounds {
		which := rng.IntN(2)
		b := blocks[which]
		// Two transfers into the same few ranges: the second should hit.
		first := rng.IntN(4)
		part := b.part(first, blockPages-2*first%blockPages)
		if first > 2 {
			part = b.part(first, 2)
		}
		for range 2 {
			want := r.through(cache, part.span())
			written += uint64(len(want))
			if !bytes.Equal(part, want) {
				lost += missing(part, want)
				t.Errorf("round %d (-seed %d): the processor sees %s of %d pages from %d on", round, *seed, pages(part, want), len(part)/page, first)
			}
		}
		if m := odp[which]; m != nil {
			// At the start of a page: see chunk.
			p := b.part(rng.IntN(blockPages), 1)[:chunk]
			got, err := r.read(m, p.span())
			must(t, err)
			if !bytes.Equal(got, p) {
				odpLost += missing(p, got)
				t.Errorf("round %d (-seed %d): the on-demand region does not read what is there", round, *seed)
			}
			want, err := r.write(m, p.span())
			must(t, err)
			if !bytes.Equal(p, want) {
				odpLost += missing(p, want)
				t.Errorf("round %d (-seed %d): what the on-demand region wrote is not there", round, *seed)
			}
		}
		c := list[rng.IntN(len(list))]
		for c.shared != (which == 1) {
			if c.name == "madvise DONTNEED" || c.name == "mprotect NONE and back" {
				break // of both kinds
			}
			c = list[rng.IntN(len(list))]
		}
		from, n := 2, 4
		if !c.shared { // the hole is where the table says
			from = rng.IntN(blockPages)
			n = 1 + rng.IntN(blockPages-from)
		}
		if err := c.do(b.part(from, n), fd); err != nil {
			t.Fatalf("round %d: %s: %v", round, c.name, err)
		}
		if t.Failed() {
			break
		}
	}
	s := cache.Stats()
	t.Logf("%d rounds in %v: %d bytes written, %d lost, %d lost by on-demand regions; %d hits, %d registrations",
		*rounds, time.Since(start).Round(time.Second), written, lost, odpLost, s.Hits, s.Registrations)
	t.Attr("rounds", strconv.Itoa(*rounds))
	t.Attr("bytes", fmt.Sprint(written))
	t.Attr("lost", fmt.Sprint(lost))
	t.Attr("on-demand", fmt.Sprint(odp[0] != nil))
	if s.Hits < uint64(*rounds)/4 || s.Registrations < uint64(*rounds)/4 {
		t.Errorf("%d hits, %d registrations in %d rounds: the cache was hardly used", s.Hits, s.Registrations, *rounds)
	}
}

func missing(got, want block) (n uint64) {
	for i := range want {
		if got[i] != want[i] {
			n++
		}
	}
	return n
}

// The rounds find what a cache without a feed loses.
func TestRandomChangesNeedTheFeed(t *testing.T) {
	r := newRig(t)
	b, part, fd := changes[2].prepare(t)
	m := r.register(b)
	must(t, changes[2].do(part, fd))
	want, err := r.write(m, b.span())
	must(t, err)
	if n := missing(b, want); n < uint64(4*page*9/10) { // some bytes are the same by chance
		t.Errorf("%d bytes lost by a registration of four dropped pages", n)
	}
}

// Another thread changes the pages while a transfer is on its way to them: what
// the processor does not see was changed while the registration was held, and
// Release says so.
func TestChangedMeanwhile(t *testing.T) {
	r := newRig(t)
	cache := newCache(t, openFeed(t), r.pd, regcache.Options{})
	b := mapPages(t, 4)
	begin, ended := make(chan bool), make(chan error)
	go func() {
		defer close(ended)
		for range begin {
			ended <- unix.Madvise(b.part(1, 2), unix.MADV_DONTNEED)
		}
	}()
	defer func() { close(begin); <-ended }()
	seen, told, missed, uncached := 0, 0, 0, 0
	for range min(*rounds, 2000) {
		ref, err := cache.Acquire(b.span(), all)
		must(t, err)
		begin <- true
		want, err := r.write(ref.Handle(), b.span())
		must(t, err)
		there := bytes.Equal(b, want)
		cached, _ := ref.Cached()
		changed := ref.Release()
		must(t, <-ended)
		switch {
		case !cached: // promises nothing
			uncached++
		case changed:
			told++
			if !there {
				missed++
			}
		case there:
			seen++
		default:
			t.Fatal("bytes are missing, and nobody says that the memory changed")
		}
	}
	t.Logf("%d transfers: %d changed meanwhile (bytes missing in %d), %d not, %d not cached", seen+told+uncached, told, missed, seen, uncached)
	if told == 0 || told+seen < uncached {
		t.Error("nothing changed meanwhile, or nothing was cached")
	}
}

// The loop of a program that sends the same buffers again and again: with a
// feed each is registered once, without one for each transfer.
func TestCost(t *testing.T) {
	const buffers, loops, size = 4, 50, 16
	r := newRig(t)
	var blocks []mm.Range
	for range buffers {
		blocks = append(blocks, mapPages(t, size).span())
	}
	run := func(c *regcache.Cache[*ibv.MR]) time.Duration {
		for _, b := range blocks { // not counted: the first time of everything
			r.through(c, b)
		}
		start := time.Now()
		for range loops {
			for _, b := range blocks {
				ref, err := c.Acquire(b, all)
				must(t, err)
				ref.Release()
			}
		}
		return time.Since(start)
	}
	uncached := newCache(t, nil, r.pd, regcache.Options{})
	without := run(uncached)
	cached := newCache(t, openFeed(t), r.pd, regcache.Options{})
	with := run(cached)
	u, c := uncached.Stats(), cached.Stats()
	if want := uint64(buffers * (loops + 1)); u.Registrations != want {
		t.Errorf("without a feed %d registrations, want %d", u.Registrations, want)
	}
	// A loss, of which this machine may have some, registers all of them again.
	if c.Registrations+c.Hits != uint64(buffers*(loops+1)) || c.Registrations > u.Registrations/4 {
		t.Errorf("with a feed %d registrations, %d hits", c.Registrations, c.Hits)
	}
	ratio := float64(without) / float64(with)
	t.Logf("%d times %d buffers of %d KiB: uncached %v, %d registrations; cached %v, %d registrations: ratio %.0f",
		loops, buffers, size*page>>10, without, u.Registrations, with, c.Registrations, ratio)
	t.Attr("ratio", fmt.Sprintf("%.0f", ratio))
	t.Attr("registrations-uncached", fmt.Sprint(u.Registrations))
	t.Attr("registrations-cached", fmt.Sprint(c.Registrations))
}
