// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/extras"
)

// These tests run the real program against real ones. They need root and BPF.

// binary is ummufeed, in a directory that everybody may read.
var binary string

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == helperArg {
		helper(os.Args[2:])
		return
	}
	os.Exit(testMain(m))
}

func testMain(m *testing.M) int {
	dir, err := os.MkdirTemp("", "ummufeed")
	if err == nil {
		defer os.RemoveAll(dir)
		err = os.Chmod(dir, 0o755)
	}
	if err == nil {
		binary, err = extras.Build(context.Background(), dir, "ummufeed")
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// helperArg makes this test binary the program that is watched.
const helperArg = "ummufeed-test-helper"

func helperCommand(args ...string) []string {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return append([]string{self, helperArg}, args...)
}

// helper does what a test asks it for on its command line.
func helper(args []string) {
	must := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, "helper:", err)
			os.Exit(99)
		}
	}
	mmap := func(addr, n uintptr, flags int) uintptr {
		a, _, e := unix.Syscall6(unix.SYS_MMAP, addr, n, unix.PROT_READ|unix.PROT_WRITE, uintptr(unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|flags), ^uintptr(0), 0)
		if e != 0 {
			must(e)
		}
		return a
	}
	call := func(nr uintptr, a ...uintptr) uintptr {
		var x [6]uintptr
		copy(x[:], a)
		r, _, _ := unix.Syscall6(nr, x[0], x[1], x[2], x[3], x[4], x[5])
		return r
	}
	size := uintptr(os.Getpagesize())
	changes := func() {
		a := mmap(0, 8*size, 0)
		fmt.Printf("base %#x\n", a)
		call(unix.SYS_MADVISE, a+size, 2*size, unix.MADV_DONTNEED)
		call(unix.SYS_MPROTECT, a+3*size, size, unix.PROT_READ)
		mmap(a+4*size, size, unix.MAP_FIXED)
		to := mmap(0, 2*size, 0)
		call(unix.SYS_MREMAP, a+5*size, size, 2*size, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, to)
		call(unix.SYS_MUNMAP, a+1, size, 0) // EINVAL
		call(unix.SYS_MUNMAP, a, 8*size)
		fmt.Printf("to %#x\n", to)
	}
	switch args[0] {
	case "changes":
		changes()
	case "churn":
		n, err := strconv.Atoi(args[1])
		must(err)
		for range n {
			call(unix.SYS_MUNMAP, mmap(0, size, 0), size)
		}
		fmt.Println("done")
	case "seccomp": // what follows is executed under a filter that kills at KVM_CREATE_VM's ioctl
		next := helperCommand(append(args[1:], "changes")...)
		must(filterSystemCalls())
		must(unix.Exec(next[0], next, os.Environ()))
	case "feed":
		must(feedClient())
	case "wait":
		fmt.Println("ready")
		in := bufio.NewScanner(os.Stdin)
		for in.Scan() {
			switch in.Text() {
			case "changes":
				changes()
			case "exit":
				return
			}
		}
	}
}

// oncePerBoot is what the first command after the boot says that is to choose
// a tier: which, is chance.
var oncePerBoot = regexp.MustCompile(`(?m)^level=INFO msg="testing a tier, once per boot".*\n`)

// result is what a command left.
type result struct {
	code        int
	out, errout string
}

func ummufeed(t *testing.T, args ...string) result {
	t.Helper()
	return finish(t, exec.Command(binary, args...))
}

func finish(t *testing.T, cmd *exec.Cmd) result {
	t.Helper()
	var out, errout bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &out
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &errout
	}
	err := cmd.Run()
	var ee *exec.ExitError
	if err != nil && !errors.As(err, &ee) {
		t.Fatalf("run %v: %v", cmd.Args, err)
	}
	return result{cmd.ProcessState.ExitCode(), out.String(), oncePerBoot.ReplaceAllString(errout.String(), "")}
}

// parse decodes NDJSON; a stream that is not whole fails the test.
func parse(t *testing.T, text string) ([]mm.Record, *recording.Reader) {
	t.Helper()
	rd, err := recording.NewReader(strings.NewReader(text), hookName)
	if err != nil {
		t.Fatalf("%v: %.2000s", err, text)
	}
	var rs []mm.Record
	for {
		var r mm.Record
		if err := rd.Read(&r); err == io.EOF {
			return rs, rd
		} else if err != nil {
			t.Fatal(err)
		}
		rs = append(rs, r)
	}
}

// printed finds "name 0x..." in the output of a helper.
func printed(t *testing.T, text, name string) mm.Addr {
	t.Helper()
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, name+" "); ok {
			n, err := strconv.ParseUint(strings.TrimSpace(v), 0, 64)
			if err != nil {
				t.Fatal(err)
			}
			return mm.Addr(n)
		}
	}
	t.Fatalf("no %s in %q", name, text)
	return 0
}

