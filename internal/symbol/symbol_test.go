// SPDX-License-Identifier: Apache-2.0

package symbol

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

func TestMain(m *testing.M) {
	debugRoot = "/nonexistent" // what is installed here is of no concern
	goleak.VerifyTestMain(m)
}

func command(t testing.TB, dir, name string, args ...string) {
	t.Helper()
	c := exec.Command(name, args...)
	c.Dir = dir
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %v\n%s", c, err, out)
	}
}

func testdata(t testing.TB, name string) string {
	t.Helper()
	p, err := filepath.Abs(filepath.Join("testdata", name))
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// compile builds a program of testdata, once, and returns a copy of it.
func compile(t testing.TB, source string, flags ...string) string {
	t.Helper()
	exe, key := filepath.Join(t.TempDir(), "program"), fmt.Sprint(source, flags)
	if b, ok := built[key]; ok {
		if err := os.WriteFile(exe, b, 0o755); err != nil {
			t.Fatal(err)
		}
		return exe
	}
	cc := "gcc"
	if strings.HasSuffix(source, ".cc") {
		cc = "g++"
	}
	command(t, "", cc, append([]string{"-o", exe, testdata(t, source)}, flags...)...)
	b, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	built[key] = b
	return exe
}

var built = map[string][]byte{}

// captured is a program that waits behind capture.
type captured struct {
	pid   int
	stack mm.Stack
	end   func()
}

func start(t testing.TB, exe string, env ...string) *captured {
	t.Helper()
	c := exec.Command(exe)
	c.Env = append(os.Environ(), env...)
	c.Stderr = os.Stderr
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	ended := false
	p := &captured{pid: c.Process.Pid}
	p.end = func() {
		if !ended {
			ended = true
			in.Close()
			if err := c.Wait(); err != nil {
				t.Errorf("%s: %v", exe, err)
			}
		}
	}
	t.Cleanup(p.end)
	var head [4]uint64
	b := make([]byte, 16384)
	if err := binary.Read(out, binary.NativeEndian, &head); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, b); err != nil {
		t.Fatal(err)
	}
	p.stack = mm.Stack{PC: mm.Addr(head[0]), SP: mm.Addr(head[1]), FP: mm.Addr(head[2]), LR: mm.Addr(head[3]), Memory: b}
	return p
}

// from lists the frames from capture's caller to main.
func from(fs []Frame) (got []string) {
	inside := false
	for _, f := range fs {
		if inside {
			s := f.Func
			if f.File != "" {
				s += fmt.Sprintf(" %s:%d", filepath.Base(f.File), f.Line)
			}
			if f.Inlined {
				s += " inlined"
			}
			got = append(got, s)
		}
		if f.Func == "capture" {
			inside = true
		}
		if f.Func == "main" {
			break
		}
	}
	return got
}

// Through the C library, which has no frame pointers.
var plainStack = []string{
	"inner plain.c:9", "inlined plain.c:15 inlined", "outer plain.c:20", "compare plain.c:29",
}

func TestStack(t *testing.T) {
	for _, c := range []struct {
		name  string
		flags []string
		// whole: also what is behind the C library
		whole bool
	}{
		{"frame pointers", []string{"-g", "-O0"}, true},
		{"none", []string{"-gdwarf-4", "-gz", "-O2", "-fomit-frame-pointer", "-no-pie", "-fno-pie", "-fno-optimize-sibling-calls"}, true},
		{"frame pointers alone", []string{"-g", "-O0", "-fno-omit-frame-pointer", "-fno-asynchronous-unwind-tables", "-fno-unwind-tables", "-fno-dwarf2-cfi-asm"}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := start(t, compile(t, "plain.c", c.flags...))
			r := New()
			defer r.Close()
			got := from(r.Stack(p.pid, &p.stack))
			n := len(plainStack)
			if len(got) < n || !cmp.Equal(got[:n], plainStack) {
				t.Fatalf("got %q", got)
			}
			if last := got[len(got)-1]; c.whole && last != "main plain.c:37" {
				t.Errorf("the stack ends at %q", last)
			}
			if c.whole && !strings.HasPrefix(got[n], "qsort") && len(got) < n+3 {
				t.Errorf("the C library is not between compare and main: %q", got)
			}
		})
	}
}

