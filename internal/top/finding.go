// SPDX-License-Identifier: Apache-2.0

package top

import (
	"fmt"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/findings"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

// libraries are those whose functions are not what a person looks for.
var libraries = []string{"libc.so", "libc-", "libpthread", "libibverbs.so", "librdmacm.so", "ld-linux", "libjemalloc", "libtcmalloc", "libmimalloc"}

// own are the frames of a stack from the innermost one of the program itself
// on; all if there is none.
func own(fs []symbol.Frame) []symbol.Frame {
	for i := range fs {
		name := path.Base(fs[i].Module)
		if fs[i].Func != "" && !slices.ContainsFunc(libraries, func(l string) bool { return strings.HasPrefix(name, l) }) {
			return fs[i:]
		}
	}
	return fs
}

func findingTable(x *surroundings) *table[findings.Finding] {
	type F = findings.Finding
	yes := func(b bool) string {
		if b {
			return "yes"
		}
		return "no"
	}
	return &table[F]{
		key: func(f F) string { return strconv.Itoa(f.ID) },
		find: func(f F) string {
			return strings.ToLower(fmt.Sprint(f.Registration.PID, " ", f.Registration.Comm, " ", f.Class, " ", f.Registration.Range))
		},
		columns: []column[F]{
			{title: "TIME", width: 12, left: true, falling: true, text: func(f F) string { return x.millis(f.Change.Time) }, compare: by(func(f F) time.Duration { return f.Change.Time })},
			{title: "PID", width: 8, rank: 1, text: func(f F) string { return strconv.Itoa(int(f.Registration.PID)) }, compare: by(func(f F) uint32 { return f.Registration.PID })},
			{title: "COMMAND", width: 15, rank: 4, left: true, text: func(f F) string { return command.Printable(f.Registration.Comm.String()) },
				compare: by(func(f F) string { return f.Registration.Comm.String() })},
			{title: "WHAT", width: 25, left: true, text: func(f F) string { return f.Class.String() }, compare: by(func(f F) findings.Class { return f.Class })},
			{title: "STALE", width: 25, rank: 2, left: true, text: func(f F) string { return rangeText(f.Stale) }, compare: by(func(f F) mm.Addr { return f.Stale.Start })},
			{title: "SIZE", width: 5, rank: 3, falling: true, text: func(f F) string { return sizeOf(f.Stale) }, compare: by(func(f F) uint64 { return f.Stale.Len() })},
			{title: "CERTAIN", width: 7, rank: 5, left: true, text: func(f F) string { return yes(f.Certain) }},
			{title: "REUSED", width: 6, rank: 6, left: true, text: func(f F) string { return yes(f.Reused) }},
			{title: "REGISTERED", width: 20, rank: 7, left: true, text: func(f F) string { return f.Ended.String() }},
			{title: "CHANGED BY", width: 12, rank: 5, left: true, flex: true, text: func(f F) string { return x.by(&f.Change) }},
		},
	}
}

// by is a call and who made it.
func (x *surroundings) by(r *mm.Record) string {
	text := x.state.Calls.Name(r.Call)
	if fs := own(x.state.Frames[r.Stack]); len(fs) > 0 {
		text += " < " + command.Printable(fs[0].String())
	}
	return text
}

// findingLines tell one finding, with both stacks.
func (m *Model) findingLines(h int) []string {
	f, ok := m.finds.current()
	if !ok {
		return []string{"it is not known any more; esc goes back"}
	}
	x := m.around
	reg, c := &f.Registration, &f.Change
	out := []string{m.th.bad(cut(fmt.Sprintf("finding %d: %v: process %d %s", f.ID, f.Class, reg.PID, command.Printable(reg.Comm.String())), m.width))}
	if f.Certain {
		out = append(out, wrap(fmt.Sprintf("%s (%s) leads elsewhere, beyond doubt", rangeText(f.Stale), sizeOf(f.Stale)), m.width)...)
	} else {
		out = append(out, wrap(fmt.Sprintf("%s (%s) may lead elsewhere: %s", rangeText(f.Stale), sizeOf(f.Stale), f.Why), m.width)...)
	}
	out = append(out, wrap(m.fate(&f), m.width)...)
	room := max(1, (h-len(out)-6)/2)
	out = append(out, m.stackLines(fmt.Sprintf("registered %s (%s) with %v at %s by task %d", rangeText(reg.Range), sizeOf(reg.Range),
		reg.Registration.By, x.millis(reg.Time), reg.TID), reg.Stack, room)...)
	what := fmt.Sprintf("%v of %s", c.Kind, rangeText(c.Range))
	if !c.To.Empty() {
		what += " to " + rangeText(c.To)
	}
	return append(out, m.stackLines(fmt.Sprintf("changed: %s by %s at %s by task %d", what, m.state.Calls.Name(c.Call), x.millis(c.Time), c.TID), c.Stack, room)...)
}

// fate is what became of the registration and of the address.
func (m *Model) fate(f *findings.Finding) string {
	x := m.around
	until, text := f.EndedAt, fmt.Sprintf("%v at %s", f.Ended, x.millis(f.EndedAt))
	if f.Ended == findings.StillRegistered {
		until, text = m.state.Now, "still registered"
	}
	text += fmt.Sprintf(", %s after the change", age(max(0, until-f.Change.Time)))
	if f.Repeats > 0 {
		text += fmt.Sprintf("; %d more changes of it", f.Repeats)
	}
	if f.Reused {
		text += "; the address was used again at " + x.millis(f.ReusedAt)
	}
	if f.RegisteredAgain {
		text += "; and registered again"
	}
	return text
}

// stackLines are a title and at most n frames.
func (m *Model) stackLines(title string, id uint32, n int) []string {
	out := []string{"", m.th.title(cut(title, m.width))}
	fs := m.state.Frames[id]
	for i, f := range fs {
		if i == n-1 && len(fs) > n {
			return append(out, fmt.Sprintf("    ... %d more", len(fs)-i))
		}
		out = append(out, cut("    "+command.Printable(f.String()), m.width))
	}
	if len(fs) == 0 {
		out = append(out, "    no stack was recorded")
	}
	return out
}
