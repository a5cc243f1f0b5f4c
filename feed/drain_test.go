// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

var everything = feedtest.Options{Everything: true}

// Each case does something to a watch that was valid, then drains once.
func TestDrain(t *testing.T) {
	unmap := func(n int) event { return event{Kind: mm.Unmap, Range: pages(n, n+1)} }
	change := func(p *feedtest.Producer, n int) { p.Change(mm.Unmap, pages(n, n+1)) }
	lost := func(n uint64) event { return event{Kind: mm.Lost, Lost: n} }
	exit := event{Kind: mm.Exit}
	cases := []struct {
		name  string
		do    func(p *feedtest.Producer)
		state feed.State
		want  []event
	}{
		{"nothing", func(*feedtest.Producer) {}, feed.Fresh, nil},
		{"one change", func(p *feedtest.Producer) { change(p, 1) }, feed.Fresh, []event{unmap(1)}},
		{"order", func(p *feedtest.Producer) { change(p, 1); change(p, 2); change(p, 3) }, feed.Fresh, []event{unmap(1), unmap(2), unmap(3)}},
		{"discard", func(p *feedtest.Producer) { change(p, 1); p.Discard(33); change(p, 2) }, feed.Fresh, []event{unmap(1), unmap(2)}},
		{"loss at the end", func(p *feedtest.Producer) { change(p, 1); p.Lose(3) }, feed.Fresh, []event{unmap(1), lost(3)}},
		{"loss before a later record", func(p *feedtest.Producer) { change(p, 1); p.Lose(3); change(p, 2); p.Lose(1) }, feed.Fresh,
			[]event{unmap(1), lost(3), unmap(2), lost(1)}},
		{"300 losses are no death", func(p *feedtest.Producer) { p.Lose(300) }, feed.Fresh, []event{lost(300)}},
		{"unpaired end", func(p *feedtest.Producer) { p.Unpaired() }, feed.Fresh, []event{lost(1)}},
		{"epoch", func(p *feedtest.Producer) { change(p, 1); p.LoseAll() }, feed.Fresh, []event{lost(0), unmap(1)}},
		{"word moved without a record", func(p *feedtest.Producer) { atomic.AddUint64(&p.Status.Generation, layout.GenRecord) }, feed.Fresh, []event{lost(0)}},
		{"word lost without a counter", func(p *feedtest.Producer) { atomic.AddUint64(&p.Status.Generation, layout.GenLoss) }, feed.Fresh, []event{lost(0)}},
		{"death", func(p *feedtest.Producer) { change(p, 1); p.Kill() }, feed.DeadState, []event{unmap(1), exit}},
		{"death after many losses", func(p *feedtest.Producer) { p.Lose(255); p.Kill() }, feed.DeadState, []event{exit}},
		{"death without a counter", func(p *feedtest.Producer) {
			atomic.AddUint64(&p.Status.Generation, layout.GenDeath)
		}, feed.DeadState, []event{exit}},
		{"untracked", func(p *feedtest.Producer) { p.Untracked() }, feed.DeadState, []event{exit}},
		{"kernel side ends", func(p *feedtest.Producer) { p.KillAll() }, feed.DeadState, []event{exit}},
		{"a change of anybody untracked", func(p *feedtest.Producer) { p.UntrackedAll() }, feed.DeadState, []event{exit}},
		{"600 losses of everybody are no death", func(p *feedtest.Producer) {
			for range 600 {
				p.LoseAll()
			}
		}, feed.Fresh, []event{lost(0)}},
		{"end of the kernel side after 65,280 losses", func(p *feedtest.Producer) {
			for range 65_280 {
				p.LoseAll()
			}
			p.KillAll()
		}, feed.DeadState, []event{exit}},
		{"generation zero", func(p *feedtest.Producer) { atomic.StoreUint64(&p.Status.Generation, 0) }, feed.DeadState, []event{exit}},
		{"counted later", func(p *feedtest.Producer) {
			c := p.Prepare(mm.Zap, pages(1, 2), mm.Range{})
			c.Start()
			c.Reserve()
			c.Submit()
		}, feed.Fresh, []event{{Kind: mm.Zap, Range: pages(1, 2)}}},
		{"record being written", func(p *feedtest.Producer) {
			change(p, 1)
			p.Prepare(mm.Zap, pages(7, 8), mm.Range{}).Reserve()
			change(p, 2)
		}, feed.Busy, []event{unmap(1)}},
		{"death behind a record being written", func(p *feedtest.Producer) {
			p.Prepare(mm.Zap, pages(7, 8), mm.Range{}).Reserve()
			p.Kill()
		}, feed.DeadState, []event{exit}},
		{"information", func(p *feedtest.Producer) { p.Begin(mm.Fork, pages(0, 1), mm.Range{}); change(p, 1) }, feed.Fresh, []event{unmap(1)}},
		{"unknown kind", func(p *feedtest.Producer) { p.Begin(77, pages(0, 1), mm.Range{}) }, feed.Fresh, []event{lost(0)}},
		{"change of nothing", func(p *feedtest.Producer) { p.Begin(mm.Unmap, mm.Range{Start: 9, End: 9}, mm.Range{}) }, feed.Fresh, []event{lost(0)}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			p, w := pair(t, everything)
			if !w.Valid() {
				t.Fatal("a new watch is not valid")
			}
			c.do(p)
			state, got := drain(w)
			if state != c.state {
				t.Errorf("state = %v, want %v", state, c.state)
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("delivered (-want +got):\n%s", d)
			}
			if v := w.Valid(); v != (c.state == feed.Fresh) {
				t.Errorf("Valid() = %v after a drain that was %v", v, state)
			}
			if c.state != feed.Busy {
				if again, got := drain(w); again != c.state || got != nil {
					t.Errorf("second drain: %v, delivered %v", again, got)
				}
			}
		})
	}
}

