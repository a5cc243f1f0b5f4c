// SPDX-License-Identifier: Apache-2.0

package recording

import (
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

// Encoder turns records into NDJSON lines. It is not safe for concurrent use.
type Encoder struct {
	zero  int64 // wall-clock nanoseconds at monotonic 0
	table *calls.Table
	hooks [256]string

	second int64 // the second that prefix shows
	prefix []byte
	flags  []string
	noArgs bool // the tier does not see arguments of calls

	frames func(uint32) []symbol.Frame // of a number; nil: stacks are not written
	told   map[uint32]bool             // stacks that were written
}

// NewEncoder returns an encoder for a stream with this meta line. hook names
// hooks; tracer.HookName does.
func NewEncoder(m *Meta, hook func(mm.Hook) string) (*Encoder, error) {
	t, err := calls.For(m.Arch)
	if err != nil {
		return nil, err
	}
	e := &Encoder{zero: m.MonotonicZero.UnixNano(), table: t, second: -1, flags: make([]string, 0, 32)}
	e.noArgs = strings.HasPrefix(m.Tier, "notifier/")
	for i := range e.hooks {
		e.hooks[i] = hook(mm.Hook(i))
	}
	return e, nil
}

// Stacks makes the encoder write the stacks of records; frames resolves
// [mm.Record].Stack. Each is written once, with the first record that has it.
func (e *Encoder) Stacks(frames func(uint32) []symbol.Frame) {
	e.frames, e.told = frames, make(map[uint32]bool)
}

// AppendRecord appends r as one line, with its newline. It does not allocate
// if dst has room and the call and its flags have names.
func (e *Encoder) AppendRecord(dst []byte, r *mm.Record) []byte {
	dst = strconv.AppendUint(append(dst, `{"seq":`...), r.Seq, 10)
	dst = e.appendTime(append(dst, `,"time":"`...), r.Time)
	dst = strconv.AppendUint(append(dst, `","pid":`...), uint64(r.PID), 10)
	dst = strconv.AppendUint(append(dst, `,"tid":`...), uint64(r.TID), 10)
	dst = appendComm(append(dst, `,"comm":`...), &r.Comm)
	dst = append(append(dst, `,"kind":"`...), r.Kind.String()...)
	dst = append(append(dst, `","phase":"`...), r.Phase.String()...)
	dst = appendAddr(append(dst, `","start":"`...), r.Range.Start)
	dst = appendAddr(append(dst, `","end":"`...), r.Range.End)
	dst = appendAddr(append(dst, `","to_start":"`...), r.To.Start)
	dst = appendAddr(append(dst, `","to_end":"`...), r.To.End)
	dst = append(append(dst, `","call":"`...), e.table.Name(r.Call)...)
	dst = append(dst, `","flags":`...)
	e.flags = e.flags[:0]
	if !e.noArgs {
		e.flags = e.table.Flags(e.flags, r.Call, r.Arg)
	}
	dst = appendNames(dst, e.flags)
	dst = appendString(append(dst, `,"hook":`...), e.hooks[r.Hook])
	if r.Call.ABI != mm.ABINone {
		dst = strconv.AppendUint(append(dst, `,"nr":`...), uint64(r.Call.NR), 10)
		if r.Call.ABI != mm.ABINative && int(r.Call.ABI) < len(abis) {
			dst = append(append(append(dst, `,"abi":"`...), abis[r.Call.ABI]...), '"')
		}
	}
	if r.Ret != 0 || r.Phase == mm.PhaseEnd && r.Call.ABI != mm.ABINone {
		dst = strconv.AppendInt(append(dst, `,"ret":`...), r.Ret, 10)
	}
	if r.Arg != [2]uint64{} {
		dst = appendAddr(append(dst, `,"args":["`...), mm.Addr(r.Arg[0]))
		dst = append(appendAddr(append(dst, `","`...), mm.Addr(r.Arg[1])), `"]`...)
	}
	if r.Flags != 0 {
		e.flags = Marks(e.flags[:0], r.Flags)
		dst = appendNames(append(dst, `,"marks":`...), e.flags)
	}
	dst = appendNonzero(dst, `,"lost":`, r.Lost)
	if r.Space != 0 {
		dst = append(appendAddr(append(dst, `,"space":"`...), mm.Addr(r.Space)), '"')
	}
	dst = appendNonzero(dst, `,"child_pid":`, uint64(r.ChildPID))
	dst = appendNonzero(dst, `,"child_tid":`, uint64(r.ChildTID))
	if r.Registration.By != mm.ByNobody {
		dst = appendRegistration(dst, &r.Registration)
	}
	if r.Stack != 0 && e.frames != nil {
		dst = appendNonzero(dst, `,"stack":`, uint64(r.Stack))
		if !e.told[r.Stack] {
			e.told[r.Stack] = true
			dst = appendFrames(append(dst, `,"frames":`...), e.frames(r.Stack))
		}
	}
	return append(dst, '}', '\n')
}

func appendRegistration(dst []byte, g *mm.Registration) []byte {
	dst = append(append(append(dst, `,"by":"`...), g.By.String()...), '"')
	if g.Device != 0 {
		dst = append(appendAddr(append(dst, `,"device":"`...), mm.Addr(g.Device)), '"')
	}
	dst = append(appendAddr(append(dst, `,"handle":"`...), mm.Addr(g.Handle)), '"')
	dst = appendNonzero(dst, `,"lkey":`, uint64(g.LKey))
	dst = appendNonzero(dst, `,"rkey":`, uint64(g.RKey))
	dst = appendNonzero(dst, `,"access":`, uint64(g.Access))
	if g.By == mm.ByIOUring {
		dst = strconv.AppendInt(append(dst, `,"fd":`...), int64(g.FD), 10)
	}
	if g.All {
		dst = append(dst, `,"all":true`...)
	}
	return dst
}

func appendFrames(dst []byte, fs []symbol.Frame) []byte {
	dst = append(dst, '[')
	for i := range fs {
		f := &fs[i]
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(appendAddr(append(dst, `{"addr":"`...), f.Addr), '"')
		if f.Func != "" {
			dst = appendString(append(dst, `,"func":`...), f.Func)
		}
		if f.File != "" {
			dst = appendString(append(dst, `,"file":`...), f.File)
			dst = strconv.AppendInt(append(dst, `,"line":`...), int64(f.Line), 10)
		}
		if f.Module != "" {
			dst = appendString(append(dst, `,"module":`...), f.Module)
			dst = append(appendAddr(append(dst, `,"offset":"`...), mm.Addr(f.Offset)), '"')
		}
		if f.BuildID != "" {
			dst = appendString(append(dst, `,"build_id":`...), f.BuildID)
		}
		if f.Inlined {
			dst = append(dst, `,"inlined":true`...)
		}
		dst = append(dst, '}')
	}
	return append(dst, ']')
}

func appendNonzero(dst []byte, key string, v uint64) []byte {
	if v == 0 {
		return dst
	}
	return strconv.AppendUint(append(dst, key...), v, 10)
}

func appendAddr(dst []byte, a mm.Addr) []byte {
	return strconv.AppendUint(append(dst, '0', 'x'), uint64(a), 16)
}

// timeLayout has a fixed width, so that lines sort by time as text.
const timeLayout = "2006-01-02T15:04:05.000000000Z"

// appendTime formats the date and the second anew only when they change.
func (e *Encoder) appendTime(dst []byte, t time.Duration) []byte {
	wall := e.zero + int64(t)
	s, ns := wall/1e9, wall%1e9
	if ns < 0 {
		s, ns = s-1, ns+1e9
	}
	if s != e.second {
		e.prefix = time.Unix(s, 0).UTC().AppendFormat(e.prefix[:0], "2006-01-02T15:04:05.")
		e.second = s
	}
	dst = append(dst, e.prefix...)
	var digits [10]byte
	for i := 8; i >= 0; i-- {
		digits[i] = byte('0' + ns%10)
		ns /= 10
	}
	digits[9] = 'Z'
	return append(dst, digits[:]...)
}

func appendNames(dst []byte, names []string) []byte {
	dst = append(dst, '[')
	for i, n := range names {
		if i > 0 {
			dst = append(dst, ',')
		}
		dst = append(append(append(dst, '"'), n...), '"')
	}
	return append(dst, ']')
}

func appendComm(dst []byte, c *mm.Comm) []byte {
	n := 0
	plain := true
	for n < len(c) && c[n] != 0 {
		plain = plain && c[n] >= ' ' && c[n] < utf8.RuneSelf && c[n] != '"' && c[n] != '\\'
		n++
	}
	if !plain {
		return appendString(dst, string(c[:n]))
	}
	return append(append(append(dst, '"'), c[:n]...), '"')
}

// appendString appends s as a JSON string. Any program can choose its name;
// bytes that are not UTF-8 become U+FFFD.
func appendString(dst []byte, s string) []byte {
	const hex = "0123456789abcdef"
	dst = append(dst, '"')
	for _, r := range s {
		switch {
		case r == '"' || r == '\\':
			dst = append(dst, '\\', byte(r))
		case r < ' ' || r == 0x7f:
			dst = append(dst, '\\', 'u', '0', '0', hex[r>>4], hex[r&15])
		default:
			dst = utf8.AppendRune(dst, r)
		}
	}
	return append(dst, '"')
}
