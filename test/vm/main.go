// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command vm runs the real test binaries, as root, on kernels that this
// machine does not have: Debian's, with each preemption model, in QEMU
// without hardware virtualisation. One table shows what passed where; -o
// writes everything as JSON. A failed test, a crash, a timeout or a missing
// kernel is exit status 1.
//
// A guest has 2 processors on one thread of the host: with more, QEMU's
// emulation of the code patching of some kernels crashes now and then.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"text/tabwriter"
	"time"
)

type options struct {
	kernels, preempt, suites string
	run                      string
	jobs, memory             int
	timeout                  time.Duration
	cache, out               string
	rdma                     bool
	record, page, quick      bool
	soakOps                  int
	soakFor                  time.Duration
}

func main() {
	var o options
	var always, all []string
	for _, k := range kernels {
		all = append(all, k.name)
		if k.always {
			always = append(always, k.name)
		}
	}
	flag.StringVar(&o.kernels, "kernels", strings.Join(always, ","), "kernels, of "+strings.Join(all, ",")+"; or all")
	flag.StringVar(&o.preempt, "preempt", "default,full", "preemption models, where the kernel has the choice")
	flag.StringVar(&o.suites, "suites", "", "suites to run (default all but soak): "+strings.Join(suiteNames(), ","))
	flag.StringVar(&o.run, "run", "", "run only tests that match, as of go test")
	flag.IntVar(&o.jobs, "jobs", 2, "machines at a time; each keeps one processor busy")
	flag.IntVar(&o.memory, "memory", 3072, "MiB of each machine")
	flag.DurationVar(&o.timeout, "timeout", 15*time.Minute, "limit of one machine; of one suite a third, but at least 8 minutes")
	flag.StringVar(&o.cache, "cache", os.Getenv("UMMU_VM_CACHE"), "where kernels are kept ($UMMU_VM_CACHE; default ummu/vm in the user's cache)")
	flag.StringVar(&o.out, "o", "out", "directory of vm.json and of the logs, vm/KERNEL-MODEL/")
	flag.BoolVar(&o.rdma, "rdma", false, "with a soft-RoCE device, rxe0")
	flag.BoolVar(&o.quick, "quick", false, "leave out long suites, and with preempt=full those to which preemption makes little difference")
	flag.BoolVar(&o.record, "record", false, "put the results into "+resultsDir+" and make "+pageFile+"; needs a tree without changes")
	flag.BoolVar(&o.page, "page", false, "make "+pageFile+" of "+resultsDir+", and nothing else")
	flag.IntVar(&o.soakOps, "soak-ops", 10_000, "operations of a soak suite")
	flag.DurationVar(&o.soakFor, "soak-for", 30*time.Minute, "time after which a soak suite stops")
	flag.Parse()
	if flag.NArg() != 0 {
		fmt.Fprintln(os.Stderr, "vm: unexpected argument", flag.Arg(0))
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	ok, err := run(ctx, &o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
	}
	if !ok || err != nil {
		os.Exit(1)
	}
}

func suiteNames() []string {
	var names []string
	for _, s := range suites {
		names = append(names, s.name)
	}
	return names
}

// pick returns those of all whose name is in the list, in the order of all.
func pick[T any](list string, all []T, name func(*T) string) ([]T, error) {
	wanted := strings.Split(list, ",")
	var picked []T
	for i := range all {
		if n := name(&all[i]); slices.Contains(wanted, n) {
			picked = append(picked, all[i])
			wanted = slices.DeleteFunc(wanted, func(w string) bool { return w == n })
		}
	}
	if len(wanted) != 0 {
		return nil, fmt.Errorf("unknown: %s", strings.Join(wanted, ","))
	}
	return picked, nil
}

// run boots all machines and prints the table. False: something failed.
func run(ctx context.Context, o *options) (bool, error) {
	repo, err := repository(ctx)
	if err != nil {
		return false, err
	}
	if o.page {
		return true, writePage(repo)
	}
	rev := commit(ctx, repo)
	if o.record && (o.run != "" || o.rdma || strings.HasSuffix(rev, "+")) {
		return false, errors.New("-record is for whole suites and a commit without changes")
	}
	chosen := kernels
	if o.kernels != "all" {
		if chosen, err = pick(o.kernels, kernels, func(k *kernel) string { return k.name }); err != nil {
			return false, fmt.Errorf("-kernels: %w", err)
		}
	}
	programs := slices.DeleteFunc(slices.Clone(suites), func(s suite) bool { return s.asked || s.rdma && !o.rdma || s.long && o.quick })
	if o.suites != "" {
		if programs, err = pick(o.suites, suites, func(s *suite) string { return s.name }); err != nil {
			return false, fmt.Errorf("-suites: %w", err)
		}
	}
	for i := range programs {
		s := &programs[i]
		if s.rdma && !o.rdma {
			return false, fmt.Errorf("suite %s needs -rdma", s.name)
		}
		s.calm = s.calm && o.quick
		if !o.quick {
			s.brief = ""
		}
		s.timeout = max(8*time.Minute, o.timeout/3)
		if strings.HasPrefix(s.command, "soak ") {
			s.command += fmt.Sprintf(" -ops %d -for %v", o.soakOps, o.soakFor)
			s.timeout = o.soakFor + 10*time.Minute
		}
	}
	models := strings.Split(o.preempt, ",")
	if o.cache == "" {
		dir, err := os.UserCacheDir()
		if err != nil {
			return false, err
		}
		o.cache = filepath.Join(dir, "ummu", "vm")
	}
	if o.cache, err = filepath.Abs(o.cache); err != nil {
		return false, err
	}
	work, err := os.MkdirTemp("", "ummu-vm-")
	if err != nil {
		return false, err
	}
	defer os.RemoveAll(work)
	start := time.Now()
	s, releases, err := fetch(ctx, o.cache, chosen)
	if err != nil {
		return false, err
	}
	p, err := build(ctx, work, repo, programs, o.rdma)
	if err != nil {
		return false, err
	}
	var machines []*machine
	for i, k := range chosen {
		for _, model := range k.models {
			if slices.Contains(models, model) {
				m := &machine{kernel: k, release: releases[i], model: model, store: s, payload: p, pattern: o.run, memory: o.memory}
				m.out = filepath.Join(o.out, "vm", m.name())
				machines = append(machines, m)
			}
		}
	}
	if len(machines) == 0 {
		return false, errors.New("no kernel chosen has a preemption model of -preempt")
	}
	fmt.Fprintf(os.Stderr, "vm: ready after %.0f s, %d machines\n", time.Since(start).Seconds(), len(machines))
	outcomes := bootAll(ctx, o, machines)
	fmt.Fprintf(os.Stderr, "vm: done after %.0f s\n", time.Since(start).Seconds())
	ok := show(os.Stdout, programs, outcomes)
	if err := save(filepath.Join(o.out, "vm.json"), rev, outcomes); err != nil {
		return ok, err
	}
	if o.record {
		return ok, record(repo, rev, outcomes, ctx.Err() != nil)
	}
	return ok, nil
}

// fetch brings the kernels, one user of the store at a time.
func fetch(ctx context.Context, cache string, chosen []kernel) (*store, []string, error) {
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return nil, nil, err
	}
	unlock, err := lock(cache)
	if err != nil {
		return nil, nil, err
	}
	defer unlock()
	s, err := openStore(ctx, cache, chosen)
	if err != nil {
		return nil, nil, err
	}
	var releases []string
	for _, k := range chosen {
		r, err := s.get(ctx, k)
		if err != nil {
			return nil, nil, err
		}
		releases = append(releases, r)
	}
	return s, releases, nil
}

