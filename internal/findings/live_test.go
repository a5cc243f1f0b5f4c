// SPDX-License-Identifier: Apache-2.0

package findings

import (
	"fmt"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/mm"
)

// What is registered, how often its range changed, and by what last.
func TestLive(t *testing.T) {
	var s stream
	s.reg(1, pages(10, 20), 0)
	s.reg(2, pages(40, 50), 0)
	s.reg(3, pages(60, 70), 0)
	s.change(mm.Protect, mprotect, pages(15, 30), 0, nil)
	s.change(mm.Unmap, munmap, pages(19, 25), 0, nil)
	s.change(mm.Move, mremap, pages(0, 2), 0, func(r *mm.Record) { r.To = pages(41, 43) })
	s.change(mm.Unmap, munmap, pages(62, 64), -22, nil) // none
	s.dereg(3, 0)
	s.add(mm.Record{Kind: mm.Register, Phase: mm.PhaseBegin, Range: pages(80, 90), Call: noCall, Registration: mm.Registration{Device: 1, By: mm.ByVerbs}, TID: 9, PID: 9})
	e := New(Options{})
	for i := range s.rs {
		e.Add(&s.rs[i])
	}
	var got []string
	e.Live(func(l *Live) {
		got = append(got, fmt.Sprint(l.Registration.Registration.Handle, l.Changes, l.Last.Kind, l.Finding != nil, l.Since > l.Registration.Time))
	})
	if d := cmp.Diff([]string{"1 2 unmap true true", "2 1 move true true"}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// With bounds nothing is silent: what is too much is counted.
func TestBounds(t *testing.T) {
	var s stream
	for i := range 20 {
		at := mm.Addr(100 * (i + 1))
		s.reg(uint64(i), pages(at, at+10), 0)
		s.change(mm.Unmap, munmap, pages(at, at+1), 0, nil)
	}
	e := New(Options{MaxLive: 15, Keep: 8})
	for i := range s.rs {
		e.Add(&s.rs[i])
	}
	st := e.Stats()
	if st.Live != 15 || st.Untracked != 5 || e.Incomplete() == "" {
		t.Errorf("%+v, %q", st, e.Incomplete())
	}
	fs := e.Findings()
	if len(fs) > 8 || int(st.Forgotten)+len(fs) != 15 || fs[len(fs)-1].ID != 15 {
		t.Errorf("%d findings, %d forgotten, the last is %d", len(fs), st.Forgotten, fs[len(fs)-1].ID)
	}
	for i := 1; i < len(fs); i++ {
		if fs[i].ID != fs[i-1].ID+1 {
			t.Errorf("finding %d follows %d", fs[i].ID, fs[i-1].ID)
		}
	}
}
