// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"testing"

	"go.uber.org/goleak"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func pages(first, last int) mm.Range {
	const base = 0x7f0000000000
	n := mm.Addr(mm.PageSize())
	return mm.Range{Start: base + mm.Addr(first)*n, End: base + mm.Addr(last)*n}
}

// pair makes a producer and its watch, closed at the end of the test.
func pair(t testing.TB, o feedtest.Options) (*feedtest.Producer, *feed.Watch) {
	t.Helper()
	p, err := feedtest.New(o)
	if err != nil {
		t.Fatal(err)
	}
	w, err := p.Watch()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Errorf("Close: %v", err)
		}
		p.Close()
	})
	return p, w
}

// event is what a callback saw, short.
type event struct {
	Kind  mm.Kind
	Range mm.Range
	Lost  uint64
}

func short(r *mm.Record) event {
	e := event{Kind: r.Kind, Lost: r.Lost}
	if r.Kind.IsChange() {
		e.Range = r.Range
	}
	return e
}

// drain collects what a drain delivers.
func drain(w *feed.Watch) (feed.State, []event) {
	var got []event
	s := w.Drain(func(r *mm.Record) { got = append(got, short(r)) })
	return s, got
}

func commit(w *feed.Watch, r mm.Range) feed.Verdict {
	return w.Commit(w.Begin(r), nil, func() {})
}
