// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"io"
	"time"

	"github.com/ummu/ummu/internal/detector"
	"github.com/ummu/ummu/internal/findings"
	"github.com/ummu/ummu/internal/pairs"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

// sink is a form of output. It gets every selected record and every selected
// change, and uses what its form shows.
type sink interface {
	record(*mm.Record) error
	change(*pairs.Change) error
	flush() error
	end(*recording.Summary) error
}

// view selects, counts, and hands records to a sink.
type view struct {
	filter  *filter
	sink    sink
	pairs   *pairs.Joiner
	hunt    *hunt // nil: stale registrations are not looked for
	tier    string
	byKind  [256]uint64
	changes [256]recording.Count
	sum     recording.Summary
}

func newView(f *filter, s sink, tier string) *view {
	v := &view{filter: f, sink: s, tier: tier}
	v.pairs = pairs.New(pairs.BeginsOnly(tier), v.change)
	return v
}

func (v *view) record(r *mm.Record) error {
	switch {
	case r.Kind == mm.Lost:
		v.sum.Lost += r.Lost
	case !v.filter.match(r):
		v.sum.Filtered++
		return v.pairs.Add(r) // its partner may be selected
	default:
		v.sum.Records++
	}
	v.byKind[r.Kind]++
	if err := v.sink.record(r); err != nil {
		return err
	}
	return v.pairs.Add(r)
}

func (v *view) change(c *pairs.Change) error {
	if !v.filter.match(&c.Record) {
		return nil
	}
	n := &v.changes[c.Kind]
	n.Count++
	if c.Ret < 0 {
		n.Failed++
	}
	if c.Range.End != mm.MaxAddr {
		n.Bytes += c.Range.Len()
	}
	return v.sink.change(c)
}

// end completes the summary and prints it. reason says why the stream is not
// complete, apart from losses; empty if it is.
func (v *view) end(lostAt []string, reason string) (*recording.Summary, error) {
	if err := v.pairs.End(); err != nil {
		return nil, err
	}
	s := &v.sum
	if v.hunt != nil {
		if err := v.hunt.end(s); err != nil {
			return nil, err
		}
	}
	s.ByKind, s.Changes = map[string]uint64{}, map[string]recording.Count{}
	var all uint64
	for k, n := range v.byKind {
		if n != 0 {
			s.ByKind[mm.Kind(k).String()] = n
			all += n
		}
		if c := v.changes[k]; c.Count != 0 && mm.Kind(k) != mm.Lost {
			s.Changes[mm.Kind(k).String()] = c
		}
	}
	s.ByTier = map[string]uint64{v.tier: all}
	s.LostAt = lostAt
	s.Reason = reason
	if s.Lost > 0 && reason == "" {
		s.Reason = fmt.Sprintf("%d events lost", s.Lost)
	}
	if len(s.Gaps) > 0 && s.Reason == "" {
		s.Reason = fmt.Sprintf("not seen: %d address space(s)", len(s.Gaps))
		if v.hunt != nil {
			s.Reason = "not seen: " + s.Gaps[0].What
		}
	}
	s.Complete = s.Reason == ""
	return s, v.sink.end(s)
}

// newSink returns the sink for a format and writes the meta line. w is
// written in large pieces, and at each flush.
func newSink(f *streamFlags, w io.Writer, m *recording.Meta, colour bool) (sink, error) {
	if f.format.Value == "table" {
		return newTable(f, w, m, colour)
	}
	return newLines(f, w, m)
}

// lines writes NDJSON, or the same objects inside one JSON document.
type lines struct {
	enc      *recording.Encoder
	out      *bufio.Writer
	buf      []byte
	document bool
	quiet    bool
	phase    mm.Phase // 0: both
	any      bool
	report   *detector.Report // nil: findings are not looked for
	found    []byte           // of a document
}

