// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

// Process is a line of the list of processes.
type Process struct {
	activity.Process
	Group, Tier string
}

// surroundings are what cells need besides their row.
type surroundings struct {
	state    *State
	location *time.Location
}

func (x *surroundings) clock(t time.Duration) string {
	return x.state.Wall(t, x.location).Format(time.TimeOnly)
}

func (x *surroundings) millis(t time.Duration) string {
	return x.state.Wall(t, x.location).Format("15:04:05.000")
}

// call is a call as C source has it, with its result.
func (x *surroundings) call(e *activity.Event) string {
	if e.Call.ABI == mm.ABINone {
		return "-" // no call
	}
	t := x.state.Calls
	b := []byte(t.Name(e.Call))
	if x.state.BeginsOnly() {
		return string(b)
	}
	b = append(b, '(')
	if t.HasArgs(e.Call) {
		b = t.AppendArgs(b, e.Call, e.Arg)
	}
	b = append(b, ") = "...)
	if e.Open {
		return string(append(b, '?'))
	}
	return string(t.AppendResult(b, e.Call, e.Ret))
}

func rangeText(r mm.Range) string { return string(command.AppendRange(nil, r)) }

func by[T any, N cmp.Ordered](f func(T) N) func(a, b T) int {
	return func(a, b T) int { return cmp.Compare(f(a), f(b)) }
}

func processTable() *table[Process] {
	type P = Process
	count := func(title string, width, rank int, show func(P) string, n func(P) float64) column[P] {
		return column[P]{title: title, width: width, rank: rank, falling: true, text: show, compare: by(n)}
	}
	num := func(title string, width, rank int, n func(P) float64) column[P] {
		return count(title, width, rank, func(p P) string { return number(n(p)) }, n)
	}
	bytes := func(title string, width, rank int, n func(P) float64) column[P] {
		return count(title, width, rank, func(p P) string { return size(uint64(n(p))) }, n)
	}
	rate := func(title string, rank, kind int) column[P] {
		return num(title, 7, rank, func(p P) float64 { return p.Rate.Changes[kind] })
	}
	changes := num("CHG/S", 6, 0, func(p P) float64 { return p.Rate.Sum() })
	changes.compare = func(a, b P) int {
		return cmp.Or(cmp.Compare(a.Rate.Sum(), b.Rate.Sum()), cmp.Compare(a.Counts.Sum().Changes, b.Counts.Sum().Changes))
	}
	return &table[P]{
		key:  func(p P) string { return strconv.Itoa(int(p.PID)) },
		find: func(p P) string { return strings.ToLower(strconv.Itoa(int(p.PID)) + " " + p.Comm + " " + p.Group) },
		bad:  func(p P) bool { return p.Stale > 0 },
		sort: 2,
		columns: []column[P]{
			{title: "PID", width: 8, text: func(p P) string { return strconv.Itoa(int(p.PID)) }, compare: by(func(p P) uint32 { return p.PID })},
			{title: "COMMAND", width: 15, left: true, flex: true, text: func(p P) string {
				if p.Ended != 0 {
					return command.Printable(p.Comm) + " (ended)"
				}
				return command.Printable(p.Comm)
			}, compare: by(func(p P) string { return p.Comm })},
			changes,
			rate("UNMAP", 4, 0), rate("REPLACE", 5, 1), rate("ZAP", 5, 2), rate("MOVE", 6, 3), rate("PROTECT", 6, 4),
			bytes("BYTES/S", 7, 3, func(p P) float64 { return p.Rate.Bytes }),
			num("CHANGES", 7, 2, func(p P) float64 { return float64(p.Counts.Sum().Changes) }),
			bytes("REGISTD", 7, 2, func(p P) float64 { return float64(p.MRBytes) }),
			num("MRS", 5, 3, func(p P) float64 { return float64(p.MRs) }),
			num("STALE", 5, 1, func(p P) float64 { return float64(p.Stale) }),
			num("FINDINGS", 8, 5, func(p P) float64 { return float64(p.Findings) }),
			num("LOST", 5, 4, func(p P) float64 { return float64(p.Lost) }),
			{title: "TIER", width: 8, rank: 8, left: true, text: func(p P) string { return p.Tier }},
			{title: "GROUP", width: 20, rank: 7, left: true, text: func(p P) string { return command.Printable(p.Group) }, compare: by(func(p P) string { return p.Group })},
		},
	}
}

