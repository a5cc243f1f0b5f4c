// SPDX-License-Identifier: Apache-2.0

package top_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	tea "charm.land/bubbletea/v2"
	"github.com/charmbracelet/x/ansi"
	"pgregory.net/rapid"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/internal/top"
	"github.com/ummu/ummu/internal/top/screens"
	"github.com/ummu/ummu/mm"
)

const sec = time.Second

// fake is a source that says what the test wants.
type fake struct {
	a       *activity.Activity
	err     error
	queries []top.Query
	change  func(*top.State)
}

func (f *fake) State(_ context.Context, q top.Query) (*top.State, error) {
	f.queries = append(f.queries, q)
	if f.err != nil {
		return nil, f.err
	}
	table, err := calls.For("amd64")
	if err != nil {
		return nil, err
	}
	s := &top.State{
		Snapshot: f.a.Snapshot(q.Query), Calls: table, What: "test",
		Meta: &recording.Meta{Tier: "syscall", Host: "h", Kernel: "6.1", MonotonicZero: time.Date(2026, 1, 1, 10, 0, 0, 0, time.UTC)},
	}
	s.Frames = map[uint32][]symbol.Frame{
		1: {{Func: "ibv_reg_mr", Module: "libibverbs.so.1"}, {Func: "open_queue", File: "app.c", Line: 40}},
		2: {{Func: "munmap", Module: "libc.so.6"}, {Func: "free_buffer", File: "app.c", Line: 12}, {Func: "main", File: "app.c", Line: 99}},
	}
	if f.change != nil {
		f.change(s)
	}
	return s, nil
}

func rng(from, to mm.Addr) mm.Range { return mm.Range{Start: from, End: to} }

func record(at time.Duration, pid uint32, comm string, k mm.Kind, r mm.Range) *mm.Record {
	x := &mm.Record{Time: at, PID: pid, TID: pid, Kind: k, Phase: mm.PhaseEnd, Range: r, Call: mm.Call{NR: 11}}
	copy(x.Comm[:], comm)
	if k == mm.Register {
		x.Call, x.Stack = mm.Call{ABI: mm.ABINone}, 1
		x.Registration = mm.Registration{Device: 1, Handle: uint64(r.Start), By: mm.ByVerbs}
	} else {
		x.Stack = 2
	}
	return x
}

// three processes: 10 "alpha" with one change, 20 "beta" with two, 30 "gamma"
// with three and a stale registration.
func three(t testing.TB) *fake {
	t.Helper()
	a, err := activity.New(activity.Options{Start: 1})
	if err != nil {
		t.Fatal(err)
	}
	for i, name := range []string{"alpha", "beta", "gamma"} {
		pid := uint32(10 * (i + 1))
		if name == "gamma" {
			a.Add(record(sec/2, pid, name, mm.Register, rng(0x7000, 0x9000)))
			a.Add(record(sec/2, pid, name, mm.Register, rng(0x100000, 0x200000)))
		}
		for n := range i + 1 {
			a.Add(record(sec+time.Duration(n), pid, name, mm.Unmap, rng(0x8000, 0xa000)))
		}
	}
	a.Advance(2 * sec)
	return &fake{a: a}
}

func press(t testing.TB, p *screens.Player, keys ...string) {
	t.Helper()
	if err := p.Press(keys...); err != nil {
		t.Fatal(err)
	}
}

// chars are the keys of a text.
func chars(s string) (keys []string) {
	for _, r := range s {
		keys = append(keys, string(r))
	}
	return keys
}

func keys(x ...any) (out []string) {
	for _, k := range x {
		switch k := k.(type) {
		case string:
			out = append(out, k)
		case []string:
			out = append(out, k...)
		}
	}
	return out
}

