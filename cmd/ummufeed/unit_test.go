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
	"pgregory.net/rapid"

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
		{"pid", filter{pids: pidsFlag{7}}, [4]bool{true, true, true, true}},
		{"other pid", filter{pids: pidsFlag{8}}, [4]bool{false, false, false, true}},
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
	var z sizeFlag
	for s, want := range map[string]sizeFlag{"0": 0, "17": 17, "4K": 4096, "2m": 2 << 20, "1G": 1 << 30, "3T": 3 << 40} {
		if err := z.Set(s); err != nil || z != want {
			t.Errorf("size %q: %d, %v", s, z, err)
		}
	}
	for _, s := range []string{"", "K", "-1", "1P", "1.5K", "99999999999T"} {
		if z.Set(s) == nil {
			t.Errorf("size %q is accepted", s)
		}
	}
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
	for _, s := range []string{"", "0", "-1", "a", "99999999999", "1,"} {
		if new(pidsFlag).Set(s) == nil {
			t.Errorf("pid %q is accepted", s)
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

// pairs runs records through a pairer.
func pairs(rs []mm.Record) []change {
	var out []change
	p := newPairer(func(c *change) error { out = append(out, *c); return nil })
	for i := range rs {
		p.add(&rs[i])
	}
	p.end()
	return out
}

func TestPairs(t *testing.T) {
	munmap, mremap, vec := mm.Call{NR: 11}, mm.Call{NR: 25}, mm.Call{NR: 440}
	uring := mm.Call{NR: 25, ABI: mm.ABIIOUring}
	b := func(seq uint64, tid uint32, k mm.Kind, r mm.Range, c mm.Call, f mm.Flags) mm.Record {
		return mm.Record{Seq: seq, Time: time.Duration(seq), PID: 1, TID: tid, Kind: k, Range: r, Call: c, Flags: f, Phase: mm.PhaseBegin}
	}
	e := func(seq uint64, tid uint32, k mm.Kind, r mm.Range, c mm.Call, f mm.Flags, ret int64) mm.Record {
		x := b(seq, tid, k, r, c, f)
		x.Phase, x.Ret = mm.PhaseEnd, ret
		return x
	}
	r1, r2, hull := rng(0x1000, 0x2000), rng(0x5000, 0x6000), rng(0x1000, 0x6000)
	for _, c := range []struct {
		name string
		in   []mm.Record
		want []string
	}{
		{"one", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), e(2, 1, mm.Unmap, r1, munmap, 0, 0)}, []string{"1 unmap 1000-2000 0"}},
		{"two threads", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), b(2, 2, mm.Unmap, r2, munmap, 0), e(3, 2, mm.Unmap, r2, munmap, 0, 0), e(4, 1, mm.Unmap, r1, munmap, 0, -22)},
			[]string{"2 unmap 5000-6000 0", "1 unmap 1000-2000 -22"}},
		{"end knows better", []mm.Record{b(1, 1, mm.Move, r1, mremap, mm.Maybe), e(2, 1, mm.Map, r2, mremap, 0, 0)}, []string{"1 map 5000-6000 0"}},
		{"vector", []mm.Record{b(1, 1, mm.Zap, r1, vec, mm.Vector), b(2, 1, mm.Zap, r2, vec, mm.Vector), e(3, 1, mm.Zap, hull, vec, mm.Vector, 8192)},
			[]string{"1 zap 1000-2000 8192", "2 zap 5000-6000 8192"}},
		{"unpaired end", []mm.Record{e(1, 1, mm.Unmap, r1, munmap, mm.Unpaired, 0)}, []string{"1 unmap 1000-2000 0"}},
		{"still open", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), b(2, 2, mm.Unmap, r2, munmap, 0)}, []string{"1 unmap 1000-2000 open", "2 unmap 5000-6000 open"}},
		{"end was lost", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), b(3, 1, mm.Unmap, r2, munmap, 0), e(4, 1, mm.Unmap, r2, munmap, 0, 0)},
			[]string{"1 unmap 1000-2000 open", "3 unmap 5000-6000 0"}},
		{"killed in the call", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), e(2, 1, mm.Exit, mm.Range{}, noCall, mm.LastTask, 0)},
			[]string{"1 unmap 1000-2000 open", "2 exit 0-0 0"}},
		{"lost between", []mm.Record{b(1, 1, mm.Unmap, r1, munmap, 0), e(9, 0, mm.Lost, mm.Whole, noCall, 0, 0), e(10, 1, mm.Unmap, r1, munmap, 0, 0)},
			[]string{"9 lost 0-ffffffffffffffff 0", "1 unmap 1000-2000 0"}},
		{"io_uring in a worker", []mm.Record{b(1, 1, mm.Zap, r1, uring, mm.Async), b(2, 1, mm.Zap, r2, uring, mm.Async), b(3, 1, mm.Unmap, r1, munmap, 0), e(4, 1, mm.Unmap, r1, munmap, 0, 0), e(5, 9, mm.Zap, r1, uring, mm.Async, 0), e(6, 8, mm.Zap, r2, uring, mm.Async, 0)},
			[]string{"3 unmap 1000-2000 0", "1 zap 1000-2000 0", "2 zap 5000-6000 0"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			var got []string
			for _, x := range pairs(c.in) {
				end := fmt.Sprint(x.Ret)
				if x.open {
					end = "open"
				}
				got = append(got, fmt.Sprintf("%d %v %v %s", x.Time, x.Kind, x.Range, end))
			}
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// Whatever comes, no begin vanishes and none is shown twice: changes = begins
// + ends - joined, and each begin is part of exactly one change.
func TestPairsConserve(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 60).Draw(t, "n")
		var rs []mm.Record
		for i := range n {
			r := mm.Record{
				Seq: uint64(i + 1), Time: time.Duration(i + 1), PID: 1, TID: rapid.Uint32Range(1, 3).Draw(t, "tid"), Kind: mm.Zap,
				Call:  rapid.SampledFrom([]mm.Call{{NR: 11}, {NR: 28}, {NR: 25, ABI: mm.ABIIOUring}}).Draw(t, "call"),
				Range: rng(0x1000, mm.Addr(rapid.SampledFrom([]int{0x2000, 0x3000}).Draw(t, "end"))),
				Phase: rapid.SampledFrom([]mm.Phase{mm.PhaseBegin, mm.PhaseEnd}).Draw(t, "phase"),
			}
			if rapid.IntRange(0, 9).Draw(t, "exit") == 0 {
				r.Kind, r.Phase, r.Call = mm.Exit, mm.PhaseEnd, noCall
				r.Flags = rapid.SampledFrom([]mm.Flags{0, mm.LastTask, mm.SpaceDeath}).Draw(t, "flags")
			}
			rs = append(rs, r)
		}
		begins, seen := 0, map[time.Duration]int{}
		for _, r := range rs {
			if r.Phase == mm.PhaseBegin {
				begins++
			}
		}
		open, changes := 0, pairs(rs)
		for _, c := range changes {
			seen[c.Time]++ // the time of the begin, if there was one
			if c.open {
				open++
			}
		}
		for _, r := range rs {
			if r.Phase == mm.PhaseBegin && seen[r.Time] != 1 {
				t.Fatalf("begin %d is in %d changes", r.Seq, seen[r.Time])
			}
		}
		if ends := n - begins; len(changes) != open+ends {
			t.Fatalf("%d changes from %d ends and %d open begins", len(changes), ends, open)
		}
	})
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
	f := streamFlags{format: formatFlag{value: "table"}}
	if d := cmp.Diff(strings.Split(want, "\n"), strings.Split(show(t, f, false), "\n")); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	if s := show(t, f, true); !strings.Contains(s, "\x1b[31munmap   \x1b[0m") {
		t.Errorf("no colours: %q", s)
	}
	f.phase.value = "both"
	if s := show(t, f, false); strings.Count(s, "munmap() = ?") != 1 || strings.Count(s, "munmap() = -1 EINVAL") != 1 {
		t.Errorf("both phases:\n%s", s)
	}
	f.phase.value = "begin"
	if s := show(t, f, false); strings.Contains(s, "EINVAL") || !strings.Contains(s, "events lost:") {
		t.Errorf("phase begin:\n%s", s)
	}
	f.summary = true
	if s := show(t, f, false); !strings.HasPrefix(s, "KIND ") {
		t.Errorf("summary only:\n%s", s)
	}
}

