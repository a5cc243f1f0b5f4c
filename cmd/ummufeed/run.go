// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime"
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

func newRun(s command.Streams) *cobra.Command {
	var f streamFlags
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run [flags] -- CMD [ARG...]",
		Short: "Start a program and show what happens to its address spaces",
		Long: `run starts CMD and shows every change of its address space and of those of its
children, from its first instruction to the end of the last of them.

Where the records go: to --output FILE if it is given. Without it a table goes
to standard error, as with strace, and json and ndjson go to standard output.
Whenever records go to standard output ("--output -" too), CMD's standard output
goes to standard error, so that nothing but records is on standard output.
CMD's command.Streams are otherwise its own.

The exit code is CMD's: 128 + N if signal N killed it, 127 if it was not found,
126 if it cannot be executed. SIGINT, SIGTERM and SIGHUP are passed on to CMD and
its children; a second one kills them. The summary is printed in any case.
With --fail-on-loss the exit code is 5 if events were lost and CMD succeeded.

With --registrations memory that CMD registers with io_uring or with libibverbs is
followed: a change that takes pages away under a live registration is printed at the
end (with -o ndjson as it comes), with both stacks. With --fail-on-stale the exit code
is 6 then, whatever CMD's is. What it can and cannot see: docs/detector.md.

` + target.TierHelp + `
--tier notifier makes a notifier (an empty KVM machine) in each address space of
the tree before its first instruction: every task of the tree is traced by ptrace
for that, stops shortly at fork, execve and signals, and cannot be traced by
strace or gdb meanwhile. CMD is not started where that cannot be; a descendant
that gets none (seccomp, 32-bit) is named at the end.`,
		Args: command.Args(cobra.MinimumNArgs(1)),
		RunE: func(_ *cobra.Command, argv []string) error {
			return runCommand(s, &f, &o, argv)
		},
	}
	cmd.Flags().SetInterspersed(false)
	f.register(cmd)
	cmd.Flags().StringVar(&f.output, "output", "", `file for the records, "-" is standard output`)
	o.register(cmd)
	return cmd
}

// runOptions are common to run and record.
type runOptions struct {
	watchOptions
	waitTree bool
}

func (o *runOptions) register(cmd *cobra.Command) {
	o.watchOptions.register(cmd)
	cmd.Flags().BoolVar(&o.waitTree, "wait-tree", true, "wait for the descendants of CMD too")
}

// watchOptions are common to all that watch.
type watchOptions struct {
	staleOptions
	follow   bool
	ring     command.Size
	tier     target.Tier
	stacksOf []mm.Range // whose changes have stacks in any case
}

func (o *watchOptions) register(cmd *cobra.Command) {
	o.staleOptions.register(cmd)
	o.ring = defaultRing
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", true, "children and what they execute too")
	o.tier.Register(cmd)
	cmd.Flags().Var(&o.ring, "ring", "size of the ring between kernel and program: a power of two, at least a page")
}

const defaultRing = 8 << 20

func (o *watchOptions) options() (tracer.WatchOptions, error) {
	if o.registrations && o.ring == defaultRing {
		o.ring = ringForStacks
	}
	w := tracer.WatchOptions{Follow: o.follow, RingBytes: int(o.ring), Registrations: o.registrations, StacksOf: o.stacksOf}
	if err := o.staleOptions.validate(); err != nil {
		return w, err
	}
	if o.ring == 0 || o.ring > 1<<30 {
		return w, command.Usagef("--ring %d is out of range", o.ring)
	}
	if err := w.Validate(); err != nil {
		return w, command.Exit(command.ExitUsage, err)
	}
	return w, nil
}

// output is where records go.
type output struct {
	io.Writer
	file   *os.File // what Writer is
	stdout bool     // it is standard output
	close  bool     // it is ours to close
}

// openOutput applies the rule of `run --help`. Without a program (trace,
// replay) a table goes to standard output too.
func openOutput(s command.Streams, f *streamFlags, program bool) (*output, error) {
	switch {
	case f.output == "-", f.output == "" && (!program || f.format.Value != "table"):
		return &output{Writer: s.Out, file: s.Out, stdout: true}, nil
	case f.output == "":
		return &output{Writer: s.Err, file: s.Err}, nil
	}
	file, err := create(f.output)
	if err != nil {
		return nil, fmt.Errorf("open output: %w", err)
	}
	return &output{Writer: file, file: file, close: true}, nil
}

// create opens a file that will be written. What was in it stays until begin:
// a command that fails before should destroy nothing.
func create(name string) (*os.File, error) {
	return os.OpenFile(name, os.O_WRONLY|os.O_CREATE, 0o600)
}

// begin empties a file from create. A pipe or a device has nothing to empty.
func begin(file *os.File) error {
	if err := file.Truncate(0); err != nil && !errors.Is(err, syscall.EINVAL) {
		return fmt.Errorf("empty output: %w", err)
	}
	return nil
}

// sink writes the meta line.
func (o *output) sink(f *streamFlags, m *recording.Meta) (sink, error) {
	if o.close {
		if err := begin(o.file); err != nil {
			return nil, err
		}
	}
	return newSink(f, o, m, command.Colourful(o.file))
}

