// SPDX-License-Identifier: Apache-2.0

// Command guards shows that the tests would notice if a step of the protocol
// were missing. It runs the test of each guard with all guards on, when it
// must pass, and with that guard off, when it must fail; prints the table, and
// writes it to docs/guards.md. It exits with 1 if a test stays green, if a
// guard has no test, or if a part of the contract has no guard; then the file
// is left as it was. What needs more than the machine can have (package
// test/machine) is named, and tried in guests (go run ./test/vm -suites
// guards). It runs in the root of the repository and needs what the tests need. Arguments select guards by name; then no file is written.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/ummu/ummu/internal/guard"
)

const (
	patience = 30 * time.Second // a test that takes longer hangs
	output   = "docs/guards.md"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "guards:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, only []string) error {
	if err := complete(); err != nil {
		return err
	}
	all := slices.Concat(rows, kvmRows)
	chosen := all
	if len(only) > 0 {
		chosen = slices.DeleteFunc(slices.Clone(all), func(r row) bool { return !slices.Contains(only, r.guard.String()) })
		if len(chosen) == 0 {
			return fmt.Errorf("no guard is named %s", strings.Join(only, " or "))
		}
	}
	dir, err := os.MkdirTemp("", "ummu-guards-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	bins, err := build(ctx, dir, chosen)
	if err != nil {
		return err
	}
	var bad []error
	on := make(map[[2]string]outcome) // a test with all guards on
	off := make([]outcome, len(chosen))
	var elsewhere []string
	for i, r := range chosen {
		key := [2]string{r.pkg, r.test}
		if _, ok := on[key]; !ok {
			o, text := test(ctx, bins[r.pkg], r.pkg, r, "", patience)
			if on[key] = o; o != passed && o != skipped {
				bad = append(bad, fmt.Errorf("%s %s: %s with all guards on\n%s", r.pkg, r.test, o, text))
			}
		}
		if off[i] = on[key]; off[i] == skipped {
			elsewhere = append(elsewhere, r.guard.String())
			fmt.Printf("%-15s %-8s %-14s %s\n", r.guard, skipped, r.pkg, r.test)
			continue
		}
		o, text := test(ctx, bins[r.pkg], r.pkg, r, r.guard.String(), patience)
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if off[i] = o; o == passed || o == notRun {
			bad = append(bad, fmt.Errorf("%s off: %s %s: %s\n%s", r.guard, r.pkg, r.test, o, text))
		}
		fmt.Printf("%-15s %-8s %-14s %s\n", r.guard, off[i], r.pkg, r.test)
	}
	if len(bad) > 0 || len(only) > 0 {
		return errors.Join(bad...)
	}
	fmt.Printf("%d guards, each missed by its test\n", len(guard.All()))
	if len(elsewhere) > 0 {
		fmt.Printf("not tried, for this machine cannot: %s\n", strings.Join(slices.Compact(elsewhere), ", "))
	}
	return os.WriteFile(output, []byte(page(off)), 0o644)
}

// complete checks that each guard, and each part of the contract and the
// protocol, has a row.
func complete() error {
	var missing []error
	for _, g := range guard.All() {
		if !slices.ContainsFunc(slices.Concat(rows, kvmRows), func(r row) bool { return r.guard == g }) {
			missing = append(missing, fmt.Errorf("guard %s has no test", g))
		}
	}
	for _, k := range slices.Concat(contract, invariants) {
		if !slices.ContainsFunc(slices.Concat(rows, kvmRows), func(r row) bool { return slices.Contains(r.keeps, k) }) {
			missing = append(missing, fmt.Errorf("%s has no guard", k))
		}
	}
	return errors.Join(missing...)
}

// build makes one test binary for each package, in which guards can be off.
func build(ctx context.Context, dir string, chosen []row) (map[string]string, error) {
	bins := make(map[string]string)
	for _, r := range chosen {
		if bins[r.pkg] != "" {
			continue
		}
		bin := filepath.Join(dir, strings.ReplaceAll(r.pkg, "/", "-")+".test")
		c := exec.CommandContext(ctx, "go", "test", "-c", "-tags", "ummu_guards", "-o", bin, "./"+r.pkg)
		if out, err := c.CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build test of %s: %w\n%s", r.pkg, err, out)
		}
		bins[r.pkg] = bin
	}
	return bins, nil
}

// outcome is how a test ended.
type outcome string

const (
	passed   outcome = "passed"
	failed   outcome = "failed"
	hung     outcome = "hung"
	crashed  outcome = "crashed"
	skipped  outcome = "skipped"   // see package test/machine
	inGuests outcome = "in guests" // tried there only
	notRun   outcome = "not run"
)