// What the keys do, by what is seen afterwards.
func TestKeys(t *testing.T) {
	for _, c := range []struct {
		name string
		keys []string
		want []string // in this order
		not  []string
	}{
		{"first by rate", nil, []string{"[complete]", "[processes]", ">", "30 gamma", "20 beta", "10 alpha"}, nil},
		{"down", keys("down"), []string{"30 gamma", ">", "20 beta"}, nil},
		{"j, then k", keys("j", "j", "k"), []string{"30 gamma", ">", "20 beta"}, nil},
		{"end", keys("end"), []string{"20 beta", ">", "10 alpha"}, nil},
		{"past the end", keys("G", "j", "pgdown"), []string{"20 beta", ">", "10 alpha"}, nil},
		{"home", keys("end", "home"), []string{">", "30 gamma", "20 beta"}, nil},
		{"sort by another column", keys("S"), []string{"10 alpha", "20 beta", "30 gamma"}, nil},
		{"sort and turn", keys("s", "S"), []string{"UNMAP^", "10 alpha"}, nil},
		{"the sort is named", keys("s"), []string{"sorted by UNMAP"}, nil},
		{"the note goes", keys("s", "down"), []string{"UNMAPv"}, []string{"sorted by"}},
		{"filter while typing", keys("/", chars("bet")), []string{"/bet (1 of 3)", "20 beta", "/bet"}, []string{"alpha", "gamma"}},
		{"filter stays", keys("/", chars("bet"), "enter"), []string{"/bet (1 of 3)", "20 beta", "help"}, []string{"gamma"}},
		{"filter by number", keys("/", chars("30"), "enter"), []string{"30 gamma"}, []string{"beta"}},
		{"keys are text in a filter", keys("/", "q", "s"), []string{"none of 3 match", "/qs"}, nil},
		{"filter given up", keys("/", chars("bet"), "esc"), []string{"30 gamma", "20 beta"}, nil},
		{"filter lifted", keys("/", chars("bet"), "enter", "esc"), []string{"30 gamma", "10 alpha"}, nil},
		{"no match", keys("/", chars("zz"), "enter"), []string{`none of 3 match "zz"`}, []string{"gamma"}},
		{"open a process", keys("enter"), []string{"> process 30", "process 30 gamma, seen since 10:00:00", "unmap 3", "MEMORY", "TOP CALL SITES", "munmap < free_buffer (app.c:12) < main (app.c:99)", "10:00:01.000 unmap"}, nil},
		{"open another", keys("down", "enter"), []string{"process 20 beta"}, nil},
		{"back", keys("enter", "esc"), []string{"[processes]", "30 gamma", "10 alpha"}, []string{"> process"}},
		{"explain what is under the cursor", keys("enter", "enter"), []string{"> process 30 > 0x8000", "address 0x8000", "registered 7000-9000 (8K) since 10:00:00.500: stale", "unmap", "8000-a000", "munmap() = 0", "free_buffer (app.c:12) < main (app.c:99)"}, nil},
		{"explain an address", keys("e", chars("0x7100"), "enter"), []string{"address 0x7100 of process 30", "stale", "10:00:00.500 register"}, []string{"munmap()"}},
		{"explain nonsense", keys("e", chars("xyz"), "enter"), []string{"[processes]", `"xyz" is not a hexadecimal address`}, nil},
		{"explain given up", keys("e", chars("12"), "esc"), []string{"[processes]", "30 gamma"}, []string{"address"}},
		{"back twice", keys("enter", "enter", "esc", "esc"), []string{"[processes]", "30 gamma"}, []string{"> process"}},
		{"tab", keys("tab"), []string{"[registrations]", "STATE", "7000-9000", "8K", "stale", "10:00:01.000", "100000-200000", "1M", "ok", "registrations by size", "to 64K", "1", "to 1M"}, nil},
		{"findings", keys("tab", "tab"), []string{"[findings]", "10:00:01.000", "30 gamma", "freed-while-registered", "8000-9000", "4K"}, []string{"100000-200000"}},
		{"a finding has both stacks", keys("tab", "tab", "enter"), []string{"> finding 1", "freed-while-registered: process 30 gamma", "8000-9000 (4K) leads elsewhere, beyond doubt",
			"still registered, 1s after the change; 2 more changes", "registered 7000-9000 (8K) with verbs at 10:00:00.500", "ibv_reg_mr", "open_queue (app.c:40)",
			"changed: unmap of 8000-a000 by munmap at 10:00:01.000", "free_buffer (app.c:12)", "main (app.c:99)"}, nil},
		{"and a story", keys("tab", "tab", "enter", "enter"), []string{"> process 30 > 0x8000", "registered 7000-9000", "stale"}, nil},
		{"back from both", keys("tab", "tab", "enter", "enter", "esc", "esc"), []string{"[findings]", "freed-while-registered"}, []string{"> "}},
		{"hooks", keys("tab", "tab", "tab"), []string{"[hooks]", "HOOK", "tier syscall"}, nil},
		{"around", keys("tab", "tab", "tab", "tab"), []string{"[processes]"}, nil},
		{"the other way", keys("shift+tab"), []string{"[hooks]"}, nil},
		{"window", keys("w"), []string{"per second (10s)"}, nil},
		{"window, around", keys("w", "w", "w"), []string{"per second (1s)"}, nil},
		{"pause", keys("p"), []string{"PAUSED"}, nil},
		{"pause ends", keys("p", "p"), []string{"[complete]"}, []string{"PAUSED"}},
		{"help", keys("?"), []string{"explain an address", "acknowledge losses"}, []string{"gamma", "1 s back"}},
		{"help goes", keys("?", "x"), []string{"30 gamma"}, []string{"acknowledge"}},
		{"no recording, no moving", keys("left", "<", ">"), []string{"30 gamma"}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := screens.New(three(t), 100, 30, top.Options{})
			press(t, p, c.keys...)
			got := p.Screen()
			rest := got
			for _, w := range c.want {
				i := strings.Index(rest, w)
				if i < 0 {
					t.Fatalf("%q is not on the screen, or not in this order:\n%s", w, got)
				}
				rest = rest[i+len(w):]
			}
			for _, w := range c.not {
				if strings.Contains(got, w) {
					t.Errorf("%q is on the screen:\n%s", w, got)
				}
			}
		})
	}
}

