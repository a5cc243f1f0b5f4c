// SPDX-License-Identifier: Apache-2.0

package activity

import (
	"cmp"
	"slices"
	"time"

	"github.com/ummu/ummu/internal/findings"
	"github.com/ummu/ummu/mm"
)

// Snapshot is what was counted until a time. It shares nothing with the
// Activity.
type Snapshot struct {
	Start, Now time.Duration // CLOCK_MONOTONIC
	Total      Process       // of everything, forgotten processes included; it has no PID
	Processes  []Process     // by PID
	Detail     *Detail       // of the process that was asked for, if it is known
	// Registrations are all that are live, by process and address.
	Registrations []Registration
	Hooks         [256]uint64 // records by hook
	Records       uint64
	Own           uint64 // records of Options.Self, not counted
	Lost          uint64
	Losses        []Loss // oldest first
	Forgotten     uint64 // processes that are only in Total
	// Findings are the stale registrations, oldest first, those that have
	// ended since too; only the latest if there are many.
	Findings []findings.Finding
	// Unfound says why findings may be missing; empty: none is.
	Unfound string
}

// Process is what one process did.
type Process struct {
	PID         uint32
	Comm        string
	First, Last time.Duration
	Ended       time.Duration // 0: it lives, as far as is known
	Counts      Counts
	Rate        Rate
	Maps        uint64 // new mappings
	MRs         int    // live registrations
	MRBytes     uint64
	Stale       int    // of them
	Findings    uint64 // registrations that went stale, those that have ended too
	Lost        uint64 // events that were lost while it lived
}

// Detail is more of one process.
type Detail struct {
	Process
	Events        []Event     // the latest first
	Sites         []SiteCount // most changes first
	Registrations []Registration
	Series        []uint32 // changes a second, the latest last
	// Oldest is the time from which on all events are in Events.
	Oldest time.Duration
}

// Query says what a snapshot is to hold beyond the processes.
type Query struct {
	Window        time.Duration // of the rates; 0: the first of Windows
	PID           uint32        // of Detail; 0: none
	Registrations bool
	Findings      bool
}

// Snapshot returns what was counted so far.
func (a *Activity) Snapshot(q Query) *Snapshot {
	if q.Window == 0 {
		q.Window = Windows[0]
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	s := &Snapshot{
		Start: a.o.Start, Now: a.now, Hooks: a.hooks, Records: a.records, Own: a.own, Lost: a.lost,
		Losses: slices.Clone(a.losses), Forgotten: a.gone, Unfound: a.engine.Incomplete(),
		Processes: make([]Process, 0, len(a.byPID)),
	}
	live := make(map[uint32]*registered)
	var detailed []Registration
	a.engine.Live(func(l *findings.Live) {
		r := registrationOf(l)
		x := live[r.PID]
		if x == nil {
			x = new(registered)
			live[r.PID] = x
		}
		x.add(&r)
		if q.Registrations {
			s.Registrations = append(s.Registrations, r)
		}
		if r.PID == q.PID {
			detailed = append(detailed, r)
		}
	})
	s.Total = a.shown(&a.total, q.Window)
	s.Total.Lost = a.lost
	for _, p := range a.byPID {
		if p.skip {
			continue
		}
		x := a.shown(p, q.Window)
		if l := live[p.pid]; l != nil {
			x.MRs, x.MRBytes, x.Stale = l.n, l.bytes, l.stale
		}
		s.Processes = append(s.Processes, x)
	}
	for _, l := range live {
		s.Total.MRs += l.n
		s.Total.MRBytes += l.bytes
		s.Total.Stale += l.stale
	}
	slices.SortFunc(s.Processes, func(x, y Process) int { return cmp.Compare(x.PID, y.PID) })
	sortRegistrations(s.Registrations)
	if q.Findings {
		for _, f := range a.engine.Findings() {
			s.Findings = append(s.Findings, *f)
		}
	}
	if p := a.byPID[q.PID]; p != nil && q.PID != 0 {
		s.Detail = a.detail(p, q.Window)
		s.Detail.Registrations = detailed
		sortRegistrations(detailed)
		if l := live[p.pid]; l != nil {
			s.Detail.MRs, s.Detail.MRBytes, s.Detail.Stale = l.n, l.bytes, l.stale
		}
	}
	return s
}

// registered is what one process has registered.
type registered struct {
	n, stale int
	bytes    uint64
}

func (x *registered) add(r *Registration) {
	x.n++
	x.bytes += r.Range.Len()
	if r.State == Stale {
		x.stale++
	}
}

func registrationOf(l *findings.Live) Registration {
	g := &l.Registration
	r := Registration{PID: g.PID, Range: g.Range, Device: g.Registration, Since: l.Since, Stack: g.Stack, Changes: l.Changes}
	if l.Changes > 0 {
		r.State = Changed
		fill(&r.Last, &l.Last, false)
	}
	if l.Finding != nil {
		r.State, r.Finding = Stale, l.Finding.ID
	}
	return r
}

func sortRegistrations(rs []Registration) {
	slices.SortFunc(rs, func(x, y Registration) int {
		return cmp.Or(cmp.Compare(x.PID, y.PID), cmp.Compare(x.Range.Start, y.Range.Start), cmp.Compare(x.Since, y.Since))
	})
}

func (a *Activity) shown(p *process, over time.Duration) Process {
	x := Process{
		PID: p.pid, Comm: p.comm.String(), First: p.first, Last: p.last, Ended: p.ended, Counts: p.counts, Maps: p.maps,
		Findings: p.findings, Lost: p.lost,
	}
	if p.win != nil && a.now-p.last <= (kept+1)*time.Second || p == &a.total {
		x.Rate = p.win.rate(a.o.Start, a.now, over)
	} else {
		p.win = nil // nothing in it counts any more
	}
	if p.ended == 0 {
		x.Lost = a.lost - p.lostBefore
	}
	return x
}

func (a *Activity) detail(p *process, over time.Duration) *Detail {
	d := &Detail{
		Process: a.shown(p, over), Events: p.recent.newest(), Series: p.win.series(a.now, 60),
		Oldest: p.first,
	}
	if n := len(d.Events); n > 0 && uint64(n) < p.told() {
		d.Oldest = d.Events[n-1].Time
	}
	for _, x := range p.sites {
		d.Sites = append(d.Sites, *x)
	}
	sortSites(d.Sites)
	return d
}

// told is how many events there were at least.
func (p *process) told() uint64 { return p.counts.Sum().Changes }

func sortSites(s []SiteCount) {
	slices.SortFunc(s, func(x, y SiteCount) int {
		return cmp.Or(cmp.Compare(y.Changes, x.Changes), cmp.Compare(y.Bytes, x.Bytes), cmp.Compare(x.PID, y.PID),
			cmp.Compare(x.Kind, y.Kind), cmp.Compare(x.Call.NR, y.Call.NR), cmp.Compare(x.Stack, y.Stack))
	})
}

// Sites returns every call site, those with most changes first, and what came
// from those that were too many to tell apart.
func (a *Activity) Sites() (sites []SiteCount, others Count) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, p := range a.byPID {
		for _, x := range p.sites {
			sites = append(sites, *x)
		}
	}
	sortSites(sites)
	return sites, a.others
}

// Story is what is still known to have happened at an address of a process,
// oldest first.
func (d *Detail) Story(addr mm.Addr) (story []Event) {
	for i := len(d.Events) - 1; i >= 0; i-- {
		if d.Events[i].Touches(addr) {
			story = append(story, d.Events[i])
		}
	}
	return story
}
