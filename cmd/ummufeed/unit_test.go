// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/pairs"
	"github.com/ummu/ummu/internal/preflight"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

func rng(a, b mm.Addr) mm.Range { return mm.Range{Start: a, End: b} }

func commOf(s string) (c mm.Comm) {
	copy(c[:15], s)
	return c
}

var noCall = mm.Call{ABI: mm.ABINone}

func TestFilter(t *testing.T) {
	r := mm.Record{Kind: mm.Unmap, PID: 7, Range: rng(0x1000, 0x3000)}
	move := mm.Record{Kind: mm.Move, PID: 7, Range: rng(0x1000, 0x3000), To: rng(0x10000, 0x18000)}
	fork := mm.Record{Kind: mm.Fork, PID: 7}
	lost := mm.Record{Kind: mm.Lost}
	for _, c := range []struct {
		name string
		f    filter
		want [4]bool // r, move, fork, lost
	}{
		{"all", filter{}, [4]bool{true, true, true, true}},
		{"kind", filter{kinds: kindsFlag{mm.Unmap}}, [4]bool{true, false, false, true}},
		{"kinds", filter{kinds: kindsFlag{mm.Fork, mm.Move}}, [4]bool{false, true, true, true}},
		{"pid", filter{pids: command.PIDs{7}}, [4]bool{true, true, true, true}},
		{"other pid", filter{pids: command.PIDs{8}}, [4]bool{false, false, false, true}},
		{"size", filter{minSize: 0x4000}, [4]bool{false, true, false, true}},
		{"range", filter{ranges: rangesFlag{rng(0x2fff, 0x3000)}}, [4]bool{true, true, false, true}},
		{"range behind", filter{ranges: rangesFlag{rng(0x3000, 0x4000)}}, [4]bool{false, false, false, true}},
		{"destination", filter{ranges: rangesFlag{rng(0x10000, 0x10001), rng(1, 2)}}, [4]bool{false, true, false, true}},
	} {
		got := [4]bool{c.f.match(&r), c.f.match(&move), c.f.match(&fork), c.f.match(&lost)}
		if got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

func TestFlagValues(t *testing.T) {
	for s, want := range map[string]mm.Range{"1000-2000": rng(0x1000, 0x2000), "0x7f0000000000-0X7f0000001000": rng(0x7f0000000000, 0x7f0000001000)} {
		var r rangesFlag
		if err := r.Set(s); err != nil || r[0] != want {
			t.Errorf("range %q: %v, %v", s, r, err)
		}
	}
	for _, s := range []string{"", "1000", "2000-1000", "1-1", "x-y", "1-2-3", "-1"} {
		if new(rangesFlag).Set(s) == nil {
			t.Errorf("range %q is accepted", s)
		}
	}
	var k kindsFlag
	if err := k.Set("unmap,zap"); err != nil || k.String() != "unmap,zap" {
		t.Error(k, err)
	}
	if k.Set("none") == nil || k.Set("") == nil {
		t.Error("kind none or empty is accepted")
	}
}

func meta() *recording.Meta {
	return &recording.Meta{Schema: recording.Schema, Arch: "amd64", Tier: "syscall", Gaps: []recording.Gap{}, MonotonicZero: time.Date(2026, 3, 1, 10, 0, 0, 0, time.UTC)}
}

func sample() []mm.Record {
	base := mm.Record{PID: 10, TID: 11, Comm: commOf("a\x1b[2Jb\xff"), Range: rng(0x7f0000001000, 0x7f0000003000), Call: mm.Call{NR: 11}, Kind: mm.Unmap, Hook: 1}
	b, e := base, base
	b.Seq, b.Phase, b.Time = 1, mm.PhaseBegin, 1234567890
	e.Seq, e.Phase, e.Time, e.Hook, e.Ret = 2, mm.PhaseEnd, 1234567999, 2, -22
	m := base
	m.Seq, m.Kind, m.Phase, m.Call, m.Arg, m.Ret, m.To, m.Flags = 3, mm.Move, mm.PhaseEnd, mm.Call{NR: 25}, [2]uint64{1, 0}, 0x7f1000000000, rng(0x7f1000000000, 0x7f1000004000), mm.Unpaired|mm.Superset
	f := mm.Record{Seq: 4, Kind: mm.Fork, Phase: mm.PhaseEnd, PID: 10, TID: 10, ChildPID: 12, ChildTID: 12, Call: noCall, Hook: 12, Comm: commOf("sh")}
	l := mm.Record{Seq: 9, Kind: mm.Lost, Phase: mm.PhaseEnd, Lost: 5, Call: noCall, Range: mm.Whole}
	s := mm.Record{Seq: 10, Kind: mm.Unmap, Phase: mm.PhaseBegin, PID: 10, TID: 10, Range: rng(0x5000, mm.MaxAddr), Call: mm.Call{NR: 67}, Comm: commOf("sh"), Flags: mm.Superset}
	return []mm.Record{b, e, m, f, l, s}
}

// show prints the sample in a form.
func show(t *testing.T, f streamFlags, colour bool) string {
	t.Helper()
	var out bytes.Buffer
	sk, err := newSink(&f, &out, meta(), colour)
	if err != nil {
		t.Fatal(err)
	}
	v := newView(&f.filter, sk, "syscall")
	for _, r := range sample() {
		if err := v.record(&r); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := v.end([]string{"ring"}, ""); err != nil {
		t.Fatal(err)
	}
	return out.String()
}

func TestTable(t *testing.T) {
	local := time.Local
	time.Local = time.UTC
	t.Cleanup(func() { time.Local = local })
	want := `TIME                PID     TID COMM            KIND                          RANGE    SIZE  CALL = RESULT  [MARKS]  HOOK
10:00:01.234567      10      11 a?[2Jb�         unmap     7f0000001000-7f0000003000      8K  munmap() = -1 EINVAL  tp_btf/sys_exit
10:00:00.000000      10      11 a?[2Jb�         move      7f0000001000-7f0000003000      8K -> 7f1000000000-7f1000004000  mremap(MREMAP_MAYMOVE) = 0x7f1000000000  [superset,unpaired]  tp_btf/sys_enter
10:00:00.000000      10      10 sh              fork                              -       -  new task 12  raw_tp/sched_process_fork
10:00:00.000000       0       0                 lost                    whole-space       -  5 events lost: everything before is doubtful
10:00:00.000000      10      10 sh              unmap                      5000-top       -  shmdt() = ?  [superset]
KIND          CHANGES     FAILED        BYTES
unmap               2          1      8.0 KiB
move                1          0      8.0 KiB
fork                1          0            0
INCOMPLETE: 5 records, 5 lost (ring), tier syscall: 5 events lost
`
	f := streamFlags{format: command.Format{Value: "table"}}
	if d := cmp.Diff(strings.Split(want, "\n"), strings.Split(show(t, f, false), "\n")); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if s := show(t, f, true); !strings.Contains(s, "\x1b[31munmap   \x1b[0m") {
		t.Errorf("no colours: %q", s)
	}
	f.phase.Value = "both"
	if s := show(t, f, false); strings.Count(s, "munmap() = ?") != 1 || strings.Count(s, "munmap() = -1 EINVAL") != 1 {
		t.Errorf("both phases:\n%s", s)
	}
	f.phase.Value = "begin"
	if s := show(t, f, false); strings.Contains(s, "EINVAL") || !strings.Contains(s, "events lost:") {
		t.Errorf("phase begin:\n%s", s)
	}
	f.summary = true
	if s := show(t, f, false); !strings.HasPrefix(s, "KIND ") {
		t.Errorf("summary only:\n%s", s)
	}
}

func TestLines(t *testing.T) {
	f := streamFlags{format: command.Format{Value: "ndjson"}}
	text := show(t, f, false)
	rd, err := recording.NewReader(strings.NewReader(text), hookName)
	if err != nil {
		t.Fatal(err)
	}
	var got []mm.Record
	for {
		var r mm.Record
		if err := rd.Read(&r); err == io.EOF {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		got = append(got, r)
	}
	if len(got) != len(sample()) {
		t.Errorf("%d records, want %d", len(got), len(sample()))
	}
	want := &recording.Summary{Records: 5, Lost: 5, ByKind: map[string]uint64{"unmap": 3, "move": 1, "fork": 1, "lost": 1}, ByTier: map[string]uint64{"syscall": 6},
		Changes: map[string]recording.Count{"unmap": {Count: 2, Failed: 1, Bytes: 8192}, "move": {Count: 1, Bytes: 8192}, "fork": {Count: 1}}, LostAt: []string{"ring"}, Reason: "5 events lost"}
	if d := cmp.Diff(want, rd.Summary()); d != "" {
		t.Errorf("summary (-want +got):\n%s", d)
	}

	f.format.Value = "json"
	var doc struct {
		Meta    recording.Meta
		Records []map[string]any
		Summary recording.Summary
	}
	if err := json.Unmarshal([]byte(show(t, f, false)), &doc); err != nil || len(doc.Records) != len(sample()) || doc.Summary.Records != 5 || doc.Meta.Schema != 1 {
		t.Errorf("json: %v, %d records", err, len(doc.Records))
	}
	f.filter.kinds = kindsFlag{mm.Zap}
	if err := json.Unmarshal([]byte(show(t, f, false)), &doc); err != nil || len(doc.Records) != 1 || doc.Summary.Filtered != 5 {
		t.Errorf("json with a filter: %v, %d records", err, len(doc.Records)) // the loss
	}
	f.summary = true
	if err := json.Unmarshal([]byte(show(t, f, false)), &doc); err != nil || len(doc.Records) != 0 {
		t.Errorf("json summary: %v, %d records", err, len(doc.Records))
	}
}

// fake is a source in memory.
type fake struct {
	records chan mm.Record
	flush   chan struct{}
	stats   tracer.Stats
}

func newFake(rs []mm.Record) *fake {
	f := &fake{records: make(chan mm.Record, len(rs)), flush: make(chan struct{}, 8)}
	for _, r := range rs {
		f.records <- r
	}
	return f
}

func (f *fake) Read(r *mm.Record) error {
	select {
	case *r = <-f.records:
		return nil
	default:
	}
	select {
	case <-f.flush:
		return tracer.ErrFlushed
	case *r = <-f.records:
		return nil
	}
}
func (f *fake) SetDeadline(time.Time) {}
func (f *fake) Flush() error          { f.flush <- struct{}{}; return nil }
func (f *fake) Stats() tracer.Stats   { return f.stats }

type countingSink struct {
	seqs []uint64
	fail error
	sum  *recording.Summary
}

func (c *countingSink) record(r *mm.Record) error  { c.seqs = append(c.seqs, r.Seq); return c.fail }
func (c *countingSink) change(*pairs.Change) error { return nil }
func (c *countingSink) flush() error               { return nil }
func (c *countingSink) end(s *recording.Summary) error {
	c.sum = s
	return nil
}

func TestSession(t *testing.T) {
	rs := []mm.Record{{Seq: 1, Kind: mm.Zap, Phase: mm.PhaseEnd}, {Seq: 4, Kind: mm.Lost, Phase: mm.PhaseEnd, Lost: 3, Call: noCall}, {Seq: 5, Kind: mm.Zap, Phase: mm.PhaseEnd}}
	start := func(sk *countingSink, fs ...*fake) (*session, error) {
		s := &session{view: newView(&filter{}, sk, "syscall")}
		for _, f := range fs {
			s.sources = append(s.sources, f)
		}
		if err := s.stop(); err != nil {
			t.Fatal(err)
		}
		return s, s.run()
	}
	t.Run("one source keeps its numbers", func(t *testing.T) {
		sk, f := &countingSink{}, newFake(rs)
		f.stats.Lost = 3
		s, err := start(sk, f)
		sum, err2 := s.end(err)
		if err != nil || err2 != nil || sum.Complete || sum.Lost != 3 || sum.Records != 2 || cmp.Diff([]string{"ring"}, sum.LostAt) != "" {
			t.Errorf("%+v %v %v", sum, err, err2)
		}
		if d := cmp.Diff([]uint64{1, 4, 5}, sk.seqs); d != "" {
			t.Error(d)
		}
	})
	t.Run("several are numbered anew", func(t *testing.T) {
		sk := &countingSink{}
		s, err := start(sk, newFake(rs), newFake(rs))
		sum, _ := s.end(err)
		if sum.Lost != 6 || sum.Records != 4 || len(sk.seqs) != 6 || sk.seqs[5] != 10 {
			t.Errorf("%+v %v", sum, sk.seqs)
		}
		for i := 1; i < len(sk.seqs); i++ {
			if sk.seqs[i] <= sk.seqs[i-1] {
				t.Errorf("numbers %v", sk.seqs)
			}
		}
	})
	t.Run("goes on reading when the output is gone", func(t *testing.T) {
		sk, f := &countingSink{fail: io.ErrClosedPipe}, newFake(rs)
		s, err := start(sk, f)
		if err != nil || len(f.records) != 0 || len(sk.seqs) != 1 {
			t.Errorf("%v, %d unread, sink was asked %d times", err, len(f.records), len(sk.seqs))
		}
		if _, err := s.end(nil); !errors.Is(err, io.ErrClosedPipe) || sk.sum != nil {
			t.Errorf("error %v", err)
		}
	})
	t.Run("a failed read is not complete", func(t *testing.T) {
		sk := &countingSink{}
		s, err := start(sk, newFake(nil))
		sum, _ := s.end(errors.Join(err, tracer.ErrCorrupt))
		if sum.Complete || sum.Reason == "" {
			t.Errorf("%+v", sum)
		}
	})
}

func TestCheckReport(t *testing.T) {
	facts := preflight.Facts{Kernel: "6.1.0", Capabilities: map[string]bool{"CAP_BPF": false}, Memlock: preflight.Limit{Soft: 1 << 30, Hard: 1 << 30}, BTF: true}
	hook := tracer.HookStatus{Hook: 1, Name: "tp_btf/sys_enter", Sees: "calls", Required: true, Attached: true}
	bad := hook
	bad.Attached, bad.Err = false, fmt.Errorf("x: %w", tracer.ErrPermission)
	old := hook
	old.Attached, old.Err = false, fmt.Errorf("x: %w", tracer.ErrNotSupported)
	gap := []tracer.Gap{{Name: "file", What: "files"}}
	for _, c := range []struct {
		name string
		cov  tracer.Coverage
		code int
	}{
		{"works", tracer.Coverage{Tier: tracer.TierSyscall, Hooks: []tracer.HookStatus{hook}, Gaps: gap}, command.ExitOK},
		{"privileges", tracer.Coverage{Hooks: []tracer.HookStatus{bad}, Gaps: gap}, command.ExitPrivileges},
		{"kernel", tracer.Coverage{Hooks: []tracer.HookStatus{old}, Gaps: gap}, command.ExitUnsupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			if got := command.ExitCode(check(&out, "json", facts, c.cov)); got != c.code {
				t.Errorf("code %d, want %d", got, c.code)
			}
			var m map[string]any
			if err := json.Unmarshal(out.Bytes(), &m); err != nil {
				t.Fatal(err)
			}
			if m["tier"] != c.cov.Tier.String() || len(m["gaps"].([]any)) != 1 || len(m["hooks"].([]any)) != 1 || m["kernel"] != "6.1.0" {
				t.Errorf("report %s", out.String())
			}
			out.Reset()
			check(&out, "table", facts, c.cov)
			for _, s := range []string{"tp_btf/sys_enter", "GAPS", "files", "CAP_BPF and CAP_PERFMON"} {
				if !strings.Contains(out.String(), s) {
					t.Errorf("table has no %q:\n%s", s, out.String())
				}
			}
		})
	}
}

func TestWarnMissing(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	warnMissing(command.Streams{Err: w}.Log(), tracer.Coverage{Hooks: []tracer.HookStatus{
		{Name: "tp_btf/sys_enter", Attached: true}, {Name: "raw_tp/io_uring_complete", Sees: "ends", Err: tracer.ErrNotSupported},
	}})
	w.Close()
	b, err := io.ReadAll(r)
	want := "level=WARN msg=\"hook is not attached\" hook=raw_tp/io_uring_complete sees=ends error=\"not supported by this kernel\"\n"
	if err != nil || string(b) != want {
		t.Errorf("got %q, want %q, %v", b, want, err)
	}
}

func BenchmarkView(b *testing.B) {
	for _, form := range []string{"ndjson", "table"} {
		b.Run(form, func(b *testing.B) {
			f := streamFlags{format: command.Format{Value: form}}
			sk, err := newSink(&f, io.Discard, meta(), false)
			if err != nil {
				b.Fatal(err)
			}
			v := newView(&f.filter, sk, "syscall")
			rs := sample()[:2]
			b.ReportAllocs()
			for i := range b.N {
				if err := v.record(&rs[i%2]); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
