// SPDX-License-Identifier: Apache-2.0

package top

import (
	"context"
	"fmt"
	"strconv"
	"strings"
	"time"

	"charm.land/bubbles/v2/help"
	"charm.land/bubbles/v2/key"
	"charm.land/bubbles/v2/textinput"
	tea "charm.land/bubbletea/v2"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/findings"
	"github.com/ummu/ummu/mm"
)

// Options configure a [Model]. The zero value works.
type Options struct {
	// Interval is the time between two looks at the source. 0: a second.
	Interval time.Duration
	// Location is where times of day are told. nil: time.Local.
	Location *time.Location
	// Plain: without colours and other styles.
	Plain bool
	// View is shown first, by its name in [ViewNames]. "": processes.
	View string
	// PID, if not 0, is the process that is shown first.
	PID uint32
	// Clock: time passes. Without it the source is only asked when a key
	// needs it, as in tests.
	Clock bool
}

// screen is one of the things to look at.
type screen int

const (
	onProcesses screen = iota
	onRegistrations
	onFindings
	onHooks
	numTabs
	onProcess = iota - 1 // of one process, opened from a tab
	onStory              // of one address
	onFinding            // one of them
)

// ViewNames are the views that tab goes through.
var ViewNames = []string{"processes", "registrations", "findings", "hooks"}

// Model is the screen's state. It is a value; Update returns a new one.
type Model struct {
	source Source
	o      Options
	th     theme
	keys   keyMap
	help   help.Model

	width, height int
	tab           screen
	above         []screen // what was opened above the tab, the top one last
	pid           uint32   // of process and story
	addr          mm.Addr  // of story
	window        int      // index into activity.Windows
	paused        bool
	showHelp      bool
	at            time.Duration // where a recording is to be; 0: where it is
	seenLost      time.Duration // losses up to here were acknowledged
	seenStages    map[string]uint64
	asking        asking
	input         textinput.Model
	note          string // a remark in the last line, until the next key

	state    *State
	err      error
	fetching bool
	again    bool // something else is wanted than what is being fetched

	around  *surroundings
	procs   *table[Process]
	watches *table[Watch]
	regs    *table[activity.Registration]
	finds   *table[findings.Finding]
	hookt   *table[Hook]
	events  *table[activity.Event]
}

// asking says what the prompt is for.
type asking int

const (
	nothing asking = iota
	forFilter
	forAddress
)

// New returns the model of a screen over a source.
func New(s Source, o Options) Model {
	if o.Interval == 0 {
		o.Interval = time.Second
	}
	if o.Location == nil {
		o.Location = time.Local
	}
	m := Model{source: s, o: o, th: newTheme(o.Plain), keys: newKeyMap(), help: help.New(), width: 80, height: 24, fetching: true} // by Init
	m.keys.replaying(false)
	m.help.ShortSeparator = "  "
	m.help.FullSeparator = "   "
	if o.Plain {
		m.help.Styles = help.Styles{}
	} else {
		m.help.Styles = help.Styles{ShortKey: m.th.titles, FullKey: m.th.titles}
	}
	for i, n := range ViewNames {
		if n == o.View {
			m.tab = screen(i)
		}
	}
	if o.PID != 0 {
		m.pid = o.PID
		m.above = []screen{onProcess}
	}
	m.input = textinput.New()
	m.input.SetVirtualCursor(false)
	if o.Plain {
		m.input.SetStyles(textinput.Styles{})
	}
	m.around = &surroundings{location: o.Location}
	m.procs = processTable()
	m.watches = watchTable()
	m.regs = registrationTable(m.around)
	m.finds = findingTable(m.around)
	m.hookt = hookTable()
	m.events = eventTable(m.around)
	return m
}

// answer is a message: what the source said.
type answer struct {
	state *State
	err   error
}

// tick is a message: it is time to look again.
type tick struct{}

// Init starts looking.
func (m Model) Init() tea.Cmd { return tea.Batch(m.fetch(), m.later()) }

func (m *Model) fetch() tea.Cmd {
	q := m.query()
	s := m.source
	return func() tea.Msg {
		st, err := s.State(context.Background(), q)
		return answer{st, err}
	}
}

func (m *Model) later() tea.Cmd {
	if !m.o.Clock {
		return nil
	}
	return tea.Tick(m.o.Interval, func(time.Time) tea.Msg { return tick{} })
}

// query is what the present view needs.
func (m *Model) query() Query {
	q := Query{Query: activity.Query{Window: activity.Windows[m.window]}, At: m.at}
	switch m.top() {
	case onProcess, onStory:
		q.PID = m.pid
	case onRegistrations:
		q.Registrations = true
	case onFindings, onFinding:
		q.Findings = true
	case onHooks:
		q.Hooks = true
	}
	return q
}

// top is the screen that is seen.
func (m *Model) top() screen {
	if n := len(m.above); n > 0 {
		return m.above[n-1]
	}
	return m.tab
}

