// SPDX-License-Identifier: Apache-2.0

package source

import (
	"cmp"
	"context"
	"time"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/daemon"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/top"
)

// Daemon shows what a daemon tells about the watches that the caller may see:
// for those who may not load BPF programs themselves.
type Daemon struct {
	socket string
	meta   *recording.Meta
	ask    func(context.Context, string) (*daemon.Report, error)

	// owned by State
	before *daemon.Report
	start  time.Duration
	lost   map[uint64]uint64 // by watch
	total  uint64
	losses []activity.Loss
}

// NewDaemon asks the daemon once, to know that it answers. m describes the
// machine; its tier is told by each watch.
func NewDaemon(ctx context.Context, socket string, m *recording.Meta) (*Daemon, error) {
	return newDaemon(ctx, socket, m, daemon.Status)
}

func newDaemon(ctx context.Context, socket string, m *recording.Meta, ask func(context.Context, string) (*daemon.Report, error)) (*Daemon, error) {
	r, err := ask(ctx, socket)
	if err != nil {
		return nil, err
	}
	d := &Daemon{socket: socket, meta: m, ask: ask, before: r, lost: make(map[uint64]uint64), start: time.Duration(r.End.StartedNanos)}
	d.count(r, d.start)
	return d, nil
}

// maxLosses bounds the losses that are told apart.
const maxLosses = 64

// count notices what was lost since the last answer, by a time.
func (d *Daemon) count(r *daemon.Report, at time.Duration) {
	var n uint64
	now := make(map[uint64]uint64, len(r.Entries))
	for _, e := range r.Entries {
		n += e.Lost - min(e.Lost, d.lost[e.Watch])
		now[e.Watch] = e.Lost
	}
	d.lost = now
	if n == 0 {
		return
	}
	d.total += n
	if k := len(d.losses); k == maxLosses {
		d.losses[k-1].Events += n
		return
	}
	d.losses = append(d.losses, activity.Loss{Time: max(at, 1), Events: n})
}

// State implements top.Source.
func (d *Daemon) State(ctx context.Context, _ top.Query) (*top.State, error) {
	r, err := d.ask(ctx, d.socket)
	if err != nil {
		return nil, err
	}
	now := time.Duration(r.End.NowNanos)
	d.count(r, now)
	s := &top.State{
		Snapshot: &activity.Snapshot{Start: d.start, Now: now, Lost: d.total, Losses: append([]activity.Loss(nil), d.losses...)},
		Meta:     d.meta, Calls: calls.Host(), What: "watches of " + d.socket,
		Stages: []top.Stage{{Name: "ring", Lost: d.total}},
		Missing: []string{"kinds of changes, call sites, address maps, findings and hooks: they need CAP_BPF, CAP_PERFMON and CAP_SYS_PTRACE (root), " +
			"or a recording (ummufeed record, then ummutop --replay)"},
		Watches: []top.Watch{},
	}
	// The same answer twice at once has no rates of its own.
	before := d.before
	if r.End.NowNanos-before.End.NowNanos < uint64(50*time.Millisecond) {
		before = nil
	}
	for _, w := range r.Watches(before) {
		s.Watches = append(s.Watches, top.Watch(w))
		s.Meta.Tier = cmp.Or(s.Meta.Tier, w.Tier)
	}
	d.before = r
	return s, nil
}
