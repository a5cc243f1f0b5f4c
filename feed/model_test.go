// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

// world is a naive model: an address space of a few pages whose contents have
// versions, changes on their way through the kernel side one step at a time,
// and a cache that remembers the versions it registered.
//
// The contract: a lookup that hits finds each page at the version registered,
// where a page gets its new version between Count and End of a change.
type world struct {
	t       *rapid.T
	p       *feedtest.Producer
	w       *feed.Watch
	version [64]int
	flying  []*flight
	cache   []entry
	open    []opened
	// What the ring must deliver, in the order of reservation.
	reserved []*flight
	losses   uint64 // counted in Lost or Unpaired
	received uint64 // sum of Lost delivered
	dead     bool
	exits    int
}

type flight struct {
	c           *feedtest.Change
	first, last int
	step        int
	filtered    bool
	lost        bool
	committed   bool
}

type entry struct {
	first, last int
	version     [64]int
}

type opened struct {
	entry
	ticket feed.Ticket
}

// advance moves a change by one step and reports whether it is over.
func (f *flight) advance(m *world) bool {
	step := f.step
	f.step++
	switch step {
	case 0:
		f.c.Start()
	case 1:
		f.filtered = !f.c.Test()
	case 2:
		if !f.filtered {
			f.lost = !f.c.Reserve()
			if f.lost {
				m.losses++
			} else {
				m.reserved = append(m.reserved, f)
			}
		}
	case 3:
		if !f.filtered && !f.lost {
			f.c.Submit()
			f.committed = true
		}
	case 4:
		if !f.filtered {
			f.c.Count()
		}
	case 5: // the page tables
		for i := f.first; i < f.last; i++ {
			m.version[i]++
		}
	case 6:
		f.c.End()
		return true
	}
	return false
}

// apply is what the cache does; it also checks order and content.
func (m *world) apply(r *mm.Record) {
	switch {
	case r.Kind == mm.Lost:
		m.received += r.Lost
		m.cache = nil
	case r.Kind == mm.Exit:
		m.exits++
		m.cache = nil
	default:
		if len(m.reserved) == 0 {
			m.t.Fatalf("delivered %v %v, nothing is in the ring", r.Kind, r.Range)
		}
		f := m.reserved[0]
		if !f.committed || f.c.Range != r.Range {
			m.t.Fatalf("delivered %v, want %v (committed %v)", r.Range, f.c.Range, f.committed)
		}
		m.reserved = m.reserved[1:]
		m.cache = slices.DeleteFunc(m.cache, func(e entry) bool {
			gone := r.Touches(pages(e.first, e.last))
			if gone {
				m.w.Forget(pages(e.first, e.last))
			}
			return gone
		})
	}
}

func (m *world) check(what string, e entry) {
	for i := e.first; i < e.last; i++ {
		if e.version[i] != m.version[i] {
			m.t.Fatalf("%s: page %d was registered at version %d, is %d", what, i, e.version[i], m.version[i])
		}
	}
}