// list is the table that the keys move in; nil: none.
func (m *Model) list() lister {
	switch m.top() {
	case onProcesses:
		if m.watching() {
			return m.watches
		}
		return m.procs
	case onRegistrations:
		return m.regs
	case onFindings:
		return m.finds
	case onHooks:
		return m.hookt
	case onProcess:
		return m.events
	}
	return nil
}

// watching: the source knows of watches, not of processes.
func (m *Model) watching() bool { return m.state != nil && m.state.Watches != nil }

// want asks the source again, now or when it has answered.
func (m *Model) want() tea.Cmd {
	if m.fetching {
		m.again = true
		return nil
	}
	m.fetching = true
	return m.fetch()
}

// Update takes a message.
func (m Model) Update(msg tea.Msg) (tea.Model, tea.Cmd) {
	var cmd tea.Cmd
	switch msg := msg.(type) {
	case tea.WindowSizeMsg:
		m.width, m.height = msg.Width, msg.Height
	case answer:
		cmd = m.take(msg)
	case tick:
		cmd = m.later()
		if p := m.position(); p != nil && !m.paused {
			m.goTo(p.At + m.o.Interval)
		}
		if !m.paused && !m.fetching {
			cmd = tea.Batch(cmd, m.want())
		}
	case tea.KeyPressMsg:
		cmd = m.press(msg)
	case tea.PasteMsg:
		if m.asking != nothing {
			m.input, _ = m.input.Update(msg)
			m.answerPrompt()
		}
	}
	m.layout()
	return m, cmd
}

func (m *Model) position() *Position {
	if m.state == nil {
		return nil
	}
	return m.state.Position
}

// goTo moves a recording.
func (m *Model) goTo(t time.Duration) {
	p := m.position()
	m.at = max(p.From, min(t, p.To))
	m.at = max(m.at, 1)
}

func (m *Model) take(a answer) tea.Cmd {
	m.fetching = false
	m.err = a.err
	if a.err == nil && a.state != nil {
		m.state = a.state
		m.keys.replaying(a.state.Position != nil)
		m.fill()
	}
	if m.again {
		m.again = false
		return m.want()
	}
	return nil
}

// fill gives the tables what has come.
func (m *Model) fill() {
	s := m.state
	m.around.state = s
	m.procs.set(s.lines())
	m.watches.set(s.Watches)
	switch m.top() {
	case onRegistrations:
		m.regs.set(s.Registrations)
	case onFindings, onFinding:
		m.finds.set(s.Findings)
	}
	m.hookt.set(s.Hooks)
	if s.Detail != nil && s.Detail.PID == m.pid {
		m.events.set(s.Detail.Events)
	}
}

// press takes a key.
func (m *Model) press(msg tea.KeyPressMsg) tea.Cmd {
	m.note = ""
	if key.Matches(msg, m.keys.interrupt) {
		return tea.Quit
	}
	if m.asking != nothing {
		return m.prompted(msg)
	}
	if m.showHelp && !key.Matches(msg, m.keys.quit) {
		m.showHelp = false // any key
		return nil
	}
	l := m.list()
	page := max(1, m.height-6)
	move := func(by int) {
		if l != nil {
			l.move(by)
		}
	}
	k := &m.keys
	switch {
	case key.Matches(msg, k.quit):
		return tea.Quit
	case key.Matches(msg, k.help):
		m.showHelp = true
	case key.Matches(msg, k.up):
		move(-1)
	case key.Matches(msg, k.down):
		move(1)
	case key.Matches(msg, k.pageUp):
		move(-page)
	case key.Matches(msg, k.pageDown):
		move(page)
	case key.Matches(msg, k.home):
		if l != nil {
			l.home()
		}
	case key.Matches(msg, k.end):
		if l != nil {
			l.end()
		}
	case key.Matches(msg, k.enter):
		return m.open()
	case key.Matches(msg, k.back):
		return m.back()
	case key.Matches(msg, k.next):
		return m.turnTo((m.tab + 1) % numTabs)
	case key.Matches(msg, k.previous):
		return m.turnTo((m.tab + numTabs - 1) % numTabs)
	case key.Matches(msg, k.explain):
		return m.askAddress()
	case key.Matches(msg, k.filter):
		if l != nil {
			return m.ask(forFilter, "/", l.filtered())
		}
	case key.Matches(msg, k.sort):
		if l != nil {
			l.nextSort()
			m.note = "sorted by " + l.sortedBy()
		}
	case key.Matches(msg, k.reverse):
		if l != nil {
			l.turn()
		}
	case key.Matches(msg, k.window):
		m.window = (m.window + 1) % len(activity.Windows)
		return m.want()
	case key.Matches(msg, k.pause):
		m.paused = !m.paused
		if !m.paused {
			return m.want()
		}
	case key.Matches(msg, k.seen):
		m.acknowledge()
	case key.Matches(msg, k.backward):
		return m.scrub(-time.Second)
	case key.Matches(msg, k.forward):
		return m.scrub(time.Second)
	case key.Matches(msg, k.farBack):
		return m.scrub(-10 * time.Second)
	case key.Matches(msg, k.farForward):
		return m.scrub(10 * time.Second)
	case key.Matches(msg, k.first):
		return m.scrub(-1 << 62)
	case key.Matches(msg, k.last):
		return m.scrub(1 << 62)
	}
	return nil
}

