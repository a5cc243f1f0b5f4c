// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

// forNotifierTiers runs a test on each notifier tier of the machine.
func forNotifierTiers(t *testing.T, test func(t *testing.T, tier string)) {
	machine.NeedKVM(t)
	tiers := []tracer.Tier{tracer.TierNotifierTracepoint}
	if machine.HasProbes() {
		tiers = append(tiers, tracer.TierNotifierProbe)
	}
	for _, tier := range tiers {
		t.Run(tier.String(), func(t *testing.T) { test(t, tier.String()) })
	}
}

var straced = regexp.MustCompile(`(munmap|mprotect|mmap)\((0x[0-9a-f]+), ([0-9]+).*\) += 0`)

// What strace sees of the changes of a program, the notifier tier sees too:
// the same ranges, in the same order.
func TestNotifierAsStrace(t *testing.T) {
	forNotifierTiers(t, notifierAsStrace)
}

func notifierAsStrace(t *testing.T, tier string) {
	file := filepath.Join(t.TempDir(), "strace")
	r := finish(t, exec.Command("setarch", "-R", "strace", "-o", file, "-e", "trace=mmap,munmap,mprotect", "git", "--version"))
	if r.code != 0 {
		t.Fatal(r.errout)
	}
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for line := range strings.Lines(string(text)) {
		m := straced.FindStringSubmatch(line)
		if m == nil || m[1] == "mmap" && !strings.Contains(line, "MAP_FIXED") {
			continue
		}
		start, _ := strconv.ParseUint(m[2], 0, 64)
		size, _ := strconv.ParseUint(m[3], 10, 64)
		want = append(want, fmt.Sprint(m[1], mm.Range{Start: mm.Addr(start), End: mm.Addr(start + size)}.Pages()))
	}
	r = finish(t, exec.Command("setarch", "-R", binary, "run", "--tier", tier, "-o", "ndjson", "--", "git", "--version"))
	rs, rd := parse(t, r.out)
	if r.code != 0 || !rd.Summary().Complete || rd.Meta().Tier != tier {
		t.Fatalf("code %d, meta %+v, summary %+v", r.code, rd.Meta(), rd.Summary())
	}
	names := map[uint32]string{unix.SYS_MUNMAP: "munmap", unix.SYS_MPROTECT: "mprotect", unix.SYS_MMAP: "mmap"}
	for _, r := range rs {
		if r.Kind.IsChange() && r.Phase == mm.PhaseBegin && names[r.Call.NR] != "" && r.Call.ABI == mm.ABINative {
			got = append(got, fmt.Sprint(names[r.Call.NR], r.Range))
		}
	}
	// Two hooks of one change tell it twice where a processor pauses for long
	// between them, as emulated ones do.
	want, got = slices.Compact(want), slices.Compact(got)
	if d := cmp.Diff(want, got); d != "" || len(want) < 10 {
		t.Errorf("changes (-strace +notifier):\n%s", d)
	}
}

// Dynamic and static programs (Go's are static), each executed by the one
// before: every address space has its notifier.
func TestNotifierExecChain(t *testing.T) {
	forNotifierTiers(t, notifierExecChain)
}

func notifierExecChain(t *testing.T, tier string) {
	self := helperCommand("changes")
	script := `exec sh -c 'exec "$0" "$@"' "$@"`
	r := ummufeed(t, append([]string{"run", "--tier", tier, "-o", "ndjson", "--", "sh", "-c", script, "sh"}, self...)...)
	rs, rd := parse(t, r.out)
	if r.code != 0 || !rd.Summary().Complete {
		t.Fatalf("code %d, %s, %+v", r.code, r.errout, rd.Summary())
	}
	// Not by Record.Space: a later space may be where an earlier one was.
	execs, ends := 0, 0
	changes := map[int]int{} // in the program after so many executions
	for _, r := range rs {
		switch {
		case r.Kind == mm.Exec:
			execs++
		case r.Kind.IsChange() && r.Phase == mm.PhaseBegin:
			changes[execs]++
		case r.Kind.IsChange():
			ends++
		}
	}
	if (ends != 0) != (tier == tracer.TierNotifierProbe.String()) {
		t.Errorf("%d ends", ends)
	}
	if len(changes) != 3 {
		t.Errorf("changes in %d programs, want 3: %v, %d executions", len(changes), changes, execs)
	}
	size := mm.Addr(os.Getpagesize())
	a := printed(t, r.errout, "base")
	var kinds []string
	for _, r := range rs {
		if r.Range.Overlaps(mm.Range{Start: a, End: a + 8*size}) && r.Kind.IsChange() {
			kinds = append(kinds, fmt.Sprint(r.Kind, r.Range.Start-a, r.Range.End-a))
		}
	}
	for _, want := range []string{
		fmt.Sprint(mm.Zap, size, 3*size), fmt.Sprint(mm.Replace, 4*size, 5*size), fmt.Sprint(mm.Unmap, 0*size, 8*size),
	} {
		if !slices.Contains(kinds, want) {
			t.Errorf("no %s in %v", want, kinds)
		}
	}
}