// outcome is how a machine ended.
type outcome struct {
	*machine
	*report
	err     error // of the machine itself
	seconds float64
}

func bootAll(ctx context.Context, o *options, machines []*machine) []outcome {
	outcomes := make([]outcome, len(machines))
	slots := make(chan struct{}, max(o.jobs, 1))
	var wg sync.WaitGroup
	for i, m := range machines {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			ctx, cancel := context.WithTimeout(ctx, o.timeout)
			defer cancel()
			start := time.Now()
			r, err := m.boot(ctx)
			outcomes[i] = outcome{m, r, err, time.Since(start).Seconds()}
			for _, s := range m.payload.suites {
				if m.has(&s) && !s.runsOn(m.kernel.name) {
					r.results = append(r.results, result{Suite: s.name, Test: s.name, Result: "unavailable", Output: s.why})
				}
			}
			fmt.Fprintf(os.Stderr, "vm: %s: %d passed, %d failed in %.0f s\n", m.name(), r.count("", "pass"), outcomes[i].failures(), outcomes[i].seconds)
		})
	}
	wg.Wait()
	return outcomes
}

// failures counts failed tests, and a machine that did not end well as one.
// Nothing may skip: these machines have what a test can ask for.
func (o *outcome) failures() int {
	n := o.count("", "fail") + o.count("", "skip")
	if o.err != nil {
		n++
	}
	return n
}

