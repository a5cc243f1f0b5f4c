// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/detector"
	"github.com/ummu/ummu/internal/pairs"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/mm"
)

// table writes lines for people, in the manner of strace.
type table struct {
	found
	out    *bufio.Writer
	calls  *calls.Table
	zero   time.Time
	tier   string
	buf    []byte
	colour bool
	quiet  bool
	phases bool // one line per record, not per change
	phase  mm.Phase
	marks  []string
}

func newTable(f *streamFlags, w io.Writer, m *recording.Meta, colour bool) (*table, error) {
	ct, err := calls.For(m.Arch)
	if err != nil {
		return nil, err
	}
	t := &table{out: bufio.NewWriterSize(w, 64<<10), calls: ct, zero: m.MonotonicZero, tier: m.Tier, colour: colour, quiet: f.summary}
	switch f.phase.Value {
	case "begin":
		t.phases, t.phase = true, mm.PhaseBegin
	case "end":
		t.phases, t.phase = true, mm.PhaseEnd
	case "both":
		t.phases = true
	}
	if !t.quiet {
		t.cell("TIME", 15)
		t.right("PID", 8)
		t.right("TID", 8)
		t.buf = append(t.buf, ' ')
		t.cell("COMM", 15)
		t.cell(" KIND", 9)
		t.right("RANGE", 27)
		t.right("SIZE", 8)
		t.buf = append(t.buf, "  CALL = RESULT  [MARKS]  HOOK\n"...)
		if err := write(t.out, t.buf); err != nil {
			return nil, err
		}
	}
	return t, nil
}

func (t *table) cell(s string, width int) {
	t.buf = append(t.buf, s...)
	for n := utf8.RuneCountInString(s); n < width; n++ {
		t.buf = append(t.buf, ' ')
	}
}

func (t *table) right(s string, width int) {
	for n := utf8.RuneCountInString(s); n < width; n++ {
		t.buf = append(t.buf, ' ')
	}
	t.buf = append(t.buf, s...)
}

func (t *table) record(r *mm.Record) error {
	if !t.phases || t.phase != 0 && t.phase != r.Phase && r.Kind != mm.Lost {
		return nil
	}
	return t.line(r, r.Phase == mm.PhaseBegin)
}

func (t *table) change(c *pairs.Change) error {
	if t.phases {
		return nil
	}
	return t.line(&c.Record, c.Open)
}

// line is one line. open: the result is not known.
func (t *table) line(r *mm.Record, open bool) error {
	if t.quiet {
		return nil
	}
	var scratch [64]byte
	t.buf = t.zero.Add(r.Time).Local().AppendFormat(t.buf[:0], "15:04:05.000000")
	t.rightNumber(uint64(r.PID), 8)
	t.rightNumber(uint64(r.TID), 8)
	t.buf = append(t.buf, ' ')
	t.cell(command.Printable(r.Comm.String()), 15)
	t.buf = append(t.buf, ' ')
	if t.colour {
		t.buf = append(t.buf, colours[r.Kind&15]...)
	}
	t.cell(r.Kind.String(), 8)
	if t.colour {
		t.buf = append(t.buf, "\x1b[0m"...)
	}
	t.right(string(command.AppendRange(scratch[:0], r.Range)), 27)
	t.right(string(command.AppendSize(scratch[:0], r.Range)), 8)
	if !r.To.Empty() {
		t.buf = append(t.buf, " -> "...)
		t.buf = command.AppendRange(t.buf, r.To)
	}
	t.buf = append(t.buf, "  "...)
	t.what(r, open)
	if r.Flags != 0 {
		t.marks = recording.Marks(t.marks[:0], r.Flags)
		t.buf = append(t.buf, "  ["...)
		for i, m := range t.marks {
			if i > 0 {
				t.buf = append(t.buf, ',')
			}
			t.buf = append(t.buf, m...)
		}
		t.buf = append(t.buf, ']')
	}
	if r.Hook != 0 {
		t.buf = append(append(t.buf, "  "...), hookName(r.Hook)...)
	}
	return write(t.out, append(t.buf, '\n'))
}

