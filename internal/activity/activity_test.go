// SPDX-License-Identifier: Apache-2.0

package activity

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ummu/ummu/mm"
)

const sec = time.Second

func rng(from, to mm.Addr) mm.Range { return mm.Range{Start: from, End: to} }

func comm(s string) (c mm.Comm) {
	copy(c[:], s)
	return c
}

var munmap = mm.Call{NR: 11}

// event is an end without a begin: one change.
func event(at time.Duration, pid uint32, k mm.Kind, r mm.Range) mm.Record {
	return mm.Record{Time: at, PID: pid, TID: pid, Kind: k, Phase: mm.PhaseEnd, Range: r, Call: munmap, Hook: 2, Comm: comm("a")}
}

func exit(at time.Duration, pid uint32) mm.Record {
	return mm.Record{Time: at, PID: pid, TID: pid, Kind: mm.Exit, Phase: mm.PhaseEnd, Flags: mm.LastTask, Call: mm.Call{ABI: mm.ABINone}, Comm: comm("a")}
}

func fork(at time.Duration, pid, child uint32) mm.Record {
	return mm.Record{Time: at, PID: pid, TID: pid, ChildPID: child, ChildTID: child, Kind: mm.Fork, Phase: mm.PhaseEnd,
		Flags: mm.NewProcess, Call: mm.Call{ABI: mm.ABINone}, Comm: comm("a")}
}

func lost(at time.Duration, n uint64) mm.Record {
	return mm.Record{Time: at, Kind: mm.Lost, Phase: mm.PhaseEnd, Range: mm.Whole, Lost: n, Call: mm.Call{ABI: mm.ABINone}}
}

func fed(t *testing.T, o Options, rs ...mm.Record) *Activity {
	t.Helper()
	a, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	for i := range rs {
		a.Add(&rs[i])
	}
	return a
}

func TestRates(t *testing.T) {
	page := rng(0x1000, 0x2000)
	var steady []mm.Record // 10 a second from 5.5 s to 20 s
	for at := 5500 * time.Millisecond; at < 20*sec; at += 100 * time.Millisecond {
		steady = append(steady, event(at, 1, mm.Unmap, page))
	}
	for _, c := range []struct {
		name   string
		in     []mm.Record
		start  time.Duration
		now    time.Duration
		window time.Duration
		want   float64
	}{
		{"nothing", nil, 0, 10 * sec, sec, 0},
		{"one second", steady, 5500 * time.Millisecond, 12500 * time.Millisecond, sec, 10},
		{"ten", steady, 5500 * time.Millisecond, 19900 * time.Millisecond, 10 * sec, 10},
		{"more than there was", steady, 5500 * time.Millisecond, 9 * sec, time.Minute, 10},
		{"within the first second", steady[:3], 5500 * time.Millisecond, 5900 * time.Millisecond, sec, 7.5},
		{"the first second is a short one", steady, 5500 * time.Millisecond, 6300 * time.Millisecond, sec, 10},
		{"long ago", steady, 5500 * time.Millisecond, 100 * sec, time.Minute, 0},
		{"partly", steady, 5500 * time.Millisecond, 25 * sec, 10 * sec, 5},
		{"just over", steady, 5500 * time.Millisecond, 21 * sec, sec, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			in := slices.DeleteFunc(slices.Clone(c.in), func(r mm.Record) bool { return r.Time > c.now })
			a := fed(t, Options{Start: c.start}, in...)
			a.Advance(c.now)
			s := a.Snapshot(Query{Window: c.window})
			if got := s.Total.Rate.Changes[0]; got != c.want {
				t.Errorf("total %v a second, want %v", got, c.want)
			}
			if len(in) > 0 && (s.Processes[0].Rate.Sum() != c.want || s.Processes[0].Rate.Bytes != c.want*4096) {
				t.Errorf("process %+v, want %v a second", s.Processes[0].Rate, c.want)
			}
		})
	}
}