// wantChanges checks that the helper's changes are there, in order, both
// phases, and nothing else touches its memory between map and unmap.
func wantChanges(t *testing.T, rs []mm.Record, out string) {
	t.Helper()
	size := mm.Addr(os.Getpagesize())
	a, to := printed(t, out, "base"), printed(t, out, "to")
	p := func(from, to mm.Addr) mm.Range { return mm.Range{Start: a + from*size, End: a + to*size} }
	want := []string{
		fmt.Sprintf("end map %v mmap 0x%x", p(0, 8), uint64(a)),
		fmt.Sprintf("begin zap %v madvise 0x0", p(1, 3)), fmt.Sprintf("end zap %v madvise 0x0", p(1, 3)),
		fmt.Sprintf("begin protect %v mprotect 0x0", p(3, 4)), fmt.Sprintf("end protect %v mprotect 0x0", p(3, 4)),
		fmt.Sprintf("begin replace %v mmap 0x0", p(4, 5)), fmt.Sprintf("end replace %v mmap 0x%x", p(4, 5), uint64(a+4*size)),
		fmt.Sprintf("begin move %v mremap 0x0", p(5, 6)), fmt.Sprintf("end move %v mremap 0x%x", p(5, 6), uint64(to)),
		fmt.Sprintf("begin unmap %v munmap 0x0", p(0, 8)), fmt.Sprintf("end unmap %v munmap 0x0", p(0, 8)),
	}
	var got []string
	started := false
	enc, err := recording.NewEncoder(meta(), hookName)
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rs {
		if r.Kind == mm.Map && r.Range == p(0, 8) && r.Call.NR == unix.SYS_MMAP {
			started = true
		}
		if !started || !r.Range.Overlaps(p(0, 8)) || r.Range == mm.Whole {
			continue
		}
		var line struct{ Call string }
		if err := json.Unmarshal(enc.AppendRecord(nil, &r), &line); err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintf("%v %v %v %s %#x", r.Phase, r.Kind, r.Range, line.Call, uint64(r.Ret)))
		if r.Kind == mm.Unmap && r.Phase == mm.PhaseEnd && r.Range == p(0, 8) {
			break
		}
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("changes (-want +got):\n%s", d)
	}
}

func TestRunExitCodes(t *testing.T) {
	for _, c := range []struct {
		name string
		cmd  []string
		want int
	}{
		{"ok", []string{"true"}, 0},
		{"failure", []string{"sh", "-c", "exit 7"}, 7},
		{"looks like ours", []string{"sh", "-c", "exit 5"}, 5},
		{"killed", []string{"sh", "-c", "kill -9 $$"}, 137},
		{"terminated", []string{"sh", "-c", "kill -TERM $$"}, 143},
		{"not found", []string{"/no/such/program"}, 127},
		{"not found in PATH", []string{"no-such-program"}, 127},
		{"not executable", []string{"/etc/passwd"}, 126},
		{"directory", []string{"/etc"}, 126},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := ummufeed(t, append([]string{"run", "--"}, c.cmd...)...)
			if r.code != c.want {
				t.Errorf("code %d, want %d; %s", r.code, c.want, r.errout)
			}
			if started := c.want != 126 && c.want != 127; started != strings.Contains(r.errout, "complete: ") {
				t.Errorf("summary: %s", r.errout)
			}
		})
	}
}

