// SPDX-License-Identifier: Apache-2.0

package activity

import (
	"fmt"
	"time"

	"github.com/google/pprof/profile"
)

// frame is a function and a line on a stack.
type frame struct {
	function, file string
	line           int
}

// Profile returns the call sites in the form of go tool pprof: two values a
// sample, changes and bytes, with the process and the kind as labels. The
// innermost frame is the call. What was too much to tell apart is a sample of
// its own. zero is the time of day when CLOCK_MONOTONIC was 0.
func (a *Activity) Profile(zero time.Time) (*profile.Profile, error) {
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
	functions := make(map[frame]*profile.Function)
	locations := make(map[frame]*profile.Location)
	locate := func(f frame) *profile.Location {
		if l := locations[f]; l != nil {
			return l
		}
		key := frame{function: f.function, file: f.file}
		fn := functions[key]
		if fn == nil {
			fn = &profile.Function{ID: uint64(len(p.Function) + 1), Name: f.function, SystemName: f.function, Filename: f.file}
			functions[key] = fn
			p.Function = append(p.Function, fn)
		}
		l := &profile.Location{ID: uint64(len(p.Location) + 1), Line: []profile.Line{{Function: fn, Line: int64(f.line)}}}
		locations[f] = l
		p.Location = append(p.Location, l)
		return l
	}
	add := func(c Count, labels map[string][]string, frames ...frame) {
		x := &profile.Sample{Value: []int64{int64(c.Changes), int64(c.Bytes)}, Label: labels}
		for _, f := range frames {
			x.Location = append(x.Location, locate(f))
		}
		p.Sample = append(p.Sample, x)
	}
	for _, x := range sites {
		name := a.o.Calls.Name(x.Call)
		if name == "" {
			name = "(no call)"
		}
		frames := []frame{{function: name}}
		if a.o.Frames != nil && x.Stack != 0 {
			for _, f := range a.o.Frames(x.Stack) {
				frames = append(frames, frame{f.Func, f.File, f.Line})
				if f.Func == "" {
					frames[len(frames)-1].function = f.String()
				}
			}
		}
		comm := comms[x.PID]
		if comm == "" {
			comm = "?" // it is forgotten
		}
		frames = append(frames, frame{function: fmt.Sprintf("%s (%d)", comm, x.PID)})
		add(x.Count, map[string][]string{"pid": {fmt.Sprint(x.PID)}, "comm": {comm}, "kind": {x.Kind.String()}}, frames...)
	}
	if others.Changes > 0 {
		add(others, nil, frame{function: "(forgotten call sites)"})
	}
	if err := p.CheckValid(); err != nil {
		return nil, fmt.Errorf("make profile: %w", err)
	}
	return p, nil
}
