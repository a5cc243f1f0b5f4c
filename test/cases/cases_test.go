// SPDX-License-Identifier: Apache-2.0

// Package cases holds tests of what happened to others who kept registrations
// coherent, or traced memory: those cases of docs/cases.md that no package
// tests by itself. Each test names its cases. Here they are seen from outside
// of the program that changes its memory; test/coherence has those seen from
// within.
package cases

import (
	"bufio"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

//go:embed target.c
var source []byte

var (
	dir    string         // of what is built
	shared *tracer.Tracer // of the tests that do not need one of their own
	page   = mm.Addr(mm.PageSize())
)

// builds are the ways in which a program comes to its system calls.
var builds = []struct {
	name string
	args []string
}{
	{"dynamic", nil},
	{"static", []string{"-static"}},
	{"raw", []string{"-static", "-DRAW"}},
}

func TestMain(m *testing.M) {
	var err error
	if dir, err = os.MkdirTemp("", "ummu-cases-"); err != nil {
		log.Fatal(err)
	}
	if err := build(); err != nil {
		log.Fatal(err)
	}
	if shared, err = tracer.Open(tracer.Options{}); err != nil {
		log.Fatalf("BPF is not available, and nothing can be tested without: %v", err)
	}
	code := m.Run()
	if err := shared.Close(); err != nil {
		log.Print(err)
		code = 1
	}
	os.RemoveAll(dir)
	if err := goleak.Find(); err != nil {
		log.Print(err)
		code = 1
	}
	os.Exit(code)
}

func build() error {
	file := filepath.Join(dir, "target.c")
	if err := os.WriteFile(file, source, 0o644); err != nil {
		return err
	}
	for _, b := range builds {
		args := append([]string{"-O2", "-Wall", "-Wextra", "-pthread", "-o", filepath.Join(dir, b.name), file}, b.args...)
		if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
			return fmt.Errorf("build %s program: %w\n%s", b.name, err, out)
		}
	}
	return nil
}

// target is a running program that obeys (target.c).
type target struct {
	t    testing.TB
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *bufio.Reader
	pid  int
	area mm.Addr
}

func start(t testing.TB, build string, env ...string) *target {
	t.Helper()
	p := &target{t: t, cmd: exec.Command(filepath.Join(dir, build))}
	p.cmd.Env = append(os.Environ(), env...)
	p.cmd.Stderr = os.Stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	p.out = bufio.NewReaderSize(out, 64<<10)
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.end)
	n := p.answer("ready")
	p.pid, p.area = int(n[0]), mm.Addr(n[1])
	return p
}

// end ends the program and waits for it. It may be called again.
func (p *target) end() {
	p.in.Close()
	if p.cmd.ProcessState == nil {
		p.cmd.Wait()
	}
}

// tell sends a command and does not wait for the answer.
func (p *target) tell(format string, args ...any) error {
	_, err := fmt.Fprintf(p.in, format+"\n", args...)
	return err
}

// ask sends a command and returns the numbers of its answer.
func (p *target) ask(format string, args ...any) ([]uint64, error) {
	if err := p.tell(format, args...); err != nil {
		return nil, err
	}
	return p.read("ok")
}

func (p *target) read(first string) ([]uint64, error) {
	line, err := p.out.ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("read answer: %w", err)
	}
	w := strings.Fields(line)
	if len(w) == 0 || w[0] != first {
		return nil, fmt.Errorf("answer %q, want %q", line, first)
	}
	n := make([]uint64, len(w)-1)
	for i, s := range w[1:] {
		if n[i], err = strconv.ParseUint(s, 0, 64); err != nil {
			return nil, err
		}
	}
	return n, nil
}

func (p *target) answer(first string) []uint64 {
	p.t.Helper()
	n, err := p.read(first)
	if err != nil {
		p.t.Fatal(err)
	}
	return n
}

func (p *target) do(format string, args ...any) []uint64 {
	p.t.Helper()
	n, err := p.ask(format, args...)
	if err != nil {
		p.t.Fatal(err)
	}
	return n
}

// pages is n pages of the area from page i.
func (p *target) pages(i, n int) mm.Range {
	return mm.Range{Start: p.area + mm.Addr(i)*page, End: p.area + mm.Addr(i+n)*page}
}

func watch(t testing.TB, tr *tracer.Tracer, pid int, o tracer.WatchOptions) *tracer.Stream {
	t.Helper()
	s, err := tr.Watch(tracer.PID(pid), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

// drain returns what was recorded up to now.
func drain(t testing.TB, s *tracer.Stream) (records []mm.Record, lost uint64) {
	t.Helper()
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	for {
		var r mm.Record
		switch err := s.Read(&r); {
		case errors.Is(err, tracer.ErrFlushed):
			return records, lost
		case err != nil:
			t.Fatal(err)
		case r.Kind == mm.Lost:
			lost += r.Lost
			fallthrough
		default:
			records = append(records, r)
		}
	}
}

// whole is drain where nothing may be lost.
func whole(t testing.TB, s *tracer.Stream) []mm.Record {
	t.Helper()
	records, lost := drain(t, s)
	if lost != 0 {
		t.Fatalf("%d events lost", lost)
	}
	return records
}

func show(records []mm.Record) string {
	var b strings.Builder
	for i := range records {
		r := &records[i]
		fmt.Fprintf(&b, "\n\t%d %v %v %v -> %v pid %d tid %d ret %d flags %#x", r.Seq, r.Kind, r.Phase, r.Range, r.To, r.PID, r.TID, r.Ret, uint16(r.Flags))
	}
	return b.String()
}

// watchdog ends the test binary with all stacks if the test hangs.
func watchdog(t testing.TB) {
	timer := time.AfterFunc(60*time.Second, func() {
		buf := make([]byte, 1<<20)
		fmt.Fprintf(os.Stderr, "%s hangs:\n%s\n", t.Name(), buf[:runtime.Stack(buf, true)])
		os.Exit(2)
	})
	t.Cleanup(func() { timer.Stop() })
}

// preloads are the allocators that make memory-management calls of their own
// accord, told to give memory back at once.
var preloads = []struct {
	name, lib, env string
}{
	{"glibc", "", ""},
	{"jemalloc", "libjemalloc.so.2", "MALLOC_CONF=dirty_decay_ms:0,muzzy_decay_ms:0,retain:false"},
	{"tcmalloc", "libtcmalloc*.so.4", "TCMALLOC_AGGRESSIVE_DECOMMIT=1"},
	{"mimalloc", "libmimalloc.so.*", "MIMALLOC_PURGE_DELAY=0"},
}

// preload returns the environment that loads an allocator.
func preload(t testing.TB, lib, env string) []string {
	t.Helper()
	if lib == "" {
		return nil
	}
	found, _ := filepath.Glob("/usr/lib/*/" + lib)
	if len(found) == 0 {
		t.Fatalf("%s is not installed (scripts/setup test)", lib)
	}
	return []string{"LD_PRELOAD=" + found[0], env}
}
