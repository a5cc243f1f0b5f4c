// SPDX-License-Identifier: Apache-2.0

package recording

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

var update = flag.Bool("update", false, "write the golden files anew")

func hookName(h mm.Hook) string {
	if h == 0 {
		return "none"
	}
	return fmt.Sprintf("tp/hook_%d", h)
}

func testMeta() *Meta {
	return &Meta{
		Schema: Schema, Version: "v0.0.1", Host: "host", Kernel: "6.18.0", Arch: "amd64", Tier: "syscall",
		Gaps:          []Gap{{"file", "pages of a file dropped by another process"}},
		Start:         time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC),
		MonotonicZero: time.Date(2026, 2, 28, 23, 59, 58, 5, time.UTC),
		PageSize:      4096, Command: []string{"git", "--version"},
	}
}

func comm(s string) (c mm.Comm) {
	copy(c[:15], s)
	return c
}

// records are what the golden file shows: every kind, and every field set once.
func records() []mm.Record {
	return []mm.Record{
		{Seq: 1, Time: 1999999994, Range: mm.Range{Start: 0x7f0000001000, End: 0x7f0000003000}, PID: 10, TID: 11, Comm: comm("python3"),
			Kind: mm.Unmap, Phase: mm.PhaseBegin, Hook: 3, Call: mm.Call{NR: 11}},
		{Seq: 2, Time: 1999999995, Range: mm.Range{Start: 0x7f0000001000, End: 0x7f0000003000}, PID: 10, TID: 11, Comm: comm("python3"),
			Kind: mm.Unmap, Phase: mm.PhaseEnd, Hook: 6, Call: mm.Call{NR: 11}},
		{Seq: 3, Time: 2 * time.Second, Range: mm.Range{Start: 0x1000, End: 0x2000}, PID: 10, TID: 10, Comm: comm("a\"b\\c\x1b[31m"),
			Kind: mm.Replace, Phase: mm.PhaseEnd, Hook: 2, Call: mm.Call{NR: 192, ABI: mm.ABICompat}, Arg: [2]uint64{3, 0x32}, Ret: 0x1000},
		{Seq: 4, Time: 3 * time.Second, Range: mm.Range{Start: 0x1000, End: 0x2000}, To: mm.Range{Start: 0x5000, End: 0x8000}, PID: 10, TID: 10, Comm: comm("größe"),
			Kind: mm.Move, Phase: mm.PhaseEnd, Hook: 7, Call: mm.Call{NR: 25}, Arg: [2]uint64{1, 0}, Ret: 0x5000, Space: 77},
		{Seq: 5, Time: 3 * time.Second, Range: mm.Range{Start: 0x1000, End: 0x2000}, PID: 10, TID: 10, Comm: comm("x"),
			Kind: mm.Protect, Phase: mm.PhaseEnd, Hook: 8, Call: mm.Call{NR: 329}, Arg: [2]uint64{0, 0xffffffff}, Ret: -12, Flags: mm.Unpaired | mm.Superset},
		{Seq: 6, Time: 4 * time.Second, Range: mm.Whole, PID: 10, TID: 10, Comm: comm("x"),
			Kind: mm.Zap, Phase: mm.PhaseEnd, Hook: 11, Call: mm.Call{NR: 25, ABI: mm.ABIIOUring}, Arg: [2]uint64{4, 0}, Flags: mm.Async | mm.Rescued | mm.Maybe | mm.Vector},
		{Seq: 7, Time: 4 * time.Second, Range: mm.Range{Start: 0x1000, End: 0x2000}, PID: 10, TID: 10, Comm: comm("x"),
			Kind: mm.Map, Phase: mm.PhaseEnd, Hook: 2, Call: mm.Call{NR: 9}, Arg: [2]uint64{1, 0x40021 | 21<<26}, Ret: 0x1000, Flags: mm.UnknownLength},
		{Seq: 8, Time: 5 * time.Second, PID: 10, TID: 10, ChildPID: 12, ChildTID: 12, Kind: mm.Fork, Phase: mm.PhaseEnd, Hook: 12,
			Call: mm.Call{ABI: mm.ABINone}, Flags: mm.NewProcess | mm.SharesSpace},
		{Seq: 9, Time: 5 * time.Second, PID: 12, TID: 12, ChildTID: 13, Kind: mm.Exec, Phase: mm.PhaseEnd, Hook: 13, Call: mm.Call{ABI: mm.ABINone}, Comm: comm("sh")},
		{Seq: 10, Time: 6 * time.Second, PID: 12, TID: 12, Kind: mm.Exit, Phase: mm.PhaseEnd, Hook: 15, Call: mm.Call{ABI: mm.ABINone}, Flags: mm.LastTask | mm.SpaceDeath},
		{Seq: 99, Time: 7 * time.Second, Kind: mm.Lost, Phase: mm.PhaseEnd, Call: mm.Call{ABI: mm.ABINone}, Lost: 89},
		{Seq: 100, Time: 8 * time.Second, Range: mm.Range{Start: 0x1000, End: 0x2000}, PID: 1, TID: 1, Kind: mm.Register, Phase: mm.PhaseEnd, Call: mm.Call{NR: 9999}},
		{Seq: 101, Time: 9 * time.Second, Range: mm.Range{Start: 0x1000, End: 0x2000}, PID: 1, TID: 1, Kind: mm.Deregister, Phase: mm.PhaseEnd, Call: mm.Call{ABI: mm.ABINone}},
		{Seq: 102, Time: 9 * time.Second, Range: mm.Range{Start: 0x1008, End: 0x1ff8}, PID: 1, TID: 1, Kind: mm.Register, Phase: mm.PhaseBegin, Call: mm.Call{NR: 427}, Flags: mm.Vector,
			Registration: mm.Registration{Device: 0xabc, Handle: 3, FD: -1, By: mm.ByIOUring}, Stack: 2},
		{Seq: 103, Time: 9 * time.Second, Range: mm.Range{Start: 0x1008, End: 0x1ff8}, PID: 1, TID: 1, Kind: mm.Register, Phase: mm.PhaseEnd, Call: mm.Call{ABI: mm.ABINone},
			Registration: mm.Registration{Device: 0xabc, Handle: 0x55d000, LKey: 7, RKey: 8, Access: 15, By: mm.ByVerbs}, Stack: 2},
		{Seq: 104, Time: 9 * time.Second, PID: 1, TID: 1, Kind: mm.Deregister, Phase: mm.PhaseEnd, Call: mm.Call{NR: 3},
			Registration: mm.Registration{Device: 0xabc, FD: 5, By: mm.ByIOUring, All: true}},
	}
}

