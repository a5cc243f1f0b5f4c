// SPDX-License-Identifier: Apache-2.0

package top

import (
	"encoding/json"
	"fmt"
	"io"
	"time"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/findings"
)

// Formats are those of [Print].
var Formats = []string{"table", "ndjson"}

// QueryFor is what a view of ViewNames needs.
func QueryFor(view string, window time.Duration) Query {
	m := New(nil, Options{View: view})
	q := m.query()
	q.Window = window
	return q
}

// Print writes a state as a table of a view, or as NDJSON: one object for the
// sample, then one for each line of the view.
func Print(w io.Writer, s *State, format, view string, l *time.Location) error {
	m := New(nil, Options{View: view, Plain: true, Location: l})
	m.width = 1 << 20
	m.take(answer{state: s})
	if format == "ndjson" {
		return m.printLines(w)
	}
	badge, _ := m.badge()
	text := fmt.Sprintf("%s [%s]\n%s\n", m.headline(), badge, m.totals())
	switch m.tab {
	case onProcesses:
		if m.watching() {
			text += m.watches.print()
			break
		}
		text += m.procs.print()
	case onRegistrations:
		text += m.regs.print()
	case onFindings:
		text += m.finds.print()
	case onHooks:
		text += m.hookt.print()
		m.height = 1 << 10
		for _, x := range m.hookLines() {
			text += x + "\n"
		}
	}
	for _, x := range s.Missing {
		if m.tab != onHooks {
			text += "missing: " + x + "\n"
		}
	}
	_, err := io.WriteString(w, text+"\n")
	return err
}

// The objects of NDJSON. Fields are added, never changed.
type (
	sampleLine struct {
		Time      time.Time         `json:"time"`
		What      string            `json:"what"`
		Tier      string            `json:"tier"`
		Complete  bool              `json:"complete"`
		Badge     string            `json:"badge"`
		Lost      uint64            `json:"lost"`
		LostAt    map[string]uint64 `json:"lost_at"`
		Processes int               `json:"processes"`
		Records   uint64            `json:"records"`
		Own       uint64            `json:"own_records"`
		Changes   map[string]counts `json:"changes"`
		MRs       int               `json:"mrs"`
		MRBytes   uint64            `json:"mr_bytes"`
		Stale     int               `json:"stale"`
		Missing   []string          `json:"missing"`
		Ended     string            `json:"ended,omitempty"`
	}
	counts struct {
		Count  uint64  `json:"count"`
		Failed uint64  `json:"failed"`
		Bytes  uint64  `json:"bytes"`
		Rate   float64 `json:"per_s"`
	}
	processLine struct {
		PID     uint32            `json:"pid"`
		Comm    string            `json:"comm"`
		Group   string            `json:"group,omitempty"`
		Tier    string            `json:"tier"`
		First   time.Time         `json:"first"`
		Ended   *time.Time        `json:"ended,omitempty"`
		Changes map[string]counts `json:"changes"`
		Rate    float64           `json:"changes_per_s"`
		Bytes   float64           `json:"bytes_per_s"`
		Maps    uint64            `json:"maps"`
		MRs     int               `json:"mrs"`
		MRBytes uint64            `json:"mr_bytes"`
		Stale   int               `json:"stale"`
		Found   uint64            `json:"findings"`
		Lost    uint64            `json:"lost"`
	}
	registrationLine struct {
		PID     uint32     `json:"pid"`
		Start   string     `json:"start"`
		End     string     `json:"end"`
		Since   time.Time  `json:"since"`
		State   string     `json:"state"`
		Changes uint64     `json:"changes"`
		Last    *time.Time `json:"last_change,omitempty"`
		Kind    string     `json:"last_kind,omitempty"`
		Call    string     `json:"last_call,omitempty"`
	}
	findingLine struct {
		ID         int       `json:"id"`
		Class      string    `json:"class"`
		Certain    bool      `json:"certain"`
		Why        string    `json:"why,omitempty"`
		PID        uint32    `json:"pid"`
		Comm       string    `json:"comm"`
		Start      string    `json:"start"` // of what is stale
		End        string    `json:"end"`
		Registered time.Time `json:"registered"`
		Changed    time.Time `json:"changed"`
		Kind       string    `json:"kind"`
		Call       string    `json:"call"`
		Repeats    int       `json:"repeats"`
		Reused     bool      `json:"reused"`
		Ended      string    `json:"ended"`
		By         []string  `json:"registered_by"` // stacks, innermost first
		ChangedBy  []string  `json:"changed_by"`
	}
	watchLine struct {
		Watch    uint64  `json:"watch"`
		PID      uint32  `json:"pid"`
		UID      uint32  `json:"uid"`
		Comm     string  `json:"comm"`
		Tier     string  `json:"tier"`
		State    string  `json:"state"`
		AgeSec   float64 `json:"age_s"`
		Bytes    uint32  `json:"bytes"`
		Records  uint64  `json:"records"`
		Filtered uint64  `json:"filtered"`
		Lost     uint64  `json:"lost"`
		Unpaired uint64  `json:"unpaired"`
		Rate     float64 `json:"records_per_s"`
	}
	hookLine struct {
		Name     string `json:"hook"`
		Sees     string `json:"sees"`
		Attached bool   `json:"attached"`
		Error    string `json:"error,omitempty"`
		Records  uint64 `json:"records"`
		Runs     uint64 `json:"runs"`
		TimeNS   int64  `json:"time_ns"`
		Skipped  uint64 `json:"skipped"`
	}
)

