// SPDX-License-Identifier: Apache-2.0

// Package source answers what the screen of ummutop asks: from the kernel side
// as it happens ([Live]) or from a recording ([Replay]).
package source

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/top"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// Live shows what happens now.
type Live struct {
	tracer   *tracer.Tracer
	meta     *recording.Meta
	activity *activity.Activity
	what     string
	groups   *groups
	detector *Detector // nil: registrations are not looked for
	ended    atomic.Pointer[string]

	mu       sync.Mutex // guards streams
	streams  []*tracer.Stream
	readers  sync.WaitGroup
	failed   chan error
	failOnce sync.Once

	// owned by State
	counting io.Closer // counts runs of hooks; nil: not now
	noCount  string    // why they cannot be counted
}

// NewLive returns a source over a tracer that stays the caller's. what says
// in words what is watched; d, if not nil, finds stacks, and becomes the Live's.
func NewLive(t *tracer.Tracer, m *recording.Meta, a *activity.Activity, d *Detector, what string) *Live {
	return &Live{tracer: t, meta: m, activity: a, detector: d, what: what, groups: newGroups(), failed: make(chan error, 1)}
}

// Read counts the records of a stream until Close, in the background. The
// stream becomes the Live's.
func (l *Live) Read(s *tracer.Stream) {
	l.mu.Lock()
	l.streams = append(l.streams, s)
	l.mu.Unlock()
	l.readers.Go(func() {
		// A panic here would leave the terminal as the screen has made it.
		defer func() {
			if p := recover(); p != nil {
				l.fail(fmt.Errorf("panic while reading records: %v\n%s", p, debug.Stack()))
			}
		}()
		var r mm.Record
		for {
			switch err := s.Read(&r); {
			case err == nil:
				l.detector.number(&r, s)
				l.activity.Add(&r)
			case errors.Is(err, tracer.ErrFlushed), errors.Is(err, os.ErrClosed):
				return
			default:
				l.fail(fmt.Errorf("read records: %w", err))
				return
			}
		}
	})
}

func (l *Live) fail(err error) { l.failOnce.Do(func() { l.failed <- err }) }

// Failed delivers the error after which nothing is counted any more.
func (l *Live) Failed() <-chan error { return l.failed }

// End says that nothing will come any more, and why.
func (l *Live) End(why string) { l.ended.Store(&why) }

// Flush waits until everything that was recorded up to now is counted.
func (l *Live) Flush() error {
	l.mu.Lock()
	var errs []error
	for _, s := range l.streams {
		errs = append(errs, s.Flush())
	}
	l.mu.Unlock()
	l.readers.Wait()
	l.activity.Finish()
	return errors.Join(errs...)
}

// Close ends the streams.
func (l *Live) Close() error {
	l.mu.Lock()
	var errs []error
	for _, s := range l.streams {
		errs = append(errs, s.Close())
	}
	l.mu.Unlock()
	l.readers.Wait()
	if l.counting != nil {
		errs = append(errs, l.counting.Close())
		l.counting = nil
	}
	return errors.Join(append(errs, l.detector.close())...)
}

// stats are the sums over all streams.
func (l *Live) stats() (sum tracer.Stats) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, s := range l.streams {
		x := s.Stats()
		sum.Records += x.Records
		sum.Lost += x.Lost
		sum.Missed = max(sum.Missed, x.Missed) // machine-wide
		sum.Unpaired += x.Unpaired
	}
	return sum
}

// State implements top.Source.
func (l *Live) State(_ context.Context, q top.Query) (*top.State, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return nil, fmt.Errorf("read clock: %w", err)
	}
	if l.ended.Load() == nil {
		l.activity.Advance(time.Duration(now.Nano()))
	}
	st := l.stats()
	s := &top.State{
		Snapshot: l.activity.Snapshot(q.Query), Meta: l.meta, Calls: calls.Host(), What: l.what,
		Stages: []top.Stage{{Name: "ring", Lost: st.Lost}, {Name: "hook", Lost: st.Missed}},
	}
	if why := l.ended.Load(); why != nil {
		s.Ended = *why
	}
	pids := make([]uint32, len(s.Processes))
	for i := range pids {
		pids[i] = s.Processes[i].PID
	}
	s.Groups = l.groups.of(pids)
	if err := l.hooks(s, q.Hooks); err != nil {
		return nil, err
	}
	s.Frames = frames(s, l.detector.Frames)
	s.Missing = append(s.Missing, l.detector.gaps()...)
	if l.noCount != "" {
		s.Missing = append(s.Missing, "runs and time of hooks: "+l.noCount)
	}
	return s, nil
}

// hooks adds what is known of the hooks. Their runs are counted only while
// somebody wants to see them: it makes every BPF program slower.
func (l *Live) hooks(s *top.State, counted bool) error {
	switch {
	case counted && l.counting == nil && l.noCount == "":
		c, err := tracer.CountRuns()
		if err != nil {
			l.noCount = err.Error()
		} else {
			l.counting = c
		}
	case !counted && l.counting != nil:
		if err := l.counting.Close(); err != nil {
			return fmt.Errorf("stop counting runs of hooks: %w", err)
		}
		l.counting = nil
	}
	runs := make(map[mm.Hook]tracer.HookRuns)
	skipped := make(map[mm.Hook]uint64)
	if counted {
		all, err := l.tracer.Runs()
		if err != nil {
			return err
		}
		for _, r := range all {
			runs[r.Hook] = r
		}
		misses, err := l.tracer.Misses()
		if err != nil {
			return err
		}
		for _, m := range misses {
			skipped[m.Hook] = m.Skipped
		}
	}
	for _, h := range l.tracer.Coverage().Hooks {
		s.Hooks = append(s.Hooks, top.Hook{
			Name: h.Name, Sees: h.Sees, Attached: h.Attached, Err: h.Err, Records: s.Snapshot.Hooks[h.Hook],
			Counted: counted && l.counting != nil, Runs: runs[h.Hook].Runs, Time: runs[h.Hook].Time, Skipped: skipped[h.Hook],
		})
	}
	return nil
}