func TestRunStreams(t *testing.T) {
	cmd := []string{"--", "sh", "-c", "cat; echo to-stderr >&2"}
	run := func(args ...string) result {
		c := exec.Command(binary, append(append([]string{"run"}, args...), cmd...)...)
		c.Stdin = strings.NewReader("from stdin\n")
		return finish(t, c)
	}
	t.Run("table", func(t *testing.T) {
		r := run()
		if r.out != "from stdin\n" || !strings.Contains(r.errout, "to-stderr\n") || !strings.Contains(r.errout, " munmap() = 0") || strings.Contains(r.errout, "\x1b[") {
			t.Errorf("stdout %q, stderr %s", r.out, r.errout)
		}
	})
	t.Run("ndjson", func(t *testing.T) {
		r := run("-o", "ndjson")
		rs, rd := parse(t, r.out)
		if r.errout != "from stdin\nto-stderr\n" || len(rs) == 0 || !rd.Summary().Complete || uint64(len(rs)) != rd.Summary().Records {
			t.Errorf("stderr %q, %d records, %+v", r.errout, len(rs), rd.Summary())
		}
		if d := cmp.Diff(cmd[1:], rd.Meta().Command); d != "" || rd.Meta().Tier != "syscall" || len(rd.Meta().Gaps) == 0 {
			t.Errorf("meta %+v", rd.Meta())
		}
	})
	t.Run("table to stdout", func(t *testing.T) {
		r := run("--output", "-")
		if r.errout != "from stdin\nto-stderr\n" || !strings.HasPrefix(r.out, "TIME") {
			t.Errorf("stdout %s, stderr %q", r.out, r.errout)
		}
	})
	t.Run("file", func(t *testing.T) {
		file := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(file, bytes.Repeat([]byte("old"), 1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		r := run("-o", "ndjson", "--output", file)
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if rs, _ := parse(t, string(b)); len(rs) == 0 || r.out != "from stdin\n" || r.errout != "to-stderr\n" {
			t.Errorf("stdout %q, stderr %q, %d records", r.out, r.errout, len(rs))
		}
		if r := ummufeed(t, "run", "--output", file, "--", "no-such-program"); r.code != 127 {
			t.Errorf("code %d", r.code)
		}
		if after, err := os.ReadFile(file); err != nil || !bytes.Equal(after, b) {
			t.Error("a command that does not start destroys the output of another")
		}
	})
	t.Run("json", func(t *testing.T) {
		var doc struct {
			Records []map[string]any
			Summary recording.Summary
		}
		if r := run("-o", "json"); json.Unmarshal([]byte(r.out), &doc) != nil || uint64(len(doc.Records)) != doc.Summary.Records || !doc.Summary.Complete {
			t.Errorf("%s", r.out)
		}
	})
}

func TestRunSeesChanges(t *testing.T) {
	r := ummufeed(t, append([]string{"run", "-o", "ndjson", "--"}, helperCommand("changes")...)...)
	rs, rd := parse(t, r.out)
	if r.code != 0 || !rd.Summary().Complete {
		t.Fatalf("code %d, %+v", r.code, rd.Summary())
	}
	wantChanges(t, rs, r.errout)
	for i, x := range rs {
		if x.Seq != uint64(i+1) {
			t.Fatalf("record %d has number %d", i+1, x.Seq)
		}
	}

	// The same without the records that a filter leaves out.
	r = ummufeed(t, append([]string{"run", "-o", "ndjson", "--kind", "move,zap", "--min-size", strconv.Itoa(os.Getpagesize()), "--"}, helperCommand("changes")...)...)
	rs, rd = parse(t, r.out)
	if len(rs) == 0 || rd.Summary().Filtered == 0 {
		t.Errorf("%d records, %+v", len(rs), rd.Summary())
	}
	for _, x := range rs {
		if x.Kind != mm.Move && x.Kind != mm.Zap {
			t.Errorf("filter let %v through", x.Kind)
		}
	}
}

// The first mapping that the dynamic linker makes is seen: nothing happens
// before the watch.
func TestRunFromFirstInstruction(t *testing.T) {
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Fatal("strace is needed: ", err)
	}
	trace := filepath.Join(t.TempDir(), "trace")
	r := ummufeed(t, "run", "-o", "ndjson", "--", strace, "-o", trace, "-e", "trace=munmap,mprotect,mmap", "/bin/true")
	rs, _ := parse(t, r.out)
	b, err := os.ReadFile(trace)
	if err != nil {
		t.Fatal(err)
	}
	want := 0
	for _, call := range []string{"mmap(", "mprotect(", "munmap("} {
		want += strings.Count(string(b), "\n"+call)
		if strings.HasPrefix(string(b), call) {
			want++
		}
	}
	got := 0
	for _, x := range rs {
		if x.Comm.String() == "true" && x.Phase == mm.PhaseEnd && x.Call.ABI == mm.ABINative && x.Call.NR != unix.SYS_BRK {
			got++
		}
	}
	if want == 0 || got != want {
		t.Errorf("%d calls seen, strace saw %d:\n%s", got, want, b)
	}
}

func TestRunTree(t *testing.T) {
	// CMD ends at once; its orphan goes on, starts others, and is waited for.
	script := `exec 3<&0; (read x <&3; /bin/true; sh -c 'exit 0'; echo orphan) & exit 3`
	c := exec.Command(binary, "run", "-o", "ndjson", "--", "sh", "-c", script)
	c.Stdin = strings.NewReader("go\n")
	r := finish(t, c)
	rs, rd := parse(t, r.out)
	if r.code != 3 || !rd.Summary().Complete || r.errout != "orphan\n" {
		t.Fatalf("code %d, stderr %q, %+v", r.code, r.errout, rd.Summary())
	}
	forks, exits, deaths := 0, 0, 0
	execs := map[string]int{}
	for _, x := range rs {
		switch {
		case x.Kind == mm.Fork && x.Flags&mm.NewProcess != 0:
			forks++
		case x.Kind == mm.Exit && x.Flags&mm.LastTask != 0:
			exits++
		case x.Kind == mm.Exit && x.Flags&mm.SpaceDeath != 0:
			deaths++
		case x.Kind == mm.Exec:
			execs[x.Comm.String()]++
		}
	}
	if forks < 3 || exits != forks+1 || deaths == 0 || execs["true"] != 1 || execs["sh"] < 1 {
		t.Errorf("%d forks, %d exits, %d deaths, %v", forks, exits, deaths, execs)
	}
}

func TestRunWithoutTree(t *testing.T) {
	out, in, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer out.Close()
	c := exec.Command(binary, "run", "--wait-tree=false", "-c", "--", "sh", "-c", "exec 3<&0; (read x <&3; exit 0) >/dev/null 2>&1 & exit 4")
	c.Stdin = out
	r := finish(t, c) // ends although the orphan waits for its input
	in.Close()
	if r.code != 4 || !strings.Contains(r.errout, "complete:") {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
}

// started is a command under way whose output can be waited for.
type started struct {
	t      *testing.T
	cmd    *exec.Cmd
	in     io.WriteCloser
	out    *bufio.Reader
	seen   bytes.Buffer // what await read from out
	errout bytes.Buffer
}

func start(t *testing.T, args ...string) *started {
	t.Helper()
	return startCommand(t, exec.Command(args[0], args[1:]...))
}

func startCommand(t *testing.T, cmd *exec.Cmd) *started {
	t.Helper()
	s := &started{t: t, cmd: cmd}
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	s.out = bufio.NewReader(out)
	if s.in, err = s.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	s.cmd.Stderr = &s.errout
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.cmd.Process.Kill()
		s.cmd.Wait()
	})
	return s
}

