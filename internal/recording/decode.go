// SPDX-License-Identifier: Apache-2.0

package recording

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"

	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

// ErrLine is wrapped by every error of a line that is not of the schema.
var ErrLine = errors.New("not a line of the schema")

// Decoder turns record lines into records, without reflection. It is not safe
// for concurrent use.
type Decoder struct {
	zero  int64
	hooks map[string]mm.Hook

	prefix [20]byte // of the last time read: everything before the fraction
	second int64
	text   []byte // a string without its escapes
	stacks map[uint32][]symbol.Frame
	frames []symbol.Frame // of the line that is being decoded; nil if it has none
}

// NewDecoder returns a decoder for a stream with this meta line. hook names
// hooks; tracer.HookName does.
func NewDecoder(m *Meta, hook func(mm.Hook) string) (*Decoder, error) {
	if m.Schema != Schema {
		return nil, fmt.Errorf("schema %d, known is %d: %w", m.Schema, Schema, ErrVersion)
	}
	d := &Decoder{hooks: make(map[string]mm.Hook)}
	var err error
	if d.zero, err = nanoseconds(m.MonotonicZero); err != nil {
		return nil, fmt.Errorf("monotonic_zero: %w", err)
	}
	for i := 255; i >= 0; i-- { // hooks of one name: the first
		d.hooks[hook(mm.Hook(i))] = mm.Hook(i)
	}
	return d, nil
}

// decodeMeta and decodeSummary report whether line is such a line.
func decodeMeta(line []byte) (*Meta, bool, error) {
	var v struct {
		Meta *Meta `json:"meta"`
	}
	if !bytes.HasPrefix(line, []byte(`{"meta":`)) {
		return nil, false, nil
	}
	if err := json.Unmarshal(line, &v); err != nil || v.Meta == nil {
		return nil, true, fmt.Errorf("meta: %w", ErrLine)
	}
	return v.Meta, true, nil
}

func decodeSummary(line []byte) (*Summary, bool, error) {
	var v struct {
		Summary *Summary `json:"summary"`
	}
	if !bytes.HasPrefix(line, []byte(`{"summary":`)) {
		return nil, false, nil
	}
	if err := json.Unmarshal(line, &v); err != nil || v.Summary == nil {
		return nil, true, fmt.Errorf("summary: %w", ErrLine)
	}
	return v.Summary, true, nil
}

// Record decodes one line (its newline may be missing) into r. It fails with
// an error that wraps [ErrLine]; r then has no meaning. Fields that it does
// not know are skipped, a missing kind or phase is an error.
func (d *Decoder) Record(line []byte, r *mm.Record) error {
	if !json.Valid(line) {
		return fmt.Errorf("not JSON: %w", ErrLine)
	}
	*r = mm.Record{Call: mm.Call{ABI: mm.ABINone}}
	d.frames = nil
	// The line is valid JSON, so that the scanner needs no error checks of its own.
	s := scanner{b: line}
	s.space()
	if s.peek() != '{' {
		return fmt.Errorf("not an object: %w", ErrLine)
	}
	s.i++
	abi := false
	for s.space(); s.peek() != '}'; s.space() {
		if s.peek() == ',' {
			s.i++
			s.space()
		}
		key := s.value()
		s.space()
		s.i++ // the colon
		s.space()
		val := s.value()
		if len(key) < 2 || bytes.IndexByte(key, '\\') >= 0 {
			continue
		}
		if err := d.field(r, key[1:len(key)-1], val, &abi); err != nil {
			return fmt.Errorf("field %s: %w: %w", key, err, ErrLine)
		}
	}
	switch {
	case r.Kind == mm.KindNone:
		return fmt.Errorf("no kind: %w", ErrLine)
	case r.Phase == 0:
		return fmt.Errorf("no phase: %w", ErrLine)
	}
	if r.Stack != 0 && d.frames != nil {
		if d.stacks == nil {
			d.stacks = make(map[uint32][]symbol.Frame)
		}
		d.stacks[r.Stack] = d.frames
	}
	return nil
}

// Frames returns the stack of a number that a record so far had; nil if there
// was none.
func (d *Decoder) Frames(id uint32) []symbol.Frame { return d.stacks[id] }

