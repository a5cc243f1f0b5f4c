// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package detector tests the search for stale registrations with programs that
// make one mistake each: real registrations with io_uring, and of memory
// regions either with a real device or with a library that stands in for
// libibverbs.
package detector

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf/features"
	"go.uber.org/goleak"

	"github.com/ummu/ummu/internal/detector"
	"github.com/ummu/ummu/internal/findings"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/planted"
	"github.com/ummu/ummu/tracer"
)

// real: libibverbs and a device are there, as in a guest with soft-RoCE.
var real = flag.Bool("real", false, "memory regions of a real device")

var (
	tr      *tracer.Tracer
	dir     string // of the programs
	standin string // with the library that stands in for libibverbs
	symbols = symbol.New()
)

func TestMain(m *testing.M) {
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	tmp, err := os.MkdirTemp("", "")
	if err != nil {
		fmt.Println(err)
		return 1
	}
	defer os.RemoveAll(tmp)
	if dir, err = planted.Build(context.Background(), tmp); err != nil {
		fmt.Println(err)
		return 1
	}
	if standin, err = planted.StandIn(tmp, dir); err != nil {
		fmt.Println(err)
		return 1
	}
	if tr, err = tracer.Open(tracer.Options{Registrations: true}); err != nil {
		fmt.Println(err)
		return 1
	}
	if err := symbols.Watch(false); err != nil {
		fmt.Println(err)
		return 1
	}
	code := m.Run()
	if err := symbols.Close(); err != nil {
		fmt.Println("close resolver:", err)
		code = 1
	}
	if err := tr.Close(); err != nil {
		fmt.Println("close tracer:", err)
		code = 1
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Println(err)
		code = 1
	}
	return code
}

// seen is what a run of a program gave.
type seen struct {
	*detector.Detector
	fs      []*findings.Finding
	records []mm.Record
	told    []mm.Range // what the program said it registered
}

// watch runs a program with a mistake, and sees all of it.
func watch(t *testing.T, p planted.Program, args ...string) *seen {
	t.Helper()
	if !*real {
		if err := tr.ProbeVerbs(filepath.Join(standin, "libibverbs.so.1")); err != nil {
			t.Fatal(err)
		}
	}
	// From 7.0 on the kernel may skip the programs that see registrations. Then
	// the findings say that they are not all, and the run shows no more.
	for range 5 {
		s := watchWith(t, standin, p, args...)
		gaps := s.Gaps()
		if len(gaps) == 1 && gaps[0].Name == "findings-incomplete" && skips(t) {
			continue
		}
		if len(gaps) != 0 {
			t.Errorf("gaps: %v", gaps)
		}
		return s
	}
	t.Skip("this kernel skipped programs in each of five runs, and was caught at it")
	return nil
}

// skips reports whether the kernel may skip programs of raw tracepoints.
func skips(t *testing.T) bool {
	t.Helper()
	v, err := features.LinuxVersionCode()
	if err != nil {
		t.Fatal(err)
	}
	return v >= 7<<16
}

// watchWith runs a program, stopped until it is watched, with the library in a
// directory.
func watchWith(t *testing.T, libDir string, p planted.Program, args ...string) *seen {
	t.Helper()
	// A shell that waits for a line before it becomes the program.
	c := exec.Command("/bin/sh", append([]string{"-c", `echo && read x && exec "$0" "$@"`, filepath.Join(dir, string(p))}, args...)...)
	c.Stderr = os.Stderr
	if p == planted.Verbs && !*real {
		c.Env = append(os.Environ(), "LD_LIBRARY_PATH="+libDir)
	}
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
	lines := bufio.NewScanner(out)
	lines.Scan() // it is the shell that waits
	d, err := detector.New(tr, false, detector.Options{Resolver: symbols})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := d.Process(c.Process.Pid); err != nil {
		t.Fatal(err)
	}
	if *real {
		d.Program(c.Args[3])
	}
	st, err := tr.Watch(tracer.PID(c.Process.Pid), tracer.WatchOptions{Follow: true, Registrations: true, RingBytes: 64 << 20})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	s := &seen{Detector: d}
	if _, err := in.Write([]byte("\n")); err != nil {
		t.Fatal(err)
	}
	done := make(chan bool, 1)
	go func() { // the program has made its mistake, then it has ended
		ok := false
		for l := lines; l.Scan(); {
			var at, n uint64
			if k, _ := fmt.Sscanf(l.Text(), "%x %x", &at, &n); k == 2 {
				s.told = append(s.told, mm.Range{Start: mm.Addr(at), End: mm.Addr(at + n)})
			}
			if l.Text() == "done" {
				ok = true
				in.Close()
			}
		}
		if err := c.Wait(); err != nil {
			ok = false
		}
		st.Flush()
		done <- ok
	}()
	var r mm.Record
	for {
		err := st.Read(&r)
		if errors.Is(err, tracer.ErrFlushed) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		d.Record(&r, st.Stack())
		s.records = append(s.records, r)
	}
	if !<-done {
		t.Fatalf("%s %v failed", p, args)
	}
	d.End()
	s.fs = d.Engine().Findings()
	return s
}

