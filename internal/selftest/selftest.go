// SPDX-License-Identifier: Apache-2.0

// Package selftest proves, on the machine it runs on, that a tier of the
// tracer sees what it says it sees. It performs the operations of the truth
// table in child processes, with memory that is really pinned, while busy
// threads and updates of BPF maps compete for the processors; and it asks a
// feed what a registration cache would ask: was the entry invalid by the time
// the operation had returned, and for which pages.
//
// It needs the privileges to load BPF programs, io_uring, and for the
// notifier tiers /dev/kvm. A program that uses it gives its children back to
// [Main]: see there.
package selftest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/truth"
	"github.com/ummu/ummu/internal/verdict"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// Options configure [Run].
type Options struct {
	// Tier is the tier to test.
	Tier tracer.Tier
	// Only are the operations to perform, by name; empty: all.
	Only []string

	// tamper changes what a feed delivered for an operation, so that tests
	// can see a tier fail that does not.
	tamper func(operation string, records []mm.Record) []mm.Record
}

// Run tests one tier, one at a time in a process. It takes some 5 s. The error says why the test could
// not be made at all: that of [tracer.Open] if the tier does not work here,
// [tracer.ErrNoKVM] without /dev/kvm, or that of ctx. A tier that was tested
// and does not keep what it promises is no error but [Report.Fit] false.
func Run(ctx context.Context, o Options) (_ *Report, err error) {
	start := time.Now()
	if ok, err := truth.RegisterFile.Available(); !ok && err != nil {
		return nil, fmt.Errorf("test tier %v: io_uring, which pins the memory: %w", o.Tier, err)
	}
	s := &session{o: o, ctx: ctx}
	defer func() { err = errors.Join(err, s.close()) }()
	if err := s.open(); err != nil {
		return nil, fmt.Errorf("test tier %v: %w", o.Tier, err)
	}
	r := newReport(s.tracer.Coverage())
	r.Cost = s.cost
	for i := range truth.Rows {
		row := &truth.Rows[i]
		if row.Refused != 0 || len(o.Only) != 0 && !slices.Contains(o.Only, row.Name) {
			continue
		}
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		if !row.By(byGo) {
			r.add(Operation{Name: row.Name, Seen: NotHere, Range: RangeNone})
			continue
		}
		op, err := s.perform(row)
		if err != nil {
			return nil, fmt.Errorf("test tier %v: %s: %w", o.Tier, row.Name, err)
		}
		r.add(op)
	}
	for _, st := range storms {
		if len(o.Only) != 0 && !slices.Contains(o.Only, st.name) {
			continue
		}
		if err := context.Cause(ctx); err != nil {
			return nil, err
		}
		op, err := s.storm(st)
		if err != nil {
			return nil, fmt.Errorf("test tier %v: %s: %w", o.Tier, st.name, err)
		}
		r.add(op)
	}
	r.finish(time.Since(start))
	return r, nil
}

// Tiers are the tiers that can be tested, strongest first.
func Tiers() []tracer.Tier {
	return []tracer.Tier{tracer.TierNotifierProbe, tracer.TierNotifierTracepoint, tracer.TierMM, tracer.TierSyscall}
}

// Attempt is what became of one tier: a report, or the reason why there is none.
type Attempt struct {
	Tier   tracer.Tier
	Report *Report
	Err    error
}

// Choose tests the given tiers in turn, and stops at the first that is fit:
// the last attempt. If none is, the last attempt says why not, as all before
// it. The error is that of ctx.
func Choose(ctx context.Context, tiers []tracer.Tier) ([]Attempt, error) {
	var tried []Attempt
	for _, tier := range tiers {
		r, err := Run(ctx, Options{Tier: tier})
		if cause := context.Cause(ctx); cause != nil {
			return tried, cause
		}
		tried = append(tried, Attempt{tier, r, err})
		if err == nil && r.Fit {
			break
		}
	}
	return tried, nil
}

// Remember keeps what was found until the next boot (package verdict). What
// could not be tested is kept only if the kernel lacks a hook: anything else may
// be different the next time.
func Remember(tried []Attempt) error {
	v := verdict.Verdicts{}
	for _, a := range tried {
		var hook *tracer.HookError
		switch {
		case a.Report != nil:
			v[a.Tier.String()] = verdict.Verdict{Fit: a.Report.Fit, Reason: strings.Join(a.Report.Reasons, "; ")}
		case errors.As(a.Err, &hook):
			v[a.Tier.String()] = verdict.Verdict{Reason: a.Err.Error()}
		}
	}
	return verdict.Save(v)
}

// Auto is the strongest of tiers, strongest first, that is fit by what is
// remembered, or by a self-test now, of which testing is told; and why. The last
// one is taken without a test if no other is fit. What is found is remembered,
// as far as it can be. The error is that of ctx.
func Auto(ctx context.Context, tiers []tracer.Tier, testing func(tracer.Tier)) (tier tracer.Tier, why string, err error) {
	known, err := verdict.Load()
	if err != nil {
		known = nil // tested again, each time
	}
	var reasons []string
	for _, t := range tiers[:len(tiers)-1] {
		v, ok := known[t.String()]
		if !ok {
			testing(t)
			tried, err := Choose(ctx, []tracer.Tier{t})
			if err != nil {
				return tracer.TierNone, "", err
			}
			if a := tried[0]; a.Err != nil {
				v.Reason = a.Err.Error()
			} else {
				v = verdict.Verdict{Fit: a.Report.Fit, Reason: strings.Join(a.Report.Reasons, "; ")}
			}
			if err := Remember(tried); err != nil {
				reasons = append(reasons, err.Error())
			}
		}
		if v.Fit {
			return t, strings.Join(append(reasons, "the strongest that passed its self-test"), "; "), nil
		}
		reasons = append(reasons, fmt.Sprintf("%v: %s", t, v.Reason))
	}
	return tiers[len(tiers)-1], strings.Join(reasons, "; "), nil
}

// byGo is the program that performs the operations: this one.
var byGo = truth.Impl{Name: "go"}

// Argument is the first argument that a program which uses this package
// passes on to [Main], with all that follow.
const Argument = "self-test-child"

// child is the command of a child process, which ends with this process.
func child(args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", append([]string{Argument}, args...)...)
	// a group of its own: an interrupt from the terminal is for this process,
	// which cleans up
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	cmd.Stderr = os.Stderr
	return cmd
}

// watchdog bounds a wait for what takes microseconds on an idle machine.
const watchdog = 5 * time.Second

// eventually polls until done, for as long as the watchdog allows.
func eventually(done func() bool) bool {
	pause := 20 * time.Microsecond
	for start := time.Now(); !done(); pause = min(2*pause, 2*time.Millisecond) {
		if time.Since(start) > watchdog {
			return false
		}
		time.Sleep(pause)
	}
	return true
}

// kernel is the running kernel's release.
func kernel() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return strings.TrimRight(string(u.Release[:]), "\x00")
}
