// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"sync/atomic"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/inject"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/target"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// targets are the running processes to watch.
type targets struct {
	watchOptions
	pids   command.PIDs
	all    bool
	inject bool
}

func (t *targets) register(cmd *cobra.Command) {
	cmd.Flags().VarP(&t.pids, "attach", "p", "watch the process PID (repeatable)")
	cmd.Flags().BoolVar(&t.all, "all", false, "watch every process of the machine")
	cmd.Flags().BoolVar(&t.inject, "inject", false, "stop each PID for some milliseconds and give it an MMU notifier, for --tier notifier")
}

func newTrace(s command.Streams) *cobra.Command {
	var f streamFlags
	var t targets
	cmd := &cobra.Command{
		Use:   "trace [flags] (-p PID... | --all)",
		Short: "Show what happens to the address spaces of running processes",
		Long: `trace shows every change of the address space of each PID and of those of the
children it creates from now on, until all of them have ended or SIGINT, SIGTERM
or SIGHUP comes. Records go to standard output, or to --output FILE.

Other users' processes need CAP_SYS_PTRACE as well.

` + target.TierHelp + `
A running process gets its notifier by --inject only: all its threads are stopped
by ptrace for some milliseconds while it makes an empty KVM machine. What it forks
or executes later has none.`,
		Args: command.Args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if len(t.pids) == 0 && !t.all {
				t.pids = f.filter.pids // --pid alone can mean nothing else
			}
			if err := t.validate(); err != nil {
				return err
			}
			out, err := openOutput(s, &f, false)
			if err != nil {
				return err
			}
			err = traceTargets(s, &f, &t, func(m *recording.Meta) (sink, error) {
				return out.sink(&f, m)
			})
			return closeOutput(out, err)
		},
	}
	f.register(cmd)
	cmd.Flags().StringVar(&f.output, "output", "", `file for the records, "-" is standard output`)
	t.watchOptions.register(cmd)
	t.register(cmd)
	return cmd
}

func (t *targets) validate() error {
	switch {
	case len(t.pids) == 0 && !t.all:
		return command.Usagef("nothing to watch: give -p PID or --all")
	case len(t.pids) > 0 && t.all:
		return command.Usagef("-p and --all exclude each other")
	case t.inject && t.all:
		return command.Usagef("--inject is for -p")
	case t.inject && t.tier != "auto" && !t.tier.Notifier():
		return command.Usagef("--inject is for --tier notifier")
	case t.tier.Notifier() && !t.inject:
		return command.Usagef("--tier notifier sees nothing of processes without a notifier; with -p, --inject makes one")
	}
	if t.inject && t.tier == "auto" {
		t.tier = "notifier"
	}
	return nil
}

// traceTargets watches running processes until they end or a signal comes.
func traceTargets(s command.Streams, f *streamFlags, t *targets, open func(*recording.Meta) (sink, error)) error {
	wo, err := t.options()
	if err != nil {
		return err
	}
	if err := target.MayWatch(t.pids, t.all); err != nil {
		return err
	}
	var ps []*target.Process
	for _, pid := range t.pids {
		p, err := target.OpenProcess(pid)
		if err != nil {
			return err
		}
		defer p.Close()
		ps = append(ps, p)
	}
	tr, why, err := t.tier.OpenWith(context.Background(), s.Log(), tracer.Options{Registrations: t.registrations})
	if err != nil {
		return err
	}
	defer tr.Close()
	warnMissing(s.Log(), tr.Coverage())
	meta, err := target.NewMeta(tr.Coverage(), why)
	if err != nil {
		return err
	}
	meta.PIDs = t.pids
	var h *hunt
	if t.registrations {
		if h, err = newHunt(tr, t.all); err != nil {
			return err
		}
		defer h.Close()
		h.Program("")
		meta.Gaps = append(meta.Gaps, gapRegistered)
	}
	if t.inject {
		machines, err := injectAll(ps)
		defer func() {
			for _, m := range machines {
				m.Close()
			}
		}()
		if err != nil {
			return err
		}
		if t.follow {
			meta.Gaps = append(meta.Gaps, gapChildren)
		}
	}
	se := &session{}
	watch := func(target tracer.Target) error {
		st, err := tr.Watch(target, wo)
		if err == nil {
			se.sources = append(se.sources, st)
		}
		return err
	}
	for _, p := range ps {
		if err := watch(tracer.PIDFD(p.FD)); err != nil {
			return err
		}
		if h != nil {
			if err := h.Process(p.PID); err != nil {
				return err
			}
		}
	}
	if t.all {
		if err := watch(tracer.All()); err != nil {
			return err
		}
	}
	sk, err := open(meta)
	if err != nil {
		return err
	}
	se.view = newView(&f.filter, sk, meta.Tier)
	if h != nil {
		if err := h.show(sk, meta); err != nil {
			return err
		}
		se.view.hunt = h
	}
	stopped := false
	stopOnce := func() {
		if !stopped {
			stopped = true
			se.stop()
		}
	}
	if !t.all {
		tree := newTree()
		se.onRecord = tree.record
		ended := false // by the last tick: its last records were read since
		se.onTick = func() {
			if se.err != nil || ended && tree.empty() {
				stopOnce()
			}
			ended = !target.AnyRuns(ps)
		}
	} else {
		se.onTick = func() {
			if se.err != nil {
				stopOnce()
			}
		}
	}
	stop := command.OnInterrupt(func(syscall.Signal) {
		se.mu.Lock()
		defer se.mu.Unlock()
		stopOnce()
	})
	readErr := se.run()
	stop()
	sum, outErr := se.end(readErr)
	switch {
	case readErr != nil:
		return readErr
	case outErr != nil:
		return fmt.Errorf("write records: %w", outErr)
	case f.failOnLoss && incomplete(sum):
		return command.Exit(command.ExitIncomplete, nil)
	case t.failOnStale:
		return h.exit(sum)
	}
	return nil
}

// gapRegistered is of streams of processes that ran before.
var gapRegistered = recording.Gap{Name: "registered-before", What: "registrations that were made before the watch was opened"}

// injectAll gives each process a notifier. A signal waits until that is done:
// to be killed meanwhile would kill the process.
func injectAll(ps []*target.Process) (machines []*inject.Machine, err error) {
	var first atomic.Int32
	stop := command.OnInterrupt(func(sig syscall.Signal) { first.CompareAndSwap(0, int32(sig)) })
	defer stop()
	for _, p := range ps {
		m, err := inject.Process(p.PID)
		if err != nil {
			return machines, injectError(err)
		}
		machines = append(machines, m)
		if sig := first.Load(); sig != 0 {
			return machines, command.Exit(128+int(sig), nil)
		}
	}
	return machines, nil
}

// tree is the set of followed children that have not ended, by the records.
type tree struct {
	live  map[uint32]struct{}
	doubt bool // an exit may have been lost
}

func newTree() *tree { return &tree{live: make(map[uint32]struct{})} }

func (t *tree) record(r *mm.Record) {
	switch {
	case r.Kind == mm.Lost:
		t.doubt = true
	case r.Kind == mm.Fork && r.Flags&mm.NewProcess != 0:
		t.live[r.ChildPID] = struct{}{}
	case r.Kind == mm.Exit && r.Flags&mm.LastTask != 0:
		delete(t.live, r.PID)
	}
}

func (t *tree) empty() bool {
	if t.doubt {
		for pid := range t.live {
			if unix.Kill(int(pid), 0) == unix.ESRCH {
				delete(t.live, pid)
			}
		}
	}
	return len(t.live) == 0
}
