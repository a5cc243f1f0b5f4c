// SPDX-License-Identifier: Apache-2.0

// Package top is the screen of ummutop: what a person asks with keys, and how
// the answer looks in a terminal, or printed. It knows nothing of where the
// data comes from: a [Source] answers each [Query] with a [State]. Update and
// View of the [Model] are pure.
package top

import (
	"context"
	"time"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/pairs"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/symbol"
)

// Source answers queries, one at a time.
type Source interface {
	// State is called outside of the screen's loop and may take its time.
	State(context.Context, Query) (*State, error)
}

// Query is what the screen wants to know.
type Query struct {
	activity.Query
	Hooks bool // runs and time of hooks, which cost something to count
	// At is the time to show, on CLOCK_MONOTONIC, for sources with a Position.
	// 0: where it is; a time behind the end: the end.
	At time.Duration
}

// State is the answer.
type State struct {
	*activity.Snapshot
	Meta  *recording.Meta // where the records come from
	Calls *calls.Table    // of the machine they come from
	What  string          // what is watched, in words
	// Groups are control groups or containers, by process, where known.
	Groups map[uint32]string
	// Frames are the stacks of what is shown, by mm.Record.Stack.
	Frames map[uint32][]symbol.Frame
	Hooks  []Hook
	// Watches are shown instead of processes by sources that know no more; nil:
	// this one does.
	Watches []Watch
	Stages  []Stage
	// Missing says what this source cannot show, and what would.
	Missing []string
	// Doubt says why the data is not complete, apart from losses; empty: it is.
	Doubt string
	// Ended says why nothing will come any more; empty: it goes on.
	Ended    string
	Position *Position // of sources that can be moved in time
}

// Hook is one place where changes are seen.
type Hook struct {
	Name     string
	Sees     string
	Attached bool
	Err      error // why not
	Records  uint64
	Counted  bool // Runs and Time mean something
	Runs     uint64
	Time     time.Duration
	Skipped  uint64 // runs that the kernel left out; others may have seen the same
}

// Watch is one watch of a daemon.
type Watch struct {
	Watch     uint64
	PID       uint32
	UID       uint32
	Comm      string
	Tier      string
	State     string // live, dead
	AgeSec    float64
	Bytes     uint32 // of kernel memory
	RingBytes uint32
	Records   uint64
	Filtered  uint64 // changes of nothing that is registered
	Lost      uint64
	Unpaired  uint64
	Rate      float64
}

// Stage is one place where events get lost.
type Stage struct {
	Name string
	Lost uint64
}

// Position is where a recording is, on CLOCK_MONOTONIC.
type Position struct{ At, From, To time.Duration }

// Wall is the time of day of a time of CLOCK_MONOTONIC.
func (s *State) Wall(t time.Duration, l *time.Location) time.Time {
	return s.Meta.MonotonicZero.Add(t).In(l)
}

// BeginsOnly reports whether the tier knows neither arguments nor results of calls.
func (s *State) BeginsOnly() bool { return pairs.BeginsOnly(s.Meta.Tier) }

// lines are the processes with what else is known of them.
func (s *State) lines() []Process {
	out := make([]Process, len(s.Processes))
	for i := range out {
		out[i] = Process{s.Processes[i], s.Groups[s.Processes[i].PID], s.Meta.Tier}
	}
	return out
}

// Stacks are the numbers of the stacks that a state shows.
func (s *State) Stacks() (ids []uint32) {
	add := func(id uint32) {
		if id != 0 {
			ids = append(ids, id)
		}
	}
	for i := range s.Findings {
		add(s.Findings[i].Registration.Stack)
		add(s.Findings[i].Change.Stack)
	}
	if s.Detail != nil {
		for i := range s.Detail.Sites {
			add(s.Detail.Sites[i].Stack)
		}
		for i := range s.Detail.Events {
			add(s.Detail.Events[i].Stack)
		}
		for i := range s.Detail.Registrations {
			add(s.Detail.Registrations[i].Stack)
		}
	}
	return ids
}