// test runs the test of r in dir, with one guard off if off is not empty, and
// returns its output too.
func test(ctx context.Context, bin, dir string, r row, off string, patience time.Duration) (outcome, string) {
	// Each part of the pattern stands for one level of subtests.
	var pattern []string
	for _, p := range strings.Split(r.test, "/") {
		pattern = append(pattern, "^"+p+"$")
	}
	// The binary's own timeout shows where it hangs; ours is for one that is
	// stuck in a system call.
	limited, cancel := context.WithTimeout(ctx, patience+10*time.Second)
	defer cancel()
	args := []string{"-test.v", "-test.timeout", patience.String(), "-test.run", strings.Join(pattern, "/")}
	if r.guard == guard.WipeOnFork {
		args = append(args, "-rounds=200") // a fork costs milliseconds
	}
	c := exec.CommandContext(limited, bin, args...)
	c.Dir = dir
	c.Env = append(os.Environ(), "UMMU_GUARD_OFF="+off)
	c.WaitDelay = time.Second
	b, err := c.CombinedOutput()
	out := string(b)
	ran := strings.Contains(out, "=== RUN   "+r.test+"\n")
	whole, _, _ := strings.Cut(r.test, "/")
	switch {
	case !ran && strings.Contains(out, "--- SKIP: "+whole+" "):
		return skipped, out
	case !ran:
		return notRun, out
	case limited.Err() != nil, strings.Contains(out, "panic: test timed out"):
		return hung, out
	case err == nil && strings.Contains(out, "--- SKIP: "+r.test+" "):
		return skipped, out
	case err == nil:
		return passed, out
	case strings.Contains(out, "--- FAIL: "+r.test+" "):
		return failed, out
	}
	return crashed, out
}

const intro = `# Guards: what each step of the protocol is for

Written by ` + "`make guards`" + `; edit internal/guard/cmd/guards/rows.go instead.

A guard is one step that keeps the contract (C1 to C7) or an invariant of the protocol (1 to 11). For each one a test
was run twice by the command that wrote this page: as the code is, when it passed, and with only that step left out, when
it did not. "failed" means that the test said so, "hung" that it was still waiting after 30 seconds for what never comes,
"crashed" that the process died, "in guests" that the machine of that command has no /dev/kvm, or no 32-bit calls: these are tried by
` + "`go run ./test/vm -suites guards`" + `. A step is left out by building the tests with the tag ummu_guards and naming the guard in
UMMU_GUARD_OFF; on the kernel side a constant does the same. In a normal build nothing can be left out.

Not here, because the parts are not: what the tiers above the system calls see. That the target is never stopped and nothing of it is changed
(C5) is so because there is no step that does it; its guards are about memory that a registration keeps.

`

const legend = `
## Contract and invariants

| | |
|---|---|
| C1 | no stale hit: once anybody can know of a change, no lookup hits an entry made before it |
| C2 | no stale insert: what was registered during a change is not cached |
| C3 | loss is loud: if an event may be missing, everything before it is invalid |
| C4 | fail closed: without a live feed lookups miss |
| C5 | do no harm: nothing keeps the target's memory, or stops it |
| C6 | the kernel is the truth: what counts is what happened to the page tables; more is allowed, less never |
| C7 | exactness: no invalidation without a cause |
| 1 | one generation word per watch for records, losses and death, and one epoch word for all |
| 2 | record, generation, drain and publication in that order |
| 3 | changes in flight are known before the filter; a registration begins and commits |
| 4 | an open change belongs to a task and is closed by what the task does, never by a timer |
| 5 | a forked child's watch is dead without a system call |
| 6 | a watch dies with its address space, or with its consumer |
| 7 | the end of the kernel side is marked |
| 8 | maps can be written by programs; closing is one store |
| 9 | status and epoch pages are frozen |
| 10 | one ring per watch; the interest filter may say yes too often, never no |
| 11 | a client that looks nothing up costs bounded memory |
`

// line is a row of the page without its outcome.
func line(r row) string {
	return fmt.Sprintf("| %s | %s | %s | %s %s |", r.guard, strings.Join(r.keeps, " "), r.what, r.pkg, r.test)
}

// page is docs/guards.md.
func page(off []outcome) string {
	var b strings.Builder
	b.WriteString(intro)
	b.WriteString("| guard | keeps | the step | test | without it |\n|---|---|---|---|---|\n")
	for i, r := range slices.Concat(rows, kvmRows) {
		o := off[i]
		if o == skipped {
			o = inGuests
		}
		fmt.Fprintf(&b, "%s %s |\n", line(r), o)
	}
	b.WriteString(legend)
	return b.String()
}