// has reports whether a stack has a function at the line that is marked so.
func has(fs []symbol.Frame, function, mark string) bool {
	line := planted.Line(mark)
	return line != 0 && slices.ContainsFunc(fs, func(f symbol.Frame) bool {
		return f.Func == function && filepath.Base(f.File) == "planted.c" && f.Line == line
	})
}

func describe(d *detector.Detector, f *findings.Finding) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%v\nregistered by\n", f)
	for _, x := range d.Frames(f.Registration.Stack) {
		fmt.Fprintf(&b, "\t%v\n", x)
	}
	fmt.Fprintf(&b, "changed by\n")
	for _, x := range d.Frames(f.Change.Stack) {
		fmt.Fprintf(&b, "\t%v\n", x)
	}
	return b.String()
}

var programs = []struct {
	program   planted.Program
	registrar mm.Registrar
	mark      string
}{
	{planted.Uring, mm.ByIOUring, "uring register"},
	{planted.Verbs, mm.ByVerbs, "verbs register"},
}

// inShort are the mistakes that are made with the stand-in too.
var inShort = []string{"unmapped", "reused", "freed", "trimmed"}

// Each mistake is one finding, with both stacks down to the line.
func TestMistakes(t *testing.T) {
	for _, p := range programs {
		for _, m := range []struct {
			name, function string
			kind           mm.Kind
			class          findings.Class
			reused, again  bool
			ended          findings.EndedBy
		}{
			{"unmapped", "unmapped", mm.Unmap, findings.Freed, false, false, findings.SpaceEnded},
			{"reused", "reused", mm.Unmap, findings.Freed, true, true, findings.Deregistered},
			{"replaced", "replaced", mm.Replace, findings.Freed, true, false, findings.SpaceEnded},
			{"dropped", "dropped", mm.Zap, findings.Freed, true, false, findings.SpaceEnded},
			{"moved", "moved", mm.Move, findings.Freed, false, false, findings.SpaceEnded},
			{"freed", "freed", mm.Unmap, findings.Trim, false, false, findings.SpaceEnded},
			{"trimmed", "trimmed", mm.Unmap, findings.Trim, false, false, findings.SpaceEnded},
			{"remapped", "remapped", mm.Replace, findings.Ring, true, false, findings.Deregistered},
			{"threaded", "unmapping", mm.Unmap, findings.Freed, false, false, findings.SpaceEnded},
			{"direct", "direct", mm.Unmap, findings.Freed, false, false, findings.SpaceEnded},
		} {
			if p.program == planted.Verbs && !*real && !slices.Contains(inShort, m.name) {
				continue // what differs is how it is registered
			}
			t.Run(string(p.program)+"/"+m.name, func(t *testing.T) {
				s := watch(t, p.program, m.name)
				if len(s.fs) != 1 {
					t.Fatalf("%d findings: %v", len(s.fs), s.fs)
				}
				f := s.fs[0]
				if f.Registration.Range != s.told[0] || f.Registration.Registration.By != p.registrar {
					t.Errorf("registration of %v by %v, want %v by %v", f.Registration.Range, f.Registration.Registration.By, s.told[0], p.registrar)
				}
				if f.Change.Kind != m.kind || f.Class != m.class || !f.Certain || f.Reused != m.reused || f.RegisteredAgain != m.again || f.Ended != m.ended {
					t.Errorf("%v, %v, certain %v (%s), reused %v, again %v, %v", f.Change.Kind, f.Class, f.Certain, f.Why, f.Reused, f.RegisteredAgain, f.Ended)
				}
				if p.registrar == mm.ByVerbs && (f.Registration.Registration.LKey == 0 || f.Registration.Registration.Handle == 0 || f.Registration.Registration.Access != 3) {
					t.Errorf("%+v", f.Registration.Registration)
				}
				if f.Stayed() <= 0 {
					t.Errorf("stayed for %v", f.Stayed())
				}
				if !has(s.Frames(f.Registration.Stack), "add", p.mark) && !has(s.Frames(f.Registration.Stack), "update", p.mark) ||
					!has(s.Frames(f.Change.Stack), m.function, m.name) {
					t.Error(describe(s.Detector, f))
				}
			})
		}
	}
}