// await reads lines until one begins with prefix.
func (s *started) await(prefix string) {
	s.t.Helper()
	for {
		line, err := s.out.ReadString('\n')
		s.seen.WriteString(line)
		if err != nil {
			s.cmd.Wait() // errout is complete, and nobody writes to it
			s.t.Fatalf("%v ended before %q: %v: %s", s.cmd.Args, prefix, err, s.errout.String())
		}
		if strings.HasPrefix(line, prefix) {
			return
		}
	}
}

func (s *started) say(line string) {
	s.t.Helper()
	if _, err := io.WriteString(s.in, line+"\n"); err != nil {
		s.t.Fatal(err)
	}
}

func (s *started) signal(sig os.Signal) {
	s.t.Helper()
	if err := s.cmd.Process.Signal(sig); err != nil {
		s.t.Fatal(err)
	}
}

func (s *started) finish() result {
	s.t.Helper()
	if _, err := io.Copy(&s.seen, s.out); err != nil {
		s.t.Fatal(err)
	}
	s.cmd.Wait()
	return result{s.cmd.ProcessState.ExitCode(), s.seen.String(), oncePerBoot.ReplaceAllString(s.errout.String(), "")}
}

// sleeper waits for a signal in one process. A shell that is about to start
// another would take a signal that is meant for both, and go on to wait.
const sleeper = "import time; print('ready', flush=True); time.sleep(1000)"

func TestRunInterrupted(t *testing.T) {
	t.Run("ends with the summary", func(t *testing.T) {
		s := start(t, binary, "run", "--", "python3", "-c", sleeper)
		s.await("ready")
		s.signal(unix.SIGINT)
		if r := s.finish(); r.code != 130 || !strings.Contains(r.errout, "complete:") {
			t.Errorf("code %d: %s", r.code, r.errout)
		}
	})
	t.Run("the program handles it", func(t *testing.T) {
		s := start(t, binary, "run", "--", "sh", "-c", "trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done")
		s.await("ready")
		s.signal(unix.SIGTERM)
		if r := s.finish(); r.code != 9 || !strings.Contains(r.errout, "complete:") {
			t.Errorf("code %d: %s", r.code, r.errout)
		}
	})
	t.Run("the second one kills", func(t *testing.T) {
		s := start(t, binary, "run", "--", "sh", "-c", "trap 'echo caught' INT; echo ready; while :; do read x || :; done")
		s.await("ready")
		s.signal(unix.SIGINT)
		s.await("caught")
		s.signal(unix.SIGINT)
		if r := s.finish(); r.code != 137 || !strings.Contains(r.errout, "complete:") {
			t.Errorf("code %d: %s", r.code, r.errout)
		}
	})
	t.Run("ignored when it was started", func(t *testing.T) {
		// As background jobs of a script are.
		s := start(t, "sh", "-c", "trap '' INT; exec "+binary+` run -- python3 -c "$0"`, sleeper)
		s.await("ready")
		s.signal(unix.SIGINT)
		if r := s.finish(); r.code != 130 || !strings.Contains(r.errout, "complete:") {
			t.Errorf("code %d: %s", r.code, r.errout)
		}
	})
}

