// SPDX-License-Identifier: Apache-2.0

package detector

import (
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/findings"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

// Report is how findings leave: lines for programs, text for people.
type Report struct {
	Calls  *calls.Table
	Zero   time.Time // wall-clock time at CLOCK_MONOTONIC 0
	Frames func(stack uint32) []symbol.Frame
}

// line is the NDJSON form; fields are only ever added.
type line struct {
	ID    int    `json:"id"`
	State string `json:"state"` // open: found now, more may follow; final
	findingFields
}

type findingFields struct {
	Class        findings.Class `json:"class"`
	Certain      bool           `json:"certain"`
	Why          string         `json:"why,omitempty"`
	Registration event          `json:"registration"`
	Change       event          `json:"change"`
	StaleStart   string         `json:"stale_start"`
	StaleEnd     string         `json:"stale_end"`
	Repeats      int            `json:"repeats"`
	Reused       bool           `json:"reused"`
	Again        bool           `json:"registered_again"`
	Ended        string         `json:"ended,omitempty"`
	Stayed       *int64         `json:"stayed_ns,omitempty"`
}

// event is the registration or the change.
type event struct {
	Seq    uint64  `json:"seq"`
	Time   string  `json:"time"`
	PID    uint32  `json:"pid"`
	TID    uint32  `json:"tid"`
	Comm   string  `json:"comm"`
	Kind   string  `json:"kind"`
	Start  string  `json:"start"`
	End    string  `json:"end"`
	Call   string  `json:"call,omitempty"`
	By     string  `json:"by,omitempty"`
	Handle string  `json:"handle,omitempty"`
	LKey   uint32  `json:"lkey,omitempty"`
	RKey   uint32  `json:"rkey,omitempty"`
	Stack  []frame `json:"stack"`
}

type frame struct {
	Addr    string `json:"addr"`
	Func    string `json:"func,omitempty"`
	File    string `json:"file,omitempty"`
	Line    int    `json:"line,omitempty"`
	Module  string `json:"module,omitempty"`
	Offset  string `json:"offset,omitempty"`
	BuildID string `json:"build_id,omitempty"`
	Inlined bool   `json:"inlined,omitempty"`
}

func (p *Report) event(r *mm.Record) event {
	e := event{
		Seq: r.Seq, Time: p.Zero.Add(r.Time).UTC().Format("2006-01-02T15:04:05.000000000Z"), PID: r.PID, TID: r.TID,
		Comm: r.Comm.String(), Kind: r.Kind.String(), Start: r.Range.Start.String(), End: r.Range.End.String(),
		Call: p.Calls.Name(r.Call), Stack: []frame{},
	}
	if g := &r.Registration; g.By != mm.ByNobody {
		e.By, e.Handle, e.LKey, e.RKey = g.By.String(), mm.Addr(g.Handle).String(), g.LKey, g.RKey
	}
	for _, f := range p.Frames(r.Stack) {
		x := frame{Addr: f.Addr.String(), Func: f.Func, File: f.File, Line: f.Line, Module: f.Module, BuildID: f.BuildID, Inlined: f.Inlined}
		if f.Module != "" {
			x.Offset = mm.Addr(f.Offset).String()
		}
		e.Stack = append(e.Stack, x)
	}
	return e
}

// AppendObject appends a finding as a JSON object. final: nothing more will be
// added to it.
func (p *Report) AppendObject(dst []byte, f *findings.Finding, final bool) ([]byte, error) {
	l := line{ID: f.ID, State: "open", findingFields: findingFields{
		Class: f.Class, Certain: f.Certain, Why: f.Why, Registration: p.event(&f.Registration), Change: p.event(&f.Change),
		StaleStart: f.Stale.Start.String(), StaleEnd: f.Stale.End.String(),
		Repeats: f.Repeats, Reused: f.Reused, Again: f.RegisteredAgain,
	}}
	if final {
		ns := int64(f.Stayed())
		l.State, l.Ended, l.Stayed = "final", f.Ended.String(), &ns
	}
	j, err := json.Marshal(l)
	if err != nil {
		return dst, fmt.Errorf("encode finding: %w", err)
	}
	return append(dst, j...), nil
}

// AppendLine appends a finding as a line of NDJSON, with its newline.
func (p *Report) AppendLine(dst []byte, f *findings.Finding, final bool) ([]byte, error) {
	dst, err := p.AppendObject(append(dst, `{"finding":`...), f, final)
	return append(dst, '}', '\n'), err
}

// AppendText appends a finding for people.
func (p *Report) AppendText(dst []byte, f *findings.Finding, printable func(string) string) []byte {
	dst = fmt.Appendf(dst, "stale registration %d: %v", f.ID, f.Class)
	if !f.Certain {
		dst = fmt.Appendf(dst, ", not certain: %s", f.Why)
	}
	r := &f.Registration
	dst = fmt.Appendf(dst, "\n  registered %v, %d bytes, %s\n", r.Range, r.Range.Len(), Describe(&r.Registration))
	dst = p.appendWho(dst, r, printable)
	c := &f.Change
	dst = fmt.Appendf(dst, "  changed    %v: %v", c.Range, c.Kind)
	if !c.To.Empty() {
		dst = fmt.Appendf(dst, " to %v", c.To)
	}
	if name := p.Calls.Name(c.Call); name != "" {
		dst = fmt.Appendf(dst, " by %s(", name)
		if p.Calls.HasArgs(c.Call) {
			dst = p.Calls.AppendArgs(dst, c.Call, c.Arg)
		}
		dst = append(dst, ") = "...)
		dst = p.Calls.AppendResult(dst, c.Call, c.Ret)
	}
	if f.Repeats > 0 {
		dst = fmt.Appendf(dst, ", and %d times more", f.Repeats)
	}
	dst = p.appendWho(append(dst, '\n'), c, printable)
	dst = fmt.Appendf(dst, "  stale      %v, for %v: %s\n", f.Stale, f.Stayed().Round(time.Microsecond), ends[f.Ended])
	switch {
	case f.Reused && f.RegisteredAgain:
		dst = append(dst, "             the address was used again meanwhile, and registered again\n"...)
	case f.Reused:
		dst = append(dst, "             the address was used again meanwhile\n"...)
	}
	return dst
}

var ends = map[findings.EndedBy]string{
	findings.StillRegistered: "still registered at the end",
	findings.Deregistered:    "then deregistered",
	findings.Replaced:        "then registered anew under the same handle",
	findings.SpaceEnded:      "until the address space ended",
}

func (p *Report) appendWho(dst []byte, r *mm.Record, printable func(string) string) []byte {
	dst = p.Zero.Add(r.Time).Local().AppendFormat(append(dst, "             at "...), "15:04:05.000000")
	dst = fmt.Appendf(dst, " by %d/%d %s\n", r.PID, r.TID, printable(r.Comm.String()))
	fs := p.Frames(r.Stack)
	if len(fs) == 0 {
		return append(dst, "               (no stack)\n"...)
	}
	return AppendStack(dst, fs, "               ", printable)
}

// AppendStack appends a stack, a line for each frame.
func AppendStack(dst []byte, fs []symbol.Frame, indent string, printable func(string) string) []byte {
	for _, f := range fs {
		dst = append(append(append(dst, indent...), printable(f.String())...), '\n')
	}
	return dst
}

// Describe names a registration: "verbs handle 0x55d000 lkey 101 rkey 101 access 3".
func Describe(g *mm.Registration) string {
	var b []byte
	b = append(append(b, g.By.String()...), ' ')
	switch {
	case g.All:
		b = append(b, "everything"...)
	case g.By == mm.ByIOUring:
		b = strconv.AppendUint(append(b, "buffer "...), g.Handle, 10)
	case g.Handle != 0:
		b = append(append(b, "handle "...), mm.Addr(g.Handle).String()...)
	}
	if g.By == mm.ByIOUring {
		if g.FD >= 0 {
			b = strconv.AppendInt(append(b, " of ring fd "...), int64(g.FD), 10)
		}
		return string(b)
	}
	if g.LKey != 0 || g.RKey != 0 {
		b = strconv.AppendUint(append(b, " lkey "...), uint64(g.LKey), 10)
		b = strconv.AppendUint(append(b, " rkey "...), uint64(g.RKey), 10)
	}
	if g.Access != 0 {
		b = strconv.AppendUint(append(b, " access 0x"...), uint64(g.Access), 16)
	}
	return string(b)
}
