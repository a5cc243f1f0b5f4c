// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"

	"github.com/ummu/ummu/mm"
)

// Record holds the fields of one NDJSON record that the comparison needs. It
// is decoded from the published schema and not with the program's own code,
// so that a mistake there is found.
type Record struct {
	Seq   uint64
	PID   int
	TID   int
	Comm  string
	Kind  mm.Kind
	Phase mm.Phase
	Range mm.Range
	To    mm.Range
	Call  string // the name alone
	Marks []string
	Ret   *int64
	Child int // tid of the new task (fork)
}

// Has reports whether the record carries a mark, such as "superset".
func (r *Record) Has(mark string) bool { return slices.Contains(r.Marks, mark) }

func (r *Record) String() string {
	s := fmt.Sprintf("#%d %s %s %v", r.Seq, r.Kind, r.Phase, r.Range)
	if !r.To.Empty() {
		s += " to " + r.To.String()
	}
	if r.Call != "" {
		s += " by " + r.Call
	}
	if r.Ret != nil {
		s += fmt.Sprintf(" ret %d", *r.Ret)
	}
	if len(r.Marks) > 0 {
		s += " " + strings.Join(r.Marks, ",")
	}
	return s
}

// A Stream is the NDJSON of one run.
type Stream struct {
	Tier     string
	Records  []Record
	Lost     uint64
	Complete bool
}

// ErrStream is what every error of [ParseStream] about the text wraps.
var ErrStream = errors.New("not understood as NDJSON of a run")

// line is any line: exactly one of Meta, Summary and a record.
type line struct {
	Meta *struct {
		Tier string `json:"tier"`
	} `json:"meta"`
	Summary *struct {
		Records  *uint64 `json:"records"`
		Lost     *uint64 `json:"lost"`
		Complete *bool   `json:"complete"`
	} `json:"summary"`
	Seq      uint64   `json:"seq"`
	PID      int      `json:"pid"`
	TID      int      `json:"tid"`
	Comm     string   `json:"comm"`
	Kind     string   `json:"kind"`
	Phase    string   `json:"phase"`
	Start    string   `json:"start"`
	End      string   `json:"end"`
	ToStart  string   `json:"to_start"`
	ToEnd    string   `json:"to_end"`
	Call     string   `json:"call"`
	Marks    []string `json:"marks"`
	Ret      *int64   `json:"ret"`
	ChildTID int      `json:"child_tid"`
}

// ParseStream reads the NDJSON of `ummufeed run -o ndjson`. Meta must come
// first, the summary last, and its counts must be those of the lines.
func ParseStream(r io.Reader) (*Stream, error) {
	var s Stream
	var n int
	var ended bool
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		n++
		if err := s.parse(sc.Bytes(), n, &ended); err != nil {
			return nil, fmt.Errorf("parse NDJSON line %d %.200q: %w", n, sc.Text(), err)
		}
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("read NDJSON: %w", err)
	}
	if !ended {
		return nil, fmt.Errorf("parse NDJSON: no summary after %d lines: %w", n, ErrStream)
	}
	return &s, nil
}

func (s *Stream) parse(text []byte, n int, ended *bool) error {
	var l line
	d := json.NewDecoder(bytes.NewReader(text))
	if err := d.Decode(&l); err != nil {
		return fmt.Errorf("%w: %w", ErrStream, err)
	}
	switch {
	case d.More(), *ended, (l.Meta != nil) != (n == 1):
		return ErrStream
	case l.Meta != nil:
		s.Tier = l.Meta.Tier
		return nil
	case l.Summary != nil:
		sum := l.Summary
		if sum.Records == nil || sum.Lost == nil || sum.Complete == nil {
			return ErrStream
		}
		var n uint64
		for i := range s.Records {
			if s.Records[i].Kind != mm.Lost {
				n++
			}
		}
		if *sum.Records != n {
			return fmt.Errorf("summary says %d records, there are %d: %w", *sum.Records, n, ErrStream)
		}
		s.Lost, s.Complete, *ended = *sum.Lost, *sum.Complete, true
		return nil
	}
	rec := Record{Seq: l.Seq, PID: l.PID, TID: l.TID, Comm: l.Comm, Marks: l.Marks, Ret: l.Ret, Child: l.ChildTID}
	rec.Call, _, _ = strings.Cut(l.Call, "(")
	var errs [6]error
	rec.Kind, errs[0] = mm.ParseKind(l.Kind)
	rec.Phase, errs[1] = mm.ParsePhase(l.Phase)
	rec.Range.Start, errs[2] = address(l.Start)
	rec.Range.End, errs[3] = address(l.End)
	rec.To.Start, errs[4] = address(l.ToStart)
	rec.To.End, errs[5] = address(l.ToEnd)
	if err := errors.Join(errs[:]...); err != nil {
		return fmt.Errorf("%w: %w", ErrStream, err)
	}
	s.Records = append(s.Records, rec)
	return nil
}

// address parses "0x..."; an empty string is 0.
func address(s string) (mm.Addr, error) {
	if s == "" {
		return 0, nil
	}
	hex, ok := strings.CutPrefix(s, "0x")
	n, err := strconv.ParseUint(hex, 16, 64)
	if !ok || err != nil {
		return 0, fmt.Errorf("address %q is not 0x and hexadecimal digits", s)
	}
	return mm.Addr(n), nil
}