func drawRange(t *rapid.T) (first, last int) {
	first = rapid.IntRange(0, 63).Draw(t, "first")
	return first, rapid.IntRange(first+1, min(first+20, 64)).Draw(t, "last")
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p, err := feedtest.New(feedtest.Options{RingBytes: int(mm.PageSize())})
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		w, err := p.Watch()
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		m := &world{t: t, p: p, w: w}
		t.Repeat(map[string]func(*rapid.T){
			"begin change": func(t *rapid.T) {
				if len(m.flying) > 4 {
					t.Skip()
				}
				first, last := drawRange(t)
				f := &flight{c: p.Prepare(mm.Unmap, pages(first, last), mm.Range{}), first: first, last: last}
				m.flying = append(m.flying, f)
			},
			"advance change": func(t *rapid.T) {
				if len(m.flying) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(m.flying)-1).Draw(t, "which")
				for range rapid.IntRange(1, 7).Draw(t, "steps") {
					if m.flying[i].advance(m) {
						m.flying = slices.Delete(m.flying, i, i+1)
						break
					}
				}
			},
			"whole change": func(t *rapid.T) {
				first, last := drawRange(t)
				f := &flight{c: p.Prepare(mm.Zap, pages(first, last), mm.Range{}), first: first, last: last}
				for !f.advance(m) {
				}
			},
			"discard": func(t *rapid.T) { p.Discard(uint32(rapid.IntRange(0, 300).Draw(t, "bytes"))) },
			"lose": func(t *rapid.T) {
				n := rapid.IntRange(1, 400).Draw(t, "n")
				p.Lose(n)
				m.losses += uint64(n)
				for i := range m.version { // whatever it was
					m.version[i]++
				}
			},
			"unpaired": func(t *rapid.T) { p.Unpaired(); m.losses++ },
			"epoch":    func(t *rapid.T) { p.LoseAll() },
			"kill": func(t *rapid.T) {
				if rapid.IntRange(0, 30).Draw(t, "rarely") == 0 {
					p.Kill()
					m.dead = true
				}
			},
			"drain": func(t *rapid.T) {
				blocked := slices.ContainsFunc(m.reserved, func(f *flight) bool { return !f.committed })
				switch s := w.Drain(m.apply); {
				case m.dead && s != feed.DeadState:
					t.Fatalf("drain of a dead watch: %v", s)
				case m.dead && m.exits != 1:
					t.Fatalf("death delivered %d times", m.exits)
				case m.dead:
				case blocked && s != feed.Busy, !blocked && s != feed.Fresh:
					t.Fatalf("drain: %v, with a record unfinished: %v", s, blocked)
				case s == feed.Fresh && !w.Valid():
					t.Fatal("not valid after a complete drain")
				case s == feed.Fresh && len(m.reserved) != 0:
					t.Fatalf("%d records are left", len(m.reserved))
				case s == feed.Fresh && m.received != m.losses:
					t.Fatalf("%d events lost, %d told", m.losses, m.received)
				}
			},
			"stop early": func(t *rapid.T) {
				n := rapid.IntRange(1, 3).Draw(t, "n")
				for r := range w.Changes() {
					m.apply(r)
					if n--; n == 0 {
						break
					}
				}
			},
			"begin": func(t *rapid.T) {
				if len(m.open) > 3 {
					t.Skip()
				}
				first, last := drawRange(t)
				o := opened{entry: entry{first: first, last: last}}
				o.ticket = w.Begin(pages(first, last))
				o.version = m.version // registered here
				m.open = append(m.open, o)
			},
			"commit": func(t *rapid.T) {
				if len(m.open) == 0 {
					t.Skip()
				}
				i := rapid.IntRange(0, len(m.open)-1).Draw(t, "which")
				o := m.open[i]
				m.open = slices.Delete(m.open, i, i+1)
				inserted := false
				v := w.Commit(o.ticket, m.apply, func() { m.cache = append(m.cache, o.entry); inserted = true })
				if inserted != (v == feed.Cacheable) || m.dead && v != feed.IsDead && v != feed.InFlight {
					t.Fatalf("commit: %v, inserted %v, dead %v", v, inserted, m.dead)
				}
			},
			"abandon": func(t *rapid.T) {
				if len(m.open) > 0 {
					w.Abandon(m.open[0].ticket)
					m.open = m.open[1:]
				}
			},
			// The contract, after every action.
			"": func(t *rapid.T) {
				m.t = t
				if !w.Valid() {
					return
				}
				if m.dead {
					t.Fatal("a dead watch is valid")
				}
				for _, e := range m.cache {
					m.check("lookup", e)
				}
			},
		})
		// Alone, everything becomes cacheable again.
		if m.dead {
			return
		}
		for _, f := range m.flying {
			for !f.advance(m) {
			}
		}
		for _, o := range m.open {
			w.Abandon(o.ticket)
		}
		if s := w.Drain(m.apply); s != feed.Fresh || !w.Valid() {
			t.Fatalf("last drain: %v", s)
		}
		if v := commit(w, pages(1, 2)); v != feed.Cacheable {
			t.Fatalf("last commit: %v", v)
		}
	})
}
