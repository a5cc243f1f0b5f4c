// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// tick is how long output may wait in a buffer, and how often a session looks
// whether its target has ended.
const tick = 100 * time.Millisecond

// source is what a session reads; tracer.Stream is one.
type source interface {
	Read(*mm.Record) error
	SetDeadline(time.Time)
	Flush() error
	Stats() tracer.Stats
}

// session moves records from sources into a view until every source was
// flushed. If the view fails (a full disk, a closed pipe) it goes on reading
// and drops what it reads, so that whoever waits for a program still does.
type session struct {
	sources []source
	// onRecord and onTick, if set, look at every record and at the time.
	onRecord func(*mm.Record)
	onTick   func()
	// gaps, if set, are the address spaces that were not seen.
	gaps func() []recording.Gap

	mu   sync.Mutex // guards what follows
	view *view
	err  error  // first error of the view
	seq  uint64 // where several sources become one stream
}

// run returns the first error of reading.
func (s *session) run() error {
	errs := make([]error, len(s.sources))
	var wg sync.WaitGroup
	for i, src := range s.sources {
		wg.Go(func() { errs[i] = s.read(src) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

func (s *session) read(src source) error {
	var r mm.Record
	stacked, _ := src.(interface{ Stack() mm.Stack })
	next := time.Now().Add(tick)
	src.SetDeadline(next)
	for n := 0; ; n++ {
		err := src.Read(&r)
		switch {
		case err == nil:
			var st mm.Stack
			if stacked != nil {
				st = stacked.Stack()
			}
			s.take(&r, st)
		case errors.Is(err, tracer.ErrFlushed), errors.Is(err, os.ErrClosed):
			return nil
		case !errors.Is(err, os.ErrDeadlineExceeded):
			return fmt.Errorf("read records: %w", err)
		}
		// A busy stream meets no deadline.
		if err != nil || n%1024 == 0 {
			if now := time.Now(); !now.Before(next) {
				s.flush()
				next = now.Add(tick)
				src.SetDeadline(next)
			}
		}
	}
}

func (s *session) take(r *mm.Record, st mm.Stack) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sources) > 1 {
		s.seq += max(r.Lost, 1)
		r.Seq = s.seq
	}
	if s.onRecord != nil {
		s.onRecord(r)
	}
	if s.view.hunt != nil {
		s.view.hunt.Record(r, st)
	}
	if s.err == nil {
		s.err = s.view.record(r)
	}
}

func (s *session) flush() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err == nil {
		s.err = s.view.sink.flush()
	}
	if s.onTick != nil {
		s.onTick()
	}
}

// stop makes run return once everything recorded until now was read.
func (s *session) stop() error {
	var errs []error
	for _, src := range s.sources {
		errs = append(errs, src.Flush())
	}
	return errors.Join(errs...)
}

// end prints the summary and returns it with the first error of the output.
func (s *session) end(readErr error) (*recording.Summary, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err != nil {
		return &s.view.sum, s.err
	}
	var at []string
	var ring, missed uint64
	for _, src := range s.sources {
		st := src.Stats()
		ring += st.Lost
		missed = max(missed, st.Missed)
	}
	if ring > 0 {
		at = append(at, "ring")
	}
	if missed > 0 {
		at = append(at, "hook")
	}
	reason := ""
	if readErr != nil {
		reason = readErr.Error()
	}
	if s.gaps != nil {
		s.view.sum.Gaps = s.gaps()
	}
	return s.view.end(at, reason)
}