func (m *Model) scrub(by time.Duration) tea.Cmd {
	p := m.position()
	if p == nil {
		return nil
	}
	from := p.At
	if m.at != 0 { // several presses before an answer add up
		from = m.at
	}
	m.goTo(max(p.From, min(p.To, from+max(by, p.From-from))))
	return m.want()
}

func (m *Model) turnTo(t screen) tea.Cmd {
	m.tab, m.above = t, nil
	return m.want()
}

// open opens what the cursor is on.
func (m *Model) open() tea.Cmd {
	switch m.top() {
	case onProcesses:
		p, ok := m.procs.current()
		if !ok {
			return nil
		}
		return m.show(p.PID)
	case onRegistrations:
		return m.tell(m.regs.current())
	case onFindings:
		if _, ok := m.finds.current(); ok {
			m.above = append(m.above, onFinding)
		}
		return m.want()
	case onFinding:
		f, ok := m.finds.current()
		if !ok {
			return nil
		}
		m.pid, m.addr = f.Registration.PID, f.Stale.Start
		m.above = append(m.above, onStory)
		return m.want()
	case onProcess:
		e, ok := m.events.current()
		if !ok {
			return nil
		}
		m.addr = e.Range.Start
		m.above = append(m.above, onStory)
		return m.want()
	}
	return nil
}

func (m *Model) show(pid uint32) tea.Cmd {
	if m.pid != pid {
		m.pid = pid
		m.events.home()
		m.events.set(nil)
	}
	m.above = append(m.above, onProcess)
	return m.want()
}

func (m *Model) tell(r activity.Registration, ok bool) tea.Cmd {
	if !ok {
		return nil
	}
	m.pid, m.addr = r.PID, r.Range.Start
	if r.Changes > 0 {
		m.addr = max(r.Range.Start, r.Last.Range.Start)
	}
	m.above = append(m.above, onStory)
	return m.want()
}

// back closes what was opened last; on a tab it lifts the filter.
func (m *Model) back() tea.Cmd {
	if n := len(m.above); n > 0 {
		m.above = m.above[: n-1 : n-1]
		return m.want()
	}
	if l := m.list(); l != nil && l.filtered() != "" {
		l.setFilter("")
	}
	return nil
}

// acknowledge makes the badge forget what was lost up to now.
func (m *Model) acknowledge() {
	if m.state == nil {
		return
	}
	m.seenLost = m.state.Now
	m.seenStages = make(map[string]uint64)
	for _, s := range m.state.Stages {
		m.seenStages[s.Name] = s.Lost
	}
}

func (m *Model) ask(what asking, prompt, value string) tea.Cmd {
	m.asking = what
	m.input.Prompt = prompt
	m.input.SetValue(value)
	m.input.CursorEnd()
	m.input.Focus() // its command makes a cursor blink, the terminal's does by itself
	return nil
}

func (m *Model) askAddress() tea.Cmd {
	if m.selectedPID() == 0 {
		m.note = "choose a process first"
		return nil
	}
	return m.ask(forAddress, "address 0x", "")
}

// selectedPID is the process that the present view is about.
func (m *Model) selectedPID() uint32 {
	switch m.top() {
	case onProcesses:
		if p, ok := m.procs.current(); ok {
			return p.PID
		}
	case onRegistrations:
		if r, ok := m.regs.current(); ok {
			return r.PID
		}
	case onFindings, onFinding:
		if f, ok := m.finds.current(); ok {
			return f.Registration.PID
		}
	case onProcess, onStory:
		return m.pid
	}
	return 0
}

// prompted takes a key for the prompt.
func (m *Model) prompted(msg tea.KeyPressMsg) tea.Cmd {
	switch msg.String() {
	case "enter":
		return m.answered()
	case "esc":
		if m.asking == forFilter {
			m.list().setFilter("")
		}
		m.asking = nothing
		m.input.Blur()
		return nil
	}
	m.input, _ = m.input.Update(msg) // its command reads a clipboard; terminals paste by themselves
	m.answerPrompt()
	return nil
}

// answerPrompt applies a filter while it is typed.
func (m *Model) answerPrompt() {
	if m.asking == forFilter {
		m.list().setFilter(m.input.Value())
	}
}

func (m *Model) answered() tea.Cmd {
	what := m.asking
	m.asking = nothing
	m.input.Blur()
	if what != forAddress {
		return nil
	}
	text := strings.TrimPrefix(strings.ToLower(strings.TrimSpace(m.input.Value())), "0x")
	n, err := strconv.ParseUint(text, 16, 64)
	if err != nil {
		m.note = fmt.Sprintf("%q is not a hexadecimal address", m.input.Value())
		return nil
	}
	m.pid, m.addr = m.selectedPID(), mm.Addr(n)
	if m.top() != onStory {
		m.above = append(m.above, onStory)
	}
	return m.want()
}