func watchTable() *table[Watch] {
	type W = Watch
	num := func(title string, rank int, n func(W) float64) column[W] {
		return column[W]{title: title, width: max(5, len(title)), rank: rank, falling: true, text: func(w W) string { return number(n(w)) }, compare: by(n)}
	}
	return &table[W]{
		key: func(w W) string { return strconv.FormatUint(w.Watch, 10) },
		find: func(w W) string {
			return strings.ToLower(fmt.Sprint(w.Watch, " ", w.PID, " ", w.Comm, " ", w.State, " ", w.Tier))
		},
		bad:  func(w W) bool { return w.State != "live" || w.Lost > 0 },
		sort: 6,
		columns: []column[W]{
			{title: "WATCH", width: 6, rank: 4, text: func(w W) string { return strconv.FormatUint(w.Watch, 10) }, compare: by(func(w W) uint64 { return w.Watch })},
			{title: "PID", width: 8, text: func(w W) string { return strconv.Itoa(int(w.PID)) }, compare: by(func(w W) uint32 { return w.PID })},
			{title: "COMMAND", width: 15, left: true, flex: true, text: func(w W) string { return command.Printable(w.Comm) }, compare: by(func(w W) string { return w.Comm })},
			{title: "UID", width: 6, rank: 5, text: func(w W) string { return strconv.Itoa(int(w.UID)) }, compare: by(func(w W) uint32 { return w.UID })},
			{title: "STATE", width: 5, left: true, text: func(w W) string { return w.State }, compare: by(func(w W) string { return w.State })},
			{title: "AGE", width: 6, rank: 3, falling: true, text: func(w W) string { return age(time.Duration(w.AgeSec * float64(time.Second))) }, compare: by(func(w W) float64 { return w.AgeSec })},
			num("REC/S", 0, func(w W) float64 { return w.Rate }),
			num("RECORDS", 2, func(w W) float64 { return float64(w.Records) }),
			num("FILTERED", 4, func(w W) float64 { return float64(w.Filtered) }),
			num("LOST", 1, func(w W) float64 { return float64(w.Lost) }),
			num("UNPAIRED", 6, func(w W) float64 { return float64(w.Unpaired) }),
			{title: "KERNEL", width: 6, rank: 5, falling: true, text: func(w W) string { return size(uint64(w.Bytes)) }, compare: by(func(w W) uint32 { return w.Bytes })},
			{title: "TIER", width: 19, rank: 7, left: true, text: func(w W) string { return w.Tier }},
		},
	}
}

func registrationTable(x *surroundings) *table[activity.Registration] {
	type R = activity.Registration
	return &table[R]{
		key:  func(r R) string { return fmt.Sprint(r.PID, r.Range, r.Since) },
		find: func(r R) string { return strconv.Itoa(int(r.PID)) + " " + r.Range.String() + " " + r.State.String() },
		columns: []column[R]{
			{title: "PID", width: 8, text: func(r R) string { return strconv.Itoa(int(r.PID)) }, compare: by(func(r R) uint32 { return r.PID })},
			{title: "RANGE", width: 25, left: true, text: func(r R) string { return rangeText(r.Range) }, compare: by(func(r R) mm.Addr { return r.Range.Start })},
			{title: "SIZE", width: 5, falling: true, rank: 1, text: func(r R) string { return sizeOf(r.Range) }, compare: by(func(r R) uint64 { return r.Range.Len() })},
			{title: "STATE", width: 7, left: true, falling: true, text: func(r R) string { return r.State.String() }, compare: by(func(r R) activity.State { return r.State })},
			{title: "WITH", width: 8, rank: 5, left: true, text: func(r R) string { return r.Device.By.String() }, compare: by(func(r R) mm.Registrar { return r.Device.By })},
			{title: "AGE", width: 6, rank: 2, falling: true, text: func(r R) string { return age(x.state.Now - r.Since) }, compare: by(func(r R) time.Duration { return -r.Since })},
			{title: "CHANGES", width: 7, rank: 3, falling: true, text: func(r R) string { return number(float64(r.Changes)) }, compare: by(func(r R) uint64 { return r.Changes })},
			{title: "LAST CHANGE", width: 12, rank: 2, falling: true, left: true, text: func(r R) string {
				if r.Changes == 0 {
					return "-"
				}
				return x.millis(r.Last.Time)
			}, compare: by(func(r R) time.Duration { return r.Last.Time })},
			{title: "BY", width: 8, rank: 4, left: true, flex: true, text: func(r R) string {
				if r.Changes == 0 {
					return "-"
				}
				return r.Last.Kind.String() + " " + x.call(&r.Last)
			}},
		},
		sort: 3,
		bad:  func(r R) bool { return r.State == activity.Stale },
	}
}