func TestRegistrations(t *testing.T) {
	reg := func(at time.Duration, k mm.Kind, r mm.Range) mm.Record {
		x := event(at, 1, k, r)
		x.Call = mm.Call{ABI: mm.ABINone}
		x.Registration = mm.Registration{Device: 1, Handle: uint64(r.Start), By: mm.ByVerbs}
		return x
	}
	dead := exit(2, 1)
	dead.Flags = mm.SpaceDeath
	buf := rng(0x10000, 0x20000)
	for _, c := range []struct {
		name    string
		in      []mm.Record
		want    string // state and changes of what is registered
		mrBytes uint64
	}{
		{"intact", []mm.Record{reg(1, mm.Register, buf), event(2, 1, mm.Unmap, rng(0x20000, 0x30000))}, "ok 0", 0x10000},
		{"rights", []mm.Record{reg(1, mm.Register, buf), event(2, 1, mm.Protect, buf)}, "changed 1", 0x10000},
		{"unmapped", []mm.Record{reg(1, mm.Register, buf), event(2, 1, mm.Protect, buf), event(3, 1, mm.Unmap, rng(0x1f000, 0x30000))}, "stale 2", 0x10000},
		{"stays stale", []mm.Record{reg(1, mm.Register, buf), event(2, 1, mm.Zap, buf), event(3, 1, mm.Protect, buf)}, "stale 2", 0x10000},
		{"changed before", []mm.Record{event(1, 1, mm.Unmap, buf), reg(2, mm.Register, buf)}, "ok 0", 0x10000},
		{"deregistered", []mm.Record{reg(1, mm.Register, buf), reg(2, mm.Deregister, buf), event(3, 1, mm.Unmap, buf)}, "", 0},
		{"another's memory", []mm.Record{reg(1, mm.Register, buf), func() mm.Record { r := event(2, 1, mm.Unmap, buf); r.Space = 9; return r }()}, "ok 0", 0x10000},
		{"the address space ends", []mm.Record{reg(1, mm.Register, buf), dead}, "", 0},
		{"moved onto", []mm.Record{reg(1, mm.Register, buf), func() mm.Record {
			r := event(2, 1, mm.Move, rng(0x80000, 0x90000))
			r.To = rng(0x18000, 0x28000)
			return r
		}()}, "stale 1", 0x10000},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := fed(t, Options{}, c.in...).Snapshot(Query{Registrations: true, Findings: true})
			got := ""
			for _, r := range s.Registrations {
				got += fmt.Sprint(r.State, " ", r.Changes)
			}
			if n := strings.Count(got, "stale"); n != len(s.Findings) || uint64(n) != s.Total.Findings || n != s.Total.Stale {
				t.Errorf("%d stale, %d findings", n, len(s.Findings))
			}
			if got != c.want || s.Total.MRBytes != c.mrBytes {
				t.Errorf("%q, %d bytes; want %q, %d", got, s.Total.MRBytes, c.want, c.mrBytes)
			}
		})
	}
}

func TestProcesses(t *testing.T) {
	page := rng(0x1000, 0x2000)
	t.Run("exit and number used again", func(t *testing.T) {
		a := fed(t, Options{}, event(1*sec, 7, mm.Unmap, page), exit(2*sec, 7))
		s := a.Snapshot(Query{})
		if p := s.Processes[0]; p.Ended != 2*sec || p.Counts.Sum().Changes != 1 {
			t.Errorf("%+v", p)
		}
		r := fork(3*sec, 1, 7)
		a.Add(&r)
		s = a.Snapshot(Query{PID: 7})
		if s.Detail.Ended != 0 || s.Detail.Counts.Sum().Changes != 0 || s.Total.Counts.Sum().Changes != 1 || len(s.Detail.Events) != 0 {
			t.Errorf("the new process is %+v", s.Detail)
		}
	})
	t.Run("lost while it lived", func(t *testing.T) {
		a := fed(t, Options{}, lost(1*sec, 5), event(2*sec, 7, mm.Unmap, page), lost(3*sec, 10), exit(4*sec, 7), lost(5*sec, 20))
		s := a.Snapshot(Query{})
		if s.Processes[0].Lost != 10 || s.Lost != 35 {
			t.Errorf("process lost %d, all %d", s.Processes[0].Lost, s.Lost)
		}
	})
	t.Run("name", func(t *testing.T) {
		r := event(2*sec, 7, mm.Unmap, page)
		r.Comm = comm("b")
		s := fed(t, Options{}, event(1*sec, 7, mm.Unmap, page), r).Snapshot(Query{})
		if s.Processes[0].Comm != "b" {
			t.Error(s.Processes[0].Comm)
		}
	})
	t.Run("selected by name", func(t *testing.T) {
		r := event(2*sec, 7, mm.Unmap, page) // it executes another program
		r.Comm = comm("b")
		a := fed(t, Options{Select: func(_ uint32, c string) bool { return c == "b" }}, event(1*sec, 7, mm.Unmap, page), r, event(1*sec, 8, mm.Unmap, page))
		s := a.Snapshot(Query{})
		if len(s.Processes) != 1 || s.Total.Counts.Sum().Changes != 1 {
			t.Errorf("%+v", s.Processes)
		}
	})
	t.Run("itself", func(t *testing.T) {
		a := fed(t, Options{Self: 7}, event(1*sec, 7, mm.Unmap, page), event(1*sec, 8, mm.Unmap, page))
		s := a.Snapshot(Query{})
		if len(s.Processes) != 1 || s.Own != 1 || s.Total.Counts.Sum().Changes != 1 || s.Hooks[2] != 1 {
			t.Errorf("%+v", s)
		}
	})
}

