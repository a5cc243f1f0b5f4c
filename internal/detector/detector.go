// SPDX-License-Identifier: Apache-2.0

// Package detector joins what a search for stale registrations takes: the
// records and stacks of a [tracer.Tracer], their symbols, and the findings. It
// finds copies of libibverbs, as a program may load them and as processes have
// them mapped, and has them probed.
package detector

import (
	"errors"
	"fmt"
	"os"
	"path"
	"strings"

	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/findings"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// Options configure [New]. The zero value works.
type Options struct {
	// Those of [findings.Options].
	Calls        *calls.Table
	BeginsOnly   bool
	Found, Ended func(*findings.Finding)
	// Resolver is one that other sessions use as well, one after the other; it
	// stays its owner's, who has called its Watch. nil: one of its own.
	Resolver *symbol.Resolver
}

// Detector follows one session. It is not safe for concurrent use; its owner
// closes it.
type Detector struct {
	o        Options
	t        *tracer.Tracer // nil: of a recording
	resolver *symbol.Resolver
	owned    bool // the resolver is
	stacks   symbol.Stacks
	frames   func(uint32) []symbol.Frame
	engine   *findings.Engine
	last     map[uint32]uint32 // by task: the stack of its registering call
	tried    map[string]bool   // libraries, by path in the process
	gaps     []Gap
	told     map[string]bool
}

// Gap is something that was not seen, for the summary.
type Gap struct{ Name, What string }

// New returns a detector of a live session; with all, of every process of the
// machine.
func New(t *tracer.Tracer, all bool, o Options) (*Detector, error) {
	d := &Detector{t: t, resolver: o.Resolver, owned: o.Resolver == nil}
	d.frames = d.stacks.Frames
	d.init(o)
	if !d.owned {
		return d, nil
	}
	d.resolver = symbol.New()
	if err := d.resolver.Watch(all); err != nil {
		return nil, errors.Join(err, d.resolver.Close())
	}
	return d, nil
}

// Replay returns a detector of recorded records, whose stacks frames resolves.
func Replay(frames func(uint32) []symbol.Frame, o Options) *Detector {
	d := &Detector{frames: frames}
	d.init(o)
	return d
}

func (d *Detector) init(o Options) {
	d.o = o
	d.last, d.tried, d.told = make(map[uint32]uint32), make(map[string]bool), make(map[string]bool)
	d.newEngine()
}

func (d *Detector) newEngine() {
	d.engine = findings.New(findings.Options{
		Calls: d.o.Calls, BeginsOnly: d.o.BeginsOnly, Frames: d.frames, Found: d.o.Found, Ended: d.o.Ended,
	})
}

// Tell sets what [Options] may not have had yet. It must be called before the
// first record.
func (d *Detector) Tell(t *calls.Table, found, ended func(*findings.Finding)) {
	d.o.Calls, d.o.Found, d.o.Ended = t, found, ended
	d.newEngine()
}

// Engine has the findings.
func (d *Detector) Engine() *findings.Engine { return d.engine }

// Frames resolves [mm.Record].Stack.
func (d *Detector) Frames(stack uint32) []symbol.Frame { return d.frames(stack) }

// Close frees what symbols need. Frames go on working.
func (d *Detector) Close() error {
	if !d.owned {
		return nil
	}
	return d.resolver.Close()
}

// Program has the copies of libibverbs probed that a program may load, before
// it runs; exe may be empty. What cannot be probed is a gap.
func (d *Detector) Program(exe string) {
	d.probe(libraries(exe, os.Getenv("LD_LIBRARY_PATH")))
}

// Process takes a process that runs already: its mappings, and the libibverbs
// that it has.
func (d *Detector) Process(pid int) error {
	if err := d.resolver.Snapshot(pid); err != nil {
		return fmt.Errorf("read mappings of process %d: %w", pid, err)
	}
	d.mapped(pid, false)
	return nil
}

func (d *Detector) probe(files []string) {
	for _, f := range files {
		switch err := d.t.ProbeVerbs(f); {
		case err == nil, errors.Is(err, tracer.ErrNotVerbs), errors.Is(err, os.ErrNotExist):
		default:
			d.gap("verbs-unprobed", err.Error())
		}
	}
}

// mapped looks at what a process has mapped. late: while it runs, so that it
// may have called a library before that is probed only now.
func (d *Detector) mapped(pid int, late bool) {
	for _, m := range d.resolver.Modules(pid) {
		if !strings.HasPrefix(path.Base(m), "libibverbs.so") {
			continue
		}
		f := fmt.Sprintf("/proc/%d/root%s", pid, m)
		if d.tried[f] {
			continue
		}
		d.tried[f] = true
		unprobed, err := d.t.VerbsUnprobed(f)
		if err != nil && late { // it has ended
			f = m
			unprobed, err = d.t.VerbsUnprobed(f)
		}
		switch {
		case err != nil:
			d.gap("verbs-unprobed", err.Error())
		case unprobed:
			if late {
				d.gap("verbs-late", fmt.Sprintf("%s of process %d was found after it was loaded: regions registered before are not known", m, pid))
			}
			d.probe([]string{f})
		}
	}
}

func (d *Detector) gap(name, what string) {
	if !d.told[what] {
		d.told[what] = true
		d.gaps = append(d.gaps, Gap{name, what})
	}
}

// Gaps are what was not seen, so far.
func (d *Detector) Gaps() []Gap {
	gaps := d.gaps
	if d.t != nil {
		if n, ok, err := d.t.VerbsGap(); err == nil && ok && n > 0 {
			gaps = append(gaps[:len(gaps):len(gaps)], Gap{"verbs-unseen",
				fmt.Sprintf("the kernel gave back %d memory regions of which libibverbs was not asked: of programs that speak to it by themselves, or went with their device", n)})
		}
	}
	if why := d.engine.Incomplete(); why != "" {
		gaps = append(gaps[:len(gaps):len(gaps)], Gap{"findings-incomplete", why})
	}
	return gaps
}

// Record takes the next record with its stack, whose memory it does not keep,
// and numbers it in r.Stack.
func (d *Detector) Record(r *mm.Record, s mm.Stack) {
	d.Number(r, s)
	d.engine.Add(r)
}

// Number is [Detector.Record] for those who look for findings themselves.
func (d *Detector) Number(r *mm.Record, s mm.Stack) {
	if d.resolver != nil {
		d.follow(r, &s)
	}
}

func (d *Detector) follow(r *mm.Record, s *mm.Stack) {
	for _, p := range d.resolver.Advance(r.Time) {
		d.mapped(p, true)
	}
	pid := int(r.PID)
	switch {
	case r.Kind == mm.Lost:
		clear(d.last)
	case r.Kind == mm.Exit && r.Flags&mm.LastTask != 0:
		d.resolver.Exit(pid)
	}
	switch {
	case s.PC != 0:
		r.Stack = d.stacks.Add(pid, d.resolver.Stack(pid, s))
		if r.Kind == mm.Register && r.Flags&mm.Vector != 0 {
			d.last[r.TID] = r.Stack
		}
	case r.Kind != mm.Register:
	case r.Phase == mm.PhaseEnd:
		delete(d.last, r.TID)
	case r.Flags&mm.Vector != 0:
		r.Stack = d.last[r.TID] // one call, one stack
	}
}

// End takes the end of the stream.
func (d *Detector) End() { d.engine.End() }