// histogram counts registrations by size, if there is room.
func (m *Model) histogram() []string {
	if m.state == nil || len(m.state.Registrations) == 0 || m.body() < 14 {
		return nil
	}
	limits := []uint64{4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20, 1 << 62}
	names := []string{"to 4K", "to 64K", "to 1M", "to 16M", "to 256M", "larger"}
	n := make([]int, len(limits))
	most := 0
	for _, r := range m.state.Registrations {
		i := 0
		for r.Range.Len() > limits[i] {
			i++
		}
		n[i]++
		most = max(most, n[i])
	}
	out := []string{m.th.title(" registrations by size")}
	for i, name := range names {
		out = append(out, fmt.Sprintf(" %-8s %6d %s", name, n[i], strings.Repeat("#", n[i]*max(1, m.width-20)/most)))
	}
	return out
}

func hookTable() *table[Hook] {
	return &table[Hook]{
		key:  func(h Hook) string { return h.Name },
		find: func(h Hook) string { return strings.ToLower(h.Name + " " + h.Sees) },
		bad:  func(h Hook) bool { return !h.Attached },
		sort: 2,
		columns: []column[Hook]{
			{title: "HOOK", width: 18, left: true, flex: true, text: func(h Hook) string { return h.Name }, compare: by(func(h Hook) string { return h.Name })},
			{title: "STATE", width: 8, rank: 1, left: true, text: func(h Hook) string {
				if h.Attached {
					return "attached"
				}
				return "missing"
			}},
			{title: "RECORDS", width: 8, falling: true, text: func(h Hook) string { return number(float64(h.Records)) }, compare: by(func(h Hook) uint64 { return h.Records })},
			{title: "RUNS", width: 7, rank: 2, falling: true, text: func(h Hook) string { return h.counted(number(float64(h.Runs))) }, compare: by(func(h Hook) uint64 { return h.Runs })},
			{title: "TIME", width: 6, rank: 3, falling: true, text: func(h Hook) string { return h.counted(age(h.Time)) }, compare: by(func(h Hook) time.Duration { return h.Time })},
			{title: "NS/RUN", width: 6, rank: 3, falling: true, text: func(h Hook) string { return h.counted(number(h.perRun())) }, compare: by(Hook.perRun)},
			{title: "SKIPPED", width: 7, rank: 2, falling: true, text: func(h Hook) string { return number(float64(h.Skipped)) }, compare: by(func(h Hook) uint64 { return h.Skipped })},
			{title: "SEES", width: 40, rank: 4, left: true, text: func(h Hook) string {
				if h.Err != nil {
					return command.Printable(h.Err.Error())
				}
				return h.Sees
			}},
		},
	}
}

func (h Hook) counted(s string) string {
	if !h.Counted {
		return "-"
	}
	return s
}

func (h Hook) perRun() float64 {
	if h.Runs == 0 {
		return 0
	}
	return float64(int64(float64(h.Time.Nanoseconds())/float64(h.Runs) + 0.5))
}