// show prints the table, then each failure, then the sum.
func show(out io.Writer, programs []suite, outcomes []outcome) bool {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprint(w, "kernel\tpreemption")
	for _, s := range programs {
		fmt.Fprint(w, "\t", s.name)
	}
	fmt.Fprintln(w, "\tseconds")
	passed, failed := 0, 0
	for i := range outcomes {
		o := &outcomes[i]
		fmt.Fprintf(w, "%s\t%s (%s)", o.machine.release, o.model, o.preempt)
		for _, s := range programs {
			pass, fail, skip := o.count(s.name, "pass"), o.count(s.name, "fail"), o.count(s.name, "skip") // skipped is failed
			cell := fmt.Sprintf("%d", pass)
			if fail != 0 {
				cell += fmt.Sprintf(" %d failed", fail)
			}
			if skip != 0 {
				cell += fmt.Sprintf(" %d skipped", skip)
			}
			switch {
			case o.count(s.name, "unavailable") != 0:
				cell = "unavailable"
			case pass+fail+skip == 0:
				cell = "not run"
			}
			fmt.Fprint(w, "\t", cell)
		}
		fmt.Fprintf(w, "\t%.0f\n", o.seconds)
		passed += o.count("", "pass")
		failed += o.failures()
	}
	w.Flush()
	for i := range outcomes {
		o := &outcomes[i]
		if o.err != nil {
			fmt.Fprintf(out, "\n%s: %v\n", o.name(), o.err)
		}
		for _, t := range o.results {
			if t.Result == "fail" || t.Result == "skip" {
				fmt.Fprintf(out, "\n%s: %s: %s: %s (%.1f s)\n%s\n", o.name(), t.Suite, t.Test, t.Result, t.Seconds, t.Output)
			}
		}
	}
	fmt.Fprintf(out, "%d passed, %d failed\n", passed, failed)
	return failed == 0
}

// save writes the results for programs.
func save(file, commit string, outcomes []outcome) error {
	type suiteResult struct {
		Suite   string          `json:"suite"`
		Seconds float64         `json:"seconds"`
		CPU     float64         `json:"cpu_seconds"` // of the host
		Data    json.RawMessage `json:"data,omitempty"`
	}
	type machineResult struct {
		Kernel  string        `json:"kernel"`
		Release string        `json:"release"`
		Asked   string        `json:"asked"`   // preemption model on the command line
		Preempt string        `json:"preempt"` // in force
		Error   string        `json:"error,omitempty"`
		Seconds float64       `json:"seconds"`
		Suites  []suiteResult `json:"suites"`
		Results []result      `json:"results"`
	}
	all := struct {
		Schema   int             `json:"schema"`
		Commit   string          `json:"commit"`
		Time     time.Time       `json:"time"`
		Machines []machineResult `json:"machines"`
	}{2, commit, time.Now().UTC().Truncate(time.Second), nil}
	for i := range outcomes {
		o := &outcomes[i]
		m := machineResult{o.kernel.name, o.machine.release, o.model, o.preempt, "", o.seconds, nil, o.results}
		for _, s := range o.payload.suites {
			if t, ran := o.took[s.name]; ran {
				r := suiteResult{s.name, t.seconds, t.cpu, nil}
				if data := []byte(o.data[s.name]); json.Valid(data) {
					r.Data = data
				}
				m.Suites = append(m.Suites, r)
			}
		}
		if o.err != nil {
			m.Error = o.err.Error()
		}
		all.Machines = append(all.Machines, m)
	}
	b, err := json.MarshalIndent(all, "", "\t")
	if err != nil {
		return err
	}
	return os.WriteFile(file, append(b, '\n'), 0o644)
}

// repository is the root of the module.
func repository(ctx context.Context) (string, error) {
	out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Dir}}").Output()
	if err != nil {
		return "", fmt.Errorf("find the module: %w", err)
	}
	return strings.TrimSpace(string(out)), nil
}

// commit names what was tested; "+" means with changes.
func commit(ctx context.Context, repo string) string {
	out, err := exec.CommandContext(ctx, "git", "-C", repo, "describe", "--always", "--dirty=+", "--abbrev=12").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(out))
}