func TestTrace(t *testing.T) {
	t.Run("until the target ends", func(t *testing.T) {
		target := start(t, helperCommand("wait")...)
		target.await("ready")
		s := start(t, binary, "trace", "-o", "ndjson", "-p", strconv.Itoa(target.cmd.Process.Pid))
		s.await(`{"meta"`)
		target.say("changes")
		target.say("exit")
		out := target.finish()
		r := s.finish()
		rs, rd := parse(t, r.out)
		if r.code != 0 || !rd.Summary().Complete || r.errout != "" {
			t.Errorf("code %d, %+v, %s", r.code, rd.Summary(), r.errout)
		}
		wantChanges(t, rs, out.out)
		if last := rs[len(rs)-1]; last.Kind != mm.Exit || last.Flags&mm.SpaceDeath == 0 {
			t.Errorf("last record is %+v", last)
		}
	})
	t.Run("until a signal", func(t *testing.T) {
		target := start(t, helperCommand("wait")...)
		target.await("ready")
		// --pid alone names the target
		s := start(t, binary, "trace", "-o", "ndjson", "--pid", strconv.Itoa(target.cmd.Process.Pid))
		s.await(`{"meta"`)
		target.say("changes")
		target.await("to ")
		s.signal(unix.SIGINT)
		r := s.finish()
		rs, rd := parse(t, r.out)
		if r.code != 0 || !rd.Summary().Complete {
			t.Errorf("code %d, %+v, %s", r.code, rd.Summary(), r.errout)
		}
		wantChanges(t, rs, target.seen.String())
		target.say("exit")
		if r := target.finish(); r.code != 0 {
			t.Errorf("target was disturbed: code %d", r.code)
		}
	})
	t.Run("two targets", func(t *testing.T) {
		a, b := start(t, helperCommand("wait")...), start(t, helperCommand("wait")...)
		a.await("ready")
		b.await("ready")
		s := start(t, binary, "trace", "-o", "ndjson", "-p", strconv.Itoa(a.cmd.Process.Pid), "-p", strconv.Itoa(b.cmd.Process.Pid))
		s.await(`{"meta"`)
		a.say("changes")
		a.say("exit")
		outA := a.finish()
		b.say("changes")
		b.say("exit")
		outB := b.finish()
		r := s.finish()
		rs, rd := parse(t, r.out)
		if r.code != 0 || !rd.Summary().Complete {
			t.Errorf("code %d, %+v", r.code, rd.Summary())
		}
		of := func(pid int) (out []mm.Record) {
			for _, x := range rs {
				if int(x.PID) == pid {
					out = append(out, x)
				}
			}
			return out
		}
		wantChanges(t, of(a.cmd.Process.Pid), outA.out)
		wantChanges(t, of(b.cmd.Process.Pid), outB.out)
		for i, x := range rs {
			if x.Seq != uint64(i+1) {
				t.Fatalf("record %d has number %d", i+1, x.Seq)
			}
		}
	})
	t.Run("children of the target", func(t *testing.T) {
		target := start(t, "sh", "-c", "exec 3<&0; echo ready; read x; (read y <&3; /bin/true) & exit 0")
		target.await("ready")
		s := start(t, binary, "trace", "-o", "ndjson", "-p", strconv.Itoa(target.cmd.Process.Pid))
		s.await(`{"meta"`)
		target.say("x")
		s.await("") // something came: the shell forks
		target.say("y")
		r := s.finish()
		rs, _ := parse(t, r.out)
		if r.code != 0 || !slices.ContainsFunc(rs, func(x mm.Record) bool { return x.Kind == mm.Exec && x.Comm.String() == "true" }) {
			t.Errorf("code %d, no exec of true in %d records", r.code, len(rs))
		}
	})
	t.Run("all", func(t *testing.T) {
		s := start(t, binary, "trace", "--all", "-o", "ndjson", "--ring", "64M")
		s.await(`{"meta"`)
		h := helperCommand("changes")
		c := exec.Command(h[0], h[1:]...)
		out := finish(t, c)
		s.signal(unix.SIGINT)
		r := s.finish()
		rs, _ := parse(t, r.out)
		var theirs []mm.Record
		for _, x := range rs {
			if int(x.PID) == c.Process.Pid {
				theirs = append(theirs, x)
			}
		}
		if r.code != 0 {
			t.Errorf("code %d", r.code)
		}
		wantChanges(t, theirs, out.out)
	})
}

func TestUsage(t *testing.T) {
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"run --no-such-flag -- true", 2, "unknown flag: --no-such-flag"},
		{"run", 2, "requires at least 1 arg"},
		{"run -o yaml -- true", 2, "one of table, json, ndjson"},
		{"run --kind flush -- true", 2, `unknown kind "flush"`},
		{"run --range 10 -- true", 2, "START-END"},
		{"run --min-size x -- true", 2, "K, M, G or T"},
		{"run --ring 5000 -- true", 2, "power of two"},
		{"run --ring 0 -- true", 2, "out of range"},
		{"run --output /no/such/dir/f -- true", 1, "open output"},
		{"trace", 2, "nothing to watch"},
		{"trace -p 0", 2, "not a process number"},
		{"trace -p x", 2, "not a process number"},
		{"trace -p 1 --all", 2, "exclude each other"},
		{"trace -p 4194304", 1, "no such process"},
		{"trace -p 2", 1, "no address space"},
		{"trace x", 2, "unknown command"},
		{"record", 2, "requires at least 1 arg"},
		{"record f true", 2, "write -- before"},
		{"record f", 2, "nothing to watch"},
		{"record -- true", 2, "the form is"},
		{"record f -p 1 -- true", 2, "excludes"},
		{"record /no/such/dir/f -- true", 1, "open recording"},
		{"replay", 2, "accepts 1 arg"},
		{"replay /no/such/file", 1, "no such file"},
		{"replay /bin/true", 1, "not a recording"},
		{"check -o ndjson", 2, "one of table, json"},
		{"check x", 2, "unknown command"},
		{"nonsense", 2, `unknown command "nonsense"`},
		{"--nonsense", 2, "unknown flag"},
	} {
		t.Run(c.args, func(t *testing.T) {
			cmd := exec.Command(binary, strings.Fields(c.args)...)
			cmd.Dir = t.TempDir()
			r := finish(t, cmd)
			if r.code != c.code || !strings.Contains(r.errout, c.says) || r.out != "" {
				t.Errorf("code %d, stdout %q, stderr %q", r.code, r.out, r.errout)
			}
			if n := strings.Count(r.errout, "\n"); n > 2 {
				t.Errorf("%d lines of error: %s", n, r.errout)
			}
		})
	}
}