// hookLines are tier, coverage and losses, below the hooks.
func (m *Model) hookLines() []string {
	if m.state == nil {
		return nil
	}
	s := m.state
	line := "tier " + s.Meta.Tier
	if s.Meta.TierReason != "" {
		line += ": " + s.Meta.TierReason
	}
	out := []string{cut(line, m.width)}
	var lost []string
	for _, x := range s.Stages {
		lost = append(lost, x.Name+" "+number(float64(x.Lost)))
	}
	if len(lost) > 0 {
		out = append(out, cut("lost by stage: "+strings.Join(lost, ", "), m.width))
	}
	if s.Own > 0 {
		out = append(out, cut("left out: "+number(float64(s.Own))+" records of ummutop itself", m.width))
	}
	for _, x := range s.Missing {
		out = append(out, cut("missing: "+x, m.width))
	}
	if m.body() >= 20 {
		for _, g := range s.Meta.Gaps {
			out = append(out, cut("not seen: "+g.Name+": "+g.What, m.width))
		}
	}
	return out[:min(len(out), max(1, m.body()/2))]
}

func eventTable(x *surroundings) *table[activity.Event] {
	type E = activity.Event
	return &table[E]{
		key:  func(e E) string { return fmt.Sprint(e.Time, e.TID, e.Range) },
		find: func(e E) string { return e.Kind.String() + " " + e.Range.String() + " " + strings.ToLower(x.call(&e)) },
		columns: []column[E]{
			{title: "TIME", width: 12, left: true, falling: true, text: func(e E) string { return x.millis(e.Time) }, compare: by(func(e E) time.Duration { return e.Time })},
			{title: "KIND", width: 10, left: true, text: func(e E) string { return e.Kind.String() }, compare: by(func(e E) mm.Kind { return e.Kind })},
			{title: "RANGE", width: 25, rank: 3, left: true, text: func(e E) string { return rangeText(e.Range) }, compare: by(func(e E) mm.Addr { return e.Range.Start })},
			{title: "SIZE", width: 5, falling: true, text: func(e E) string { return sizeOf(e.Range) }, compare: by(func(e E) uint64 { return e.Range.Len() })},
			{title: "TID", width: 8, rank: 2, text: func(e E) string { return strconv.Itoa(int(e.TID)) }, compare: by(func(e E) uint32 { return e.TID })},
			{title: "CALL", width: 14, rank: 1, left: true, flex: true, text: func(e E) string { return x.call(&e) }, compare: by(func(e E) uint32 { return e.Call.NR })},
		},
	}
}

// processParts is how a process's lines are shared out: the map's, the call
// sites', and the changes'.
func (m *Model) processParts(h int) (memory, sites, events int) {
	rest := h - 2 // facts
	if rest >= 12 {
		memory = rest / 4
		sites = rest / 4
	}
	return memory, sites, max(2, rest-memory-sites)
}

func (m *Model) eventLines(h int) int {
	_, _, n := m.processParts(h)
	return n
}

func (m *Model) processLines(h int) []string {
	d := m.state.Detail
	if d == nil || d.PID != m.pid {
		if m.fetching {
			return []string{fmt.Sprintf("process %d: waiting for data", m.pid)}
		}
		return []string{fmt.Sprintf("process %d: nothing was seen of it, or it was forgotten after its end; esc goes back", m.pid)}
	}
	x := m.around
	facts := fmt.Sprintf("process %d %s, seen since %s", d.PID, command.Printable(d.Comm), x.clock(d.First))
	if g := m.state.Groups[d.PID]; g != "" {
		facts += ", " + command.Printable(g)
	}
	if d.Ended != 0 {
		facts += ", ended " + x.clock(d.Ended)
	}
	if d.Lost > 0 {
		facts += fmt.Sprintf(", %d events lost meanwhile", d.Lost)
	}
	var b strings.Builder
	for i, k := range activity.Kinds {
		if c := d.Counts[i]; c.Changes > 0 {
			fmt.Fprintf(&b, "%v %s (%s/s, %sB)  ", k, number(float64(c.Changes)), number(d.Rate.Changes[i]), size(c.Bytes))
		}
	}
	if b.Len() == 0 {
		b.WriteString("no change yet  ")
	}
	fmt.Fprintf(&b, "map %s  ", number(float64(d.Maps)))
	fmt.Fprintf(&b, "MRs %d, %sB, %d stale  ", d.MRs, size(d.MRBytes), d.Stale)
	if room := m.width - len(b.String()); room > 10 {
		b.WriteString(sparkline(d.Series[max(0, len(d.Series)-room):]))
	}
	out := []string{cut(facts, m.width), cut(b.String(), m.width)}
	memory, sites, events := m.processParts(h)
	if memory > 0 {
		out = append(out, m.exactly(memoryMap(d, m.width, memory, m.th), memory)...)
	}
	if sites > 0 {
		out = append(out, m.exactly(m.siteLines(d, sites), sites)...)
	}
	return append(out, m.exactly(m.events.view(m.width, events, m.th), events)...)
}

