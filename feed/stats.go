// SPDX-License-Identifier: Apache-2.0

package feed

import "sync/atomic"

// Stats are totals since New.
type Stats struct {
	Records   uint64 // records read from the ring
	Losses    uint64 // times that everything became doubtful
	Lost      uint64 // events lost, where the number is known
	Busy      uint64 // drains that stopped at a record still being written
	Corrupt   uint64 // drains that found the ring damaged, which ends the watch: 0 or 1
	Waits     uint64 // Begins that found a change in flight
	Unsettled uint64 // of these, those that gave up waiting
	// Verdicts counts Commits by verdict.
	Verdicts [numVerdicts]uint64
}

type counters struct {
	records, losses, lost, busy, corrupt, waits, unsettled atomic.Uint64

	verdicts [numVerdicts]atomic.Uint64
}

// Stats returns the totals; they are read one by one.
func (w *Watch) Stats() Stats {
	c := &w.stats
	s := Stats{
		Records:   c.records.Load(),
		Losses:    c.losses.Load(),
		Lost:      c.lost.Load(),
		Busy:      c.busy.Load(),
		Corrupt:   c.corrupt.Load(),
		Waits:     c.waits.Load(),
		Unsettled: c.unsettled.Load(),
	}
	for v := range c.verdicts {
		s.Verdicts[v] = c.verdicts[v].Load()
	}
	return s
}
