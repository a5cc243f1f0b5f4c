// SPDX-License-Identifier: Apache-2.0

package main

import (
	"io"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	got, err := parse(strings.Join([]string{
		"| case | what | test | tier |",
		"|---|---|---|---|",
		"| A1 | some text | `a/b.TestX/y_z`, `c.FuzzY` | any |",
		"text",
		"| B10 | other | `regcache.Example` | syscall |",
	}, "\n"))
	if err != nil {
		t.Fatal(err)
	}
	want := []row{
		{"A1", []test{{"a/b", "TestX/y_z"}, {"c", "FuzzY"}}},
		{"B10", []test{{"regcache", "Example"}}},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(row{}, test{})); diff != "" {
		t.Error(diff)
	}
	for name, text := range map[string]string{
		"nothing":     "no table",
		"no test":     "| A1 | what | none | any |",
		"not a test":  "| A1 | what | `a.TestX`, `b.y` | any |",
		"columns":     "| A1 | what | `a.TestX` |",
		"second time": "| A1 | what | `a.TestX` | any |\n| A1 | what | `a.TestX` | any |",
	} {
		if rows, err := parse(text); err == nil {
			t.Errorf("%s: %v, want an error", name, rows)
		}
	}
}

// What is missing, skipped (itself or in part) or failed is a problem.
func TestJudge(t *testing.T) {
	const events = `{"Action":"run","Package":"github.com/ummu/ummu/a","Test":"TestGood"}
{"Action":"pass","Package":"github.com/ummu/ummu/a","Test":"TestGood/sub"}
{"Action":"pass","Package":"github.com/ummu/ummu/a","Test":"TestGood"}
{"Action":"output","Package":"github.com/ummu/ummu/a","Test":"TestBad","Output":"why\n"}
{"Action":"fail","Package":"github.com/ummu/ummu/a","Test":"TestBad"}
{"Action":"skip","Package":"github.com/ummu/ummu/a","Test":"TestPart/of/it"}
{"Action":"pass","Package":"github.com/ummu/ummu/a","Test":"TestPart/of"}
{"Action":"pass","Package":"github.com/ummu/ummu/a","Test":"TestPart/other"}
{"Action":"pass","Package":"github.com/ummu/ummu/a","Test":"TestPart"}
{"Action":"run","Package":"github.com/ummu/ummu/a","Test":"TestHung"}
{"Action":"pass","Package":"github.com/ummu/ummu/other","Test":"TestElsewhere"}
{"Action":"fail","Package":"github.com/ummu/ummu/a"}
`
	var log strings.Builder
	res, err := read(strings.NewReader(events), &log)
	if err != nil {
		t.Fatal(err)
	}
	if log.String() != "why\n" {
		t.Errorf("log %q", log.String())
	}
	var tests []test
	for _, name := range []string{"TestGood", "TestGood/sub", "TestGood/none", "TestBad", "TestPart", "TestPart/of", "TestPart/other", "TestHung", "TestElsewhere"} {
		tests = append(tests, test{"a", name})
	}
	want := []string{
		"A1: a.TestGood/none did not run",
		"A1: a.TestBad: fail",
		"A1: a.TestPart: skip",
		"A1: a.TestPart/of: skip",
		"A1: a.TestHung did not run",
		"A1: a.TestElsewhere did not run",
	}
	if diff := cmp.Diff(want, judge([]row{{"A1", tests}}, res)); diff != "" {
		t.Error(diff)
	}
	if _, err := read(strings.NewReader("no JSON\n"), io.Discard); err == nil {
		t.Error("no error for what is not JSON")
	}
}

// The document can be read, and no group is lost.
func TestDocument(t *testing.T) {
	text, err := os.ReadFile("../../../../docs/cases.md")
	if err != nil {
		t.Fatal(err)
	}
	rows, err := parse(string(text))
	if err != nil {
		t.Fatal(err)
	}
	count := map[byte]int{}
	for _, r := range rows {
		count[r.id[0]]++
	}
	want := map[byte]int{'A': 11, 'B': 10, 'C': 7, 'D': 8, 'H': 6, 'I': 9}
	if diff := cmp.Diff(want, count); diff != "" {
		t.Error(diff)
	}
}