func TestStory(t *testing.T) {
	a := fed(t, Options{MaxRecent: 3},
		event(1, 1, mm.Unmap, rng(0x1000, 0x3000)), event(2, 1, mm.Protect, rng(0x2000, 0x4000)),
		event(3, 1, mm.Zap, rng(0x8000, 0x9000)), event(4, 1, mm.Unmap, rng(0x2000, 0x3000)))
	d := a.Snapshot(Query{PID: 1}).Detail
	var got []mm.Kind
	for _, e := range d.Story(0x2fff) {
		got = append(got, e.Kind)
	}
	if diff := cmp.Diff([]mm.Kind{mm.Protect, mm.Unmap}, got); diff != "" || d.Oldest != 2 {
		t.Errorf("from %v: %s", d.Oldest, diff)
	}
}

func TestLosses(t *testing.T) {
	var in []mm.Record
	for i := range 3 * maxLosses {
		in = append(in, lost(time.Duration(i+1)*2*sec, 1), lost(time.Duration(i+1)*2*sec+1, 1))
	}
	s := fed(t, Options{}, in...).Snapshot(Query{})
	var sum uint64
	for _, l := range s.Losses {
		sum += l.Events
	}
	if len(s.Losses) != maxLosses || sum != uint64(len(in)) || s.Losses[0].Time != 2*sec || s.Lost != sum {
		t.Errorf("%d losses of %d events, the first at %v", len(s.Losses), sum, s.Losses[0].Time)
	}
}

func TestOptions(t *testing.T) {
	if _, err := New(Options{MaxSites: -1}); err == nil {
		t.Error("a negative limit is accepted")
	}
}

// Whatever is fed, and however little may be kept: every change is in the
// totals once, by kind and bytes; the call sites and the processes add up to
// them; and no bound is passed.
func TestCountsEqualWhatWasFed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		o := Options{
			MaxProcesses: rapid.IntRange(1, 5).Draw(t, "processes"), MaxEnded: rapid.IntRange(1, 3).Draw(t, "ended"),
			MaxSites: rapid.IntRange(1, 6).Draw(t, "sites"), MaxEvents: rapid.IntRange(1, 40).Draw(t, "events"),
			MaxRecent: rapid.IntRange(1, 20).Draw(t, "recent"), MaxRegistrations: rapid.IntRange(1, 4).Draw(t, "registrations"),
		}
		a, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		var want Counts
		var lostEvents, hooks uint64
		now := time.Duration(0)
		open := map[uint32]bool{}
		for range rapid.IntRange(0, 200).Draw(t, "n") {
			now += time.Duration(rapid.Int64Range(0, int64(3*sec)).Draw(t, "dt"))
			pid := rapid.Uint32Range(1, 8).Draw(t, "pid")
			start := mm.Addr(rapid.IntRange(1, 10).Draw(t, "page")) << 12
			r := event(now, pid, mm.Kind(rapid.IntRange(int(mm.Unmap), int(mm.Deregister)).Draw(t, "kind")), rng(start, start+0x2000))
			r.Call.NR = rapid.Uint32Range(1, 4).Draw(t, "nr")
			r.Ret = -rapid.Int64Range(0, 1).Draw(t, "ret")
			switch {
			case r.Kind == mm.Lost:
				r = lost(now, uint64(rapid.IntRange(1, 9).Draw(t, "lost")))
				lostEvents += r.Lost
			case r.Kind == mm.Exit:
				r = exit(now, pid)
				open[pid] = false
			case r.Kind == mm.Fork:
				r = fork(now, pid, rapid.Uint32Range(1, 8).Draw(t, "child"))
			case r.Kind.IsChange():
				n := Count{Changes: 1, Bytes: r.Range.Len()}
				if r.Ret < 0 {
					n.Failed = 1
				}
				want[index(r.Kind)].add(n)
			}
			if r.Kind != mm.Lost {
				hooks++
			}
			a.Add(&r)
			checkBounds(t, a)
		}
		a.Advance(now + sec)
		s := a.Snapshot(Query{PID: 1, Registrations: true})
		if d := cmp.Diff(want, s.Total.Counts); d != "" {
			t.Fatalf("totals (-want +got):\n%s", d)
		}
		sites, others := a.Sites()
		for _, x := range sites {
			others.add(x.Count)
		}
		if others != want.Sum() {
			t.Fatalf("sites add up to %+v, want %+v", others, want.Sum())
		}
		var live Count
		for _, p := range s.Processes {
			live.add(p.Counts.Sum())
		}
		if s.Forgotten == 0 && live != want.Sum() || live.Changes > want.Sum().Changes {
			t.Fatalf("processes add up to %+v, want %+v", live, want.Sum())
		}
		if s.Lost != lostEvents || s.Hooks[0]+s.Hooks[2] != hooks {
			t.Fatalf("lost %d of %d, hooks %v of %d", s.Lost, lostEvents, s.Hooks, hooks)
		}
	})
}

