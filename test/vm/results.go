// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// The results that are kept in the repository: for each machine, what became
// of each suite when it was last run as a whole. The page docs/kernels.md is
// made of them.
const (
	resultsDir = "test/vm/results" // MACHINE.json, below the repository
	pageFile   = "docs/kernels.md"
)

// kept is what is kept of one machine.
type kept struct {
	Kernel  string      `json:"kernel"`
	Asked   string      `json:"asked"` // preemption model on the command line
	Preempt string      `json:"preempt"`
	Suites  []keptSuite `json:"suites"` // in the order of suites
}

// keptSuite is one run of a suite.
type keptSuite struct {
	Suite       string    `json:"suite"`
	Release     string    `json:"release"`
	Commit      string    `json:"commit"`
	Time        time.Time `json:"time"`
	Seconds     float64   `json:"seconds"`
	Unavailable string    `json:"unavailable,omitempty"`
	Passed      int       `json:"passed"`
	Failed      []string  `json:"failed,omitempty"`
	// Figures are what tests measured, by test.
	Figures  map[string]map[string]string `json:"figures,omitempty"`
	SelfTest *selfTest                    `json:"self_test,omitempty"`
	Soak     *soak                        `json:"soak,omitempty"`
}

// selfTest is what is kept of ummufeed check --self-test -o json.
type selfTest struct {
	Fit                bool              `json:"fit"`
	Reasons            []string          `json:"reasons,omitempty"`
	Missed             int               `json:"missed"`
	Subset             int               `json:"subset"`
	FalseInvalidations int               `json:"false_invalidations"`
	Operations         map[string]string `json:"operations"` // what was seen of each
}

// soak is what is kept of soak.json.
type soak struct {
	Ops                int     `json:"ops"`
	Uncovered          int     `json:"uncovered"`
	FalseInvalidations int     `json:"false_invalidations"`
	Seed               uint64  `json:"seed"`
	Tier               string  `json:"tier"`
	Kernel             string  `json:"kernel"`
	Commit             string  `json:"commit"`
	Duration           float64 `json:"duration_s"`
	Registrations      int     `json:"registrations"`
	Changes            int     `json:"changes_of_entries"`
	Transfers          int     `json:"transfers"`
}

// parse makes a selfTest or a soak of what a suite wrote.
func (k *keptSuite) parse(data string) error {
	switch {
	case strings.HasPrefix(k.Suite, "soak-"):
		k.Soak = new(soak)
		return json.Unmarshal([]byte(data), k.Soak)
	case strings.HasPrefix(k.Suite, "selftest-"):
		var r struct {
			selfTest
			Operations []struct {
				Name, Seen, Range  string
				Changes, Uncovered int
			} `json:"operations"`
		}
		if err := json.Unmarshal([]byte(data), &r); err != nil {
			return err
		}
		k.SelfTest = &r.selfTest
		k.SelfTest.Operations = make(map[string]string)
		for _, op := range r.Operations {
			seen := op.Seen
			switch {
			case op.Changes != 0:
				seen = fmt.Sprintf("%d, %d uncovered", op.Changes, op.Uncovered)
			case op.Seen == "seen":
				seen = op.Range
			}
			k.SelfTest.Operations[op.Name] = seen
		}
	}
	return nil
}

// keep adds what became of the suites of an outcome that ran as a whole. A
// suite in which a machine crashed or ran out of time has failed; the one in
// which somebody interrupted it has not run.
func (k *kept) keep(o *outcome, commit string, now time.Time, interrupted bool) error {
	k.Kernel, k.Asked = o.kernel.name, o.model
	if o.preempt != "" {
		k.Preempt = o.preempt
	}
	var errs []error
	for _, s := range o.payload.suites {
		n := keptSuite{Suite: s.name, Release: o.machine.release, Commit: commit, Time: now, Seconds: o.took[s.name].seconds}
		ran := false
		for _, r := range o.results {
			if r.Suite != s.name {
				continue
			}
			ran = true
			switch r.Result {
			case "pass":
				n.Passed++
			case "unavailable":
				n.Unavailable = r.Output
			default:
				n.Failed = append(n.Failed, r.Test)
			}
			if r.Figures != nil {
				if n.Figures == nil {
					n.Figures = make(map[string]map[string]string)
				}
				n.Figures[r.Test] = r.Figures
			}
		}
		if !ran || interrupted && s.name == o.cut {
			continue
		}
		if data := o.data[s.name]; data != "" {
			if err := n.parse(data); err != nil {
				errs = append(errs, fmt.Errorf("%s: %s: %w", o.name(), s.name, err))
			}
		}
		k.Suites = slices.DeleteFunc(k.Suites, func(old keptSuite) bool { return old.Suite == s.name })
		k.Suites = append(k.Suites, n)
	}
	names := suiteNames()
	k.Suites = slices.DeleteFunc(k.Suites, func(s keptSuite) bool { return !slices.Contains(names, s.Suite) })
	slices.SortFunc(k.Suites, func(a, b keptSuite) int { return slices.Index(names, a.Suite) - slices.Index(names, b.Suite) })
	return errors.Join(errs...)
}

// record adds the outcomes to the results in the repository, and makes the
// page again.
func record(repo, commit string, outcomes []outcome, interrupted bool) error {
	now := time.Now().UTC().Truncate(time.Second)
	dir := filepath.Join(repo, resultsDir)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for i := range outcomes {
		o := &outcomes[i]
		file := filepath.Join(dir, o.name()+".json")
		var k kept
		b, err := os.ReadFile(file)
		if err == nil {
			err = json.Unmarshal(b, &k)
		} else if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		if err == nil {
			err = k.keep(o, commit, now, interrupted)
		}
		if err == nil {
			b, err = json.MarshalIndent(&k, "", "\t")
		}
		if err == nil {
			err = os.WriteFile(file, append(b, '\n'), 0o644)
		}
		if err != nil {
			return fmt.Errorf("record %s: %w", o.name(), err)
		}
	}
	return writePage(repo)
}

// load reads what is kept, in the order of the kernels.
func load(repo string) ([]kept, error) {
	var all []kept
	for _, k := range kernels {
		for _, model := range k.models {
			b, err := os.ReadFile(filepath.Join(repo, resultsDir, k.name+"-"+model+".json"))
			if errors.Is(err, fs.ErrNotExist) {
				continue
			}
			if err != nil {
				return nil, err
			}
			var m kept
			if err := json.Unmarshal(b, &m); err != nil {
				return nil, fmt.Errorf("%s-%s.json: %w", k.name, model, err)
			}
			all = append(all, m)
		}
	}
	return all, nil
}

func writePage(repo string) error {
	all, err := load(repo)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(repo, pageFile), []byte(page(all)), 0o644)
}
