// SPDX-License-Identifier: Apache-2.0

// Package activity counts what happens to address spaces: by process, kind of
// change, call site and hook, with rates over windows, what memory is
// registered and what touched it, and losses. Whatever is fed, it takes
// bounded memory: what is forgotten about single processes and call sites
// stays in the totals.
package activity

import (
	"fmt"
	"sync"
	"time"

	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/findings"
	"github.com/ummu/ummu/internal/pairs"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

// Kinds are the kinds that count as changes, in the order of [Counts].
var Kinds = [...]mm.Kind{mm.Unmap, mm.Replace, mm.Zap, mm.Move, mm.Protect}

// NumKinds is their number.
const NumKinds = 5

// index is the place of a kind of change in Counts.
func index(k mm.Kind) int { return int(k - mm.Unmap) }

// Options configure [New]. The zero value works.
type Options struct {
	// Start is CLOCK_MONOTONIC when counting began.
	Start time.Duration
	// BeginsOnly: the tier has no records of ends, so each begin is a change.
	BeginsOnly bool
	// Self, if not 0, is a process of which nothing is counted: the one that
	// counts.
	Self uint32
	// Select, if not nil, says whether a process is counted. It is asked once
	// for each process and name.
	Select func(pid uint32, comm string) bool
	// MaxProcesses bounds the processes that are told apart. 0: 16384.
	MaxProcesses int
	// MaxEnded bounds those of them that have ended. 0: 256.
	MaxEnded int
	// MaxSites bounds the call sites. 0: 8192.
	MaxSites int
	// MaxEvents bounds the single events kept for all processes together, and
	// MaxRecent those of one process. 0: 32768 and 512.
	MaxEvents, MaxRecent int
	// MaxRegistrations bounds the live registrations that are followed, and
	// MaxFindings the findings that are kept. 0: 262144 and 4096.
	MaxRegistrations, MaxFindings int
	// Calls names system calls; nil: those of this machine.
	Calls *calls.Table
	// Frames resolves the stacks of records; nil: there are none.
	Frames func(stack uint32) []symbol.Frame
}

func (o Options) withDefaults() Options {
	for _, x := range []struct {
		v   *int
		def int
	}{
		{&o.MaxProcesses, 16384}, {&o.MaxEnded, 256}, {&o.MaxSites, 8192},
		{&o.MaxEvents, 32768}, {&o.MaxRecent, 512}, {&o.MaxRegistrations, 262144}, {&o.MaxFindings, 4096},
	} {
		if *x.v == 0 {
			*x.v = x.def
		}
	}
	if o.Calls == nil {
		o.Calls = calls.Host()
	}
	return o
}

// Validate reports options out of range.
func (o Options) Validate() error {
	for _, x := range []struct {
		name string
		v    int
	}{
		{"MaxProcesses", o.MaxProcesses}, {"MaxEnded", o.MaxEnded}, {"MaxSites", o.MaxSites},
		{"MaxEvents", o.MaxEvents}, {"MaxRecent", o.MaxRecent}, {"MaxRegistrations", o.MaxRegistrations}, {"MaxFindings", o.MaxFindings},
	} {
		if x.v < 0 {
			return fmt.Errorf("%s %d is negative", x.name, x.v)
		}
	}
	return nil
}

// Count is a number of changes, of those whose call failed (it may have
// changed something all the same), and of the bytes in their ranges. Changes
// of unknown size count no bytes.
type Count struct{ Changes, Failed, Bytes uint64 }

func (c *Count) add(d Count) {
	c.Changes += d.Changes
	c.Failed += d.Failed
	c.Bytes += d.Bytes
}

// Counts are counts by kind of change, in the order of [Kinds].
type Counts [NumKinds]Count

// Sum is the count of all kinds.
func (c *Counts) Sum() (n Count) {
	for _, x := range c {
		n.add(x)
	}
	return n
}

// Site is a place from which changes are made: a call, by a stack if it is known.
type Site struct {
	PID   uint32
	Call  mm.Call
	Kind  mm.Kind
	Stack uint32 // 0: not known
}

// SiteCount is what came from a site.
type SiteCount struct {
	Site
	Count
	Last time.Duration
}

// Event is one thing that happened to a process's memory: a change, joined
// from its begin and end, or a registration or its end.
type Event struct {
	Time      time.Duration // of the begin
	Range, To mm.Range
	Arg       [2]uint64
	Ret       int64
	Stack     uint32
	TID       uint32
	Call      mm.Call
	Flags     mm.Flags
	Kind      mm.Kind
	Hook      mm.Hook
	Open      bool // no end was seen
}

// Touches reports whether the event is about the page of an address.
func (e *Event) Touches(a mm.Addr) bool { return e.Range.Pages().Has(a) || e.To.Pages().Has(a) }

// State says what became of a registration.
type State uint8

// The states, best first.
const (
	Intact  State = iota // nothing changed in its range since it was made
	Changed              // the rights changed; the pages are the same
	Stale                // an address in it leads to other pages, or to none
)

// String is the state in one word.
func (s State) String() string { return [...]string{"ok", "changed", "stale"}[s] }

// Registration is memory that a process has registered with a device.
type Registration struct {
	PID     uint32
	Range   mm.Range // exact in bytes
	Device  mm.Registration
	Since   time.Duration
	Stack   uint32 // of who registered; 0: not known
	State   State
	Changes uint64 // that overlapped
	Last    Event  // the last of them, if Changes is not 0
	Finding int    // its number; 0: none
}

// Loss is a number of events that were lost by a time.
type Loss struct {
	Time   time.Duration
	Events uint64
}

// Activity counts. It is safe for concurrent use.
type Activity struct {
	o Options

	mu      sync.Mutex // guards what follows
	joiner  *pairs.Joiner
	engine  *findings.Engine
	now     time.Duration // latest time seen
	total   process
	byPID   map[uint32]*process
	ended   []*process // that have ended, the first one first
	sites   int        // told apart in all processes
	others  Count      // of sites that were too many, or of forgotten processes
	events  int        // kept in all processes
	hooks   [256]uint64
	records uint64
	own     uint64 // records of Options.Self
	lost    uint64
	losses  []Loss
	gone    uint64 // processes that were forgotten
}

// process is what is known of one.
type process struct {
	pid         uint32
	comm        mm.Comm
	skip        bool // not selected
	first, last time.Duration
	ended       time.Duration // 0: it lives
	counts      Counts
	maps        uint64 // new mappings
	lostBefore  uint64 // Activity.lost when it was first seen
	lost        uint64 // when it ended: since it was first seen
	win         *window
	recent      ring
	sites       map[Site]*SiteCount
	lastSite    *SiteCount // mostly the next one too
	findings    uint64
}

// maxLosses bounds the losses told apart; older ones become one.
const maxLosses = 64

// New returns an empty Activity.
func New(o Options) (*Activity, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	o = o.withDefaults()
	a := &Activity{o: o, now: o.Start, byPID: make(map[uint32]*process)}
	a.total.win = new(window)
	a.joiner = pairs.New(o.BeginsOnly, a.change)
	a.engine = findings.New(findings.Options{
		Calls: o.Calls, Frames: o.Frames, BeginsOnly: o.BeginsOnly, Keep: o.MaxFindings, MaxLive: o.MaxRegistrations, Found: a.found,
	})
	return a, nil
}

// Add counts one record.
func (a *Activity) Add(r *mm.Record) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.add(r)
}

