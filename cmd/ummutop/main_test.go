// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/pprof/profile"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/daemon"
	"github.com/ummu/ummu/tracer"
)

// These tests run the command, which is this test binary, against a program,
// which is this test binary too. They need root and BPF.

const (
	asCommand = "UMMUTOP_TEST_COMMAND" // environment: be ummutop
	helperArg = "ummutop-test-helper"  // first argument: be the program
	golden    = "../../internal/top/testdata/golden.ummurec"
)

func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == helperArg {
		helper(os.Args[2:])
		return
	}
	switch os.Getenv(asCommand) {
	case "":
	case "panic":
		os.Exit(panicking())
	case "hang":
		os.Exit(hanging())
	default:
		s := command.Standard()
		os.Exit(command.Execute(newRoot(s), os.Args[1:], s))
	}
	os.Exit(m.Run())
}

func self() string {
	name, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return name
}

// helper is the program that is watched: it moves pages, which nothing else in
// a Go program does.
func helper(args []string) {
	if args[0] == "client" { // of the daemon at a socket, until standard input ends
		w, err := feed.Dial(context.Background(), feed.Options{Socket: args[1]})
		if err != nil {
			panic(err)
		}
		defer w.Close()
		fmt.Println("ready")
		os.Stdin.Read(make([]byte, 1))
		return
	}
	n, err := strconv.Atoi(args[1])
	if err != nil {
		panic(err)
	}
	size := uintptr(os.Getpagesize())
	mmap := func() uintptr {
		a, _, e := unix.Syscall6(unix.SYS_MMAP, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0)
		if e != 0 {
			panic(e)
		}
		return a
	}
	a, b := mmap(), mmap()
	move := func() {
		if _, _, e := unix.Syscall6(unix.SYS_MREMAP, a, size, size, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, b, 0); e != 0 {
			panic(e)
		}
		a, b = b, a
	}
	switch args[0] {
	case "moves": // so many, then the end
		for range n {
			move()
		}
	case "steady": // one each so many ms, until standard input ends
		fmt.Printf("%#x %#x\n", a, b)
		go func() {
			for {
				move()
				time.Sleep(time.Duration(n) * time.Millisecond)
			}
		}()
		os.Stdin.Read(make([]byte, 1))
	case "load": // so many moves a second, until standard input ends; then it says how many
		fmt.Println("ready")
		stop := make(chan struct{})
		go func() {
			os.Stdin.Read(make([]byte, 1))
			close(stop)
		}()
		fmt.Println(load(n, move, stop))
	}
}

// load moves evenly in time.
func load(perSecond int, move func(), stop chan struct{}) (done int) {
	const slice = time.Millisecond
	begin := time.Now()
	for {
		select {
		case <-stop:
			return done
		default:
		}
		due := int(time.Since(begin).Seconds() * float64(perSecond))
		for ; done < due; done++ {
			move()
		}
		time.Sleep(slice)
	}
}

// result is what a command said.
type result struct {
	out, errout string
	code        int
}

func ummutop(t *testing.T, as *syscall.Credential, args ...string) result {
	t.Helper()
	name := self()
	if as != nil {
		name = filepath.Join(public(t), "ummutop")
	}
	c := exec.Command(name, args...)
	c.Env = append(os.Environ(), asCommand+"=1")
	var out, errout bytes.Buffer
	c.Stdout, c.Stderr = &out, &errout
	if as != nil {
		c.SysProcAttr = &syscall.SysProcAttr{Credential: as}
	}
	err := c.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return result{out.String(), errout.String(), c.ProcessState.ExitCode()}
}

// public returns a directory that everybody may read, with this program in it.
func public(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(self())
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "ummutop")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(filepath.Join(dir, "ummutop"), b, 0o755)); err != nil {
		t.Fatal(err)
	}
	return dir
}

// lines are the objects of NDJSON by their kind.
func lines(t *testing.T, out string) (samples, processes, others []map[string]any) {
	t.Helper()
	for line := range strings.Lines(out) {
		var x map[string]map[string]any
		if err := json.Unmarshal([]byte(line), &x); err != nil || len(x) != 1 {
			t.Fatalf("%q: %v", line, err)
		}
		for kind, v := range x {
			switch kind {
			case "sample":
				samples = append(samples, v)
			case "process":
				processes = append(processes, v)
			default:
				others = append(others, v)
			}
		}
	}
	return samples, processes, others
}