func TestDrainDecodesEverything(t *testing.T) {
	p, w := pair(t, everything)
	c := p.Prepare(mm.Move, pages(1, 3), pages(5, 9))
	c.PID, c.TID, c.Flags = 12, 34, mm.Maybe|mm.Superset
	c.Start()
	c.Reserve()
	c.Submit()
	c.Count()
	for r := range w.Changes() {
		if r.Time <= 0 {
			t.Errorf("time %v", r.Time)
		}
		got := *r
		got.Time = 0
		want := mm.Record{Seq: 1, Range: pages(1, 3), To: pages(5, 9), PID: 12, TID: 34, Flags: mm.Maybe | mm.Superset, Kind: mm.Move, Phase: mm.PhaseBegin}
		if d := cmp.Diff(want, got); d != "" {
			t.Error(d)
		}
	}
	if !w.Valid() {
		t.Error("not valid after all changes were seen")
	}
}

// The generation must not be published past a record being written, and is
// once it was.
func TestDrainUnfinished(t *testing.T) {
	p, w := pair(t, everything)
	slow := p.Prepare(mm.Unmap, pages(1, 2), mm.Range{})
	slow.Start()
	slow.Reserve()
	p.Change(mm.Zap, pages(3, 4))
	for range 3 {
		if s, got := drain(w); s != feed.Busy || got != nil || w.Valid() {
			t.Fatalf("before the commit: %v, %v, valid %v", s, got, w.Valid())
		}
	}
	if w.Stats().Busy != 3 {
		t.Errorf("Busy = %d", w.Stats().Busy)
	}
	slow.Submit()
	slow.Count()
	s, got := drain(w)
	if d := cmp.Diff([]event{{Kind: mm.Unmap, Range: pages(1, 2)}, {Kind: mm.Zap, Range: pages(3, 4)}}, got); s != feed.Fresh || d != "" || !w.Valid() {
		t.Errorf("after the commit: %v, valid %v\n%s", s, w.Valid(), d)
	}
}

// A ring that nobody reads fills, and then everything is a counted loss;
// sent = received + lost.
func TestDrainFullRing(t *testing.T) {
	p, w := pair(t, feedtest.Options{Everything: true, RingBytes: 1 << 16})
	const sent = 100_000
	for i := range sent {
		p.Change(mm.Zap, pages(i, i+1))
	}
	var received, lost, next int
	var lastSeq uint64
	count := func(r *mm.Record) {
		switch {
		case r.Kind == mm.Lost:
			lost += int(r.Lost)
		case r.Range != pages(next, next+1):
			t.Fatalf("record %d is of %v", next, r.Range)
		default:
			received++
			next++
		}
		lastSeq = r.Seq
	}
	if s := w.Drain(count); s != feed.Fresh || !w.Valid() {
		t.Fatalf("drain: %v", s)
	}
	if received+lost != sent || received == 0 || lost == 0 || lastSeq != sent {
		t.Errorf("sent %d, received %d, lost %d, last number %d", sent, received, lost, lastSeq)
	}
	p.Change(mm.Zap, pages(next, next+1))
	if w.Drain(count); received+lost != sent+1 {
		t.Errorf("after the loss: received %d, lost %d", received, lost)
	}
}

// Records, discards of every size and the two copies of the data area.
func TestDrainWrapAround(t *testing.T) {
	p, w := pair(t, feedtest.Options{Everything: true, RingBytes: int(mm.PageSize())})
	n := 0
	for i := range 20_000 {
		if !p.Discard(uint32(i % 701)) {
			t.Fatal("no room")
		}
		p.Change(mm.Zap, pages(i, i+1))
		if i%3 != 0 {
			continue
		}
		s := w.Drain(func(r *mm.Record) {
			if r.Kind != mm.Zap || r.Range != pages(n, n+1) {
				t.Fatalf("record %d: %v %v", n, r.Kind, r.Range)
			}
			n++
		})
		if s != feed.Fresh || n != i+1 {
			t.Fatalf("round %d: %v, %d records", i, s, n)
		}
	}
}