// readFrames decodes the frames of a stack, which come once.
func (d *Decoder) readFrames(val []byte) ([]symbol.Frame, error) {
	var lines []struct {
		Addr, Func, File, Module, Offset string
		Line                             int
		BuildID                          string `json:"build_id"`
		Inlined                          bool
	}
	if json.Unmarshal(val, &lines) != nil {
		return nil, errFrames
	}
	fs := make([]symbol.Frame, len(lines))
	for i, l := range lines {
		addr, err := parseAddr(l.Addr)
		if err != nil {
			return nil, err
		}
		var offset mm.Addr
		if l.Offset != "" {
			if offset, err = parseAddr(l.Offset); err != nil {
				return nil, err
			}
		}
		fs[i] = symbol.Frame{Addr: addr, Func: l.Func, File: l.File, Line: l.Line, Module: l.Module,
			Offset: uint64(offset), BuildID: l.BuildID, Inlined: l.Inlined}
	}
	return fs, nil
}

var (
	errNumber = errors.New("not a number that fits")
	errString = errors.New("not a string")
	errAddr   = errors.New(`not an address "0x..."`)
	errList   = errors.New("not a list of two addresses")
	errFrames = errors.New("not a list of frames")
)

func (d *Decoder) field(r *mm.Record, key, val []byte, abi *bool) (err error) {
	switch string(key) {
	case "seq":
		r.Seq, err = number(val, 64)
	case "time":
		r.Time, err = d.time(val)
	case "pid":
		r.PID, err = number32(val)
	case "tid":
		r.TID, err = number32(val)
	case "comm":
		var s []byte
		if s, err = d.string(val); err == nil {
			copy(r.Comm[:len(r.Comm)-1], wholeRunes(s, len(r.Comm)-1))
		}
	case "kind":
		var s []byte
		if s, err = d.string(val); err == nil {
			r.Kind, err = mm.ParseKind(string(s))
		}
	case "phase":
		var s []byte
		if s, err = d.string(val); err == nil {
			r.Phase, err = mm.ParsePhase(string(s))
		}
	case "start":
		r.Range.Start, err = d.addr(val)
	case "end":
		r.Range.End, err = d.addr(val)
	case "to_start":
		r.To.Start, err = d.addr(val)
	case "to_end":
		r.To.End, err = d.addr(val)
	case "hook":
		var s []byte
		if s, err = d.string(val); err == nil {
			r.Hook = d.hooks[string(s)] // 0 if a later version made it
		}
	case "nr":
		r.Call.NR, err = number32(val)
		if !*abi {
			r.Call.ABI = mm.ABINative
		}
	case "abi":
		var s []byte
		if s, err = d.string(val); err == nil {
			err = fmt.Errorf("unknown abi %q", s)
			for i, n := range abis {
				if n == string(s) {
					r.Call.ABI, *abi, err = mm.ABI(i), true, nil
				}
			}
		}
	case "ret":
		r.Ret, err = strconv.ParseInt(string(val), 10, 64)
		if err != nil {
			err = errNumber
		}
	case "args":
		s := scanner{b: val}
		if s.peek() != '[' {
			return errList
		}
		s.i++
		for i := range r.Arg {
			s.space()
			if s.peek() == ',' {
				s.i++
				s.space()
			}
			if s.peek() != '"' {
				return errList
			}
			var a mm.Addr
			if a, err = d.addr(s.value()); err != nil {
				return err
			}
			r.Arg[i] = uint64(a)
		}
	case "marks":
		s := scanner{b: val}
		if s.peek() != '[' {
			return errList
		}
		s.i++
		r.Flags = 0
		for s.space(); s.peek() != ']'; s.space() {
			if s.peek() == ',' {
				s.i++
				s.space()
			}
			var m []byte
			if m, err = d.string(s.value()); err != nil {
				return err
			}
			for i, n := range marks { // a later version may have more
				if n == string(m) {
					r.Flags |= 1 << i
				}
			}
		}
	case "lost":
		r.Lost, err = number(val, 64)
	case "space":
		var a mm.Addr
		a, err = d.addr(val)
		r.Space = uint64(a)
	case "child_pid":
		r.ChildPID, err = number32(val)
	case "child_tid":
		r.ChildTID, err = number32(val)
	case "by":
		var s []byte
		if s, err = d.string(val); err == nil {
			r.Registration.By, err = mm.ParseRegistrar(string(s))
		}
	case "device":
		var a mm.Addr
		a, err = d.addr(val)
		r.Registration.Device = uint64(a)
	case "handle":
		var a mm.Addr
		a, err = d.addr(val)
		r.Registration.Handle = uint64(a)
	case "lkey":
		r.Registration.LKey, err = number32(val)
	case "rkey":
		r.Registration.RKey, err = number32(val)
	case "access":
		r.Registration.Access, err = number32(val)
	case "fd":
		var n int64
		if n, err = strconv.ParseInt(string(val), 10, 32); err != nil {
			err = errNumber
		}
		r.Registration.FD = int32(n)
	case "all":
		r.Registration.All = string(val) == "true"
	case "stack":
		r.Stack, err = number32(val)
	case "frames":
		d.frames, err = d.readFrames(val)
	}
	return err
}