// Leaving is a command, wherever one is; ctrl+c even where keys are text.
func TestLeave(t *testing.T) {
	for _, c := range []struct {
		name  string
		keys  []string
		leave bool
	}{
		{"q", keys("q"), true}, {"ctrl+c", keys("ctrl+c"), true}, {"in a process", keys("enter", "q"), true},
		{"q is text", keys("/", "q"), false}, {"ctrl+c in a prompt", keys("/", "ctrl+c"), true}, {"in help", keys("?", "q"), true},
		{"esc does not", keys("esc"), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := screens.New(three(t), 80, 24, top.Options{})
			press(t, p, c.keys...)
			if p.Left() != c.leave {
				t.Errorf("left: %v", p.Left())
			}
		})
	}
}

// The badge: what was lost, since when and where, until it is acknowledged.
func TestBadge(t *testing.T) {
	f := three(t)
	lost := uint64(0)
	lose := func(at time.Duration, n uint64) {
		lost += n
		f.a.Add(&mm.Record{Time: at, Kind: mm.Lost, Phase: mm.PhaseEnd, Range: mm.Whole, Lost: n, Call: mm.Call{ABI: mm.ABINone}})
	}
	f.change = func(s *top.State) { s.Stages = []top.Stage{{Name: "ring", Lost: lost}, {Name: "hook"}} }
	p := screens.New(f, 100, 30, top.Options{})
	want := func(badge string) {
		t.Helper()
		press(t, p, "p", "p") // look again
		if first, _, _ := strings.Cut(p.Screen(), "\n"); !strings.HasSuffix(first, "["+badge+"]") {
			t.Fatalf("want badge %q: %s", badge, first)
		}
	}
	want("complete")
	lose(3*sec, 5)
	want("incomplete since 10:00:03, 5 lost: ring 5")
	lose(5*sec, 2)
	want("incomplete since 10:00:03, 7 lost: ring 7")
	press(t, p, "enter", "tab") // it stays in every view
	want("incomplete since 10:00:03, 7 lost: ring 7")
	press(t, p, "a")
	want("complete")
	lose(7*sec, 4)
	want("incomplete since 10:00:07, 4 lost: ring 4")
	press(t, p, "a")
	want("complete")
	f.err = errors.New("no more")
	want("error: no more")
	f.err = nil
	f.change = func(s *top.State) { s.Doubt = "cut off" }
	want("incomplete: cut off")
}

