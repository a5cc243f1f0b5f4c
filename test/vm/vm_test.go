// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/test/extras"
	"github.com/ummu/ummu/test/vm/wire"
)

type member struct {
	Name     string
	Mode     uint64
	Contents string
}

// members reads a newc archive as the kernel does (init/initramfs.c).
func members(t *testing.T, b []byte) (list []member) {
	t.Helper()
	for at := 0; ; {
		field := func(i int) uint64 {
			n, err := strconv.ParseUint(string(b[at+6+8*i:at+14+8*i]), 16, 32)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
		if string(b[at:at+6]) != "070701" {
			t.Fatalf("no header at %d: %q", at, b[at:at+6])
		}
		size, name := int(field(6)), int(field(11))
		start := at + 110
		data := (start + name + 3) &^ 3
		m := member{string(b[start : start+name-1]), field(1), string(b[data : data+size])}
		if b[start+name-1] != 0 {
			t.Fatalf("name of %q does not end", m.Name)
		}
		if m.Name == "TRAILER!!!" {
			if len(b)%512 != 0 {
				t.Errorf("%d bytes: not padded", len(b))
			}
			return list
		}
		list = append(list, m)
		at = (data + size + 3) &^ 3
	}
}

func TestArchive(t *testing.T) {
	host := filepath.Join(t.TempDir(), "tool")
	if err := os.WriteFile(host, []byte("#!\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	a := newArchive(&out)
	a.bytes("/etc/hosts", 0o644, []byte("12345"))
	a.link("bin/sh", "busybox")
	a.file("/bin/../bin/tool", host)
	a.bytes("/etc/hosts", 0o600, []byte("second"))
	a.dir("/etc/")
	if err := a.Close(); err != nil {
		t.Fatal(err)
	}
	want := []member{
		{"etc", 0o040755, ""},
		{"etc/hosts", 0o100644, "12345"},
		{"bin", 0o040755, ""},
		{"bin/sh", 0o120777, "busybox"},
		{"bin/tool", 0o100700, "#!\n"},
	}
	if diff := cmp.Diff(want, members(t, out.Bytes())); diff != "" {
		t.Error(diff)
	}
	a = newArchive(&out)
	a.file("/missing", host+"-not-there")
	if err := a.Close(); err == nil {
		t.Error("a missing file is no error")
	}
}

func TestNewer(t *testing.T) {
	for _, c := range []struct{ a, b string }{
		{"6.1.0-57-amd64", "6.1.0-9-amd64"},
		{"6.12.117+deb12-amd64", "6.12.99+deb12-amd64"},
		{"6.12", "6.1"},
		{"7.3", "6.18"},
	} {
		if !newer(c.a, c.b) || newer(c.b, c.a) || newer(c.a, c.a) {
			t.Errorf("%s is newer than %s", c.a, c.b)
		}
	}
}

// Each kernel takes packages of its own only, and none with another flavour.
func TestReleases(t *testing.T) {
	want := map[string]string{
		"linux-image-5.10.0-46-amd64":            "5.10",
		"linux-image-6.1.0-57-amd64":             "6.1",
		"linux-image-6.12.117+deb12-amd64":       "6.12",
		"linux-image-6.18.15+deb13-amd64":        "6.18",
		"linux-image-7.3.4+deb13-amd64":          "7.3",
		"linux-image-6.1.0-57-rt-amd64":          "",
		"linux-image-6.1.0-57-cloud-amd64":       "",
		"linux-image-6.1.0-57-amd64-unsigned":    "",
		"linux-image-6.1.0-0.deb11.52-amd64":     "",
		"linux-image-6.12.117+deb12-cloud-amd64": "",
	}
	for p, name := range want {
		got := ""
		for _, k := range kernels {
			if k.release.MatchString(p) {
				got += k.name
			}
		}
		if got != name {
			t.Errorf("%s: for %q, want %q", p, got, name)
		}
	}
}

// A suite's output, cut anywhere, becomes its results.
func TestReport(t *testing.T) {
	const output = "" +
		"\x16=== RUN   TestA\n" +
		"\x16=== ATTR  TestA changes 80 000\n" +
		"\x16--- PASS: TestA (0.10s)\n" +
		"\x16=== RUN   TestB\n" +
		"\x16=== RUN   TestB/x\n" +
		"    b_test.go:1: wrong\n" +
		"--- PASS: TestFaked (0.00s)\n" +
		"\x16=== RUN   TestB/y\n" +
		"\x16--- FAIL: TestB (0.20s)\n" +
		"    \x16--- FAIL: TestB/x (0.10s)\n" +
		"    \x16--- PASS: TestB/y (0.10s)\n" +
		"\x16=== RUN   TestC\n" +
		"no newline\x16--- SKIP: TestC (0.00s)\n" +
		"FAIL\n"
	for cut := range len(output) {
		r := newReport(t.TempDir(), nil)
		r.event(&wire.Event{Type: wire.Start, Suite: "s"})
		r.event(&wire.Event{Type: wire.Output, Suite: "s", Text: output[:cut]})
		r.event(&wire.Event{Type: wire.Output, Suite: "s", Text: output[cut:]})
		r.event(&wire.Event{Type: wire.End, Suite: "s", Exit: 1})
		want := []result{
			{Suite: "s", Test: "TestA", Result: "pass", Seconds: 0.1, Figures: map[string]string{"changes": "80 000"}},
			{Suite: "s", Test: "TestB/x", Result: "fail", Seconds: 0.1, Output: "    b_test.go:1: wrong\n--- PASS: TestFaked (0.00s)"},
			{Suite: "s", Test: "TestB/y", Result: "pass", Seconds: 0.1},
			{Suite: "s", Test: "TestC", Result: "skip"},
		}
		if diff := cmp.Diff(want, r.results); diff != "" {
			t.Fatalf("cut at %d: %s", cut, diff)
		}
	}
}

// What does not end by a failed test is a failure all the same.
func TestReportAbnormal(t *testing.T) {
	const half = "\x16=== RUN   TestA\n\x16--- PASS: TestA (0.10s)\n\x16=== RUN   TestB\npanic: oh\n"
	for _, c := range []struct {
		name   string
		output string
		end    *wire.Event // nil: the machine stops
		passed int
		says   string // by the failure; empty: there is none
	}{
		{"panic", half, &wire.Event{Exit: 2}, 1, "exit status 2  in TestB\npanic: oh"},
		{"killed", half, &wire.Event{Exit: 137, Text: "killed after 5m0s"}, 1, "killed after 5m0s"},
		{"crash", half, nil, 1, "the machine ended during it in TestB"},
		{"no test", "PASS\n", &wire.Event{}, 0, "no test ran"},
		{"not started", "", &wire.Event{Exit: 127, Text: "no such file"}, 0, "no such file"},
		{"command", "fine\n", &wire.Event{}, 1, ""},
		{"command fails", "bad\n", &wire.Event{Exit: 1}, 0, "exit status 1  in \nbad"},
	} {
		t.Run(c.name, func(t *testing.T) {
			right := map[string]int{}
			if strings.HasPrefix(c.name, "command") {
				right["s"] = 0
			}
			r := newReport(t.TempDir(), right)
			r.event(&wire.Event{Type: wire.Start, Suite: "s"})
			r.event(&wire.Event{Type: wire.Output, Suite: "s", Text: c.output})
			if c.end != nil {
				c.end.Type, c.end.Suite = wire.End, "s"
				r.event(c.end)
			}
			r.close()
			if n := r.count("s", "pass"); n != c.passed {
				t.Errorf("%d passed, want %d", n, c.passed)
			}
			var said []string
			for _, x := range r.results {
				if x.Result == "fail" {
					said = append(said, x.Output)
				}
			}
			if c.says == "" && said != nil || c.says != "" && (len(said) != 1 || !strings.Contains(said[0], c.says)) {
				t.Errorf("failures %q, want one with %q", said, c.says)
			}
		})
	}
	r := newReport(t.TempDir(), map[string]int{"s": 3})
	r.event(&wire.Event{Type: wire.Start, Suite: "s"})
	r.event(&wire.Event{Type: wire.End, Suite: "s", Exit: 3})
	r.event(&wire.Event{Type: wire.Start, Suite: "s"})
	r.event(&wire.Event{Type: wire.End, Suite: "s"})
	if r.count("", "pass") != 1 || r.count("", "fail") != 1 {
		t.Errorf("exit status 3 is right, 0 is not: %+v", r.results)
	}
}

// Whatever a serial line brings, a reader does not fall over.
func FuzzReport(f *testing.F) {
	f.Add([]byte(`{"Type":"start","Suite":"s"}` + "\n" + `{"Type":"output","Text":"\u0016--- FAIL: T/a (1s)\n"}` + "\n" + `{"Type":"end","Exit":1}` + "\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		r := newReport("/nonexistent", nil)
		r.read(bytes.NewReader(b))
		r.close()
		for _, x := range r.results {
			if x.Result == "" {
				t.Errorf("%+v", x)
			}
		}
	})
}

// Every suite is either tests of a package that exists, or a program that is
// built, and says why where it is not run.
func TestSuites(t *testing.T) {
	seen := make(map[string]bool)
	for _, s := range suites {
		if seen[s.name] {
			t.Errorf("two suites %s", s.name)
		}
		seen[s.name] = true
		if program, _, _ := strings.Cut(s.command, " "); s.command != "" && !slices.Contains(extras.Names(), program) {
			t.Errorf("%s: no program %s", s.name, program)
		}
		if s.command == "" && !exists(filepath.Join("../..", s.pkg)) {
			t.Errorf("%s: no package %s", s.name, s.pkg)
		}
		if (s.command == "") == (s.pkg == "") || (s.since == "") != (s.why == "") || s.data && s.command == "" {
			t.Errorf("%s: %+v", s.name, s)
		}
	}
}

// With -quick each suite but the long ones still runs on each kernel: on the
// first model. What a tier sees is looked at with each.
func TestQuick(t *testing.T) {
	for _, k := range kernels {
		for i, model := range k.models {
			m := &machine{kernel: k, model: model}
			for _, s := range suites {
				if got, want := m.has(&s), i == 0 || !s.calm; got != want {
					t.Errorf("%s: %s: %v, want %v", m.name(), s.name, got, want)
				}
				if s.tier != "" && (s.calm || s.brief != "") {
					t.Errorf("%s: preemption makes a difference to what a tier sees", s.name)
				}
			}
		}
	}
}

// What a suite wrote as data is kept, and the page is that of what is kept.
func TestKeep(t *testing.T) {
	m := &machine{kernel: kernels[1], release: "6.1.0-57-amd64", model: "full", payload: &payload{suites: suites}}
	o := &outcome{machine: m, report: newReport(t.TempDir(), map[string]int{"selftest-syscall": 0, "soak-probe": 0})}
	o.event(&wire.Event{Type: wire.Hello, Preempt: "full"})
	for _, e := range []wire.Event{
		{Suite: "tracer", Type: wire.Output, Text: "\x16=== RUN   TestA\n\x16=== ATTR  TestA n 1\n\x16--- PASS: TestA (0.10s)\n\x16=== RUN   TestB\n\x16--- SKIP: TestB (0.10s)\n"},
		{Suite: "selftest-syscall", Type: wire.Data, Text: `{"fit":true,"missed":0,"false_invalidations":2,"operations":[` +
			`{"name":"a","seen":"seen","range":"exact"},{"name":"b","seen":"gap","range":"none"},{"name":"c","seen":"seen","range":"exact","changes":7,"uncovered":1}]}`},
		{Suite: "soak-probe", Type: wire.Data, Text: `{"ops":5,"uncovered":0,"seed":9,"tier":"notifier/probe"}`},
	} {
		o.event(&wire.Event{Type: wire.Start, Suite: e.Suite})
		o.event(&e)
		o.event(&wire.Event{Type: wire.End, Suite: e.Suite, Seconds: 3})
	}
	o.event(&wire.Event{Type: wire.Start, Suite: "probe"})
	o.event(&wire.Event{Type: wire.Output, Suite: "probe", Text: "\x16=== RUN   TestA\n"})
	o.close()
	then := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	k := kept{Suites: []keptSuite{{Suite: "gone"}, {Suite: "tracer", Passed: 99}, {Suite: "feed", Passed: 8}}}
	if err := k.keep(o, "abc", then, true); err != nil {
		t.Fatal(err)
	}
	n := keptSuite{Release: m.release, Commit: "abc", Time: then, Seconds: 3, Passed: 1}
	tracer, self, soaked := n, n, n
	tracer.Suite, tracer.Failed, tracer.Figures = "tracer", []string{"TestB"}, map[string]map[string]string{"TestA": {"n": "1"}}
	self.Suite, self.SelfTest = "selftest-syscall", &selfTest{Fit: true, FalseInvalidations: 2,
		Operations: map[string]string{"a": "exact", "b": "gap", "c": "7, 1 uncovered"}}
	soaked.Suite, soaked.Soak = "soak-probe", &soak{Ops: 5, Seed: 9, Tier: "notifier/probe"}
	want := kept{Kernel: "6.1", Asked: "full", Preempt: "full", Suites: []keptSuite{{Suite: "feed", Passed: 8}, tracer, self, soaked}}
	if d := cmp.Diff(want, k); d != "" {
		t.Error(d)
	}
	if err := k.keep(o, "abc", then, false); err != nil || len(k.suite("probe").Failed) != 1 {
		t.Errorf("a crash is not kept: %v, %+v", err, k.Suites)
	}
	text := page([]kept{want})
	for _, says := range []string{
		"| tracer | all | 1, **1 failed** |", "- **6.1 full, tracer: TestB failed**", "| syscall | fit, 3 |", "- exact: a\n",
		"| 6.1 full | notifier/probe | 5 | 0 |", "| 6.1 | full | 6.1.0-57-amd64 | full | abc | 2026-01-02 03:04 | tracer selftest-syscall soak-probe |",
	} {
		if !strings.Contains(text, says) {
			t.Errorf("no %q in\n%s", says, text)
		}
	}
}

// docs/kernels.md is the page of the results in the repository.
func TestPage(t *testing.T) {
	all, err := load("../..")
	if err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile("../../" + pageFile)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(page(all), string(got)); d != "" {
		t.Errorf("not made again: go run ./test/vm -page\n%s", d)
	}
	for i := range all {
		for _, s := range all[i].Suites {
			if strings.HasSuffix(s.Commit, "+") || s.Commit == "" {
				t.Errorf("%s %s: %s: of a commit that nobody can look at: %q", all[i].Kernel, all[i].Asked, s.Suite, s.Commit)
			}
		}
	}
}