// moves is how many moves a process line tells of.
func moves(p map[string]any) float64 {
	c, _ := p["changes"].(map[string]any)
	m, _ := c["move"].(map[string]any)
	n, _ := m["count"].(float64)
	return n
}

// steady starts a program that moves pages until the test ends.
func steady(t *testing.T, every time.Duration) (pid int, pages []string) {
	t.Helper()
	c := exec.Command(self(), helperArg, "steady", fmt.Sprint(every.Milliseconds()))
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
	t.Cleanup(func() {
		in.Close()
		c.Wait()
	})
	var a, b string
	if _, err := fmt.Fscan(out, &a, &b); err != nil {
		t.Fatal(err)
	}
	return c.Process.Pid, []string{a, b}
}

// A program that is started is counted exactly, from its first to its last
// change, and its exit code is passed on.
func TestCommandIsCounted(t *testing.T) {
	t.Parallel()
	const n = 3000
	pprof := filepath.Join(t.TempDir(), "p.pb.gz")
	r := ummutop(t, nil, "--tier", "syscall", "-o", "ndjson", "--pprof", pprof, "--", self(), helperArg, "moves", strconv.Itoa(n))
	samples, processes, _ := lines(t, r.out)
	if r.code != 0 || len(samples) == 0 || len(processes) == 0 {
		t.Fatalf("%+v", r)
	}
	last := samples[len(samples)-1]
	if last["complete"] != true || last["ended"] != "ended" || moves(last) != n {
		t.Errorf("the last sample is %v", last)
	}
	sum := 0.0
	for _, p := range processes[len(processes)-int(last["processes"].(float64)):] {
		sum += moves(p)
	}
	if sum != n {
		t.Errorf("the processes moved %v times, want %d", sum, n)
	}
	f, err := os.Open(pprof)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p, err := profile.Parse(f)
	if err != nil {
		t.Fatal(err)
	}
	var moved int64
	for _, s := range p.Sample {
		if len(s.Label["kind"]) == 1 && s.Label["kind"][0] == "move" && s.Location[0].Line[0].Function.Name == "mremap" {
			moved += s.Value[0]
		}
	}
	if moved != n {
		t.Errorf("the profile has %d moves, want %d", moved, n)
	}
}

func TestExitCodes(t *testing.T) {
	t.Parallel()
	whole, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	cut := filepath.Join(t.TempDir(), "cut")
	if err := os.WriteFile(cut, whole[:len(whole)-10], 0o600); err != nil {
		t.Fatal(err)
	}
	nobody := &syscall.Credential{Uid: 65534, Gid: 65534}
	for _, c := range []struct {
		name string
		as   *syscall.Credential
		args []string
		code int
		says string // on standard error
	}{
		{"its own", nil, []string{"--tier", "syscall", "--", "sh", "-c", "exit 7"}, 7, ""},
		{"killed", nil, []string{"--tier", "syscall", "--", "sh", "-c", "kill -TERM $$"}, 128 + 15, ""},
		{"not found", nil, []string{"--", "no-such-program"}, 127, "command not found"},
		{"no process", nil, []string{"-p", "4194304"}, 1, "no such process"},
		{"not a number", nil, []string{"-p", "x"}, 2, "not a process number"},
		{"two targets", nil, []string{"-p", "1", "--comm", "x"}, 2, "exclude each other"},
		{"three", nil, []string{"--replay", golden, "--", "true"}, 2, "exclude each other"},
		{"no dashes", nil, []string{"true"}, 2, "write --"},
		{"too fast", nil, []string{"-d", "1ms"}, 2, "100ms"},
		{"format", nil, []string{"-o", "xml"}, 2, "table, ndjson"},
		{"view", nil, []string{"--view", "stars"}, 2, "processes"},
		{"notifier", nil, []string{"--tier", "notifier"}, 2, "ummufeed run"},
		{"ring", nil, []string{"--ring", "5"}, 2, "power of two"},
		{"once and more", nil, []string{"--once", "-n", "2"}, 2, "--once"},
		{"no recording", nil, []string{"--replay", "/no/such"}, 1, "no such file"},
		{"not a recording", nil, []string{"--replay", "/etc/passwd"}, 1, "not a recording"},
		{"cut off", nil, []string{"--replay", cut}, 5, "too early"},
		{"all, without privileges", nobody, []string{"--once", "--socket", "/no/such"}, 4, "CAP_SYS_PTRACE"},
		{"nor a daemon", nobody, []string{"--once", "--socket", "/no/such"}, 4, "/no/such"},
		{"a program, without privileges", nobody, []string{"--tier", "syscall", "--", "true"}, 4, "CAP_BPF"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := ummutop(t, c.as, c.args...)
			if r.code != c.code || !strings.Contains(r.errout, c.says) {
				t.Errorf("code %d, want %d; it says %q", r.code, c.code, r.errout)
			}
		})
	}
}