// Stacks of a process that has ended are resolved from what was read before.
func TestStackOfTheDead(t *testing.T) {
	exe := compile(t, "plain.c", "-g", "-O0")
	p := start(t, exe)
	r := New()
	defer r.Close()
	if err := r.Snapshot(p.pid); err != nil {
		t.Fatal(err)
	}
	p.end()
	if err := os.Remove(exe); err != nil {
		t.Fatal(err)
	}
	r.Stale(p.pid)
	if got := from(r.Stack(p.pid, &p.stack)); len(got) < 5 || got[len(got)-1] != "main plain.c:37" {
		t.Errorf("got %q", got)
	}
	if err := r.Snapshot(p.pid); err == nil {
		t.Error("a snapshot of nobody")
	}
	r.Exit(p.pid)
	if got := r.Stack(p.pid, &p.stack); len(got) == 0 || got[0] != (Frame{Addr: p.stack.PC}) {
		t.Errorf("after Exit: %v", got)
	}
	if st := r.Stats(); st.Stacks != 2 || st.Unmapped != 1 {
		t.Errorf("%+v", st)
	}
}

func now() time.Duration {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	return time.Duration(ts.Nano())
}

// A process that has ended before anybody looked, and its child: the kernel
// told what they mapped.
func TestWatch(t *testing.T) {
	r := New()
	defer r.Close()
	if err := r.Watch(true); err != nil {
		t.Fatal(err)
	}
	before := now()
	p := start(t, compile(t, "plain.c", "-g", "-O0"))
	p.end()
	r.Advance(before) // nothing of it yet
	if got := from(r.Stack(p.pid, &p.stack)); len(got) != 0 {
		t.Errorf("before it began: %q", got)
	}
	pids := r.Advance(now())
	if !slices.Contains(pids, p.pid) {
		t.Errorf("process %d mapped nothing: %v", p.pid, pids)
	}
	if got := from(r.Stack(p.pid, &p.stack)); len(got) < 5 || got[len(got)-1] != "main plain.c:37" {
		t.Errorf("got %q", got)
	}
	if m := r.Modules(p.pid); len(m) < 2 || filepath.Base(m[0]) != "program" {
		t.Errorf("modules %q", m)
	}
}

// Only processes that were asked about, and their children, are kept.
func TestWatchSome(t *testing.T) {
	r := New()
	defer r.Close()
	if err := r.Watch(false); err != nil {
		t.Fatal(err)
	}
	p := start(t, compile(t, "plain.c", "-g", "-O0"))
	p.end()
	if pids := r.Advance(now()); len(pids) != 0 || len(r.procs) != 0 {
		t.Errorf("of nobody: %v, %d processes", pids, len(r.procs))
	}
	if err := r.Snapshot(os.Getpid()); err != nil {
		t.Fatal(err)
	}
	p = start(t, compile(t, "plain.c", "-g", "-O0")) // a child
	p.end()
	r.Advance(now())
	if got := from(r.Stack(p.pid, &p.stack)); len(got) < 5 {
		t.Errorf("got %q", got)
	}
}