func TestSmallCommands(t *testing.T) {
	for _, c := range []struct{ args, says string }{
		{"", "Available Commands:"}, {"--help", "Exit codes: 0 ok"}, {"version", "("}, {"completion bash", "__start_ummufeed"},
		{"__complete run --kind ", "unmap"}, {"__complete trace -o ", "ndjson"},
	} {
		args := strings.Fields(c.args)
		if strings.HasSuffix(c.args, " ") {
			args = append(args, "")
		}
		if r := ummufeed(t, args...); r.code != 0 || !strings.Contains(r.out, c.says) {
			t.Errorf("%q: code %d, stdout %q, stderr %q", c.args, r.code, r.out, r.errout)
		}
	}
}

func TestCheckHere(t *testing.T) {
	r := ummufeed(t, "check", "-o", "json")
	var m map[string]any
	if err := json.Unmarshal([]byte(r.out), &m); err != nil {
		t.Fatal(err)
	}
	hooks, _ := m["hooks"].([]any)
	gaps, _ := m["gaps"].([]any)
	if r.code != 0 || m["tier"] != "syscall" || len(hooks) == 0 || len(gaps) == 0 {
		t.Errorf("code %d: %s", r.code, r.out)
	}
	for _, h := range hooks {
		if h := h.(map[string]any); h["attached"] != true {
			t.Errorf("hook %v is not attached: %v", h["hook"], h["error"])
		}
	}
	var u unix.Utsname
	unix.Uname(&u)
	for _, k := range []string{"preemption", "lockdown", "capabilities", "unprivileged_bpf_disabled", "selinux", "apparmor", "io_uring_disabled", "memlock", "btf", "kvm"} {
		if _, ok := m[k]; !ok {
			t.Errorf("fact %s is missing", k)
		}
	}
	if m["kernel"] != unix.ByteSliceToString(u.Release[:]) {
		t.Errorf("kernel %v", m["kernel"])
	}
	if r := ummufeed(t, "check"); r.code != 0 || !strings.HasPrefix(r.out, "tier ") || !strings.Contains(r.out, "GAPS") {
		t.Errorf("code %d: %s", r.code, r.out)
	}
}

func TestUnprivileged(t *testing.T) {
	nobody := func(args ...string) result {
		c := exec.Command(binary, args...)
		c.Dir = "/"
		c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
		return finish(t, c)
	}
	for _, args := range [][]string{{"run", "--", "true"}, {"trace", "--all"}, {"trace", "-p", "1"}, {"record", "/dev/null", "--", "true"}, {"check"}} {
		r := nobody(args...)
		if r.code != command.ExitPrivileges || !strings.Contains(r.errout+r.out, "CAP_") {
			t.Errorf("%v: code %d, stdout %q, stderr %q", args, r.code, r.out, r.errout)
		}
		if strings.Contains(r.errout, "panic") {
			t.Errorf("%v: %s", args, r.errout)
		}
	}
	r := nobody("check", "-o", "json")
	var m struct {
		Tier  string
		Hooks []struct{ Error string }
	}
	if err := json.Unmarshal([]byte(r.out), &m); err != nil || r.code != command.ExitPrivileges || m.Tier != "none" || len(m.Hooks) == 0 || m.Hooks[0].Error == "" {
		t.Errorf("code %d, %v: %s", r.code, err, r.out)
	}
}

// record makes a recording of the helper.
func record(t *testing.T, args ...string) (file string, r result) {
	t.Helper()
	file = filepath.Join(t.TempDir(), "r")
	r = ummufeed(t, append([]string{"record", file, "--"}, helperCommand(args...)...)...)
	if r.code != 0 {
		t.Fatalf("record: code %d: %s", r.code, r.errout)
	}
	return file, r
}

