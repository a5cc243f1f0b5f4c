// SPDX-License-Identifier: Apache-2.0

package inject

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/child"
	"github.com/ummu/ummu/test/injectees"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

var (
	shared  *tracer.Tracer    // notifier tier
	targets map[string]string // programs by name
)

// Without BPF and KVM nothing here can be tested: a failure, never a skip.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == goTarget {
		playTarget()
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "ummu-inject-")
	if err == nil {
		defer os.RemoveAll(dir)
		err = build(dir)
	}
	if err == nil {
		shared, err = tracer.Open(tracer.Options{Tier: tracer.TierNotifierTracepoint})
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := m.Run()
	err = shared.Close()
	if err == nil {
		err = goleak.Find()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

func build(dir string) (err error) {
	if targets, err = injectees.Build(dir); err != nil {
		return err
	}
	targets["Go"], err = os.Executable()
	return err
}

// goTarget makes this test binary a target.
const goTarget = "inject-test-target"

func playTarget() {
	done := make(chan error)
	for range 4 { // goroutines that move between threads and sleep
		go func() {
			var err error
			for n := 0; n < 2000 && err == nil; n++ {
				b := make([]byte, 1000)
				b[n%1000] = 1
				time.Sleep(10 * time.Microsecond)
			}
			done <- err
		}()
	}
	fmt.Println("ready")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() && in.Text() == "change" {
		b, err := unix.Mmap(-1, 0, 3*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			panic(err)
		}
		b[os.Getpagesize()] = 1
		at := uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) + uint64(os.Getpagesize())
		if err := unix.Munmap(b); err != nil {
			panic(err)
		}
		fmt.Printf("unmapped %x\n", at) // not before it is
	}
	for range 4 {
		<-done
	}
	fmt.Println("ok")
}

type target struct {
	t   testing.TB
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func start(t testing.TB, name string, cred *syscall.Credential, args ...string) *target {
	t.Helper()
	if name == "Go" {
		args = []string{goTarget}
	}
	x := &target{t: t, cmd: exec.Command(targets[name], args...)}
	x.cmd.Stderr = os.Stderr
	x.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: cred}
	x.in, x.out = child.Start(t, x.cmd)
	x.expect("ready")
	return x
}

func (x *target) line() string {
	x.t.Helper()
	line, err := x.out.ReadString('\n')
	if err != nil {
		x.t.Fatalf("the target ended: %q, %v", line, err)
	}
	return strings.TrimSuffix(line, "\n")
}

func (x *target) expect(want string) {
	x.t.Helper()
	if got := x.line(); got != want {
		x.t.Fatalf("the target says %q, want %q", got, want)
	}
}

func (x *target) say(word string) {
	x.t.Helper()
	if _, err := io.WriteString(x.in, word+"\n"); err != nil {
		x.t.Fatal(err)
	}
}

// unmapped is the page that a target says it has unmapped.
func unmapped(t testing.TB, line string) mm.Range {
	t.Helper()
	var a uint64
	if _, err := fmt.Sscanf(line, "unmapped %x", &a); err != nil {
		t.Fatalf("the target says %q", line)
	}
	return mm.Range{Start: mm.Addr(a), End: mm.Addr(a + uint64(os.Getpagesize()))}
}

// changed makes the target unmap a page and reports whether the tier saw it.
func (x *target) changed() bool {
	x.t.Helper()
	s, err := shared.Watch(tracer.PID(x.cmd.Process.Pid), tracer.WatchOptions{})
	if err != nil {
		x.t.Fatal(err)
	}
	defer s.Close()
	x.say("change")
	return seen(x.t, s, unmapped(x.t, x.line())) > 0
}

// seen counts the records so far that cover r.
func seen(t testing.TB, s *tracer.Stream, r mm.Range) (n int) {
	t.Helper()
	all := records(t, s)
	for _, rec := range all {
		if rec.Kind == mm.Unmap && rec.Range.Contains(r) {
			n++
		}
	}
	if n == 0 {
		t.Logf("no unmap of %v among %+v, %+v", r, all, s.Stats())
	}
	return n
}

func records(t testing.TB, s *tracer.Stream) (all []mm.Record) {
	t.Helper()
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	for {
		var r mm.Record
		switch err := s.Read(&r); {
		case errors.Is(err, tracer.ErrFlushed):
			return all
		case err != nil:
			t.Fatal(err)
		}
		if r.Kind == mm.Lost {
			t.Fatalf("%d events lost", r.Lost)
		}
		all = append(all, r)
	}
}

// look is what a process, or others, can see of it.
type look struct {
	Maps   string
	Files  []string
	Status string
}

var statusLines = regexp.MustCompile(`(?m)^(SigPnd|SigBlk|SigIgn|SigCgt|Threads|VmSize|VmLck|VmData|VmStk|TracerPid|FDSize|NoNewPrivs|Uid).*$`)

func (x *target) look() look {
	x.t.Helper()
	dir := fmt.Sprintf("/proc/%d/", x.cmd.Process.Pid)
	read := func(name string) string {
		b, err := os.ReadFile(dir + name)
		if err != nil {
			x.t.Fatal(err)
		}
		return string(b)
	}
	l := look{Maps: read("maps"), Status: strings.Join(statusLines.FindAllString(read("status"), -1), "\n")}
	entries, err := os.ReadDir(dir + "fd")
	if err != nil {
		x.t.Fatal(err)
	}
	for _, e := range entries {
		to, _ := os.Readlink(dir + "fd/" + e.Name())
		l.Files = append(l.Files, e.Name()+" "+to)
	}
	slices.Sort(l.Files)
	return l
}

func machineOf(t *testing.T, pid int) *Machine {
	t.Helper()
	m, err := Process(pid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func TestProcess(t *testing.T) {
	machine.NeedKVM(t)
	for name := range targets {
		t.Run(name, func(t *testing.T) {
			x := start(t, name, nil)
			if x.changed() {
				t.Fatal("the change was seen without a notifier")
			}
			before := x.look()
			m := machineOf(t, x.cmd.Process.Pid)
			if name == "Go" { // its heap moves on by itself
				before.Maps, before.Status = "", ""
				after := x.look()
				after.Maps, after.Status = "", ""
				if d := cmp.Diff(before, after); d != "" {
					t.Error(d)
				}
			} else if d := cmp.Diff(before, x.look()); d != "" {
				t.Error(d)
			}
			if !x.changed() {
				t.Error("no change was seen")
			}
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
			if x.changed() {
				t.Error("the change was seen after the last duplicate was gone")
			}
			x.say("check")
			x.expect("ok")
		})
	}
}

// Every single change is seen, and as what it is. In the Go program threads
// come and go, and get signals meanwhile.
func TestEveryChange(t *testing.T) {
	machine.NeedKVM(t)
	for name := range targets {
		t.Run(name, func(t *testing.T) {
			x := start(t, name, nil)
			machineOf(t, x.cmd.Process.Pid)
			s, err := shared.Watch(tracer.PID(x.cmd.Process.Pid), tracer.WatchOptions{})
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			for i := range 300 {
				x.say("change")
				if n := seen(t, s, unmapped(t, x.line())); n != 1 {
					t.Fatalf("change %d has %d records, want 1", i, n)
				}
			}
			x.say("check")
			x.expect("ok")
		})
	}
}

// Threads that wait in system calls, that compute, and that close every
// descriptor they can, are not disturbed by many injections.
func TestThreads(t *testing.T) {
	machine.NeedKVM(t)
	times := 100
	if testing.Short() {
		times = 10 // emulated processors may not stop them all in time, every time
	}
	for _, name := range []string{"dynamic", "static"} {
		t.Run(name, func(t *testing.T) {
			x := start(t, name, nil, "threads")
			before := x.look()
			for range times {
				m, err := Process(x.cmd.Process.Pid)
				if err != nil {
					t.Fatal(err)
				}
				go m.Close() // it takes its time; nobody waits for the notifier
			}
			machineOf(t, x.cmd.Process.Pid)
			if d := cmp.Diff(before, x.look()); d != "" {
				t.Error(d)
			}
			if !x.changed() {
				t.Error("the change was not seen")
			}
			x.say("check")
			x.expect("ok")
			if err := x.cmd.Wait(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A target that may not open /dev/kvm itself.
func TestUnprivileged(t *testing.T) {
	machine.NeedKVM(t)
	if err := os.Chmod(filepath.Dir(targets["dynamic"]), 0o755); err != nil {
		t.Fatal(err)
	}
	x := start(t, "dynamic", &syscall.Credential{Uid: 65534, Gid: 65534})
	machineOf(t, x.cmd.Process.Pid)
	if !x.changed() {
		t.Error("the change was not seen")
	}
	x.say("check")
	x.expect("ok")
}

func TestSeccomp(t *testing.T) {
	machine.NeedKVM(t)
	x := start(t, "dynamic", nil, "filter")
	if _, err := Process(x.cmd.Process.Pid); !errors.Is(err, ErrSeccomp) {
		t.Errorf("%v, want %v", err, ErrSeccomp)
	}
	x.say("change")
	x.line()
	x.say("check")
	x.expect("ok")
}

// A target with all descriptors taken is refused and loses none.
func TestNoDescriptors(t *testing.T) {
	machine.NeedKVM(t)
	x := start(t, "dynamic", nil)
	before := x.look()
	limit := unix.Rlimit{Cur: 4, Max: 4}
	if err := unix.Prlimit(x.cmd.Process.Pid, unix.RLIMIT_NOFILE, &limit, nil); err != nil {
		t.Fatal(err)
	}
	if _, err := Process(x.cmd.Process.Pid); !errors.Is(err, unix.EMFILE) {
		t.Errorf("%v, want %v", err, unix.EMFILE)
	}
	if d := cmp.Diff(before, x.look()); d != "" {
		t.Error(d)
	}
	x.say("check")
	x.expect("ok")
}

func TestNoProcess(t *testing.T) {
	machine.NeedKVM(t)
	x := start(t, "dynamic", nil)
	x.in.Close()
	x.cmd.Wait()
	if _, err := Process(x.cmd.Process.Pid); err == nil {
		t.Error("no error for a process that has ended")
	}
}

// A stopped target stays stopped.
func TestStopped(t *testing.T) {
	machine.NeedKVM(t)
	x := start(t, "dynamic", nil)
	pid := x.cmd.Process.Pid
	if err := unix.Kill(pid, unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for state(pid) != 'T' {
		runtime.Gosched()
	}
	machineOf(t, pid)
	for state(pid) != 'T' {
		runtime.Gosched() // on its way back
	}
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if !x.changed() {
		t.Error("the change was not seen")
	}
}

// follow runs a program as a Tree and returns its records, what it wrote, and
// its exit status.
func follow(t *testing.T, name string, args ...string) (rs []mm.Record, out string, ws unix.WaitStatus, gaps []Gap) {
	t.Helper()
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	text := make(chan string)
	go func() {
		b, _ := io.ReadAll(r)
		text <- string(b)
	}()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	p, err := os.StartProcess(targets[name], append([]string{"target"}, args...), &os.ProcAttr{
		Files: []*os.File{null, w, os.Stderr}, Sys: &syscall.SysProcAttr{Ptrace: true},
	})
	w.Close()
	if err != nil {
		t.Fatal(err)
	}
	defer p.Release()
	if _, err := unix.Wait4(p.Pid, &ws, 0, nil); err != nil {
		t.Fatal(err)
	}
	tree, err := NewTree()
	if err != nil {
		t.Fatal(err)
	}
	if err := tree.Start(p.Pid); err != nil {
		t.Fatal(err)
	}
	s, err := shared.Watch(tracer.PID(p.Pid), tracer.WatchOptions{Follow: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	if err := tree.Run(func(pid int, status unix.WaitStatus) bool {
		if pid == p.Pid {
			ws = status
		}
		return true
	}); err != nil {
		t.Error(err)
	}
	if err := tree.Close(); err != nil {
		t.Error(err)
	}
	return records(t, s), <-text, ws, tree.Gaps()
}

func TestTree(t *testing.T) {
	machine.NeedKVM(t)
	for _, c := range []struct {
		name, mode string
		code       int
		changes    int
	}{
		{"dynamic", "plain", 0, 1},
		{"static", "plain", 0, 1},
		{"dynamic", "fork", 0, 1},
		{"dynamic", "orphan", 7, 1},
		{"static", "orphan", 7, 1},
		{"dynamic", "execthread", 0, 1},
		{"dynamic", "threads", 0, 0}, // timers, signals, and nobody to say anything
		{"static", "threads", 0, 0},
	} {
		t.Run(c.name+" "+c.mode, func(t *testing.T) {
			rs, out, ws, gaps := follow(t, c.name, c.mode)
			if len(gaps) > 0 {
				t.Errorf("gaps: %v", gaps)
			}
			n := 0
			for line := range strings.Lines(out) {
				if !strings.HasPrefix(line, "unmapped") {
					continue
				}
				n++
				want, covering := unmapped(t, line), 0
				for _, r := range rs {
					if r.Kind == mm.Unmap && r.Range == want {
						covering++
					}
				}
				if covering != 1 {
					t.Errorf("%d records of %v, want 1", covering, want)
				}
			}
			if strings.Contains(c.mode, "threads") && !strings.Contains(out, "ok\n") {
				t.Errorf("the target says %q", out)
			}
			if n != c.changes || ws.ExitStatus() != c.code {
				t.Errorf("%d changes, exit status %d: %q", n, ws.ExitStatus(), out)
			}
		})
	}
}

// A program that cannot get a notifier runs, and is a gap.
func TestTreeGap(t *testing.T) {
	machine.NeedKVM(t)
	_, out, ws, gaps := follow(t, "dynamic", "filterexec")
	if len(gaps) != 1 || !errors.Is(gaps[0].Err, ErrSeccomp) {
		t.Errorf("gaps %v, want one with %v", gaps, ErrSeccomp)
	}
	if ws.ExitStatus() != 0 || !strings.HasPrefix(out, "unmapped") {
		t.Errorf("status %v: %q", ws, out)
	}
}

// Job control works inside: the program stops itself, and goes on by SIGCONT.
func TestTreeStopped(t *testing.T) {
	machine.NeedKVM(t)
	_, out, ws, gaps := follow(t, "dynamic", "stopped")
	if ws.ExitStatus() != 0 || !strings.HasPrefix(out, "unmapped") || len(gaps) > 0 {
		t.Errorf("status %v: %q, %v", ws, out, gaps)
	}
}

// The price of an injection, the target standing still, by its mappings; and of
// letting the machine go.
func BenchmarkProcess(b *testing.B) {
	for _, mode := range []string{"idle", "threads", "many"} {
		b.Run(mode, func(b *testing.B) {
			x := start(b, "dynamic", nil, mode)
			pid := x.cmd.Process.Pid
			for b.Loop() {
				m, err := Process(pid)
				if err != nil {
					b.Fatal(err)
				}
				b.StopTimer()
				m.Close()
				b.StartTimer()
			}
		})
	}
}