// A ring lives as long as one of its descriptors.
func TestSecondDescriptor(t *testing.T) {
	s := watch(t, planted.Uring, "dupped")
	if len(s.fs) != 1 || !has(s.Frames(s.fs[0].Change.Stack), "dupped", "dupped") {
		t.Errorf("%d findings: %v", len(s.fs), s.fs)
	}
}

// A program without a mistake has no finding, whatever else it does.
func TestCorrect(t *testing.T) {
	for _, p := range programs {
		t.Run(string(p.program), func(t *testing.T) {
			s := watch(t, p.program, "correct")
			for _, f := range s.fs {
				t.Error(describe(s.Detector, f))
			}
			if n := s.Engine().Stats(); n.Registrations < 100 || n.Live != 0 && p.registrar == mm.ByVerbs || n.Unknown != 0 {
				t.Errorf("%+v", n)
			}
		})
	}
}

// Ten thousand registrations with one mistake are one finding.
func TestMany(t *testing.T) {
	for _, p := range programs {
		count := uint64(10000)
		if p.program == planted.Verbs {
			count = 1000 // what is different has been tested with the first
		}
		t.Run(string(p.program), func(t *testing.T) {
			s := watch(t, p.program, "many", fmt.Sprint(count))
			if n := s.Engine().Stats(); n.Registrations != count || n.Deregistrations != count {
				t.Errorf("%+v", n)
			}
			if len(s.fs) != 1 || s.fs[0].Registration.Range != s.told[0] || !has(s.Frames(s.fs[0].Change.Stack), "many", "many") {
				t.Errorf("%d findings: %v", len(s.fs), s.fs)
			}
		})
	}
}

// All by one call, from an array that is not in memory when the call begins.
func TestTable(t *testing.T) {
	const count = 10000
	s := watch(t, planted.Uring, "table", fmt.Sprint(count))
	if n := s.Engine().Stats(); n.Registrations != count {
		t.Errorf("%+v", n)
	}
	if len(s.fs) != 1 || s.fs[0].Registration.Range != s.told[0] || s.fs[0].Registration.Registration.Handle != count/2 ||
		!has(s.Frames(s.fs[0].Registration.Stack), "table", "table register") || !has(s.Frames(s.fs[0].Change.Stack), "table", "table") {
		t.Errorf("%d findings: %v", len(s.fs), s.fs)
	}
}

// A library where nobody looked for it is probed when it is mapped; what was
// registered before is not known, which is said.
func TestLateLibrary(t *testing.T) {
	lib, err := os.ReadFile(filepath.Join(standin, "libibverbs.so.1"))
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "libibverbs.so.1"), lib, 0o755); err != nil {
		t.Fatal(err)
	}
	s := watchWith(t, dir, planted.Verbs, "unmapped")
	if gaps := s.Gaps(); len(gaps) != 1 || gaps[0].Name != "verbs-late" || !strings.Contains(gaps[0].What, dir) {
		t.Errorf("gaps: %v", gaps)
	}
	if s = watchWith(t, dir, planted.Verbs, "unmapped"); len(s.Gaps()) != 0 || len(s.fs) != 1 { // now it is known
		t.Errorf("gaps %v, findings %v", s.Gaps(), s.fs)
	}
}
