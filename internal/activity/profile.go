// SPDX-License-Identifier: Apache-2.0

package activity

import (
	"fmt"
	"time"

	"github.com/google/pprof/profile"

	"github.com/ummu/ummu/mm"
)

// Frame is a function and a line on a stack.
type Frame struct {
	Function, File string
	Line           int
}

// Names are what a profile needs to know of a Site.
type Names struct {
	Call func(mm.Call) string
	// Stack returns the frames of a stack, the innermost first; nil: none are known.
	Stack func(Site) []Frame
}

// Profile returns the call sites in the form of go tool pprof: two values a
// sample, changes and bytes, with the process and the kind as labels. The
// innermost frame is the call. What was too much to tell apart is a sample of
// its own. zero is the time of day when CLOCK_MONOTONIC was 0.
func (a *Activity) Profile(n Names, zero time.Time) (*profile.Profile, error) {
	s := a.Snapshot(Query{})
	sites, others := a.Sites()
	comms := make(map[uint32]string)
	for _, p := range s.Processes {
		comms[p.PID] = p.Comm
	}
	p := &profile.Profile{
		SampleType:        []*profile.ValueType{{Type: "changes", Unit: "count"}, {Type: "bytes", Unit: "bytes"}},
		DefaultSampleType: "changes",
		TimeNanos:         zero.Add(s.Start).UnixNano(),
		DurationNanos:     int64(s.Now - s.Start),
	}
	functions := make(map[Frame]*profile.Function)
	locations := make(map[Frame]*profile.Location)
	locate := func(f Frame) *profile.Location {
		if l := locations[f]; l != nil {
			return l
		}
		key := Frame{Function: f.Function, File: f.File}
		fn := functions[key]
		if fn == nil {
			fn = &profile.Function{ID: uint64(len(p.Function) + 1), Name: f.Function, SystemName: f.Function, Filename: f.File}
			functions[key] = fn
			p.Function = append(p.Function, fn)
		}
		l := &profile.Location{ID: uint64(len(p.Location) + 1), Line: []profile.Line{{Function: fn, Line: int64(f.Line)}}}
		locations[f] = l
		p.Location = append(p.Location, l)
		return l
	}
	add := func(c Count, labels map[string][]string, frames ...Frame) {
		x := &profile.Sample{Value: []int64{int64(c.Changes), int64(c.Bytes)}, Label: labels}
		for _, f := range frames {
			x.Location = append(x.Location, locate(f))
		}
		p.Sample = append(p.Sample, x)
	}
	for _, x := range sites {
		name := n.Call(x.Call)
		if name == "" {
			name = "(no call)"
		}
		frames := []Frame{{Function: name}}
		if n.Stack != nil {
			frames = append(frames, n.Stack(x.Site)...)
		}
		comm := comms[x.PID]
		if comm == "" {
			comm = "?"
		}
		frames = append(frames, Frame{Function: fmt.Sprintf("%s (%d)", comm, x.PID)})
		add(x.Count, map[string][]string{"pid": {fmt.Sprint(x.PID)}, "comm": {comm}, "kind": {x.Kind.String()}}, frames...)
	}
	if others.Changes > 0 {
		add(others, nil, Frame{Function: "(forgotten call sites)"})
	}
	if err := p.CheckValid(); err != nil {
		return nil, fmt.Errorf("make profile: %w", err)
	}
	return p, nil
}