func checkBounds(t *rapid.T, a *Activity) {
	var events, sites int
	for pid, p := range a.byPID {
		events += cap(p.recent.events)
		sites += len(p.sites)
		if p.pid != pid || cap(p.recent.events) > a.o.MaxRecent {
			t.Fatalf("process %d: %d events", pid, cap(p.recent.events))
		}
	}
	if events != a.events || sites != a.sites {
		t.Fatalf("counted %d events, %d sites; there are %d, %d", a.events, a.sites, events, sites)
	}
	regs := a.engine.Stats().Live
	if len(a.byPID) > a.o.MaxProcesses || events > a.o.MaxEvents || sites > a.o.MaxSites || regs > uint64(a.o.MaxRegistrations) || len(a.ended) > a.o.MaxEnded {
		t.Fatalf("bounds are passed: %d processes, %d events, %d sites, %d registrations, %d ended", len(a.byPID), events, sites, regs, len(a.ended))
	}
}

// For each window a rate is what was fed in its seconds, divided by their number.
func TestRateIsWhatWasFed(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		over := rapid.SampledFrom(Windows[:]).Draw(t, "over")
		times := rapid.SliceOfN(rapid.Int64Range(0, int64(100*sec)), 0, 100).Draw(t, "times")
		slices.Sort(times)
		now := time.Duration(rapid.Int64Range(int64(2*sec), int64(120*sec)).Draw(t, "now"))
		w := new(window)
		want := 0.0
		to := second(now)
		from := max(to-second(over), 0)
		for _, x := range times {
			at := time.Duration(x)
			if at > now {
				break
			}
			w.add(at, 0, 0)
			if s := second(at); s >= from && s < to {
				want++
			}
		}
		if got := w.rate(0, now, over).Changes[0] * float64(to-from); got < want-0.001 || got > want+0.001 {
			t.Fatalf("%v changes in %v before %v, want %v", got, over, now, want)
		}
	})
}

func BenchmarkAdd(b *testing.B) {
	for _, processes := range []uint32{1, 100, 10000} {
		b.Run(fmt.Sprintf("processes=%d", processes), func(b *testing.B) {
			a, err := New(Options{})
			if err != nil {
				b.Fatal(err)
			}
			rs := make([]mm.Record, 2*processes)
			for i := range rs {
				rs[i] = event(0, uint32(i)/2+1, mm.Unmap, rng(0x1000, 0x2000))
				if i%2 == 0 {
					rs[i].Phase = mm.PhaseBegin
				}
			}
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				r := &rs[i%len(rs)]
				r.Time += 5 * time.Microsecond * time.Duration(processes)
				a.Add(r)
				i++
			}
		})
	}
}

func BenchmarkSnapshot(b *testing.B) {
	for _, processes := range []uint32{1, 10000} {
		b.Run(fmt.Sprintf("processes=%d", processes), func(b *testing.B) {
			a, err := New(Options{})
			if err != nil {
				b.Fatal(err)
			}
			for i := range processes {
				r := event(sec, i+1, mm.Unmap, rng(0x1000, 0x2000))
				a.Add(&r)
			}
			b.ReportAllocs()
			for b.Loop() {
				a.Snapshot(Query{Window: time.Minute, PID: 1})
			}
		})
	}
}
