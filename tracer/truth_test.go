// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ummu/ummu/internal/truth"
	"github.com/ummu/ummu/mm"
)

// Every row of the truth table, by the hooks as they are, and by copies: with
// the first programs taken away, and with the second ones too.
func TestTruthByCopies(t *testing.T) {
	programs, err := truth.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	firsts := []string{"tp_btf/sys_enter", "tp_btf/sys_exit", "raw_tp/io_uring_submit_req", "raw_tp/io_uring_queue_async_work", "raw_tp/io_uring_complete",
		"raw_tp/sched_process_exec", "raw_tp/sched_process_exit", "raw_tp/exit_mmap"}
	seconds := []string{"tp_btf2/sys_enter", "tp_btf2/sys_exit", "raw_tp2/io_uring_submit_req", "raw_tp2/io_uring_queue_async_work", "raw_tp2/io_uring_complete",
		"raw_tp2/exit_mmap"}
	for _, c := range []struct {
		name string
		gone []string
	}{{"all", nil}, {"backwards", nil}, {"second", firsts}, {"classic", slices.Concat(firsts, seconds)}} {
		t.Run(c.name, func(t *testing.T) {
			tr, err := Open(Options{copied: true, backwards: c.name == "backwards"})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() {
				if err := tr.Close(); err != nil {
					t.Error(err)
				}
			})
			for _, name := range c.gone {
				if !strings.HasPrefix(name, "raw_tp/io_uring_") || tr.attached(name) {
					tr.detach(t, name)
				}
			}
			traceTruth(t, tr, programs, truth.Impls()[2])
		})
	}
}

// attached reports whether the kernel has the hook.
func (t *Tracer) attached(name string) bool {
	return slices.ContainsFunc(t.coverage.Hooks, func(h HookStatus) bool { return h.Name == name && h.Attached })
}

// Every row of the truth table: what changes something has its begin and its
// end with the range of the table, what changes nothing has neither, and what
// the tier cannot see is in its gaps.
func TestTruth(t *testing.T) {
	programs, err := truth.Build(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for _, impl := range truth.Impls() {
		if impl.Preload != "" {
			continue // an allocator is no other way of making a call
		}
		t.Run(impl.Name, func(t *testing.T) {
			traceTruth(t, shared, programs, impl)
		})
	}
}

func traceTruth(t *testing.T, tr *Tracer, programs *truth.Programs, impl truth.Impl) {
	p, err := programs.Start(impl)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	s := watchTruth(t, tr, p)
	for i := range truth.Rows {
		row := &truth.Rows[i]
		if !row.By(impl) || row.Refused != 0 {
			continue
		}
		t.Run(row.Name, func(t *testing.T) { traceRow(t, tr, p, s, row) })
		if row.Oracle == truth.CPUOnly { // the space is gone
			s = watchTruth(t, tr, p)
		}
	}
}

func watchTruth(t *testing.T, tr *Tracer, p *truth.Proc) *Stream {
	t.Helper()
	s, err := tr.Watch(PID(p.PID()), WatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func traceRow(t *testing.T, tr *Tracer, p *truth.Proc, s *Stream, row *truth.Row) {
	r, err := row.Setup(p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Teardown(); err != nil {
			t.Error(err)
		}
	}()
	if ret, err := r.Register(); ret != 0 || err != nil {
		t.Fatalf("register: %d, %v", ret, err)
	}
	flushed(t, s)
	if err := r.Act(); err != nil {
		t.Fatal(err)
	}
	records := flushed(t, s)
	// watched, it does to the registration what it does unwatched
	if seen, err := r.Oracle(); err != nil || seen != row.Want {
		t.Errorf("pages %s, want %s (%v)", seen, row.Want, err)
	}

	complaints := judge(tr.Coverage(), r, records)
	if len(complaints) > 0 {
		for i := range records {
			if rec := &records[i]; rec.Touches(r.Buffer()) || rec.Kind == mm.Map || row.Name == "exec" {
				t.Logf("%d %v %v %v -> %v pid %d call %v flags %b ret %d", rec.Seq, rec.Kind, rec.Phase, rec.Range, rec.To, rec.PID, rec.Call, rec.Flags, rec.Ret)
			}
		}
		t.Errorf("buffer %v: %s", r.Buffer(), strings.Join(complaints, "; "))
		return
	}

	// the judge would have noticed
	if row.Changes() && row.Gap == "" && judge(tr.Coverage(), r, nil) == nil {
		t.Error("judge is content without records")
	}
	if row.Gap != "" && judge(Coverage{}, r, records) == nil {
		t.Error("judge is content without the gap")
	}
	stray := mm.Record{Kind: mm.Replace, Phase: mm.PhaseBegin, Range: r.Span(truth.Span{First: -1, End: 1}), PID: uint32(p.PID())}
	if !slices.Contains(row.May, stray.Kind) && judge(tr.Coverage(), r, append(records, stray)) == nil {
		t.Error("judge is content with a stray record")
	}
}

// flushed returns the records made so far.
func flushed(t *testing.T, s *Stream) []mm.Record {
	t.Helper()
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	var records []mm.Record
	for {
		var rec mm.Record
		err := s.Read(&rec)
		if errors.Is(err, ErrFlushed) {
			return records
		}
		if err != nil {
			t.Fatal(err)
		}
		records = append(records, rec)
	}
}

// judge says what is wrong with the records of a row's operation.
func judge(cov Coverage, r *truth.Run, records []mm.Record) (complaints []string) {
	complain := func(format string, args ...any) { complaints = append(complaints, fmt.Sprintf(format, args...)) }
	row := r.Row
	expected := row.Records
	if row.Gap != "" {
		expected = nil
		if !slices.ContainsFunc(cov.Gaps, func(g Gap) bool { return g.Name == row.Gap }) {
			complain("cannot be seen, and gap %q is not listed", row.Gap)
		}
	}
	explained := make([]bool, len(records))
	for _, e := range expected {
		var begins, ends int
		coarse := false // records that stand for several expectations
		for i := range records {
			rec := &records[i]
			if !e.Match(r, rec) {
				continue
			}
			explained[i] = true
			coarse = coarse || rec.Flags&mm.Superset != 0
			switch {
			case rec.Phase == mm.PhaseBegin:
				begins++
			case e.Kind.IsChange() && ends == begins:
				complain("%+v: end before begin", e)
			default:
				ends++
			}
		}
		want := max(e.Counted, 1)
		right := func(n int) bool { return n == want || n > want && coarse }
		if !right(ends) || e.Kind.IsChange() && !right(begins) {
			complain("%+v: %d begins, %d ends, want %d", e, begins, ends, want)
		}
	}
	failed := len(row.Errnos) != 0 && len(expected) != 0
	for i := range records {
		rec := &records[i]
		switch {
		case rec.Kind == mm.Lost:
			complain("%d records lost", rec.Lost)
		case rec.Flags&mm.Unpaired != 0:
			complain("%v %v has no begin", rec.Kind, rec.Range)
		case rec.Touches(r.Buffer()) && !explained[i] && !slices.Contains(row.May, rec.Kind):
			complain("%v %v of %v, and nothing like it happened", rec.Kind, rec.Phase, rec.Range)
		case explained[i] && rec.Phase == mm.PhaseEnd && rec.Ret == r.Result:
			failed = false
		}
	}
	if failed {
		complain("no end with the result %d", r.Result)
	}
	return complaints
}