// A ring that was written round, and records of any bytes.
func TestSidebandRecords(t *testing.T) {
	mmap2 := func(pid uint32, start uint64, name string) []byte {
		b := make([]byte, 8+64+(len(name)+8)&^7+trailerSize)
		o := binary.NativeEndian
		o.PutUint32(b, recordMmap2)
		o.PutUint16(b[6:], uint16(len(b)))
		o.PutUint32(b[8:], pid)
		o.PutUint64(b[16:], start)
		o.PutUint64(b[24:], 0x1000)
		o.PutUint32(b[40:], 0xfe)
		o.PutUint32(b[44:], 1)
		o.PutUint64(b[48:], 77)
		copy(b[8+64:], name)
		o.PutUint64(b[len(b)-8:], start)
		return b
	}
	ring := make([]byte, 256)
	one := mmap2(5, 0x1000, "/lib/a b")
	at := uint64(256*3 - 40) // wraps
	for i, c := range one {
		ring[(at+uint64(i))%256] = c
	}
	s := &sideband{}
	s.read(ring, at, at+uint64(len(one)))
	want := event{at: 0x1000, pid: 5, m: mapping{Range: mm.Range{Start: 0x1000, End: 0x2000}, file: fileID{"fe:01", 77}, path: "/lib/a b"}}
	if len(s.pending) != 1 || s.pending[0] != want || s.lost {
		t.Errorf("%+v, lost %v", s.pending, s.lost)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for range 5000 {
		for i := range ring {
			ring[i] = byte(rng.Uint32())
		}
		if rng.IntN(2) == 0 {
			binary.NativeEndian.PutUint16(ring[6:], uint16(rng.IntN(300)))
			binary.NativeEndian.PutUint32(ring, uint32(rng.IntN(12)))
		}
		s := &sideband{}
		s.read(ring, 0, 256)
	}
	s = &sideband{}
	lost := make([]byte, 32)
	binary.NativeEndian.PutUint32(lost, recordLost)
	binary.NativeEndian.PutUint16(lost[6:], 32)
	s.read(lost, 0, 32)
	if !s.lost {
		t.Error("a loss is not seen")
	}
}

func TestPut(t *testing.T) {
	var ms []mapping
	for _, m := range []mapping{
		{Range: mm.Range{Start: 0x1000, End: 0x9000}, path: "a"},
		{Range: mm.Range{Start: 0x3000, End: 0x4000}, offset: 0x70, path: "b"},
		{Range: mm.Range{Start: 0x8000, End: 0xa000}, path: "c"},
	} {
		ms = put(ms, m)
	}
	var got []string
	for _, m := range ms {
		got = append(got, fmt.Sprintf("%v+%x %s", m.Range, m.offset, m.path))
	}
	if d := cmp.Diff([]string{"1000-3000+0 a", "3000-4000+70 b", "4000-8000+3000 a", "8000-a000+0 c"}, got); d != "" {
		t.Error(d)
	}
}

// A child's stack begins with what is known of its parent.
func TestFork(t *testing.T) {
	p := start(t, compile(t, "plain.c", "-g", "-O0"))
	r := New()
	defer r.Close()
	if err := r.Snapshot(p.pid); err != nil {
		t.Fatal(err)
	}
	const child = 1 << 22 // beyond any process number
	r.Fork(p.pid, child)
	if got := from(r.Stack(child, &p.stack)); len(got) < 5 {
		t.Errorf("got %q", got)
	}
}

func TestDemangle(t *testing.T) {
	p := start(t, compile(t, "names.cc", "-g", "-O1"))
	r := New()
	defer r.Close()
	fs := r.Stack(p.pid, &p.stack)
	want := []string{"app::Pool<int>::drop(std::vector<int, std::allocator<int> > const&) names.cc:11", "main names.cc:19"}
	if got := from(fs); !cmp.Equal(got, want) {
		t.Errorf("got %q", got)
	}
	for _, c := range [][2]string{
		{"app::Pool<int>::drop(std::vector<int, std::allocator<int> > const&)", "drop"},
		{"operator delete(void*)", "operator delete"},
		{"free", "free"},
		{"runtime.(*mheap).alloc", "runtime.(*mheap).alloc"},
		{"ring::Block::recycle", "recycle"},
		{"", ""},
	} {
		if got := (Frame{Func: c[0]}).Base(); got != c[1] {
			t.Errorf("Base of %q is %q", c[0], got)
		}
	}
	for _, c := range [][2]string{
		{"_ZN4ring5Block7recycle17h0123456789abcdefE", "ring::Block::recycle"},
		{"_RNvMNtCs1234_7example4ringNtB2_5Block7recycle", "<example::ring::Block>::recycle"},
		{"main.(*buffer).free", "main.(*buffer).free"},
	} {
		if got := demangled(c[0]); got != c[1] {
			t.Errorf("%q became %q", c[0], got)
		}
	}
}

// Debug information in a file of its own, by build-id and by name.
func TestSeparateDebug(t *testing.T) {
	old := debugRoot
	defer func() { debugRoot = old }()
	for _, how := range []string{"build-id", "debuglink"} {
		t.Run(how, func(t *testing.T) {
			debugRoot = t.TempDir()
			exe := compile(t, "plain.c", "-g", "-O0")
			debug := exe + ".debug"
			command(t, filepath.Dir(exe), "objcopy", "--only-keep-debug", exe, debug)
			command(t, filepath.Dir(exe), "objcopy", "--strip-all", exe)
			if how == "build-id" {
				e, err := elf.Open(exe)
				if err != nil {
					t.Fatal(err)
				}
				id := buildID(e)
				e.Close()
				dir := filepath.Join(debugRoot, ".build-id", id[:2])
				if err := os.MkdirAll(dir, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.Rename(debug, filepath.Join(dir, id[2:]+".debug")); err != nil {
					t.Fatal(err)
				}
			} else {
				command(t, filepath.Dir(exe), "objcopy", "--add-gnu-debuglink="+debug, exe)
			}
			p := start(t, exe)
			r := New()
			defer r.Close()
			if got := from(r.Stack(p.pid, &p.stack)); len(got) < 5 || got[len(got)-1] != "main plain.c:37" {
				t.Errorf("got %q", got)
			}
			if how == "debuglink" { // another build's must not be believed
				f, err := os.OpenFile(debug, os.O_WRONLY|os.O_APPEND, 0)
				if err != nil {
					t.Fatal(err)
				}
				f.WriteString("x")
				f.Close()
				r := New()
				defer r.Close()
				if got := from(r.Stack(p.pid, &p.stack)); len(got) != 0 {
					t.Errorf("with a debug file that does not fit: %q", got)
				}
			}
		})
	}
}

// A stripped library: what is exported has a name, what is not has none, and
// is not taken for its neighbour.
func TestStripped(t *testing.T) {
	dir := t.TempDir()
	lib := filepath.Join(dir, "libshared.so")
	command(t, dir, "gcc", "-g", "-O1", "-fno-optimize-sibling-calls", "-shared", "-fPIC", "-o", lib, testdata(t, "shared.c"))
	exe := compile(t, "sharer.c", "-g", "-O0", "-rdynamic", "-L"+dir, "-lshared", "-Wl,-rpath,"+dir)
	for _, c := range []struct {
		strip bool
		want  []string
	}{
		{false, []string{"hidden shared.c:6", "exported shared.c:12", "main sharer.c:8"}},
		{true, []string{"", "exported", "main sharer.c:8"}},
	} {
		if c.strip {
			command(t, dir, "strip", lib)
		}
		p := start(t, exe)
		r := New()
		defer r.Close()
		fs := r.Stack(p.pid, &p.stack)
		if got := from(fs); !cmp.Equal(got, c.want) {
			t.Errorf("strip %v: got %q", c.strip, got)
		}
		for _, f := range fs {
			if f.Func == "exported" && (f.Module != lib || f.BuildID == "" || f.Offset == 0) {
				t.Errorf("%+v", f)
			}
		}
		p.end()
	}
}

// Bytes of files and stacks are whatever they are.
func TestDamaged(t *testing.T) {
	exe := compile(t, "plain.c", "-g", "-O0")
	good, err := os.ReadFile(exe)
	if err != nil {
		t.Fatal(err)
	}
	p := start(t, exe)
	for seed := range 12 {
		bad := bytes.Clone(good)
		for i := seed * 7; i < len(bad); i += 97 + seed {
			if i > 0x40 { // leave it an ELF file
				bad[i] ^= byte(i)
			}
		}
		name := filepath.Join(t.TempDir(), "bad")
		if err := os.WriteFile(name, bad, 0o644); err != nil {
			t.Fatal(err)
		}
		f, err := os.Open(name)
		if err != nil {
			t.Fatal(err)
		}
		im, err := openImage(f, name)
		if err != nil {
			f.Close()
			continue
		}
		for a := uint64(0); a < 0x4000; a += 13 {
			im.function(a)
			im.rule(a)
			if im.lines != nil {
				im.lines.find(a)
			}
		}
		im.close()
	}
	r := New()
	defer r.Close()
	for cut := 0; cut < 512; cut += 8 {
		s := p.stack
		s.Memory = s.Memory[:cut]
		if fs := r.Stack(p.pid, &s); len(fs) == 0 || fs[0].Addr != s.PC {
			t.Fatalf("with %d bytes of the stack: %v", cut, fs)
		}
	}
	s := p.stack
	for i := range s.Memory {
		s.Memory[i] = byte(i * 31)
	}
	if fs := r.Stack(p.pid, &s); len(fs) == 0 {
		t.Error("no frame")
	}
	if fs := r.Stack(p.pid, &mm.Stack{}); fs != nil {
		t.Error(fs)
	}
}

func TestParseMaps(t *testing.T) {
	ms, err := parseMaps(strings.NewReader(`55d000-55e000 r--p 00000000 fe:01 1234   /usr/bin/a b
55e000-560000 r-xp 00001000 fe:01 1234                       /usr/bin/a b (deleted)
7f0000000000-7f0000001000 r-xp 00000000 00:00 0              [vdso]
7f0000002000-7f0000003000 rwxp 00000000 00:00 0 
`))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"55e000-560000 1000 fe:01 1234 /usr/bin/a b (deleted)", "7f0000000000-7f0000001000 0 00:00 0 [vdso]", "7f0000002000-7f0000003000 0 00:00 0 "}
	var got []string
	for _, m := range ms {
		got = append(got, fmt.Sprintf("%v %x %s %d %s", m.Range, m.offset, m.file.dev, m.file.inode, m.path))
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	for _, bad := range []string{"x", "1-2 r-xp 0 0", "1-2 r-x 0 0:0 0", "1-2 r-xp zz 0:0 0 x", "1 r-xp 0 0:0 0 x"} {
		if _, err := parseMaps(strings.NewReader(bad + "\n")); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

func TestStacks(t *testing.T) {
	var s Stacks
	a := []Frame{{Addr: 1, Func: "a"}, {Addr: 2}}
	b := []Frame{{Addr: 1, Func: "a"}, {Addr: 3}}
	if s.Add(1, nil) != 0 || s.Add(1, a) != 1 || s.Add(1, b) != 2 || s.Add(1, a) != 1 || s.Add(2, a) != 3 {
		t.Error("numbers")
	}
	if s.Frames(0) != nil || s.Frames(4) != nil || !cmp.Equal(s.Frames(2), b) {
		t.Error("frames")
	}
}

//go:noinline
func callers(pcs []uintptr) int { return runtime.Callers(2, pcs) }

// Test programs of Go are stripped: what Go's runtime itself uses is there.
// (The line of an address is that of the innermost inlined call, the function
// the one that it was inlined into.)
func TestGo(t *testing.T) {
	pcs := make([]uintptr, 8)
	n := callers(pcs)
	var as []mm.Addr
	for _, pc := range pcs[:n] {
		as = append(as, mm.Addr(pc))
	}
	r := New()
	defer r.Close()
	fs := r.Frames(os.Getpid(), as)
	if len(fs) == 0 || !strings.HasSuffix(fs[0].Func, "symbol.TestGo") || filepath.Base(fs[0].File) != "symbol_test.go" || fs[0].Line == 0 {
		t.Errorf("%v", fs)
	}
}

func BenchmarkStack(b *testing.B) {
	p := start(b, compile(b, "plain.c", "-g", "-O0"))
	r := New()
	defer r.Close()
	for b.Loop() {
		r.Stack(p.pid, &p.stack)
	}
}