func newLines(f *streamFlags, w io.Writer, m *recording.Meta) (*lines, error) {
	enc, err := recording.NewEncoder(m, hookName)
	if err != nil {
		return nil, err
	}
	l := &lines{enc: enc, out: bufio.NewWriterSize(w, 256<<10), document: f.format.Value == "json", quiet: f.summary}
	switch f.phase.Value {
	case "begin":
		l.phase = mm.PhaseBegin
	case "end":
		l.phase = mm.PhaseEnd
	}
	if l.buf, err = recording.AppendMeta(nil, m); err != nil {
		return nil, err
	}
	if l.document {
		// {"meta":{...}} without its last brace and newline
		l.buf = append(l.buf[:len(l.buf)-2], ",\"records\":["...)
	}
	return l, write(l.out, l.buf)
}

func (l *lines) record(r *mm.Record) error {
	if l.quiet || l.phase != 0 && l.phase != r.Phase && r.Kind != mm.Lost {
		return nil
	}
	l.buf = l.buf[:0]
	if l.document {
		if l.any {
			l.buf = append(l.buf, ',')
		}
		l.buf = append(l.buf, '\n')
		l.any = true
	}
	l.buf = l.enc.AppendRecord(l.buf, r)
	if l.document {
		l.buf = l.buf[:len(l.buf)-1]
	}
	return write(l.out, l.buf)
}

func (l *lines) change(*pairs.Change) error { return nil }
func (l *lines) flush() error               { return l.out.Flush() }

func (l *lines) finds(p *detector.Report) { l.report = p }

func (l *lines) stacks(frames func(uint32) []symbol.Frame) { l.enc.Stacks(frames) }

// finding writes a line; a document has them at its end.
func (l *lines) finding(f *findings.Finding, final bool) (err error) {
	if !l.document {
		if l.buf, err = l.report.AppendLine(l.buf[:0], f, final); err != nil {
			return err
		}
		return write(l.out, l.buf)
	}
	if !final {
		return nil
	}
	if len(l.found) > 0 {
		l.found = append(l.found, ',')
	}
	l.found, err = l.report.AppendObject(append(l.found, '\n'), f, true)
	return err
}

func (l *lines) end(s *recording.Summary) error {
	b, err := recording.AppendSummary(nil, s)
	if err != nil {
		return err
	}
	if l.document {
		// {"summary":{...}} without its first brace
		head := []byte("\n],")
		if l.report != nil {
			head = append(append(append(head, `"findings":[`...), l.found...), "\n],"...)
		}
		b = append(head, b[1:]...)
	}
	if err := write(l.out, b); err != nil {
		return err
	}
	return l.out.Flush()
}

// blocks writes a recording. A block is written when it is full, or when
// nothing came for a while and the last one is a second old.
type blocks struct {
	enc  *recording.Encoder
	out  *recording.Writer
	buf  []byte
	last time.Time
}

const blockAge = time.Second

func newBlocks(w io.Writer, m *recording.Meta) (*blocks, error) {
	enc, err := recording.NewEncoder(m, hookName)
	if err != nil {
		return nil, err
	}
	out, err := recording.NewWriter(w)
	if err != nil {
		return nil, err
	}
	line, err := recording.AppendMeta(nil, m)
	if err != nil {
		return nil, err
	}
	if err := write(out, line); err != nil {
		return nil, err
	}
	// A full disk shows before the program starts.
	return &blocks{enc: enc, out: out, last: time.Now()}, out.Flush()
}

func (b *blocks) record(r *mm.Record) error {
	b.buf = b.enc.AppendRecord(b.buf[:0], r)
	return write(b.out, b.buf)
}

func (b *blocks) stacks(frames func(uint32) []symbol.Frame) { b.enc.Stacks(frames) }

func (b *blocks) change(*pairs.Change) error { return nil }

func (b *blocks) flush() error {
	if time.Since(b.last) < blockAge {
		return nil
	}
	b.last = time.Now()
	return b.out.Flush()
}

func (b *blocks) end(s *recording.Summary) error {
	line, err := recording.AppendSummary(nil, s)
	if err != nil {
		return err
	}
	if err := write(b.out, line); err != nil {
		return err
	}
	return b.out.Flush()
}