func TestDrainEndsUnderAFasterProducer(t *testing.T) {
	p, w := pair(t, everything)
	p.Change(mm.Zap, pages(0, 1))
	n := 0
	if s := w.Drain(func(*mm.Record) { n++; p.Change(mm.Zap, pages(0, 1)) }); s != feed.Fresh || n != 1 {
		t.Errorf("%v after %d records", s, n)
	}
	if w.Valid() {
		t.Error("valid, with a change behind the drain")
	}
}

func TestChangesStopsEarly(t *testing.T) {
	p, w := pair(t, everything)
	for i := range 5 {
		p.Change(mm.Zap, pages(i, i+1))
	}
	p.Lose(2)
	var got []event
	for round := 0; !w.Valid(); round++ {
		if round == 10 {
			t.Fatal("never valid")
		}
		for r := range w.Changes() {
			got = append(got, short(r))
			break
		}
	}
	want := []event{{Kind: mm.Lost, Lost: 2}}
	for i := range 5 {
		want = append(want[:i], event{Kind: mm.Zap, Range: pages(i, i+1)}, event{Kind: mm.Lost, Lost: 2})
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
}

func TestDrainPanicDeliversAgain(t *testing.T) {
	for name, do := range map[string]func(*feedtest.Producer){
		"change": func(p *feedtest.Producer) { p.Change(mm.Zap, pages(1, 2)) },
		"loss":   func(p *feedtest.Producer) { p.Lose(1) },
		"epoch":  func(p *feedtest.Producer) { p.LoseAll() },
		"death":  func(p *feedtest.Producer) { p.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			p, w := pair(t, everything)
			do(p)
			var first mm.Record
			func() {
				defer func() { recover() }()
				w.Drain(func(r *mm.Record) { first = *r; panic("callback") })
			}()
			if w.Valid() {
				t.Fatal("valid after a callback that panicked")
			}
			n := 0
			w.Drain(func(r *mm.Record) {
				n++
				if r.Kind != first.Kind || r.Seq != first.Seq {
					t.Errorf("delivered %v %d, then %v %d", first.Kind, first.Seq, r.Kind, r.Seq)
				}
			})
			if n != 1 {
				t.Errorf("delivered %d times after the panic", n)
			}
		})
	}
}

// Every method is called from a callback; none hangs, and none lies.
func TestReentry(t *testing.T) {
	p, w := pair(t, everything)
	p.Change(mm.Zap, pages(1, 2))
	calls := 0
	w.Drain(func(*mm.Record) {
		calls++
		if w.Valid() {
			t.Error("valid during the drain")
		}
		if s, _ := drain(w); s != feed.Busy {
			t.Errorf("nested Drain = %v", s)
		}
		for range w.Changes() {
			t.Error("nested Changes yields")
		}
		if v := commit(w, pages(5, 6)); v != feed.InFlight {
			t.Errorf("nested Commit = %v", v)
		}
		w.Abandon(w.Begin(pages(5, 6)))
		w.Forget(pages(5, 6))
		w.Stats()
		if err := w.Wait(t.Context()); err != nil {
			t.Error(err)
		}
	})
	if calls != 1 || !w.Valid() {
		t.Errorf("%d calls, valid %v", calls, w.Valid())
	}
	p.Change(mm.Zap, pages(1, 2))
	w.Drain(func(*mm.Record) {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	if s, _ := drain(w); s != feed.DeadState || w.Valid() {
		t.Errorf("after Close from a callback: %v", s)
	}
}

func TestDead(t *testing.T) {
	w := feed.Dead()
	if w.Valid() {
		t.Error("valid")
	}
	if s, got := drain(w); s != feed.DeadState || got != nil {
		t.Error(s, got)
	}
	for range w.Changes() {
		t.Error("yields")
	}
	if v := commit(w, pages(0, 1)); v != feed.IsDead {
		t.Error(v)
	}
	w.Abandon(w.Begin(pages(0, 1)))
	w.Forget(pages(0, 1))
	if err := w.Wait(t.Context()); err != nil {
		t.Error(err)
	}
	if err := w.Close(); err != nil || w.Gaps() != 0 || w.Tier() != 0 {
		t.Error(err)
	}
}

// The end of the kernel side is for ever; what it could not track ends the
// watches that there were.
func TestNewAfterTheEnd(t *testing.T) {
	for name, c := range map[string]struct {
		do    func(*feedtest.Producer)
		valid bool
	}{
		"kernel side ended":  {(*feedtest.Producer).KillAll, false},
		"untracked change":   {(*feedtest.Producer).UntrackedAll, true},
		"losses of everyone": {(*feedtest.Producer).LoseAll, true},
	} {
		t.Run(name, func(t *testing.T) {
			p, old := pair(t, everything)
			c.do(p)
			old.Close()
			w, err := p.Watch()
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			if w.Valid() != c.valid {
				t.Errorf("valid: %v", w.Valid())
			}
			if s, _ := drain(w); (s == feed.DeadState) == c.valid {
				t.Errorf("drain: %v", s)
			}
		})
	}
}