func TestRecordReplay(t *testing.T) {
	file, rec := record(t, "changes")
	if !strings.Contains(rec.out, "base 0x") || !strings.Contains(rec.errout, "complete:") {
		t.Errorf("stdout %q, stderr %q", rec.out, rec.errout)
	}
	r := ummufeed(t, "replay", "-o", "ndjson", file)
	rs, rd := parse(t, r.out)
	if r.code != 0 || !rd.Summary().Complete || r.errout != "" {
		t.Errorf("code %d, %+v, %s", r.code, rd.Summary(), r.errout)
	}
	wantChanges(t, rs, rec.out)

	// Plain NDJSON replays too, byte for byte, and a replay of a replay.
	text := filepath.Join(t.TempDir(), "ndjson")
	if err := os.WriteFile(text, []byte(r.out), 0o600); err != nil {
		t.Fatal(err)
	}
	if again := ummufeed(t, "replay", "-o", "ndjson", text); again.code != 0 || again.out != r.out {
		t.Errorf("code %d, differs: %s", again.code, cmp.Diff(r.out, again.out))
	}
	tab := ummufeed(t, "replay", file)
	if tab.code != 0 || !strings.Contains(tab.out, "mremap(MREMAP_MAYMOVE|MREMAP_FIXED)") || !strings.Contains(tab.out, "complete:") {
		t.Errorf("code %d: %s", tab.code, tab.out)
	}
	one := ummufeed(t, "replay", "-o", "ndjson", "--kind", "move", "--phase", "end", file)
	rs, rd = parse(t, one.out)
	if len(rs) != 1 || rs[0].Kind != mm.Move || rd.Summary().Filtered == 0 {
		t.Errorf("%d records, %+v", len(rs), rd.Summary())
	}
}