func countLines(c *activity.Counts, r *activity.Rate) map[string]counts {
	out := make(map[string]counts)
	for i, k := range activity.Kinds {
		if c[i].Changes > 0 {
			out[k.String()] = counts{c[i].Changes, c[i].Failed, c[i].Bytes, r.Changes[i]}
		}
	}
	return out
}

func (m *Model) printLines(w io.Writer) error {
	e := json.NewEncoder(w)
	s := m.state
	wall := func(t time.Duration) time.Time { return s.Wall(t, time.UTC) }
	at := func(t time.Duration) *time.Time {
		if t == 0 {
			return nil
		}
		x := wall(t)
		return &x
	}
	badge, bad := m.badge()
	lost := make(map[string]uint64)
	for _, x := range s.Stages {
		lost[x.Name] = x.Lost
	}
	line := func(kind string, v any) error { return e.Encode(map[string]any{kind: v}) }
	missing := append([]string{}, s.Missing...)
	err := line("sample", sampleLine{
		Time: wall(s.Now), What: s.What, Tier: s.Meta.Tier, Complete: !bad, Badge: badge, Lost: s.Lost, LostAt: lost,
		Processes: len(s.Processes), Records: s.Records, Own: s.Own, Changes: countLines(&s.Total.Counts, &s.Total.Rate),
		MRs: s.Total.MRs, MRBytes: s.Total.MRBytes, Stale: s.Total.Stale, Missing: missing, Ended: s.Ended,
	})
	if err != nil {
		return err
	}
	switch m.tab {
	case onRegistrations:
		for _, r := range m.regs.rows {
			x := registrationLine{PID: r.PID, Start: r.Range.Start.String(), End: r.Range.End.String(), Since: wall(r.Since), State: r.State.String(), Changes: r.Changes}
			if r.Changes > 0 {
				x.Last, x.Kind, x.Call = at(r.Last.Time), r.Last.Kind.String(), m.around.call(&r.Last)
			}
			if err := line("registration", x); err != nil {
				return err
			}
		}
	case onFindings:
		for i := range m.finds.rows {
			if err := line("finding", m.findingLine(&m.finds.rows[i])); err != nil {
				return err
			}
		}
	case onProcesses:
		for _, x := range m.watches.rows {
			err := line("watch", watchLine{
				Watch: x.Watch, PID: x.PID, UID: x.UID, Comm: command.Printable(x.Comm), Tier: x.Tier, State: x.State, AgeSec: x.AgeSec,
				Bytes: x.Bytes, Records: x.Records, Filtered: x.Filtered, Lost: x.Lost, Unpaired: x.Unpaired, Rate: x.Rate,
			})
			if err != nil {
				return err
			}
		}
		for _, p := range m.procs.rows {
			err := line("process", processLine{
				PID: p.PID, Comm: command.Printable(p.Comm), Group: p.Group, Tier: p.Tier, First: wall(p.First), Ended: at(p.Ended),
				Changes: countLines(&p.Counts, &p.Rate), Rate: p.Rate.Sum(), Bytes: p.Rate.Bytes, Maps: p.Maps,
				MRs: p.MRs, MRBytes: p.MRBytes, Stale: p.Stale, Found: p.Findings, Lost: p.Lost,
			})
			if err != nil {
				return err
			}
		}
	case onHooks:
		for _, h := range m.hookt.rows {
			x := hookLine{Name: h.Name, Sees: h.Sees, Attached: h.Attached, Records: h.Records, Runs: h.Runs, TimeNS: h.Time.Nanoseconds(), Skipped: h.Skipped}
			if h.Err != nil {
				x.Error = h.Err.Error()
			}
			if err := line("hook", x); err != nil {
				return err
			}
		}
	}
	return nil
}

func (m *Model) findingLine(f *findings.Finding) findingLine {
	wall := func(t time.Duration) time.Time { return m.state.Wall(t, time.UTC) }
	stack := func(id uint32) []string {
		out := []string{}
		for _, x := range m.state.Frames[id] {
			out = append(out, command.Printable(x.String()))
		}
		return out
	}
	return findingLine{
		ID: f.ID, Class: f.Class.String(), Certain: f.Certain, Why: f.Why, PID: f.Registration.PID, Comm: command.Printable(f.Registration.Comm.String()),
		Start: f.Stale.Start.String(), End: f.Stale.End.String(), Registered: wall(f.Registration.Time), Changed: wall(f.Change.Time),
		Kind: f.Change.Kind.String(), Call: m.state.Calls.Name(f.Change.Call), Repeats: f.Repeats, Reused: f.Reused, Ended: f.Ended.String(),
		By: stack(f.Registration.Stack), ChangedBy: stack(f.Change.Stack),
	}
}
