// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/tracees"
)

var (
	shared  *Tracer // of all tests that do not need one of their own
	program string  // the compiled tracee
)

// Without BPF nothing here can be tested: that is a failure, never a skip.
func TestMain(m *testing.M) {
	if role := os.Getenv("UMMU_TEST_ROLE"); role != "" {
		play(role)
		return
	}
	os.Exit(run(m))
}

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "ummu-tracer-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	if program, err = tracees.Build(dir); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if shared, err = Open(Options{}); err != nil {
		fmt.Fprintln(os.Stderr, "BPF is not available, and these tests are about nothing else:", err)
		return 1
	}
	code := m.Run()
	if err := shared.Close(); err != nil {
		fmt.Fprintln(os.Stderr, "close tracer:", err)
		code = 1
	}
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	return code
}

// times is n, or a twentieth of it with -short: for emulated processors.
func times(n int) int {
	if testing.Short() {
		return n / 20
	}
	return n
}

// tracee is a process that obeys (test/tracees/tracee.c).
type tracee struct {
	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
	pid     int
	area    mm.Addr
	scratch mm.Addr
}

func startTracee(t testing.TB) *tracee {
	t.Helper()
	p := &tracee{cmd: exec.Command(program)}
	p.cmd.Stderr = os.Stderr
	in, err := p.cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p.in, p.out = in, bufio.NewReaderSize(out, 64<<10)
	t.Cleanup(func() { p.end() })
	p.ready(t)
	return p
}

// end ends the process and waits for it.
func (p *tracee) end() error {
	p.in.Close()
	return p.cmd.Wait()
}

func (p *tracee) ready(t testing.TB) {
	t.Helper()
	w := p.answer(t, "ready", 3)
	p.pid, p.area, p.scratch = int(number(t, w[0])), mm.Addr(number(t, w[1])), mm.Addr(number(t, w[2]))
}

// tell sends a command and does not wait for the answer.
func (p *tracee) tell(t testing.TB, format string, args ...any) {
	t.Helper()
	if _, err := fmt.Fprintf(p.in, format+"\n", args...); err != nil {
		t.Fatalf("tell tracee: %v", err)
	}
}

func (p *tracee) answer(t testing.TB, first string, words int) []string {
	t.Helper()
	line, err := p.out.ReadString('\n')
	if err != nil {
		t.Fatalf("read tracee's answer: %v", err)
	}
	w := strings.Fields(line)
	if len(w) == 0 || w[0] != first || len(w)-1 < words {
		t.Fatalf("tracee answered %q, want %q and %d words", line, first, words)
	}
	return w[1:]
}

// do sends a command and returns the numbers of its answer.
func (p *tracee) do(t testing.TB, format string, args ...any) []int64 {
	t.Helper()
	p.tell(t, format, args...)
	w := p.answer(t, "ok", 0)
	n := make([]int64, len(w))
	for i := range w {
		n[i] = number(t, w[i])
	}
	return n
}

// call makes the tracee perform one system call, which must succeed.
func (p *tracee) call(t testing.TB, nr uintptr, args ...any) int64 {
	t.Helper()
	words := fmt.Sprintln(args...)
	ret := p.do(t, "call 1 %d %s", nr, strings.TrimSuffix(words, "\n"))[0]
	if ret < 0 && ret > -4096 {
		t.Fatalf("call %d %s failed: %d", nr, words, ret)
	}
	return ret
}

// page is the range of n pages from page i of the area.
func (p *tracee) page(i, n int) mm.Range {
	size := mm.Addr(mm.PageSize())
	return mm.Range{Start: p.area + mm.Addr(i)*size, End: p.area + mm.Addr(i+n)*size}
}

func number(t testing.TB, s string) int64 {
	t.Helper()
	n, err := strconv.ParseInt(s, 0, 64)
	if err != nil {
		t.Fatalf("tracee said %q, want a number", s)
	}
	return n
}

func watch(t testing.TB, tr *Tracer, target Target, o WatchOptions) *Stream {
	t.Helper()
	s, err := tr.Watch(target, o)
	if err != nil {
		t.Fatalf("watch: %v", err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Errorf("close stream: %v", err)
		}
	})
	return s
}

// drain returns everything recorded until now.
func drain(t testing.TB, s *Stream) []mm.Record {
	t.Helper()
	if err := s.Flush(); err != nil {
		t.Fatal(err)
	}
	var records []mm.Record
	for {
		var r mm.Record
		switch err := s.Read(&r); {
		case err == nil:
			records = append(records, r)
		case errors.Is(err, ErrFlushed):
			return records
		default:
			t.Fatalf("read: %v", err)
		}
	}
}

// drainDeaths drains until n address spaces have died. That may be a little
// after the exit of their last task, while anybody looks at them in /proc.
func drainDeaths(t testing.TB, s *Stream, n int) []mm.Record {
	t.Helper()
	var records []mm.Record
	for start := time.Now(); ; runtime.Gosched() {
		records = append(records, drain(t, s)...)
		if len(those(records, isDeath)) >= n {
			return records
		}
		if time.Since(start) > 20*time.Second {
			t.Fatalf("want %d deaths of address spaces:%s", n, show(records))
		}
	}
}

func isDeath(r *mm.Record) bool { return r.Flags&mm.SpaceDeath != 0 }

// complete checks that nothing was lost and that Seq counts from first.
func complete(t testing.TB, records []mm.Record, first uint64) {
	t.Helper()
	for i := range records {
		if records[i].Kind == mm.Lost {
			t.Fatalf("lost %d events at %d", records[i].Lost, i)
		}
		if want := first + uint64(i); records[i].Seq != want {
			t.Fatalf("record %d has seq %d, want %d", i, records[i].Seq, want)
		}
	}
}

func show(records []mm.Record) string {
	var b strings.Builder
	for i := range records {
		r := &records[i]
		fmt.Fprintf(&b, "\n\t%d %v %v pid=%d tid=%d %v", r.Seq, r.Kind, r.Phase, r.PID, r.TID, r.Range)
		if !r.To.Empty() {
			fmt.Fprintf(&b, " -> %v", r.To)
		}
		fmt.Fprintf(&b, " call=%d/%d flags=%#x hook=%s space=%x ret=%d", r.Call.ABI, r.Call.NR, uint16(r.Flags), HookName(r.Hook), r.Space, r.Ret)
		if r.ChildTID != 0 {
			fmt.Fprintf(&b, " child=%d/%d", r.ChildPID, r.ChildTID)
		}
		if r.Lost != 0 {
			fmt.Fprintf(&b, " lost=%d", r.Lost)
		}
	}
	return b.String()
}

// those returns the records that keep selects.
func those(records []mm.Record, keep func(*mm.Record) bool) []mm.Record {
	var out []mm.Record
	for i := range records {
		if keep(&records[i]) {
			out = append(out, records[i])
		}
	}
	return out
}