func TestRecordRunning(t *testing.T) {
	target := start(t, helperCommand("wait")...)
	target.await("ready")
	file := filepath.Join(t.TempDir(), "r")
	s := start(t, binary, "record", file, "-p", strconv.Itoa(target.cmd.Process.Pid))
	// The file begins with its meta block when the watch is open.
	for {
		if st, err := os.Stat(file); err == nil && st.Size() > 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	target.say("changes")
	target.say("exit")
	out := target.finish()
	if r := s.finish(); r.code != 0 || !strings.Contains(r.errout, "complete:") {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
	rs, _ := parse(t, ummufeed(t, "replay", "-o", "ndjson", file).out)
	wantChanges(t, rs, out.out)
}

func TestReplayDamaged(t *testing.T) {
	file, _ := record(t, "churn", "20000") // several blocks
	whole, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	bad := func(name string, b []byte) string {
		f := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(f, b, 0o600); err != nil {
			t.Fatal(err)
		}
		return f
	}
	flipped := bytes.Clone(whole)
	flipped[len(flipped)*3/4] ^= 0x10
	for name, b := range map[string][]byte{"cut": whole[:len(whole)*3/4], "flipped": flipped, "tail": append(bytes.Clone(whole), "garbage"...)} {
		t.Run(name, func(t *testing.T) {
			r := ummufeed(t, "replay", "-o", "ndjson", bad(name, b))
			rs, rd := parse(t, r.out)
			if r.code != command.ExitIncomplete || len(rs) < 1000 || rd.Summary().Complete || !strings.Contains(rd.Summary().Reason, "recording") {
				t.Errorf("code %d, %d records, %+v", r.code, len(rs), rd.Summary())
			}
			if strings.Count(r.errout, "\n") != 1 || !strings.HasPrefix(r.errout, "ummufeed replay: read recording:") {
				t.Errorf("stderr %q", r.errout)
			}
		})
	}
	for name, b := range map[string][]byte{"empty": nil, "half a header": whole[:16]} {
		if r := ummufeed(t, "replay", bad("e", b)); r.code != command.ExitIncomplete || !strings.Contains(r.errout, "too early") {
			t.Errorf("%s: code %d: %s", name, r.code, r.errout)
		}
	}
}

// A recorder that is killed leaves what it had written.
func TestRecordKilled(t *testing.T) {
	target := start(t, helperCommand("wait")...)
	target.await("ready")
	file := filepath.Join(t.TempDir(), "r")
	s := start(t, binary, "record", file, "-p", strconv.Itoa(target.cmd.Process.Pid))
	grown := func(than int64) int64 {
		for {
			if st, err := os.Stat(file); err == nil && st.Size() > than {
				return st.Size()
			}
			time.Sleep(time.Millisecond)
		}
	}
	meta := grown(0)
	target.say("changes")
	target.await("to ")
	grown(meta) // within about a second
	s.signal(unix.SIGKILL)
	s.finish()
	r := ummufeed(t, "replay", "-o", "ndjson", file)
	rs, _ := parse(t, r.out)
	if r.code != command.ExitIncomplete || !strings.Contains(r.errout, "no summary") {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
	wantChanges(t, rs, target.seen.String())
}

func TestBrokenPipe(t *testing.T) {
	file, _ := record(t, "churn", "5000")
	closed := func() *os.File {
		r, w, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		r.Close()
		t.Cleanup(func() { w.Close() })
		return w
	}
	t.Run("replay", func(t *testing.T) {
		c := exec.Command(binary, "replay", "-o", "ndjson", file)
		c.Stdout = closed()
		if r := finish(t, c); r.code != 0 || r.errout != "" {
			t.Errorf("code %d: %q", r.code, r.errout)
		}
	})
	t.Run("run waits for its program", func(t *testing.T) {
		done := filepath.Join(t.TempDir(), "done")
		c := exec.Command(binary, "run", "-o", "ndjson", "--", "sh", "-c", "for i in 1 2 3 4 5 6 7 8 9; do /bin/true; done; touch "+done+"; exit 6")
		c.Stdout = closed()
		if r := finish(t, c); r.code != 6 || r.errout != "" {
			t.Errorf("code %d: %q", r.code, r.errout)
		}
		if _, err := os.Stat(done); err != nil {
			t.Error(err)
		}
	})
	t.Run("trace ends", func(t *testing.T) {
		c := exec.Command(binary, "trace", "--all", "-o", "ndjson")
		c.Stdout = closed()
		if r := finish(t, c); r.code != 0 || r.errout != "" {
			t.Errorf("code %d: %q", r.code, r.errout)
		}
	})
	for _, args := range [][]string{{"check"}, {"check", "-o", "json"}, {"version"}, {"--help"}} {
		c := exec.Command(binary, args...)
		c.Stdout = closed()
		if r := finish(t, c); r.code != 0 || r.errout != "" {
			t.Errorf("%v: code %d: %q", args, r.code, r.errout)
		}
	}
}

func TestFullDisk(t *testing.T) {
	for _, args := range [][]string{
		{"record", "/dev/full", "--", "true"},
		{"run", "--output", "/dev/full", "-o", "ndjson", "--", "true"},
		{"run", "--output", "/dev/full", "--", "true"},
	} {
		if r := ummufeed(t, args...); r.code != command.ExitFailure || !strings.Contains(r.errout, "no space left on device") {
			t.Errorf("%v: code %d: %s", args, r.code, r.errout)
		}
	}

	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal("mount a small file system (needs CAP_SYS_ADMIN): ", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	file := filepath.Join(dir, "r")
	r := ummufeed(t, append([]string{"record", file, "--"}, helperCommand("churn", "100000")...)...)
	if r.code != command.ExitFailure || r.out != "done\n" || !strings.Contains(r.errout, "no space left on device") || strings.Contains(r.errout, "complete:") {
		t.Errorf("record: code %d, stdout %q, stderr %s", r.code, r.out, r.errout)
	}
	re := ummufeed(t, "replay", "-o", "ndjson", file)
	rs, _ := parse(t, re.out)
	if re.code != command.ExitIncomplete || len(rs) < 1000 || !strings.Contains(re.errout, "no summary") {
		t.Errorf("replay: code %d, %d records, %s", re.code, len(rs), re.errout)
	}
}

// A reader that is stopped loses events, and says how many.
func TestLoss(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		code int
	}{{"told", nil, 0}, {"fails", []string{"--fail-on-loss"}, command.ExitIncomplete}} {
		t.Run(c.name, func(t *testing.T) {
			file := filepath.Join(t.TempDir(), "ndjson")
			args := append([]string{binary, "run", "-o", "ndjson", "--output", file, "--ring", "4K"}, c.args...)
			s := start(t, append(append(args, "--"), "sh", "-c", `echo ready; read x; "$@"; read x`, "sh", helperCommand()[0], helperArg, "churn", "2000")...)
			s.await("ready")
			s.signal(unix.SIGSTOP)
			s.say("go")
			s.await("done")
			s.signal(unix.SIGCONT)
			s.say("end")
			r := s.finish()
			b, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			rs, rd := parse(t, string(b))
			sum := rd.Summary()
			if r.code != c.code || sum.Complete || sum.Lost < 3000 || !slices.Contains(sum.LostAt, "ring") {
				t.Errorf("code %d, %+v", r.code, sum)
			}
			if last := rs[len(rs)-1].Seq; last != sum.Records+sum.Lost {
				t.Errorf("last number %d, %d records and %d lost", last, sum.Records, sum.Lost)
			}
			tab := ummufeed(t, "replay", "-c", file)
			if !strings.Contains(tab.out, "INCOMPLETE:") || !strings.Contains(tab.out, "lost (ring)") {
				t.Errorf("table %s", tab.out)
			}
		})
	}
}

func TestNoColor(t *testing.T) {
	pty, tty := openPTY(t)
	run := func(env ...string) string {
		c := exec.Command(binary, "run", "--", "true")
		c.Env = append(append(os.Environ(), "TERM=xterm"), env...)
		c.Stderr = tty
		finish(t, c)
		if _, err := tty.WriteString("END\n"); err != nil {
			t.Fatal(err)
		}
		var out strings.Builder
		for buf := make([]byte, 4096); !strings.Contains(out.String(), "END"); {
			n, err := pty.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			out.Write(buf[:n])
		}
		return out.String()
	}
	if s := run("NO_COLOR="); !strings.Contains(s, "\x1b[31m") {
		t.Errorf("no colours on a terminal: %q", s)
	}
	if s := run("NO_COLOR=1"); strings.Contains(s, "\x1b[") {
		t.Errorf("colours in spite of NO_COLOR: %q", s)
	}
}

func openPTY(t *testing.T) (pty, tty *os.File) {
	t.Helper()
	pty, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { pty.Close() })
	if err := unix.IoctlSetPointerInt(int(pty.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(pty.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	tty, err = os.OpenFile("/dev/pts/"+strconv.Itoa(n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	return pty, tty
}