func (m *Model) siteLines(d *activity.Detail, n int) []string {
	out := []string{m.th.title(fmt.Sprintf(" %8s %7s %-8s %s", "CHANGES", "BYTES", "KIND", "TOP CALL SITES"))}
	for _, s := range d.Sites {
		if len(out) == n {
			break
		}
		where := m.state.Calls.Name(s.Call)
		if where == "" {
			where = "(no call)"
		}
		where += chain(own(m.state.Frames[s.Stack]))
		out = append(out, fmt.Sprintf(" %8s %7s %-8v %s", number(float64(s.Changes)), size(s.Bytes), s.Kind, where))
	}
	return out
}

// storyLines explain an address: who registered it, what happened to it.
func (m *Model) storyLines(h int) []string {
	d := m.state.Detail
	head := fmt.Sprintf("address %v of process %d", m.addr, m.pid)
	if d == nil || d.PID != m.pid {
		return []string{head, "nothing was seen of this process"}
	}
	x := m.around
	out := []string{m.th.title(cut(head+" "+command.Printable(d.Comm), m.width))}
	registered := false
	for _, r := range d.Registrations {
		if r.Range.Pages().Has(m.addr) {
			registered = true
			line := fmt.Sprintf("registered %s (%s) since %s: %v", rangeText(r.Range), sizeOf(r.Range), x.millis(r.Since), r.State)
			if r.State == activity.Stale {
				line = m.th.bad(line)
			}
			out = append(out, line)
		}
	}
	if !registered {
		out = append(out, "not registered now")
	}
	events := d.Story(m.addr)
	if len(events) == 0 {
		out = append(out, "no change of it is known")
	}
	out = append(out, cut(fmt.Sprintf("since %s everything is known, but for what was lost (%d)", x.clock(d.Oldest), d.Lost), m.width), "")
	room := h - len(out)
	need := func(es []activity.Event) (n int) {
		for i := range es {
			n++
			if len(m.state.Frames[es[i].Stack]) > 0 {
				n++
			}
		}
		return n
	}
	if left := 0; need(events) > room && room > 1 {
		for len(events) > 1 && need(events) > room-1 {
			events, left = events[1:], left+1
		}
		out = append(out, fmt.Sprintf("(%d earlier)", left))
	}
	for _, e := range events {
		line := fmt.Sprintf("%s %-10v %s", x.millis(e.Time), e.Kind, rangeText(e.Range))
		if !e.To.Empty() {
			line += " -> " + rangeText(e.To)
		}
		line += " " + sizeOf(e.Range)
		out = append(out, cut(fmt.Sprintf("%s by task %d: ", line, e.TID)+x.call(&e), m.width))
		if fs := own(m.state.Frames[e.Stack]); len(fs) > 0 {
			out = append(out, cut(strings.Repeat(" ", 13)+strings.TrimPrefix(chain(fs), " < "), m.width))
		}
	}
	return out
}

// chain is a stack on one line, innermost first.
func chain(fs []symbol.Frame) string {
	var b strings.Builder
	for _, f := range fs {
		b.WriteString(" < ")
		b.WriteString(command.Printable(f.String()))
	}
	return b.String()
}
