// SPDX-License-Identifier: Apache-2.0

package top

import (
	"fmt"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/command"
)

// Below this nothing fits but the badge.
const (
	minWidth  = 20
	minHeight = 5
)

// body is how many lines the view has between header and footer.
func (m *Model) body() int {
	n := m.height - 2
	if m.tall() {
		n -= 2
	}
	return max(n, 1)
}

// tall: there is room for the totals and the tabs.
func (m *Model) tall() bool { return m.height >= 12 }

// layout keeps cursors in sight.
func (m *Model) layout() {
	h := m.body()
	if m.top() == onProcess {
		m.events.scroll(m.eventLines(h))
		return
	}
	if l := m.list(); l != nil {
		l.scroll(h - m.extraLines())
	}
}

// extraLines is what a view has besides its table.
func (m *Model) extraLines() int {
	switch m.top() {
	case onRegistrations:
		return len(m.histogram())
	case onHooks:
		return len(m.hookLines())
	}
	return 0
}

// View draws the screen.
func (m Model) View() tea.View {
	v := tea.NewView(strings.Join(m.lines(), "\n"))
	v.AltScreen = true
	v.WindowTitle = "ummutop"
	if m.asking != nothing && m.height >= minHeight && m.width >= minWidth {
		if c := m.input.Cursor(); c != nil {
			c.Y = m.height - 1
			v.Cursor = c
		}
	}
	return v
}

// lines are exactly as many as there is height for, none wider than the screen.
func (m *Model) lines() []string {
	if m.height < minHeight || m.width < minWidth {
		badge, bad := m.badge()
		text := cut(badge, m.width)
		if bad {
			text = m.th.bad(text)
		}
		return m.exactly([]string{text}, m.height)
	}
	out := []string{m.header()}
	if m.tall() {
		out = append(out, m.totals(), m.tabs())
	}
	var body []string
	switch {
	case m.showHelp:
		body = m.helpLines()
	case m.state == nil && m.err != nil:
		body = wrap("error: "+m.err.Error(), m.width)
	case m.state == nil:
		body = []string{"waiting for the first data"}
	default:
		body = m.content(m.body())
	}
	out = append(out, m.exactly(body, m.body())...)
	return m.exactly(append(out, m.footer()), m.height)
}

// exactly makes it n lines, and none too wide.
func (m *Model) exactly(lines []string, n int) []string {
	out := make([]string, n)
	for i := range out {
		if i < len(lines) {
			out[i] = ansi.Truncate(lines[i], m.width, "")
			if m.th.plain {
				out[i] = strings.TrimRight(out[i], " ")
			}
		}
	}
	return out
}

func (m *Model) content(h int) []string {
	switch m.top() {
	case onProcesses:
		if m.watching() {
			return m.orEmpty(m.watches, h, "no program of yours has a watch: ummufeed demo --daemon opens some")
		}
		return m.orEmpty(m.procs, h, "no process has changed its memory yet")
	case onRegistrations:
		extra := m.histogram()
		return append(m.orEmpty(m.regs, h-len(extra), "no registrations were seen"), extra...)
	case onFindings:
		sentence := "no registration went stale"
		if m.state.Unfound != "" {
			sentence += ", as far as is known: " + m.state.Unfound
		}
		return m.orEmpty(m.finds, h, sentence)
	case onHooks:
		extra := m.hookLines()
		return append(m.exactly(m.hookt.view(m.width, h-len(extra), m.th), h-len(extra)), extra...)
	case onProcess:
		return m.processLines(h)
	case onFinding:
		return m.findingLines(h)
	}
	return m.storyLines(h)
}

// orEmpty is the table, or a sentence about why there is none.
func (m *Model) orEmpty(l lister, h int, sentence string) []string {
	lines := l.view(m.width, h, m.th)
	switch shown, all := l.length(); {
	case all == 0:
		lines = append(lines[:1], wrap(sentence, m.width)...)
		for _, x := range m.state.Missing {
			lines = append(lines, wrap("missing: "+x, m.width)...)
		}
	case shown == 0:
		lines = append(lines[:1], cut(fmt.Sprintf("none of %d match %q; esc shows all", all, l.filtered()), m.width))
	}
	return m.exactly(lines, h)
}

// header is the first line: what is watched, and the badge, always.
func (m *Model) header() string {
	badge, bad := m.badge()
	badge = "[" + cut(badge, m.width-2) + "]"
	room := m.width - ansi.StringWidth(badge) - 1
	left := fit(cut(m.headline(), room), room, false)
	if room <= 0 {
		left = ""
	} else {
		left = m.th.title(left) + " "
	}
	if bad {
		return left + m.th.bad(badge)
	}
	return left + m.th.good(badge)
}

func (m *Model) headline() string {
	if m.state == nil {
		return "ummutop"
	}
	s := m.state
	words := []string{"ummutop", s.Wall(s.Now, m.o.Location).Format(time.TimeOnly)}
	if m.paused {
		words = append(words, "PAUSED")
	}
	words = append(words, s.What)
	if s.Ended != "" {
		words = append(words, "("+s.Ended+")")
	}
	words = append(words, "tier "+s.Meta.Tier, s.Meta.Host, s.Meta.Kernel)
	return strings.Join(words, " ")
}