func TestLines(t *testing.T) {
	f := streamFlags{format: formatFlag{value: "ndjson"}}
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

	f.format.value = "json"
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

func (c *countingSink) record(r *mm.Record) error { c.seqs = append(c.seqs, r.Seq); return c.fail }
func (c *countingSink) change(*change) error      { return nil }
func (c *countingSink) flush() error              { return nil }
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
		{"works", tracer.Coverage{Tier: tracer.TierSyscall, Hooks: []tracer.HookStatus{hook}, Gaps: gap}, exitOK},
		{"privileges", tracer.Coverage{Hooks: []tracer.HookStatus{bad}, Gaps: gap}, exitPrivileges},
		{"kernel", tracer.Coverage{Hooks: []tracer.HookStatus{old}, Gaps: gap}, exitUnsupported},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			if got := exitCode(check(&out, "json", facts, c.cov)); got != c.code {
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
	warnMissing(streams{err: w}.log(), tracer.Coverage{Hooks: []tracer.HookStatus{
		{Name: "tp_btf/sys_enter", Attached: true}, {Name: "raw_tp/io_uring_complete", Sees: "ends", Err: tracer.ErrNotSupported},
	}})
	w.Close()
	b, err := io.ReadAll(r)
	want := "level=WARN msg=\"hook is not attached\" hook=raw_tp/io_uring_complete sees=ends error=\"not supported by this kernel\"\n"
	if err != nil || string(b) != want {
		t.Errorf("got %q, want %q, %v", b, want, err)
	}
}

func TestExitCode(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, 0}, {io.EOF, 1}, {usagef("x"), 2}, {fmt.Errorf("a: %w", tracer.ErrNotSupported), 3}, {fmt.Errorf("a: %w", tracer.ErrPermission), 4},
		{fmt.Errorf("a: %w", recording.ErrCorrupt), 5}, {fmt.Errorf("a: %w", recording.ErrTruncated), 5}, {&exitError{code: 77}, 77},
	} {
		if got := exitCode(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}

func BenchmarkView(b *testing.B) {
	for _, form := range []string{"ndjson", "table"} {
		b.Run(form, func(b *testing.B) {
			f := streamFlags{format: formatFlag{value: form}}
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