func number(val []byte, bits int) (uint64, error) {
	n, err := strconv.ParseUint(string(val), 10, bits)
	if err != nil {
		return 0, errNumber
	}
	return n, nil
}

func number32(val []byte) (uint32, error) {
	n, err := number(val, 32)
	return uint32(n), err
}

func (d *Decoder) addr(val []byte) (mm.Addr, error) {
	s, err := d.string(val)
	if err != nil {
		return 0, errAddr
	}
	return parseAddr(string(s))
}

func parseAddr(s string) (mm.Addr, error) {
	if len(s) < 3 || s[0] != '0' || s[1] != 'x' {
		return 0, errAddr
	}
	n, err := strconv.ParseUint(s[2:], 16, 64)
	if err != nil {
		return 0, errAddr
	}
	return mm.Addr(n), nil
}

// string returns the text of a JSON string; it is valid until the next call.
func (d *Decoder) string(val []byte) ([]byte, error) {
	if len(val) < 2 || val[0] != '"' {
		return nil, errString
	}
	if s := val[1 : len(val)-1]; bytes.IndexByte(s, '\\') < 0 {
		return s, nil
	}
	var s string
	if json.Unmarshal(val, &s) != nil {
		return nil, errString
	}
	d.text = append(d.text[:0], s...)
	return d.text, nil
}

// wholeRunes is s cut to at most n bytes, not inside a character.
func wholeRunes(s []byte, n int) []byte {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

func (d *Decoder) time(val []byte) (time.Duration, error) {
	s, err := d.string(val)
	if err != nil {
		return 0, err
	}
	const seconds = len(timeLayout) - len("000000000Z")
	if len(s) == len(timeLayout) && s[len(s)-1] == 'Z' && bytes.Equal(s[:seconds], d.prefix[:]) {
		if ns, err := strconv.ParseUint(string(s[seconds:len(s)-1]), 10, 32); err == nil {
			return time.Duration(d.second + int64(ns) - d.zero), nil
		}
	}
	t, err := time.Parse(time.RFC3339Nano, string(s))
	if err != nil {
		return 0, errors.New("not a time of RFC 3339")
	}
	ns, err := nanoseconds(t)
	if err != nil {
		return 0, err
	}
	if len(s) == len(timeLayout) && s[len(s)-1] == 'Z' {
		copy(d.prefix[:], s)
		d.second = ns - int64(t.Nanosecond())
	}
	return time.Duration(ns - d.zero), nil
}

// nanoseconds is t.UnixNano where that is defined and not negative.
func nanoseconds(t time.Time) (int64, error) {
	if y := t.UTC().Year(); y < 1970 || y > 2261 {
		return 0, fmt.Errorf("year %d is out of range", y)
	}
	return t.UnixNano(), nil
}

// scanner walks over JSON that is known to be valid.
type scanner struct {
	b []byte
	i int
}

func (s *scanner) peek() byte { return s.b[s.i] }

func (s *scanner) space() {
	for s.i < len(s.b) {
		switch s.b[s.i] {
		case ' ', '\t', '\r', '\n':
			s.i++
		default:
			return
		}
	}
}

// value returns the value that begins here and steps behind it.
func (s *scanner) value() []byte {
	from := s.i
	switch s.peek() {
	case '"':
		s.quoted()
	case '{', '[':
		depth := 0
		for {
			switch s.peek() {
			case '"':
				s.quoted()
				continue
			case '{', '[':
				depth++
			case '}', ']':
				depth--
			}
			s.i++
			if depth == 0 {
				return s.b[from:s.i]
			}
		}
	default:
		for s.i < len(s.b) {
			switch s.peek() {
			case ',', '}', ']', ' ', '\t', '\r', '\n':
				return s.b[from:s.i]
			}
			s.i++
		}
	}
	return s.b[from:s.i]
}

func (s *scanner) quoted() {
	for s.i++; s.peek() != '"'; s.i++ {
		if s.peek() == '\\' {
			s.i++
		}
	}
	s.i++
}