func (a *Activity) add(r *mm.Record) {
	a.now = max(a.now, r.Time)
	if r.Kind == mm.Lost {
		a.lose(r.Time, r.Lost)
		a.joiner.Add(r)
		a.engine.Add(r)
		return
	}
	if r.PID == a.o.Self && r.PID != 0 {
		a.own++
		return
	}
	if a.o.Select != nil && a.process(r.PID, r.Comm, r.Time).skip {
		if r.Kind == mm.Exit && r.Flags&mm.LastTask != 0 {
			delete(a.byPID, r.PID)
		}
		return
	}
	a.records++
	a.hooks[r.Hook]++
	a.joiner.Add(r) // its error is change's, which has none
	a.engine.Add(r)
}

// Finish takes the end of the records: changes that are still open count too.
func (a *Activity) Finish() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.joiner.End()
	a.engine.End()
}

// Advance tells the time where there may be no records.
func (a *Activity) Advance(now time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.now = max(a.now, now)
}

// Watch makes a process known of which there may be no record yet.
func (a *Activity) Watch(pid uint32, comm string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var c mm.Comm
	copy(c[:len(c)-1], comm)
	a.process(pid, c, a.now)
}

func (a *Activity) lose(at time.Duration, n uint64) {
	a.lost += n
	if k := len(a.losses); k > 0 && at-a.losses[k-1].Time < time.Second {
		a.losses[k-1].Events += n
		return
	}
	if len(a.losses) == maxLosses {
		a.losses[1].Events += a.losses[0].Events
		a.losses[1].Time = a.losses[0].Time
		a.losses = append(a.losses[:0], a.losses[1:]...)
	}
	a.losses = append(a.losses, Loss{at, n})
}

// process finds or makes a process.
func (a *Activity) process(pid uint32, comm mm.Comm, at time.Duration) *process {
	p := a.byPID[pid]
	if p == nil {
		p = &process{pid: pid, comm: comm, first: at, last: at, lostBefore: a.lost}
		p.skip = a.o.Select != nil && !a.o.Select(pid, comm.String())
		if len(a.byPID) >= a.o.MaxProcesses {
			a.makeRoom()
		}
		a.byPID[pid] = p
		return p
	}
	if p.comm != comm {
		p.comm = comm
		p.skip = a.o.Select != nil && !a.o.Select(pid, comm.String())
	}
	return p
}