// frames are those of stack 2.
func frames(id uint32) []symbol.Frame {
	if id != 2 {
		return nil
	}
	return []symbol.Frame{
		{Addr: 0x401008, Func: "drop<\"x\">(int)", File: "/src/a b.cc", Line: 12, Module: "/bin/app", Offset: 0x1008, BuildID: "00ff", Inlined: true},
		{Addr: 0x401008, Func: "main"},
		{Addr: 0x7f0000000000},
	}
}

func testSummary() *Summary {
	return &Summary{Records: 12, Lost: 89, ByKind: map[string]uint64{"unmap": 2, "lost": 1}, ByTier: map[string]uint64{"syscall": 13},
		Changes: map[string]Count{"unmap": {1, 0, 8192}}, LostAt: []string{"ring"}, Reason: "89 events lost"}
}

// stream encodes a whole stream.
func stream(t testing.TB, rs []mm.Record) []byte {
	t.Helper()
	m := testMeta()
	e, err := NewEncoder(m, hookName)
	if err != nil {
		t.Fatal(err)
	}
	e.Stacks(frames)
	b, err := AppendMeta(nil, m)
	if err != nil {
		t.Fatal(err)
	}
	for i := range rs {
		b = e.AppendRecord(b, &rs[i])
	}
	b, err = AppendSummary(b, testSummary())
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// blocks puts lines into a recording.
func blocks(t testing.TB, lines []byte, flushEvery int) []byte {
	t.Helper()
	var out bytes.Buffer
	w, err := NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	for i, l := range bytes.SplitAfter(lines, []byte{'\n'}) {
		if len(l) == 0 {
			continue
		}
		if _, err := w.Write(l); err != nil {
			t.Fatal(err)
		}
		if flushEvery > 0 && i%flushEvery == flushEvery-1 {
			if err := w.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// readAll reads until an error, which is io.EOF at a clean end.
func readAll(r io.Reader) ([]mm.Record, *Reader, error) {
	rd, err := NewReader(r, hookName)
	if err != nil {
		return nil, nil, err
	}
	var rs []mm.Record
	for {
		var r mm.Record
		if err := rd.Read(&r); err != nil {
			return rs, rd, err
		}
		rs = append(rs, r)
	}
}

// The golden file is the schema: a change of an existing line is a change of
// what others parse.
func TestGolden(t *testing.T) {
	got := stream(t, records())
	const file = "testdata/stream.ndjson"
	if *update {
		if err := os.WriteFile(file, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(string(got), "\n")); d != "" {
		t.Errorf("schema changed (-want +got):\n%s", d)
	}
	for i, l := range bytes.Split(bytes.TrimSpace(got), []byte{'\n'}) {
		if !json.Valid(l) {
			t.Errorf("line %d is not JSON: %s", i+1, l)
		}
	}
}

func TestAlwaysPresent(t *testing.T) {
	e, err := NewEncoder(testMeta(), hookName)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range records() {
		var m map[string]any
		if err := json.Unmarshal(e.AppendRecord(nil, &r), &m); err != nil {
			t.Fatal(err)
		}
		for _, k := range strings.Split("seq,time,pid,tid,comm,kind,phase,start,end,to_start,to_end,call,flags,hook", ",") {
			if v, ok := m[k]; !ok || v == nil {
				t.Errorf("%v record has no %s", r.Kind, k)
			}
		}
		if _, err := time.Parse(time.RFC3339Nano, m["time"].(string)); err != nil {
			t.Error(err)
		}
	}
}

func TestRoundTrip(t *testing.T) {
	want := records()
	text := stream(t, want)
	for name, file := range map[string][]byte{
		"ndjson": text, "one block": blocks(t, text, 0), "block per line": blocks(t, text, 1), "three lines": blocks(t, text, 3),
	} {
		t.Run(name, func(t *testing.T) {
			got, rd, err := readAll(iotestOneByte{bytes.NewReader(file)})
			if err != io.EOF {
				t.Fatal(err)
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("records (-want +got):\n%s", d)
			}
			if d := cmp.Diff(frames(2), rd.Frames(2)); d != "" || rd.Frames(1) != nil {
				t.Errorf("frames (-want +got):\n%s", d)
			}
			if d := cmp.Diff(testMeta(), rd.Meta()); d != "" {
				t.Errorf("meta (-want +got):\n%s", d)
			}
			if d := cmp.Diff(testSummary(), rd.Summary()); d != "" {
				t.Errorf("summary (-want +got):\n%s", d)
			}
		})
	}
}

// iotestOneByte returns one byte at a time, so that every boundary is met.
type iotestOneByte struct{ r io.Reader }

func (o iotestOneByte) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	return o.r.Read(p[:1])
}

// randomRecord sets every field, within what the schema can carry.
func randomRecord(rng *rand.Rand) mm.Record {
	r := mm.Record{
		Seq: rng.Uint64(), Time: time.Duration(rng.Int64N(1 << 60)),
		Range: mm.Range{Start: mm.Addr(rng.Uint64()), End: mm.Addr(rng.Uint64())},
		To:    mm.Range{Start: mm.Addr(rng.Uint64()), End: mm.Addr(rng.Uint64())},
		Space: rng.Uint64(), Lost: rng.Uint64(), Arg: [2]uint64{rng.Uint64(), rng.Uint64() >> rng.IntN(64)},
		Ret: int64(rng.Uint64()), PID: rng.Uint32(), TID: rng.Uint32(), ChildPID: rng.Uint32(), ChildTID: rng.Uint32(),
		Call: mm.Call{NR: rng.Uint32N(500), ABI: mm.ABI(rng.UintN(4))}, Flags: mm.Flags(rng.UintN(1 << len(marks))),
		Kind: mm.Kinds()[rng.IntN(len(mm.Kinds()))], Phase: mm.Phase(1 + rng.IntN(2)), Hook: mm.Hook(rng.UintN(256)),
	}
	if rng.IntN(2) == 0 {
		r.Registration = mm.Registration{Device: rng.Uint64(), Handle: rng.Uint64(), LKey: rng.Uint32(), RKey: rng.Uint32(), Access: rng.Uint32(),
			By: mm.ByVerbs, All: rng.IntN(2) == 0}
		if rng.IntN(2) == 0 {
			r.Registration.By, r.Registration.FD = mm.ByIOUring, int32(rng.Uint32())
		}
		r.Stack = rng.Uint32()
	}
	for i := range rng.IntN(16) {
		r.Comm[i] = byte(1 + rng.UintN(127))
	}
	return r
}

func TestRoundTripRandom(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	m := testMeta()
	e, _ := NewEncoder(m, hookName)
	e.Stacks(frames)
	d, _ := NewDecoder(m, hookName)
	for range 20000 {
		want := randomRecord(rng)
		line := e.AppendRecord(nil, &want)
		var got mm.Record
		if err := d.Record(line, &got); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if got != want {
			t.Fatalf("line %s\n%s", line, cmp.Diff(want, got))
		}
	}
}

// Findings are in streams that look for them; a reader takes the records.
func TestFindingLines(t *testing.T) {
	lines := bytes.SplitAfter(stream(t, records()), []byte{'\n'})
	var with []byte
	for i, l := range lines {
		with = append(with, l...)
		if i < len(lines)-2 { // behind the meta line and every record, not behind the summary
			with = append(with, `{"finding":{"id":1,"nested":{"kind":"unmap"}}}`+"\n"...)
		}
	}
	got, _, err := readAll(bytes.NewReader(with))
	if err != io.EOF {
		t.Fatal(err)
	}
	if d := cmp.Diff(records(), got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestDecodeLine(t *testing.T) {
	base := `"seq":1,"time":"2026-02-28T23:59:59Z","kind":"zap","phase":"end"`
	for _, c := range []struct {
		name, line string
		ok         bool
	}{
		{"least", `{"kind":"zap","phase":"end"}`, true},
		{"spaces", " { \"kind\" : \"zap\" ,\t\"phase\" : \"end\" , \"args\" : [ \"0x1\" , \"0x2\" ] } \r\n", true},
		{"unknown fields", `{"new":{"a":[1,{"b":"}]\""}],"c":null},` + base + `,"x":[],"y":-1.5e9,"z":true}`, true},
		{"escaped key is not ours", `{"\u006bind":"nonsense",` + base + `}`, true},
		{"time with zone", `{"kind":"zap","phase":"end","time":"2026-03-01T01:59:59.5+02:00"}`, true},
		{"unknown mark", `{` + base + `,"marks":["later","maybe"]}`, true},
		{"escaped mark", `{` + base + `,"marks":["m\u0061ybe"]}`, true},
		{"empty", ``, false},
		{"no object", `[1]`, false},
		{"two objects", `{` + base + `}{}`, false},
		{"cut", `{` + base, false},
		{"no kind", `{"phase":"end"}`, false},
		{"no phase", `{"kind":"zap"}`, false},
		{"unknown kind", `{"kind":"zip","phase":"end"}`, false},
		{"null kind", `{"kind":null,"phase":"end"}`, false},
		{"negative pid", `{` + base + `,"pid":-1}`, false},
		{"large pid", `{` + base + `,"pid":4294967296}`, false},
		{"float seq", `{` + base + `,"seq":1.5}`, false},
		{"address without 0x", `{` + base + `,"start":"10"}`, false},
		{"address as number", `{` + base + `,"start":16}`, false},
		{"address too long", `{` + base + `,"start":"0x10000000000000000"}`, false},
		{"one arg", `{` + base + `,"args":["0x1"]}`, false},
		{"args no list", `{` + base + `,"args":"0x1"}`, false},
		{"no time", `{"kind":"zap","phase":"end","time":"yesterday"}`, false},
		{"time out of range", `{"kind":"zap","phase":"end","time":"9999-03-01T01:59:59Z"}`, false},
		{"unknown abi", `{` + base + `,"abi":"z80"}`, false},
		{"unknown registrar", `{` + base + `,"by":"gpu"}`, false},
		{"descriptor too large", `{` + base + `,"by":"io_uring","fd":2147483648}`, false},
		{"frames no list", `{` + base + `,"stack":1,"frames":7}`, false},
		{"frame without an address", `{` + base + `,"stack":1,"frames":[{"func":"f"}]}`, false},
		{"empty stack", `{` + base + `,"stack":1,"frames":[]}`, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			d, err := NewDecoder(testMeta(), hookName)
			if err != nil {
				t.Fatal(err)
			}
			var r mm.Record
			err = d.Record([]byte(c.line), &r)
			if (err == nil) != c.ok {
				t.Fatalf("error %v, want success %v", err, c.ok)
			}
			if err != nil && !errors.Is(err, ErrLine) {
				t.Errorf("error does not wrap ErrLine: %v", err)
			}
			if err == nil && (r.Kind != mm.Zap || r.Phase != mm.PhaseEnd) {
				t.Errorf("got %v %v", r.Kind, r.Phase)
			}
		})
	}
}

// Cut anywhere, a recording gives whole records and an error; so does plain NDJSON.
func TestTruncated(t *testing.T) {
	want := records()
	text := stream(t, want)
	for name, file := range map[string][]byte{"ndjson": text, "blocks": blocks(t, text, 4)} {
		t.Run(name, func(t *testing.T) {
			most := 0
			for n := 0; n < len(file); n += 3 {
				got, _, err := readAll(bytes.NewReader(file[:n]))
				if !errors.Is(err, ErrTruncated) {
					t.Fatalf("cut at %d: error %v, want ErrTruncated", n, err)
				}
				if d := cmp.Diff(want[:len(got)], got); len(got) > 0 && d != "" {
					t.Fatalf("cut at %d: %s", n, d)
				}
				most = max(most, len(got))
			}
			if most < len(want)-4 {
				t.Errorf("at most %d of %d records were readable", most, len(want))
			}
		})
	}
}

// Any flipped bit in a recording is noticed, and nothing wrong is delivered before.
func TestCorrupt(t *testing.T) {
	want := records()
	file := blocks(t, stream(t, want), 4)
	for i := 0; i < len(file); i += 3 {
		bad := bytes.Clone(file)
		bad[i] ^= 1 << (i % 8)
		got, _, err := readAll(bytes.NewReader(bad))
		if !errors.Is(err, ErrCorrupt) && !errors.Is(err, ErrNotRecording) && !errors.Is(err, ErrTruncated) {
			t.Fatalf("byte %d: error %v", i, err)
		}
		if len(got) > 0 && cmp.Diff(want[:len(got)], got) != "" {
			t.Fatalf("byte %d: wrong records", i)
		}
	}
}

func TestBlockMissing(t *testing.T) {
	file := blocks(t, stream(t, records()), 4)
	second := bytes.Index(file[8:], []byte(magic)) + 8
	third := bytes.Index(file[second+8:], []byte(magic)) + second + 8
	_, _, err := readAll(bytes.NewReader(append(bytes.Clone(file[:second]), file[third:]...)))
	if !errors.Is(err, ErrCorrupt) {
		t.Errorf("error %v, want ErrCorrupt", err)
	}
	_, _, err = readAll(bytes.NewReader(append(bytes.Clone(file), file...)))
	if !errors.Is(err, ErrCorrupt) {
		t.Errorf("twice: error %v, want ErrCorrupt", err)
	}
}

func TestNotRecording(t *testing.T) {
	for name, c := range map[string]struct {
		file string
		want error
	}{
		"empty":        {"", ErrTruncated},
		"text":         {"hello, world\n", ErrNotRecording},
		"other json":   {`{"a":1}` + "\n", ErrNotRecording},
		"other schema": {`{"meta":{"schema":2,"arch":"amd64","monotonic_zero":"2026-01-01T00:00:00Z"}}` + "\n", ErrVersion},
		"broken meta":  {`{"meta":{"schema":"one"}}` + "\n", ErrCorrupt},
		"long line":    {`{"meta":{"host":"` + strings.Repeat("x", 2*maxLine) + `"}}` + "\n", ErrCorrupt},
	} {
		if _, err := NewReader(strings.NewReader(c.file), hookName); !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", name, err, c.want)
		}
	}
}

// fullDisk takes some bytes and then fails, as a full disk does.
type fullDisk struct {
	bytes.Buffer
	room int
}

var errFull = errors.New("no space left on device")

func (f *fullDisk) Write(p []byte) (int, error) {
	n := min(len(p), f.room-f.Len())
	f.Buffer.Write(p[:n])
	if n < len(p) {
		return n, errFull
	}
	return n, nil
}

func (f *fullDisk) Truncate(n int64) error { f.Buffer.Truncate(int(n)); return nil }

func TestWriterFullDisk(t *testing.T) {
	text := stream(t, records())
	whole := len(blocks(t, text, 4))
	for room := 0; room < whole; room += 5 {
		f := &fullDisk{room: room}
		w, err := NewWriter(f)
		if err != nil {
			t.Fatal(err)
		}
		for i, l := range bytes.SplitAfter(text, []byte{'\n'}) {
			if len(l) == 0 {
				continue
			}
			if _, err = w.Write(l); err == nil && i%4 == 3 {
				err = w.Flush()
			}
			if err != nil {
				break
			}
		}
		if err == nil {
			err = w.Flush()
		}
		if !errors.Is(err, errFull) {
			t.Fatalf("room %d: error %v", room, err)
		}
		if _, err := w.Write([]byte("{}\n")); !errors.Is(err, errFull) {
			t.Fatalf("room %d: write after failure: %v", room, err)
		}
		if f.Len() == 0 {
			continue
		}
		// Whole blocks only: the end is missing, but nothing is half there.
		got, _, err := readAll(&f.Buffer)
		if !errors.Is(err, ErrTruncated) || !strings.Contains(err.Error(), "no summary") {
			t.Fatalf("room %d: %d records, error %v", room, len(got), err)
		}
	}
}

// A block is read without more memory than its caps, whatever it declares.
func TestDeclaredSizes(t *testing.T) {
	bomb := make([]byte, 64<<20)
	for i := range bomb {
		bomb[i] = '\n'
	}
	var out bytes.Buffer
	w, err := NewWriter(&out)
	if err != nil {
		t.Fatal(err)
	}
	w.raw, w.lines = bomb, uint32(len(bomb))
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	if _, err := NewReader(&out, hookName); !errors.Is(err, ErrCorrupt) {
		t.Errorf("bomb: error %v", err)
	}
}

func TestEncodeAllocations(t *testing.T) {
	e, err := NewEncoder(testMeta(), hookName)
	if err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 0, 4096)
	rs := records()[:7]
	rs[2].Comm = comm("plain")
	rs[3].Comm = comm("plain")
	rs[4].Arg[1] = 0 // "pkey=N" is put together
	rs[4].Call.NR = 10
	for _, r := range rs {
		if r.Arg[1]>>26 != 0 {
			continue // MAP_HUGE_2MB is put together
		}
		if n := testing.AllocsPerRun(100, func() { buf = e.AppendRecord(buf[:0], &r) }); n != 0 {
			t.Errorf("%v: %v allocations", r.Kind, n)
		}
	}
}

func FuzzDecodeLine(f *testing.F) {
	for _, l := range bytes.Split(stream(f, records()), []byte{'\n'}) {
		f.Add(l)
	}
	f.Add([]byte(`{"new":{"a":[1,{"b":"}]\""}],"c":null},"kind":"zap","phase":"end","args":["0x1","0x2"],"marks":["x"]}`))
	f.Fuzz(func(t *testing.T, line []byte) {
		m := testMeta()
		d, err := NewDecoder(m, hookName)
		if err != nil {
			t.Fatal(err)
		}
		e, err := NewEncoder(m, hookName)
		if err != nil {
			t.Fatal(err)
		}
		var r mm.Record
		if err := d.Record(line, &r); err != nil {
			if !errors.Is(err, ErrLine) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		// What is decoded survives another round.
		l1 := e.AppendRecord(nil, &r)
		var r2 mm.Record
		if err := d.Record(l1, &r2); err != nil {
			t.Fatalf("own line is not readable: %v: %s", err, l1)
		}
		if l2 := e.AppendRecord(nil, &r2); !bytes.Equal(l1, l2) {
			t.Fatalf("lines differ:\n%s%s", l1, l2)
		}
	})
}

func FuzzReplay(f *testing.F) {
	text := stream(f, records())
	f.Add(text)
	f.Add(blocks(f, text, 0))
	f.Add(blocks(f, text, 3))
	f.Add([]byte(magic))
	f.Fuzz(func(t *testing.T, file []byte) {
		_, rd, err := readAll(bytes.NewReader(file))
		if err == io.EOF {
			if rd.Summary() == nil {
				t.Fatal("clean end without a summary")
			}
			return
		}
		for _, want := range []error{ErrNotRecording, ErrVersion, ErrCorrupt, ErrTruncated} {
			if errors.Is(err, want) {
				return
			}
		}
		t.Fatalf("untyped error %v", err)
	})
}

func BenchmarkEncode(b *testing.B) {
	e, _ := NewEncoder(testMeta(), hookName)
	rs := records()[:7]
	buf := make([]byte, 0, 4096)
	b.ReportAllocs()
	n := 0
	for i := range b.N {
		buf = e.AppendRecord(buf[:0], &rs[i%2])
		n += len(buf)
	}
	b.SetBytes(int64(n / b.N))
}

func BenchmarkDecode(b *testing.B) {
	e, _ := NewEncoder(testMeta(), hookName)
	d, _ := NewDecoder(testMeta(), hookName)
	rs := records()
	line := e.AppendRecord(nil, &rs[0])
	b.ReportAllocs()
	b.SetBytes(int64(len(line)))
	var r mm.Record
	for b.Loop() {
		if err := d.Record(line, &r); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkRecord is one record encoded, compressed and checksummed.
func BenchmarkRecord(b *testing.B) {
	e, _ := NewEncoder(testMeta(), hookName)
	var n counter
	w, err := NewWriter(&n)
	if err != nil {
		b.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 1))
	rs := make([]mm.Record, 4096)
	for i := range rs {
		a := mm.Addr(0x7f0000000000 + rng.Uint64N(1<<30)&^0xfff)
		rs[i] = mm.Record{PID: 1000, TID: 1000 + rng.Uint32N(4), Comm: comm("python3"), Range: mm.Range{Start: a, End: a + 0x4000},
			Kind: mm.Unmap, Phase: mm.Phase(1 + i%2), Hook: 3, Call: mm.Call{NR: 11}}
	}
	var buf []byte
	raw := 0
	b.ReportAllocs()
	for i := range b.N {
		r := &rs[i%len(rs)]
		r.Seq, r.Time = uint64(i), time.Duration(i)*1317
		buf = e.AppendRecord(buf[:0], r)
		raw += len(buf)
		if _, err := w.Write(buf); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric(float64(n)/float64(b.N), "stored-B/op")
	b.ReportMetric(float64(raw)/float64(b.N), "raw-B/op")
}

type counter int

func (c *counter) Write(p []byte) (int, error) { *c += counter(len(p)); return len(p), nil }
