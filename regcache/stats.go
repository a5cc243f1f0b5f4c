// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"fmt"
	"maps"
	"syscall"

	"github.com/ummu/ummu/mm"
)

// Cause says why an invalidation may have been false: the record that caused
// it does not prove that the registration went stale.
type Cause uint8

// The causes.
const (
	CauseSuperset Cause = iota // the record's range may be larger than what changed
	CauseMaybe                 // the call may turn out to change nothing
	CauseRights                // protection changed to readable and writable: no page moved
	CauseLost                  // records were lost, or the feed ended: everything was dropped
	numCauses
)

// String is the cause in lower case.
func (c Cause) String() string {
	switch c {
	case CauseSuperset:
		return "superset"
	case CauseMaybe:
		return "maybe"
	case CauseRights:
		return "rights"
	case CauseLost:
		return "lost"
	}
	return fmt.Sprintf("cause(%d)", uint8(c))
}

// protReadWrite is PROT_READ|PROT_WRITE.
const protReadWrite = 3

// causeOf returns why rec's invalidations may be false, or numCauses.
func causeOf(rec *mm.Record) Cause {
	switch {
	case !rec.Kind.IsChange():
		return CauseLost
	case rec.Flags&mm.Superset != 0:
		return CauseSuperset
	case rec.Flags&mm.Maybe != 0:
		return CauseMaybe
	case rec.Kind == mm.Protect && rec.Arg[0]&protReadWrite == protReadWrite:
		return CauseRights
	}
	return numCauses
}

// Stats are the cache's counters since it was made, and its present size.
type Stats struct {
	Hits, Misses uint64 // every Acquire that returned a Ref or failed to register is one of them

	// Invalidated counts registrations that a change, a loss or a death took out
	// of the cache, by the kind of the record; the end of the feed counts as Lost.
	Invalidated map[mm.Kind]uint64
	// FalseInvalidated counts those of Invalidated that may have been in vain.
	FalseInvalidated map[Cause]uint64
	Evicted          uint64            // idle registrations that made room
	Replaced         uint64            // registrations replaced by one with more rights
	Uncached         map[Reason]uint64 // registrations for one use only

	Registrations   uint64 // calls of Register that succeeded
	Deregistrations uint64 // calls of Deregister that succeeded
	// Failures counts calls of the Registrar that failed, by errno; 0 is an
	// error without one.
	Failures map[syscall.Errno]uint64

	Entries         int    // in the cache
	Bytes           uint64 // pinned by them, whole pages of each
	InUse           int    // referenced: in the cache or not
	Stale           int    // waiting to be deregistered
	StaleBytes      uint64 // pinned by them
	Zombies         int    // waiting for Deregister to be retried
	RegisteredBytes uint64 // pinned by everything that is registered
}

// Stats returns the counters. It looks at every entry under the index lock: a few
// nanoseconds each, hits are not held up.
func (c *Cache[H]) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	n := &c.count
	s := Stats{
		Hits: n.hits, Misses: n.misses,
		Invalidated:      make(map[mm.Kind]uint64),
		FalseInvalidated: make(map[Cause]uint64),
		Evicted:          n.evicted,
		Replaced:         n.replaced,
		Uncached:         make(map[Reason]uint64),
		Registrations:    n.registrations,
		Deregistrations:  n.deregistrations,
		Failures:         maps.Clone(n.failures),
		Entries:          c.ix.n,
		Bytes:            c.ix.bytes,
		InUse:            c.orphans.n,
		Stale:            c.dead.n,
		Zombies:          c.zombies.n,
		RegisteredBytes:  c.registered,
	}
	for k, v := range n.invalidated {
		if v > 0 {
			s.Invalidated[mm.Kind(k)] = v
		}
	}
	for k, v := range n.doubtful {
		if v > 0 {
			s.FalseInvalidated[Cause(k)] = v
		}
	}
	for k, v := range n.uncached {
		if v > 0 {
			s.Uncached[Reason(k)] = v
		}
	}
	for _, l := range []*list[H]{&c.idle, &c.parked} {
		for e := l.front; e != nil; e = e.next {
			w := e.state.Load()
			s.Hits += w >> hitShift
			if w&refMask != 0 {
				s.InUse++
			}
		}
	}
	for e := c.dead.front; e != nil; e = e.next {
		s.StaleBytes += e.size()
	}
	return s
}