// The source is asked for no more than the view shows.
func TestQueries(t *testing.T) {
	for _, c := range []struct {
		name string
		keys []string
		want top.Query
	}{
		{"processes", nil, top.Query{Query: activity.Query{Window: sec}}},
		{"window", keys("w"), top.Query{Query: activity.Query{Window: 10 * sec}}},
		{"process", keys("enter"), top.Query{Query: activity.Query{Window: sec, PID: 30}}},
		{"registrations", keys("tab"), top.Query{Query: activity.Query{Window: sec, Registrations: true}}},
		{"findings", keys("tab", "tab"), top.Query{Query: activity.Query{Window: sec, Findings: true}}},
		{"hooks", keys("shift+tab"), top.Query{Query: activity.Query{Window: sec}, Hooks: true}},
		{"left the hooks", keys("shift+tab", "tab"), top.Query{Query: activity.Query{Window: sec}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := three(t)
			p := screens.New(f, 80, 24, top.Options{})
			press(t, p, c.keys...)
			if got := f.queries[len(f.queries)-1]; got != c.want {
				t.Errorf("%+v, want %+v", got, c.want)
			}
		})
	}
}

// The cursor stays on what it was put on while rows come and go around it.
func TestCursorFollows(t *testing.T) {
	f := three(t)
	p := screens.New(f, 80, 24, top.Options{})
	press(t, p, "down") // beta
	for i := range 5 {
		f.a.Add(record(2*sec+time.Duration(i), 10, "alpha", mm.Unmap, rng(0x8000, 0xa000)))
	}
	f.a.Advance(3 * sec)
	press(t, p, "p", "p", "enter")
	if !strings.Contains(p.Screen(), "process 20 beta") {
		t.Errorf("the cursor left beta:\n%s", p.Screen())
	}
}

// A process that ends while it is shown stays, and says so; one that was
// forgotten is said to be.
func TestProcessEnds(t *testing.T) {
	f := three(t)
	p := screens.New(f, 80, 24, top.Options{})
	press(t, p, "enter")
	f.a.Add(&mm.Record{Time: 3 * sec, PID: 30, TID: 30, Kind: mm.Exit, Phase: mm.PhaseEnd, Flags: mm.LastTask, Call: mm.Call{ABI: mm.ABINone}, Comm: mm.Comm{'g'}})
	press(t, p, "p", "p")
	if !strings.Contains(p.Screen(), "ended 10:00:03") {
		t.Errorf("no end:\n%s", p.Screen())
	}
	f.change = func(s *top.State) { s.Detail = nil }
	press(t, p, "p", "p")
	if !strings.Contains(p.Screen(), "forgotten") {
		t.Errorf("not told:\n%s", p.Screen())
	}
}