func (o *output) Close() error {
	if !o.close {
		return nil
	}
	return o.file.Close()
}

func runCommand(s command.Streams, f *streamFlags, o *runOptions, argv []string) error {
	out, err := openOutput(s, f, true)
	if err != nil {
		return err
	}
	theirs := s
	if out.stdout {
		theirs.Out = s.Err
	}
	err = startAndWatch(theirs, f, o, argv, func(m *recording.Meta) (sink, error) {
		return out.sink(f, m)
	})
	return closeOutput(out, err)
}

// incomplete reports whether --fail-on-loss is to fail.
func incomplete(s *recording.Summary) bool { return s.Lost > 0 || len(s.Gaps) > 0 }

// closeOutput closes out; its error matters only if there was none before.
func closeOutput(out io.Closer, err error) error {
	if cerr := out.Close(); cerr != nil && err == nil {
		return fmt.Errorf("close output: %w", cerr)
	}
	return err
}

// warnMissing tells about hooks without which less is seen.
func warnMissing(log *slog.Logger, c tracer.Coverage) {
	for _, h := range c.Hooks {
		if !h.Attached {
			log.Warn("hook is not attached", "hook", h.Name, "sees", h.Sees, "error", h.Err)
		}
	}
}

// startAndWatch starts a program and feeds its records to a sink.
func startAndWatch(s command.Streams, f *streamFlags, o *runOptions, argv []string, open func(*recording.Meta) (sink, error)) error {
	wo, err := o.options()
	if err != nil {
		return err
	}
	path, err := target.LookPath(argv[0])
	if err != nil {
		return err
	}
	tr, why, err := o.tier.OpenWith(context.Background(), s.Log(), tracer.Options{Registrations: o.registrations})
	if err != nil {
		return err
	}
	defer tr.Close()
	warnMissing(s.Log(), tr.Coverage())
	meta, err := target.NewMeta(tr.Coverage(), why)
	if err != nil {
		return err
	}
	meta.Command = argv
	var h *hunt
	if o.registrations {
		if h, err = newHunt(tr, false); err != nil {
			return err
		}
		defer h.Close()
		h.Program(path)
	}
	var tree *inject.Tree // with the notifier tier
	if o.tier.Notifier() {
		if tree, err = inject.NewTree(); err != nil {
			return injectError(err)
		}
		defer tree.Close()
	}

	// Before the start: a signal that this program was started to ignore (a
	// background job's SIGINT) would stay ignored in the other one.
	var first atomic.Int32
	stop := command.OnInterrupt(func(sig syscall.Signal) {
		if first.CompareAndSwap(0, int32(sig)) {
			target.PassOn(sig)
		} else {
			target.KillDescendants()
		}
	})
	defer stop()

	// ptrace belongs to one thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c, err := target.StartStopped(path, argv, s)
	if err != nil {
		return err
	}
	if tree != nil {
		if err := tree.Start(c.PID); err != nil {
			c.Abandon()
			return injectError(err)
		}
	}
	st, err := tr.Watch(tracer.PID(c.PID), wo)
	if err != nil {
		c.Abandon()
		return fmt.Errorf("watch %s: %w", argv[0], err)
	}
	defer st.Close()
	sk, err := open(meta)
	if err == nil && h != nil {
		err = errors.Join(h.Process(c.PID), h.show(sk, meta))
	}
	if err != nil {
		c.Abandon()
		return err
	}
	se := &session{sources: []source{st}, view: newView(&f.filter, sk, meta.Tier)}
	se.view.hunt = h
	if sig := first.Load(); sig != 0 {
		c.Abandon() // it has not run
		return command.Exit(128+int(sig), nil)
	}
	if tree == nil {
		if err := c.Release(); err != nil {
			c.Abandon()
			return err
		}
	}
	read := make(chan error, 1)
	go func() { read <- se.run() }()
	var waitErr error
	if tree == nil {
		waitErr = c.Wait(o.waitTree)
	} else {
		waitErr = tree.Run(func(pid int, ws unix.WaitStatus) bool {
			return !c.Reaped(pid, ws) || o.waitTree
		})
		se.gaps = func() []recording.Gap { return gapsOfTree(tree.Gaps()) }
	}
	waitErr = errors.Join(waitErr, se.stop())
	readErr := <-read
	sum, outErr := se.end(readErr)
	if err := errors.Join(readErr, waitErr); err != nil {
		return err
	}
	code := c.Code()
	if o.failOnStale && outErr == nil {
		if err := h.exit(sum); err != nil && (code == 0 || command.ExitCode(err) == command.ExitStale) {
			return err
		}
	}
	switch {
	case outErr != nil && !errors.Is(outErr, syscall.EPIPE):
		return fmt.Errorf("write records: %w", outErr)
	case code != 0:
		return command.Exit(code, nil)
	case f.failOnLoss && incomplete(sum):
		return command.Exit(command.ExitIncomplete, nil)
	}
	return nil
}
