// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"strings"
	"time"

	"github.com/ummu/ummu/internal/wire"
	"github.com/ummu/ummu/tracer"
)

// Watch is one watch, for people. Losses are events that the client could not be
// told one by one; each made everything it had cached invalid.
type Watch struct {
	Watch     uint64  `json:"watch"`
	PID       uint32  `json:"pid"`
	UID       uint32  `json:"uid"`
	Comm      string  `json:"comm"`
	Tier      string  `json:"tier"`
	State     string  `json:"state"` // live, dead
	AgeSec    float64 `json:"age_s"`
	Bytes     uint32  `json:"bytes"` // of kernel memory
	RingBytes uint32  `json:"ring_bytes"`
	Records   uint64  `json:"records"`
	Filtered  uint64  `json:"filtered"` // changes of nothing that is registered
	Lost      uint64  `json:"lost"`
	Unpaired  uint64  `json:"unpaired"`
	Rate      float64 `json:"records_per_s"`
}

// Up is how long the daemon runs.
func (r *Report) Up() time.Duration { return since(r.End.StartedNanos, r.End.NowNanos) }

func since(from, to uint64) time.Duration { return time.Duration(to - min(from, to)) }

// Watches are the watches of a report. Their rates are those since an earlier
// report; means since they were opened if it is nil, or did not have them.
func (r *Report) Watches(before *Report) []Watch {
	old := make(map[uint64]wire.Entry)
	if before != nil {
		for _, e := range before.Entries {
			old[e.Watch] = e
		}
	}
	out := []Watch{}
	for _, e := range r.Entries {
		name, _, _ := strings.Cut(string(e.Comm[:]), "\x00")
		w := Watch{
			Watch: e.Watch, PID: e.PID, UID: e.UID, Comm: name, Tier: tracer.Tier(e.Tier).String(), State: "live",
			AgeSec: since(e.OpenedNanos, r.End.NowNanos).Seconds(), Bytes: e.MemoryBytes, RingBytes: e.RingBytes,
			Records: e.Records, Filtered: e.Filtered, Lost: e.Lost, Unpaired: e.Unpaired,
		}
		if e.Deaths|e.Untracked != 0 {
			w.State = "dead"
		}
		records, over := e.Records, w.AgeSec
		if o, ok := old[e.Watch]; ok {
			records, over = e.Records-o.Records, since(before.End.NowNanos, r.End.NowNanos).Seconds()
		}
		if over > 0 {
			w.Rate = float64(records) / over
		}
		out = append(out, w)
	}
	return out
}