// makeRoom forgets the process that ended first, or else the one that was
// silent longest.
func (a *Activity) makeRoom() {
	if len(a.ended) > 0 {
		a.forget(a.ended[0])
		a.ended = a.ended[1:]
		return
	}
	var oldest *process
	for _, p := range a.byPID {
		if oldest == nil || p.last < oldest.last {
			oldest = p
		}
	}
	a.forget(oldest)
}

func (a *Activity) forget(p *process) {
	delete(a.byPID, p.pid)
	a.gone++
	a.events -= p.recent.release()
	for _, s := range p.sites {
		a.others.add(s.Count)
	}
	a.sites -= len(p.sites)
	p.sites, p.lastSite = nil, nil
}

// end marks a process as ended; it is shown for a while.
func (a *Activity) end(p *process, at time.Duration) {
	if p.ended != 0 {
		return
	}
	p.ended = max(at, 1)
	p.lost = a.lost - p.lostBefore
	a.ended = append(a.ended, p)
	for len(a.ended) > a.o.MaxEnded {
		a.forget(a.ended[0])
		a.ended = a.ended[1:]
	}
}

// change takes what the joiner made of the records.
func (a *Activity) change(c *pairs.Change) error {
	r := &c.Record
	switch {
	case r.Kind == mm.Lost:
		return nil
	case r.Kind == mm.Fork && r.Flags&mm.NewProcess != 0:
		a.born(r)
		return nil
	}
	p := a.process(r.PID, r.Comm, r.Time)
	p.last = max(p.last, r.Time)
	switch {
	case r.Kind.IsChange():
		a.count(p, c)
	case r.Kind == mm.Map:
		p.maps++
	case r.Kind == mm.Register || r.Kind == mm.Deregister:
		a.remember(p, c)
	case r.Kind == mm.Exit && r.Flags&mm.LastTask != 0:
		a.end(p, r.Time)
	}
	return nil
}

// born takes a new process. Its number may have been another's.
func (a *Activity) born(r *mm.Record) {
	if old := a.byPID[r.ChildPID]; old != nil && old.ended != 0 {
		for i, p := range a.ended {
			if p == old {
				a.ended = append(a.ended[:i], a.ended[i+1:]...)
				break
			}
		}
		a.forget(old)
	}
	a.process(r.ChildPID, r.Comm, r.Time)
}

func (a *Activity) count(p *process, c *pairs.Change) {
	r := &c.Record
	i := index(r.Kind)
	n := Count{Changes: 1}
	if r.Ret < 0 {
		n.Failed = 1
	}
	if r.Range.End != mm.MaxAddr {
		n.Bytes = r.Range.Len()
	}
	p.counts[i].add(n)
	a.total.counts[i].add(n)
	if p.win == nil {
		p.win = new(window)
	}
	p.win.add(r.Time, i, n.Bytes)
	a.total.win.add(r.Time, i, n.Bytes)
	a.site(p, Site{PID: r.PID, Call: r.Call, Kind: r.Kind, Stack: r.Stack}, n, r.Time)
	a.remember(p, c)
}

func (a *Activity) site(p *process, s Site, n Count, at time.Duration) {
	x := p.lastSite
	if x == nil || x.Site != s {
		x = p.sites[s]
	}
	if x == nil {
		if a.sites >= a.o.MaxSites {
			a.others.add(n)
			return
		}
		if p.sites == nil {
			p.sites = make(map[Site]*SiteCount)
		}
		x = &SiteCount{Site: s}
		p.sites[s] = x
		a.sites++
	}
	p.lastSite = x
	x.add(n)
	x.Last = at
}

// remember keeps an event as long as there is room.
func (a *Activity) remember(p *process, c *pairs.Change) {
	slot, grown := p.recent.next(a.o.MaxRecent, a.o.MaxEvents-a.events)
	a.events += grown
	if slot != nil {
		fill(slot, &c.Record, c.Open)
	}
}

func fill(e *Event, r *mm.Record, open bool) {
	*e = Event{
		Time: r.Time, Range: r.Range, To: r.To, Arg: r.Arg, Ret: r.Ret, Stack: r.Stack, TID: r.TID,
		Call: r.Call, Flags: r.Flags, Kind: r.Kind, Hook: r.Hook, Open: open,
	}
}

// found takes a finding of the engine.
func (a *Activity) found(f *findings.Finding) {
	if p := a.byPID[f.Registration.PID]; p != nil {
		p.findings++
	}
	a.total.findings++
}