// Whatever is pressed at whatever size: no panic, exactly as many lines as the
// screen has, none wider, and the badge is there if there is room for it.
func TestAnySize(t *testing.T) {
	all := []string{"up", "down", "enter", "esc", "tab", "shift+tab", "e", "/", "s", "S", "w", "p", "a", "?", "home", "end", "pgup", "pgdown", "left", "right", "<", ">", "7", "x", "backspace"}
	f := three(t)
	f.change = func(s *top.State) {
		s.Position = &top.Position{At: sec, From: 0, To: 5 * sec}
		s.Hooks = []top.Hook{{Name: "tp_btf/sys_enter", Sees: "everything", Attached: true}, {Name: "other", Err: errors.New("no such hook")}}
		s.Missing = []string{"something"}
		s.Groups = map[uint32]string{10: "docker:0123456789ab", 20: "\x1b[31mevil", 30: "日本語の長い名前"}
	}
	rapid.Check(t, func(t *rapid.T) {
		w, h := rapid.IntRange(1, 220).Draw(t, "width"), rapid.IntRange(1, 60).Draw(t, "height")
		p := screens.New(f, w, h, top.Options{View: rapid.SampledFrom(top.ViewNames).Draw(t, "view")})
		for _, k := range rapid.SliceOfN(rapid.SampledFrom(all), 0, 20).Draw(t, "keys") {
			if err := p.Press(k); err != nil {
				t.Fatal(err)
			}
			if rapid.IntRange(0, 5).Draw(t, "resize") == 0 {
				w, h = rapid.IntRange(1, 220).Draw(t, "width"), rapid.IntRange(1, 60).Draw(t, "height")
				p.Send(tea.WindowSizeMsg{Width: w, Height: h})
			}
			lines := strings.Split(strings.TrimSuffix(p.Screen(), "\n"), "\n")
			if len(lines) != h {
				t.Fatalf("%d lines at %dx%d", len(lines), w, h)
			}
			for _, l := range lines {
				if ansi.StringWidth(l) > w {
					t.Fatalf("%q is wider than %d", l, w)
				}
				if strings.ContainsRune(l, '\x1b') {
					t.Fatalf("%q has a control sequence", l)
				}
			}
			if w >= 10 && !strings.Contains(lines[0], "complete") {
				t.Fatalf("no badge at %dx%d: %q", w, h, lines[0])
			}
		}
	})
}

// A source that knows of watches only: they take the place of the processes,
// and every other view says what is missing.
func TestWatches(t *testing.T) {
	f := three(t)
	f.a, _ = activity.New(activity.Options{})
	f.change = func(s *top.State) {
		s.Watches = []top.Watch{{Watch: 1, PID: 10, Comm: "rank0", State: "live", Rate: 5}, {Watch: 2, PID: 11, Comm: "rank1", State: "dead", Lost: 7}}
		s.Missing = []string{"findings: root sees them"}
	}
	p := screens.New(f, 100, 20, top.Options{})
	for _, w := range []string{"2 watches, 5 records a second", "REC/Sv", "rank0", "live", "rank1", "dead"} {
		if !strings.Contains(p.Screen(), w) {
			t.Errorf("no %q:\n%s", w, p.Screen())
		}
	}
	press(t, p, keys("/", chars("rank1"), "enter", "tab", "tab")...)
	if !strings.Contains(p.Screen(), "missing: findings: root sees them") {
		t.Errorf("%s", p.Screen())
	}
	var out strings.Builder
	s, err := f.State(context.Background(), top.Query{})
	if err != nil {
		t.Fatal(err)
	}
	for _, format := range top.Formats {
		if err := top.Print(&out, s, format, "processes", time.UTC); err != nil {
			t.Fatal(err)
		}
	}
	if got := out.String(); strings.Count(got, "rank1") != 2 || !strings.Contains(got, `{"watch":{"watch":1,"pid":10,`) {
		t.Errorf("%s", got)
	}
}

// 10,000 processes are looked through while they are shown.
func TestManyProcesses(t *testing.T) {
	a, err := activity.New(activity.Options{Start: 1})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 10000 {
		a.Add(record(sec, uint32(i+1), fmt.Sprintf("p%d", i+1), mm.Unmap, rng(0x8000, 0xa000)))
	}
	p := screens.New(&fake{a: a}, 80, 24, top.Options{})
	press(t, p, keys("/", chars("p777"), "enter", "end")...)
	if !strings.Contains(p.Screen(), "(11 of 10000)") || !strings.Contains(p.Screen(), ">    7779") {
		t.Errorf("%s", p.Screen())
	}
}

func BenchmarkView(b *testing.B) {
	for _, n := range []int{3, 10000} {
		b.Run(fmt.Sprintf("processes=%d", n), func(b *testing.B) {
			f := three(b)
			for i := range n - 3 {
				f.a.Add(record(sec, uint32(i+100), "p", mm.Unmap, rng(0x8000, 0xa000)))
			}
			p := screens.New(f, 200, 50, top.Options{})
			for b.Loop() {
				press(b, p, "down")
				p.Screen()
			}
		})
	}
}