// what is the call and its result, or what else happened.
func (t *table) what(r *mm.Record, open bool) {
	switch {
	case r.Kind == mm.Lost:
		t.buf = append(strconv.AppendUint(t.buf, r.Lost, 10), " events lost: everything before is doubtful"...)
	case r.Kind == mm.Fork:
		t.buf = append(t.buf, "new task "...)
		t.buf = strconv.AppendUint(t.buf, uint64(r.ChildPID), 10)
		if r.ChildTID != r.ChildPID {
			t.buf = strconv.AppendUint(append(t.buf, '/'), uint64(r.ChildTID), 10)
		}
	case r.Kind == mm.Register || r.Kind == mm.Deregister:
		t.registration(r, open)
	case r.Call.ABI == mm.ABINone:
		t.buf = append(t.buf, '-')
	case pairs.BeginsOnly(t.tier):
		t.buf = append(t.buf, t.calls.Name(r.Call)...)
	default:
		t.buf = append(append(t.buf, t.calls.Name(r.Call)...), '(')
		if t.calls.HasArgs(r.Call) {
			t.buf = t.calls.AppendArgs(t.buf, r.Call, r.Arg)
		}
		t.buf = append(t.buf, ") = "...)
		if open {
			t.buf = append(t.buf, '?')
		} else {
			t.buf = t.calls.AppendResult(t.buf, r.Call, r.Ret)
		}
	}
}

func (t *table) rightNumber(n uint64, width int) {
	var b [20]byte
	t.right(string(strconv.AppendUint(b[:0], n, 10)), width)
}

var colours = [16]string{
	mm.Unmap: "\x1b[31m", mm.Replace: "\x1b[35m", mm.Zap: "\x1b[33m", mm.Move: "\x1b[36m", mm.Protect: "\x1b[34m",
	mm.Map: "\x1b[32m", mm.Lost: "\x1b[1;31m", mm.Fork: "\x1b[2m", mm.Exec: "\x1b[2m", mm.Exit: "\x1b[2m",
}

func (t *table) flush() error { return t.out.Flush() }

// registration is what is registered, by which call.
func (t *table) registration(r *mm.Record, open bool) {
	t.buf = append(t.buf, detector.Describe(&r.Registration)...)
	if name := t.calls.Name(r.Call); name != "" {
		t.buf = append(append(append(t.buf, " by "...), name...), '(')
		if t.calls.HasArgs(r.Call) {
			t.buf = t.calls.AppendArgs(t.buf, r.Call, r.Arg)
		}
		t.buf = append(t.buf, ')')
	}
	switch {
	case open:
		t.buf = append(t.buf, " = ?"...)
	case r.Ret < 0 && r.Registration.By == mm.ByVerbs:
		t.buf = append(t.buf, " failed"...)
	case r.Ret != 0:
		t.buf = t.calls.AppendResult(append(t.buf, " = "...), r.Call, r.Ret)
	}
}

func (t *table) end(s *recording.Summary) error {
	if err := write(t.out, summaryTable(t.text(), s, t.tier)); err != nil {
		return err
	}
	return t.out.Flush()
}

// summaryTable is the end of a stream for people: kinds, then one line.
func summaryTable(b []byte, s *recording.Summary, tier string) []byte {
	b = fmt.Appendf(b, "%-10s %10s %10s %12s\n", "KIND", "CHANGES", "FAILED", "BYTES")
	for _, k := range mm.Kinds() {
		if c, ok := s.Changes[k.String()]; ok {
			b = fmt.Appendf(b, "%-10s %10d %10d %12s\n", k, c.Count, c.Failed, command.Human(c.Bytes))
		}
	}
	for _, g := range s.Gaps {
		b = fmt.Appendf(b, "gap: %s: %s\n", g.Name, g.What)
	}
	if s.Registrations > 0 || s.Stale > 0 {
		b = fmt.Appendf(b, "stale: %d of %d registrations\n", s.Stale, s.Registrations)
	}
	if s.Complete {
		return fmt.Appendf(b, "complete: %d records, 0 lost, tier %s\n", s.Records, tier)
	}
	where := ""
	if len(s.LostAt) > 0 {
		where = " (" + strings.Join(s.LostAt, ", ") + ")"
	}
	return fmt.Appendf(b, "INCOMPLETE: %d records, %d lost%s, tier %s: %s\n", s.Records, s.Lost, where, tier, s.Reason)
}
