// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/pairs"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/internal/top"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// Replay shows a recording at any of its times. Going back reads it again from
// the start.
type Replay struct {
	open     func() (io.ReadCloser, error)
	o        activity.Options
	what     string
	calls    *calls.Table
	from, to time.Duration
	summary  *recording.Summary // nil: it has none
	doubt    string             // why it is not whole

	// owned by State
	meta     *recording.Meta
	file     io.ReadCloser
	reader   *recording.Reader
	activity *activity.Activity
	ahead    mm.Record // read, but later than what is shown
	held     bool
	over     bool
	at       time.Duration
}

// NewReplay reads a recording once, to know how long it is and whether it is
// whole; what is damaged is shown up to there. open opens it from the start.
func NewReplay(name string, open func() (io.ReadCloser, error), o activity.Options) (*Replay, error) {
	p := &Replay{open: open, o: o, what: "recording " + name}
	if err := p.rewind(); err != nil {
		return nil, err
	}
	var err error
	if p.calls, err = calls.For(p.meta.Arch); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	var r mm.Record
	first := true
	for {
		if err = p.reader.Read(&r); err != nil {
			break
		}
		if first || r.Time < p.from {
			p.from = r.Time
		}
		p.to, first = max(p.to, r.Time), false
	}
	p.summary = p.reader.Summary()
	if err != io.EOF {
		p.doubt = err.Error()
	} else if !p.summary.Complete && p.summary.Lost == 0 {
		p.doubt = p.summary.Reason
	}
	// Counting began when the recording did, as far as that can be true.
	if start := p.meta.Start.Sub(p.meta.MonotonicZero); start < p.from && p.from-start < time.Hour {
		p.from = start
	}
	p.o.Calls = p.calls
	p.o.Start, p.o.BeginsOnly = p.from, pairs.BeginsOnly(p.meta.Tier)
	p.at = p.from
	return p, p.rewind()
}

// rewind opens the recording again.
func (p *Replay) rewind() error {
	if err := p.Close(); err != nil {
		return err
	}
	f, err := p.open()
	if err != nil {
		return fmt.Errorf("open recording: %w", err)
	}
	rd, err := recording.NewReader(f, tracer.HookName)
	if err != nil {
		return errors.Join(fmt.Errorf("read recording: %w", err), f.Close())
	}
	p.o.Frames = rd.Frames
	a, err := activity.New(p.o)
	if err != nil {
		return errors.Join(err, f.Close())
	}
	p.file, p.reader, p.meta, p.activity = f, rd, rd.Meta(), a
	p.held, p.over, p.at = false, false, p.from
	return nil
}

// Close closes the recording.
func (p *Replay) Close() error {
	if p.file == nil {
		return nil
	}
	err := p.file.Close()
	p.file = nil
	return err
}

// Activity is what was counted up to the time that is shown.
func (p *Replay) Activity() *activity.Activity { return p.activity }

// Whole is nil, or why the recording is not whole.
func (p *Replay) Whole() error {
	if p.doubt == "" {
		return nil
	}
	return fmt.Errorf("%s: %w", p.doubt, recording.ErrTruncated)
}

// State implements top.Source.
func (p *Replay) State(ctx context.Context, q top.Query) (*top.State, error) {
	at := p.at
	if q.At != 0 {
		at = max(p.from, min(q.At, p.to))
	}
	if at < p.at {
		if err := p.rewind(); err != nil {
			return nil, err
		}
	}
	if err := p.advance(ctx, at); err != nil {
		return nil, err
	}
	s := &top.State{
		Snapshot: p.activity.Snapshot(q.Query), Meta: p.meta, Calls: p.calls, What: p.what, Doubt: p.doubt,
		Position: &top.Position{At: p.at, From: p.from, To: p.to},
		Missing:  []string{"control groups, runs and time of hooks: recordings have none"},
	}
	s.Frames = frames(s, p.reader.Frames)
	if p.at == p.to {
		s.Ended = "end"
	}
	if s.Lost > 0 && p.summary != nil {
		s.Stages = []top.Stage{{Name: strings.Join(p.summary.LostAt, " or "), Lost: s.Lost}}
	}
	for i, n := range s.Snapshot.Hooks {
		if n > 0 {
			s.Hooks = append(s.Hooks, top.Hook{Name: tracer.HookName(mm.Hook(i)), Attached: true, Records: n})
		}
	}
	return s, nil
}

// advance counts what happened up to a time.
func (p *Replay) advance(ctx context.Context, at time.Duration) error {
	for n := 0; !p.over; n++ {
		if !p.held {
			// What is wrong with it has been said.
			if p.over = p.reader.Read(&p.ahead) != nil; p.over {
				p.activity.Finish()
				break
			}
		}
		if p.held = p.ahead.Time > at; p.held {
			break
		}
		p.activity.Add(&p.ahead)
		if n%4096 == 0 && ctx.Err() != nil {
			return ctx.Err()
		}
	}
	p.at = at
	p.activity.Advance(at)
	return nil
}

// frames resolves the stacks that a state shows.
func frames(s *top.State, of func(uint32) []symbol.Frame) map[uint32][]symbol.Frame {
	out := make(map[uint32][]symbol.Frame)
	for _, id := range s.Stacks() {
		if out[id] == nil {
			out[id] = of(id)
		}
	}
	return out
}
