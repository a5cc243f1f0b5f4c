// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ummu/ummu/test/planted"
)

// plant builds the programs that make a mistake.
func plant(t *testing.T) string {
	t.Helper()
	dir, err := planted.Build(context.Background(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, string(planted.Uring))
}

// at is how a marked line of the programs is printed.
func at(function, mark string) string {
	return fmt.Sprintf("%s (", function) + "%planted.c:" + fmt.Sprint(planted.Line(mark))
}

// wantText looks for lines; "%" stands for anything.
func wantText(t *testing.T, text string, want ...string) {
	t.Helper()
	for _, w := range want {
		before, after, _ := strings.Cut(w, "%")
		ok := false
		for line := range strings.Lines(text) {
			if i := strings.Index(line, before); i >= 0 && strings.Contains(line[i+len(before):], after) {
				ok = true
			}
		}
		if !ok {
			t.Errorf("no line with %q in\n%s", w, text)
		}
	}
}

func TestRegistrations(t *testing.T) {
	program := plant(t)
	dir := t.TempDir()
	file := filepath.Join(dir, "recording")

	r := ummufeed(t, "run", "--registrations", "--fail-on-stale", "-c", "--", program, "replaced")
	if r.code != 6 {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
	wantText(t, r.errout, "stale registration 1: freed-while-registered", at("registered", "registered"), at("replaced", "replaced"),
		"replace by mmap(PROT_READ, MAP_PRIVATE|MAP_FIXED|MAP_ANONYMOUS)", "the address was used again", "stale: 1 of 1 registrations", "complete:")

	r = ummufeed(t, "run", "--registrations", "--fail-on-stale", "--", program, "correct")
	if r.code != 0 {
		t.Errorf("without a mistake: code %d: %s", r.code, r.errout)
	}
	wantText(t, r.errout, "register ", "io_uring buffer 0 of ring fd", "by io_uring_register(IORING_REGISTER_BUFFERS_UPDATE) = 1", "stale: 0 of ")

	// in time order, with what is known at first and at last
	r = ummufeed(t, "run", "--registrations", "-o", "ndjson", "--", program, "freed")
	if r.code != 0 {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
	var states []string
	for line := range strings.Lines(r.out) {
		var l struct {
			Finding *struct {
				State, Class string
				Registration struct{ Stack []struct{ Func string } }
				Stayed       *int64 `json:"stayed_ns"`
			}
		}
		if err := json.Unmarshal([]byte(line), &l); err != nil {
			t.Fatalf("%v: %s", err, line)
		}
		if l.Finding != nil {
			states = append(states, l.Finding.State+" "+l.Finding.Class)
			if (l.Finding.Stayed != nil) != (l.Finding.State == "final") || len(l.Finding.Registration.Stack) < 3 {
				t.Errorf("%s", line)
			}
		}
	}
	if got := strings.Join(states, ", "); got != "open allocator-trim, final allocator-trim" {
		t.Errorf("findings: %s", got)
	}
	if _, rd := parse(t, r.out); rd.Summary().Stale != 1 || rd.Summary().Registrations != 1 {
		t.Errorf("%+v", rd.Summary())
	}

	r = ummufeed(t, "run", "--registrations", "-o", "json", "--", program, "dropped")
	var doc struct {
		Findings []struct{ Class string }
		Records  []struct{ Kind string }
	}
	if err := json.Unmarshal([]byte(r.out), &doc); err != nil || len(doc.Findings) != 1 || len(doc.Records) < 10 {
		t.Errorf("%v: %d findings, %d records", err, len(doc.Findings), len(doc.Records))
	}

	// one change of many registrations is not told many times
	r = ummufeed(t, "run", "--registrations", "-c", "--", program, "arena")
	if n := strings.Count(r.errout, "\nstale registration "); n != foundOf-1 { // the first is the first line
		t.Errorf("%d more in\n%s", n, r.errout)
	}
	wantText(t, r.errout, "stale registrations 4 to 16: by the same change", "stale: 16 of 16 registrations")

	// a recording has all of it
	r = ummufeed(t, "record", "--registrations", file, "--", program, "reused")
	if r.code != 0 {
		t.Fatalf("code %d: %s", r.code, r.errout)
	}
	live := r.errout
	r = ummufeed(t, "replay", "--registrations", "--fail-on-stale", "-c", file)
	if r.code != 6 || r.out != live {
		t.Errorf("code %d, replayed\n%s\nof\n%s", r.code, r.out, live)
	}
	_, told, _ := strings.Cut(live, "registered ")
	addr, _, _ := strings.Cut(told, "-")
	r = ummufeed(t, "explain", "--replay", file, addr)
	if r.code != 0 {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
	order := []string{"  map ", "  register ", "  unmap ", "stale: registration 1", "  map ", "  register ", "  deregister ", "  deregister ", "stale registration 1: "}
	rest := r.out
	for _, w := range order {
		_, after, ok := strings.Cut(rest, w)
		if !ok {
			t.Fatalf("no %q where it belongs in\n%s", w, r.out)
		}
		rest = after
	}
	wantText(t, r.out, at("reused", "reused"))
	if r = ummufeed(t, "explain", "--replay", file, "0x1000"); r.code != 0 || !strings.Contains(r.out, "nothing happened to 0x1000") {
		t.Errorf("code %d: %s", r.code, r.out)
	}
}

// What was lost cannot be found: no finding is not a good sign then.
func TestRegistrationsLost(t *testing.T) {
	program := plant(t)
	r := ummufeed(t, "run", "--registrations", "--fail-on-stale", "-c", "--ring", "4096", "--", program, "correct")
	if r.code != 5 || !strings.Contains(r.errout, "INCOMPLETE") || !strings.Contains(r.errout, "findings-incomplete") {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
}

// Of a process that runs already.
func TestExplainLive(t *testing.T) {
	c := exec.Command(plant(t), "later")
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
	defer c.Wait()
	defer in.Close()
	lines := bufio.NewScanner(out)
	if !lines.Scan() {
		t.Fatal("the program has not begun")
	}
	addr, _, _ := strings.Cut(lines.Text(), " ")
	x := exec.Command(binary, "explain", "-p", fmt.Sprint(c.Process.Pid), addr)
	story, err := x.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := x.Start(); err != nil {
		t.Fatal(err)
	}
	var text strings.Builder
	for l := bufio.NewScanner(story); l.Scan(); {
		text.WriteString(l.Text() + "\n")
		if strings.HasPrefix(l.Text(), "watching") { // from now on it sees
			in.Write([]byte("\n"))
			in.Close()
		}
	}
	if err := x.Wait(); err != nil {
		t.Errorf("%v", err)
	}
	wantText(t, text.String(), "now       mapped: %rw-p", "  unmap %by munmap() = 0", at("later", "later"), "gap: registered-before")
}

func TestRegistrationsUsage(t *testing.T) {
	for _, args := range [][]string{
		{"run", "--fail-on-stale", "--", "true"},
		{"replay", "--fail-on-stale", "file"},
		{"explain", "0x1000"},
		{"explain", "-p", "1", "--replay", "file", "0x1000"},
		{"explain", "-p", "1", "here"},
		{"explain", "-p", "1"},
	} {
		if r := ummufeed(t, args...); r.code != 2 || r.errout == "" {
			t.Errorf("%v: code %d, %q", args, r.code, r.errout)
		}
	}
}
