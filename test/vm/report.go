// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/ummu/ummu/test/vm/wire"
)

// result is the fate of one test (or command) in one machine.
type result struct {
	Suite   string  `json:"suite"`
	Test    string  `json:"test"`
	Result  string  `json:"result"` // pass, fail, skip, unavailable
	Seconds float64 `json:"seconds"`
	Output  string  `json:"output,omitempty"` // of a failure
	// Figures are what a test measured (testing.T.Attr).
	Figures map[string]string `json:"figures,omitempty"`
}

// took is how long a suite took: by the machine's clock, and in processor
// time of the host, which does not depend on what else that does.
type took struct{ seconds, cpu float64 }

// report collects the events of one machine.
type report struct {
	dir     string         // suite logs
	right   map[string]int // of suites that are no tests: the exit status that is right
	release string
	preempt string
	failed  string // why the guest could not do its work
	done    bool
	results []result

	cut string // suite that the machine did not live to end

	suite   string   // running
	log     *os.File // of the suite
	rest    string   // an unfinished line of its output
	current string   // the test that its output belongs to
	output  map[string][]string
	figures map[string]map[string]string // by test
	tests   []result                     // of the running suite
	data    map[string]string            // by suite: what it wrote as data
	took    map[string]took              // by suite
	cpu     func() float64               // processor time of the machine, seconds
	began   float64                      // the same at the suite's start
}

func newReport(dir string, right map[string]int) *report {
	return &report{dir: dir, right: right, data: make(map[string]string), took: make(map[string]took), cpu: func() float64 { return 0 }}
}

func (r *report) event(e *wire.Event) {
	switch e.Type {
	case wire.Hello:
		r.release, r.preempt = e.Kernel, e.Preempt
	case wire.Failed:
		r.failed = e.Text
	case wire.Start:
		r.close()
		r.suite, r.rest, r.current, r.tests, r.began = e.Suite, "", "", nil, r.cpu()
		r.output, r.figures = make(map[string][]string), make(map[string]map[string]string)
		if f, err := os.Create(filepath.Join(r.dir, e.Suite+".log")); err == nil {
			r.log = f
		}
	case wire.Output, wire.Data, wire.End:
		switch {
		case r.suite == "": // before any
		case e.Type == wire.Output:
			r.text(e.Text)
		case e.Type == wire.Data:
			r.data[r.suite] += e.Text
		default:
			r.end(e)
		}
	case wire.Done:
		r.done = true
	}
}

// close ends a suite that the machine did not.
func (r *report) close() {
	if r.suite != "" {
		r.cut = r.suite
		r.end(&wire.Event{Suite: r.suite, Exit: -1, Text: "the machine ended during it"})
	}
}

// With -test.v=test2json the lines about tests begin with this, so that no
// output is taken for one.
const marker = "\x16"

var verdict = regexp.MustCompile(`^ *--- (PASS|FAIL|SKIP): (\S+) \(([0-9.]+)s\)`)

func (r *report) text(s string) {
	if r.log != nil {
		r.log.WriteString(strings.ReplaceAll(s, marker, ""))
	}
	lines := strings.Split(r.rest+s, "\n")
	r.rest = lines[len(lines)-1]
	for _, line := range lines[:len(lines)-1] {
		r.line(line)
	}
}

func (r *report) line(line string) {
	before, line, marked := cut(line)
	if strings.TrimSpace(before) != "" || !marked {
		r.keep(before)
	}
	if !marked {
		return
	}
	if m := verdict.FindStringSubmatch(line); m != nil {
		seconds, _ := strconv.ParseFloat(m[3], 64)
		r.tests = append(r.tests, result{Suite: r.suite, Test: m[2], Result: strings.ToLower(m[1]), Seconds: seconds})
		r.current = m[2]
		return
	}
	if w := strings.Fields(line); len(w) >= 3 && w[0] == "===" {
		r.current = w[2]
		if w[1] == "ATTR" && len(w) >= 5 {
			if r.figures[w[2]] == nil {
				r.figures[w[2]] = make(map[string]string)
			}
			r.figures[w[2]][w[3]] = strings.Join(w[4:], " ")
		}
		return
	}
	r.keep(line)
}

// cut divides a line at the marker.
func cut(line string) (before, after string, marked bool) {
	before, after, marked = strings.Cut(line, marker)
	return before, strings.ReplaceAll(after, marker, ""), marked
}

const keptLines = 60 // of the output of a test

func (r *report) keep(line string) {
	kept := append(r.output[r.current], line)
	if len(kept) > keptLines {
		kept = kept[1:]
	}
	r.output[r.current] = kept
}

func (r *report) end(e *wire.Event) {
	if r.rest != "" {
		r.line(r.rest)
	}
	r.took[r.suite] = took{e.Seconds, r.cpu() - r.began}
	failures := 0
	for i, t := range r.tests {
		// a test with subtests counts only if it failed on its own
		parent, badChild := false, false
		for j, o := range r.tests {
			if i != j && strings.HasPrefix(o.Test, t.Test+"/") {
				parent = true
				badChild = badChild || o.Result == "fail"
			}
		}
		if parent && (t.Result != "fail" || badChild) {
			continue
		}
		t.Figures = r.figures[t.Test]
		if t.Result == "fail" {
			failures++
			t.Output = strings.Join(r.output[t.Test], "\n")
		}
		r.results = append(r.results, t)
	}
	whole := result{Suite: r.suite, Test: r.suite, Result: "pass", Seconds: e.Seconds}
	switch {
	case e.Exit != r.right[r.suite] && failures == 0, e.Text != "":
		// it ended in another way than by a failed test
		whole.Result = "fail"
		whole.Output = fmt.Sprintf("exit status %d %s in %s\n%s", e.Exit, e.Text, r.current, strings.Join(r.output[r.current], "\n"))
		r.results = append(r.results, whole)
	case len(r.tests) == 0:
		if _, command := r.right[r.suite]; !command {
			whole.Result, whole.Output = "fail", "no test ran"
		}
		r.results = append(r.results, whole)
	}
	if r.log != nil {
		r.log.Close()
		r.log = nil
	}
	r.suite = ""
}

// count returns how many results of a suite (empty: of all) are as asked.
func (r *report) count(suite, what string) int {
	n := 0
	for i := range r.results {
		if (suite == "" || r.results[i].Suite == suite) && r.results[i].Result == what {
			n++
		}
	}
	return n
}