// badge says whether everything was seen, and if not since when and where how
// much was lost. bad: it was not.
func (m *Model) badge() (text string, bad bool) {
	switch {
	case m.err != nil:
		return "error: " + m.err.Error(), true
	case m.state == nil:
		return "no data", true
	}
	s := m.state
	var since time.Duration
	var n uint64
	for _, l := range s.Losses {
		if m.seenLost != 0 && l.Time <= m.seenLost || l.Time > s.Now {
			continue
		}
		if n == 0 {
			since = l.Time
		}
		n += l.Events
	}
	if n == 0 && s.Doubt != "" {
		return "incomplete: " + command.Printable(s.Doubt), true
	}
	if n == 0 {
		return "complete", false
	}
	var at []string
	var told uint64 // by the stages, which may know of more than has been read
	for _, x := range s.Stages {
		if d := x.Lost - min(x.Lost, m.seenStages[x.Name]); d > 0 {
			at = append(at, x.Name+" "+number(float64(d)))
			told += d
		}
	}
	n = max(n, told)
	where := ""
	if len(at) > 0 {
		where = ": " + strings.Join(at, ", ")
	}
	return fmt.Sprintf("incomplete since %s, %s lost%s", s.Wall(since, m.o.Location).Format(time.TimeOnly), number(float64(n)), where), true
}

// totals is the second line.
func (m *Model) totals() string {
	if m.state == nil {
		return ""
	}
	t := &m.state.Total
	if m.watching() {
		var rate float64
		var bytes uint64
		for _, w := range m.state.Watches {
			rate += w.Rate
			bytes += uint64(w.Bytes)
		}
		return cut(fmt.Sprintf("%d watches, %s records a second, %sB of kernel memory", len(m.state.Watches), number(rate), size(bytes)), m.width)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "per second (%v): ", activity.Windows[m.window])
	for i, k := range activity.Kinds {
		fmt.Fprintf(&b, "%v %s  ", k, number(t.Rate.Changes[i]))
	}
	fmt.Fprintf(&b, "unmapped %sB  all: %s changes, %d MRs %sB", size(uint64(t.Rate.Bytes)), number(float64(t.Counts.Sum().Changes)), t.MRs, size(t.MRBytes))
	return cut(b.String(), m.width)
}

// tabs is the third line: where one is.
func (m *Model) tabs() string {
	var b strings.Builder
	for i, n := range ViewNames {
		if i > 0 {
			b.WriteByte(' ')
		}
		if screen(i) == m.tab {
			b.WriteString(m.th.title("[" + n + "]"))
		} else {
			b.WriteString(" " + n + " ")
		}
	}
	switch m.top() {
	case onProcess:
		fmt.Fprintf(&b, " > process %d", m.pid)
	case onStory:
		fmt.Fprintf(&b, " > process %d > %v", m.pid, m.addr)
	case onFinding:
		if f, ok := m.finds.current(); ok {
			fmt.Fprintf(&b, " > finding %d", f.ID)
		}
	}
	if l := m.list(); l != nil && l.filtered() != "" {
		shown, all := l.length()
		fmt.Fprintf(&b, "  /%s (%d of %d)", command.Printable(l.filtered()), shown, all)
	}
	return b.String()
}

// footer is the last line: a prompt, a remark, where a recording is, or keys.
func (m *Model) footer() string {
	switch {
	case m.asking != nothing:
		return m.input.View()
	case m.note != "":
		return cut(m.note, m.width)
	}
	h := m.help
	left := ""
	if p := m.position(); p != nil {
		at := p.At
		left = m.timeline(at, p, min(30, m.width/3)) + "  "
	}
	h.SetWidth(m.width - ansi.StringWidth(left))
	return left + h.ShortHelpView(m.keys.ShortHelp())
}

// timeline draws where a recording is.
func (m *Model) timeline(at time.Duration, p *Position, width int) string {
	n := 0
	if p.To > p.From {
		n = int(int64(width-1) * int64(at-p.From) / int64(p.To-p.From))
	}
	n = max(0, min(n, width-1))
	return "[" + strings.Repeat("=", n) + "|" + strings.Repeat("-", width-1-n) + "] " +
		fmt.Sprintf("%.0fs/%.0fs", (at-p.From).Seconds(), (p.To-p.From).Seconds())
}

// helpLines are all keys, in columns if there is room, and the words.
func (m *Model) helpLines() []string {
	h := m.help
	h.ShowAll = true
	var lines []string
	if m.width >= 76 {
		h.SetWidth(m.width)
		lines = strings.Split(h.View(m.keys), "\n")
	} else {
		for _, group := range m.keys.FullHelp() {
			for _, b := range group {
				if b.Enabled() {
					lines = append(lines, fit(b.Help().Key, 10, false)+" "+b.Help().Desc)
				}
			}
		}
	}
	if m.state != nil {
		lines = append(lines, "")
		for _, g := range m.state.Meta.Gaps {
			lines = append(lines, wrap("not seen by this tier: "+g.Name+": "+g.What, m.width)...)
		}
	}
	return lines
}
