// SPDX-License-Identifier: Apache-2.0

// Cases runs every test that docs/cases.md names, and fails unless each ran and
// passed: a test that is missing, was skipped, or failed is named with its
// case. Arguments go to go test (-race, -v is implied). Exit code: 0 if all
// passed, 1 if not, 2 if the document cannot be read.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
)

const module = "github.com/ummu/ummu/"

func main() {
	text, err := os.ReadFile("docs/cases.md")
	if err != nil {
		fmt.Fprintln(os.Stderr, "cases:", err)
		os.Exit(2)
	}
	rows, err := parse(string(text))
	if err != nil {
		fmt.Fprintln(os.Stderr, "cases: docs/cases.md:", err)
		os.Exit(2)
	}
	res, err := run(rows, os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "cases:", err)
	}
	problems := judge(rows, res)
	for _, p := range problems {
		fmt.Println(p)
	}
	fmt.Printf("%d cases, %d tests, %d problems\n", len(rows), len(tests(rows)), len(problems))
	if len(problems) > 0 || err != nil {
		os.Exit(1)
	}
}

// row is one case of the document.
type row struct {
	id    string
	tests []test
}

// test is a test by its package, relative to the module, and its name as go
// test prints it.
type test struct{ pkg, name string }

func (t test) String() string { return t.pkg + "." + t.name }

var named = regexp.MustCompile("`([a-z0-9_/]+)\\.((?:Test|Fuzz|Example)[^`]*)`")

// parse reads the tables: rows of four columns whose first is a case's
// number, such as A1.
func parse(text string) (rows []row, err error) {
	seen := map[string]bool{}
	for line := range strings.Lines(text) {
		cells := strings.Split(strings.TrimSpace(line), "|")
		if len(cells) < 2 || cells[0] != "" {
			continue
		}
		id := strings.TrimSpace(cells[1])
		if ok, _ := regexp.MatchString(`^[A-Z][0-9]+$`, id); !ok {
			continue
		}
		if len(cells) != 6 {
			return nil, fmt.Errorf("case %s: %d columns, want 4", id, len(cells)-2)
		}
		if seen[id] {
			return nil, fmt.Errorf("case %s: more than once", id)
		}
		seen[id] = true
		r := row{id: id}
		for _, m := range named.FindAllStringSubmatch(cells[3], -1) {
			r.tests = append(r.tests, test{m[1], m[2]})
		}
		if n := strings.Count(cells[3], "`"); n != 2*len(r.tests) {
			return nil, fmt.Errorf("case %s: a test that is not package.TestName", id)
		}
		if len(r.tests) == 0 {
			return nil, fmt.Errorf("case %s: no test", id)
		}
		rows = append(rows, r)
	}
	if len(rows) == 0 {
		return nil, errors.New("no cases")
	}
	return rows, nil
}

// tests are those of all rows, once each, in order.
func tests(rows []row) []test {
	var all []test
	for _, r := range rows {
		all = append(all, r.tests...)
	}
	slices.SortFunc(all, func(a, b test) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(all)
}

// results is how each test ended: "pass", "fail" or "skip". A test below
// which one was skipped is skipped.
type results map[test]string

// run runs the tests' packages, each once, with the tests that are named.
func run(rows []row, flags []string) (results, error) {
	var pkgs, names []string
	for _, t := range tests(rows) {
		top, _, _ := strings.Cut(t.name, "/")
		pkgs, names = append(pkgs, module+t.pkg), append(names, regexp.QuoteMeta(top))
	}
	slices.Sort(names)
	args := append([]string{"test", "-json", "-count=1", "-p=1", "-timeout=20m", "-run=^(" + strings.Join(slices.Compact(names), "|") + ")$"}, flags...)
	cmd := exec.Command("go", append(args, slices.Compact(pkgs)...)...)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	res, err := read(out, os.Stderr)
	io.Copy(io.Discard, out)
	return res, errors.Join(err, cmd.Wait())
}

// read reads the events of go test -json and prints what failed to log, with
// its output.
func read(in io.Reader, log io.Writer) (results, error) {
	res := results{}
	output := map[test]*strings.Builder{}
	b := bufio.NewReader(in)
	for {
		line, err := b.ReadBytes('\n')
		if len(line) == 0 && err == io.EOF {
			return res, nil
		}
		if err != nil && err != io.EOF {
			return res, fmt.Errorf("read events: %w", err)
		}
		var e struct{ Action, Package, Test, Output string }
		if err := json.Unmarshal(line, &e); err != nil {
			return res, fmt.Errorf("read event %q: %w", line, err)
		}
		t := test{strings.TrimPrefix(e.Package, module), e.Test}
		switch e.Action {
		case "output", "build-output":
			if output[t] == nil {
				output[t] = new(strings.Builder)
			}
			output[t].WriteString(e.Output)
		case "pass", "fail", "skip":
			if e.Action != "pass" && output[t] != nil {
				fmt.Fprint(log, output[t])
			}
			if e.Test == "" {
				if e.Action == "pass" {
					fmt.Fprintln(log, "ok", t.pkg)
				}
				break
			}
			delete(output, t)
			if res[t] != "skip" {
				res[t] = e.Action
			}
			for e.Action == "skip" && strings.Contains(t.name, "/") {
				t.name = t.name[:strings.LastIndexByte(t.name, '/')]
				res[t] = "skip"
			}
		}
	}
}

// judge says which tests did not show their cases.
func judge(rows []row, res results) (problems []string) {
	for _, r := range rows {
		for _, t := range r.tests {
			switch res[t] {
			case "pass":
			case "":
				problems = append(problems, fmt.Sprintf("%s: %v did not run", r.id, t))
			default:
				problems = append(problems, fmt.Sprintf("%s: %v: %s", r.id, t, res[t]))
			}
		}
	}
	return problems
}