// Printed, a view of a running process, a given number of times.
func TestPrinted(t *testing.T) {
	t.Parallel()
	pid, _ := steady(t, time.Millisecond)
	number := strconv.Itoa(pid)
	comm := filepath.Base(self())
	comm = comm[:min(len(comm), 15)]
	r := ummutop(t, nil, "--tier", "syscall", "-n", "2", "-d", "200ms", "-p", number)
	if r.code != 0 || strings.Count(r.out, "PID") != 2 || strings.Count(r.out, "\n"+number+" ") != 2 || !strings.Contains(r.out, "[complete]") {
		t.Errorf("-n 2: %+v", r)
	}
	for _, args := range [][]string{{"-p", number}, {"--comm", comm}, {}} {
		r := ummutop(t, nil, append([]string{"--tier", "syscall", "--once", "-d", "300ms", "-o", "ndjson"}, args...)...)
		samples, processes, _ := lines(t, r.out)
		found := false
		for _, p := range processes {
			found = found || p["pid"] == float64(pid) && moves(p) > 0
			if len(args) > 0 && args[0] == "-p" && p["pid"] != float64(pid) {
				t.Errorf("%v shows %v", args, p)
			}
		}
		if r.code != 0 || len(samples) != 1 || !found {
			t.Errorf("%v: code %d, %s, %d samples, found: %v", args, r.code, r.errout, len(samples), found)
		}
	}
	r = ummutop(t, nil, "--tier", "syscall", "--once", "-d", "300ms", "--comm", "nobody-is-called-so", "-o", "ndjson")
	if _, processes, _ := lines(t, r.out); r.code != 0 || len(processes) != 0 {
		t.Errorf("%+v", r)
	}
	r = ummutop(t, nil, "--tier", "syscall", "--once", "-d", "500ms", "--view", "hooks", "-o", "ndjson")
	_, _, hooks := lines(t, r.out)
	ran := 0
	for _, h := range hooks {
		if h["attached"] == true && h["runs"].(float64) > 0 && h["time_ns"].(float64) > 0 {
			ran++
		}
	}
	if r.code != 0 || ran < 2 {
		t.Errorf("%d hooks ran: %+v", ran, r)
	}
	r = ummutop(t, nil, "--replay", golden, "-o", "ndjson")
	if samples, processes, _ := lines(t, r.out); r.code != 0 || len(samples) != 1 || len(processes) == 0 {
		t.Errorf("replay: %+v", r)
	}
}

// Without privileges a user sees the watches of its own processes, and is told
// what is missing.
func TestDaemon(t *testing.T) {
	t.Parallel()
	dir := public(t)
	socket := filepath.Join(dir, "feed.sock")
	d, err := daemon.New(daemon.Config{Socket: socket, Tiers: []tracer.Tier{tracer.TierSyscall}})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error)
	go func() { served <- d.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	nobody := &syscall.Credential{Uid: 65534, Gid: 65534}
	client := func(as *syscall.Credential) int {
		c := exec.Command(filepath.Join(dir, "ummutop"), helperArg, "client", socket)
		c.SysProcAttr = &syscall.SysProcAttr{Credential: as}
		c.Stderr = os.Stderr
		in, err1 := c.StdinPipe()
		out, err2 := c.StdoutPipe()
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			in.Close()
			c.Wait()
		})
		var word string
		if _, err := fmt.Fscan(out, &word); err != nil {
			t.Fatal(err)
		}
		return c.Process.Pid
	}
	theirs, ours := client(nobody), client(&syscall.Credential{})
	r := ummutop(t, nobody, "--once", "-d", "100ms", "--socket", socket, "-o", "ndjson")
	samples, _, watches := lines(t, r.out)
	if r.code != 0 || len(samples) != 1 || len(watches) != 1 || watches[0]["pid"] != float64(theirs) || watches[0]["state"] != "live" {
		t.Errorf("pid %d (root's is %d): %+v", theirs, ours, r)
	}
	if missing, _ := samples[0]["missing"].([]any); len(missing) == 0 || !strings.Contains(fmt.Sprint(missing...), "CAP_BPF") {
		t.Errorf("it does not say what is missing: %v", samples[0])
	}
}
