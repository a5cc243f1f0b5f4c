// SPDX-License-Identifier: Apache-2.0

package findings

import (
	"time"

	"github.com/ummu/ummu/mm"
)

// Live is a registration that has not ended.
type Live struct {
	// Registration is as in [Finding].
	Registration mm.Record
	// Since is when the registering call had ended.
	Since time.Duration
	// Changes is how many changes its range has seen since, changes of rights
	// included, and Last the last of them.
	Changes uint64
	Last    mm.Record
	// Finding says how it went stale; nil: it did not.
	Finding *Finding
}

// Live calls f for each live registration, address space by address space in
// no order, and within one by address. f must not keep its argument.
func (e *Engine) Live(f func(*Live)) {
	for _, s := range e.spaces {
		s.live.each(func(g *registration) {
			if g.busy != registering {
				f(&Live{Registration: g.rec, Since: g.since, Changes: g.changes, Last: g.last, Finding: g.finding})
			}
		})
	}
}

// touch counts a change of whatever is registered there.
func (s *space) touch(c *mm.Record) {
	for _, r := range [...]mm.Range{c.Range, c.To} {
		for _, g := range s.live.overlapping(r) {
			if g.busy != registering && (g.changes == 0 || g.last.Seq != c.Seq || g.last.Time != c.Time) {
				g.changes++
				g.last = *c
			}
		}
	}
}

// keep forgets the oldest findings if there are too many.
func (e *Engine) keep() {
	if n := e.o.Keep; n > 0 && len(e.all) > n {
		drop := len(e.all) - n + n/8
		e.stats.Forgotten += uint64(drop)
		e.all = append([]*Finding(nil), e.all[drop:]...)
	}
}