func TestNotifierExitCodes(t *testing.T) {
	machine.NeedKVM(t)
	for _, c := range []struct {
		name string
		cmd  []string
		want int
	}{
		{"ok", []string{"true"}, 0},
		{"failure", []string{"sh", "-c", "exit 7"}, 7},
		{"killed", []string{"sh", "-c", "kill -9 $$"}, 137},
		{"terminated", []string{"sh", "-c", "kill -TERM $$"}, 143},
		{"child ends first", []string{"sh", "-c", "true; (exit 3); false | true; exit 9"}, 9},
		{"not found", []string{"/no/such/program"}, 127},
		{"not executable", []string{"/etc/passwd"}, 126},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := ummufeed(t, append([]string{"run", "--tier", "notifier", "--"}, c.cmd...)...)
			if r.code != c.want {
				t.Errorf("code %d, want %d; %s", r.code, c.want, r.errout)
			}
		})
	}
}

func TestNotifierInterrupted(t *testing.T) {
	machine.NeedKVM(t)
	s := start(t, binary, "run", "--tier", "notifier", "--", "sh", "-c", "trap 'exit 9' TERM; echo ready; while :; do sleep 0.01; done")
	s.await("ready")
	s.signal(unix.SIGTERM)
	if r := s.finish(); r.code != 9 || !strings.Contains(r.errout, "complete:") {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
}

// A descendant that gets no notifier is named, and the stream is not complete.
func TestNotifierGap(t *testing.T) {
	machine.NeedKVM(t)
	cmd := append([]string{"run", "--tier", "notifier", "--fail-on-loss", "-o", "ndjson", "--"}, helperCommand("seccomp")...)
	r := ummufeed(t, cmd...)
	_, rd := parse(t, r.out)
	sum := rd.Summary()
	if r.code != command.ExitIncomplete || sum.Complete || len(sum.Gaps) != 1 || !strings.Contains(sum.Gaps[0].What, "seccomp") || sum.Reason == "" {
		t.Errorf("code %d, %s, %+v", r.code, r.errout, sum)
	}
	if !strings.Contains(r.errout, "base 0x") {
		t.Errorf("the program did not run: %s", r.errout)
	}
}

func TestNotifierTrace(t *testing.T) {
	forNotifierTiers(t, notifierTrace)
}

func notifierTrace(t *testing.T, tier string) {
	target := start(t, helperCommand("wait")...)
	target.await("ready")
	s := start(t, binary, "trace", "--tier", tier, "--inject", "-o", "ndjson", "-p", strconv.Itoa(target.cmd.Process.Pid))
	s.await(`{"meta"`)
	target.say("changes")
	target.await("to ")
	target.say("exit")
	r := s.finish()
	rs, rd := parse(t, r.out)
	meta := rd.Meta()
	if r.code != 0 || meta.Tier != tier ||
		!slices.ContainsFunc(meta.Gaps, func(g recording.Gap) bool { return g == gapChildren }) {
		t.Fatalf("code %d, %s, meta %+v", r.code, r.errout, meta)
	}
	size := mm.Addr(os.Getpagesize())
	a := printed(t, target.seen.String(), "base")
	want := mm.Range{Start: a + size, End: a + 3*size}
	if !slices.ContainsFunc(rs, func(r mm.Record) bool { return r.Kind == mm.Zap && r.Range == want }) {
		t.Errorf("no zap of %v in %d records", want, len(rs))
	}
}

// The lines for people have no results and no arguments, which are not known,
// and come at once.
func TestNotifierTable(t *testing.T) {
	machine.NeedKVM(t)
	r := ummufeed(t, append([]string{"run", "--tier", "notifier/tracepoint", "--"}, helperCommand("changes")...)...)
	if r.code != 0 || !strings.Contains(r.errout, "  munmap  raw_tp/kvm_unmap_hva_range\n") || strings.Contains(r.errout, "munmap(") {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
}

func TestTierRefused(t *testing.T) {
	self := strconv.Itoa(os.Getpid())
	for _, c := range []struct {
		args string
		code int
		says string
	}{
		{"run --tier mm -- true", command.ExitUnsupported, "attach "},
		{"run --tier best -- true", command.ExitUsage, "one of auto, notifier"},
		{"trace --tier notifier --all", command.ExitUsage, "notifier"},
		{"trace --tier notifier -p " + self, command.ExitUsage, "--inject"},
		{"trace --tier syscall --inject -p " + self, command.ExitUsage, "--tier notifier"},
		{"trace --inject --all", command.ExitUsage, "--inject is for -p"},
		{"record --inject /dev/null -- true", command.ExitUsage, "--inject"},
	} {
		t.Run(c.args, func(t *testing.T) {
			if c.code == command.ExitUnsupported && machine.HasProbes() {
				t.Skip("this kernel has the tier")
			}
			r := ummufeed(t, strings.Fields(c.args)...)
			if r.code != c.code || !strings.Contains(r.errout, c.says) {
				t.Errorf("code %d, want %d: %s", r.code, c.code, r.errout)
			}
		})
	}
	t.Run("seccomp", func(t *testing.T) {
		machine.NeedKVM(t)
		target := start(t, helperCommand("seccomp", "wait")...)
		target.await("ready")
		r := ummufeed(t, "trace", "--inject", "-p", strconv.Itoa(target.cmd.Process.Pid))
		if r.code != command.ExitUnsupported || !strings.Contains(r.errout, "seccomp") {
			t.Errorf("code %d: %s", r.code, r.errout)
		}
		target.say("changes")
		target.await("to ") // unharmed
	})
}

// filterSystemCalls kills whoever calls ioctl with a request of KVM.
func filterSystemCalls() error {
	runtime.LockOSThread()
	stmt := func(code uint16, k uint32) unix.SockFilter { return unix.SockFilter{Code: code, K: k} }
	load := uint16(unix.BPF_LD | unix.BPF_W | unix.BPF_ABS)
	equal := uint16(unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K)
	code := []unix.SockFilter{
		stmt(load, 0), // the call's number
		{Code: equal, K: unix.SYS_IOCTL, Jf: 3},
		stmt(load, 24), // low half of its second argument, little endian
		{Code: equal, K: 0xae01, Jf: 1},
		stmt(unix.BPF_RET|unix.BPF_K, unix.SECCOMP_RET_KILL_PROCESS),
		stmt(unix.BPF_RET|unix.BPF_K, unix.SECCOMP_RET_ALLOW),
	}
	prog := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]}
	_, _, e := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	if e != 0 {
		return e
	}
	return nil
}

// Whoever kills ummufeed does not harm what it traces.
func TestNotifierKilled(t *testing.T) {
	machine.NeedKVM(t)
	fifo := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	// at "ready" nobody is about to fork
	script := `(echo ready; read x <"$1"; true; (exit 3); echo survived $? >"$1.out"; mv "$1.out" "$1.done") & wait`
	s := start(t, binary, "run", "--tier", "notifier", "--", "sh", "-c", script, "sh", fifo)
	s.await("ready")
	s.signal(unix.SIGKILL)
	s.cmd.Process.Wait()
	w, err := os.OpenFile(fifo, os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.WriteString("go\n"); err != nil {
		t.Fatal(err)
	}
	w.Close()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(time.Millisecond) {
		b, err := os.ReadFile(fifo + ".done")
		if err == nil {
			if string(b) != "survived 3\n" {
				t.Errorf("%q", b)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("the program did not go on")
		}
	}
}
