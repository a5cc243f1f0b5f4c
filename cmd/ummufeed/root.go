// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/tracer"
)

// Exit codes. `run` and `record` pass on the code of the program they start.
const (
	exitOK          = 0
	exitFailure     = 1
	exitUsage       = 2
	exitUnsupported = 3
	exitPrivileges  = 4
	exitIncomplete  = 5

	exitNotExecutable = 126 // as a shell
	exitNotFound      = 127
)

const exitHelp = `Exit codes: 0 ok, 1 failure, 2 usage, 3 not supported by this kernel,
4 privileges are missing, 5 data is incomplete.`

// streams are the standard streams of a command. A started program gets them
// as they are; so they are files.
type streams struct{ in, out, err *os.File }

func (s streams) log() *slog.Logger {
	return slog.New(slog.NewTextHandler(s.err, &slog.HandlerOptions{
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey && len(groups) == 0 {
				return slog.Attr{}
			}
			return a
		},
	}))
}

// exitError is an error with an exit code of its own. A nil err is a code
// about which everything has been said.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

func usagef(format string, args ...any) error {
	return &exitError{exitUsage, fmt.Errorf(format, args...)}
}

// exitCode is the code for an error of a command.
func exitCode(err error) int {
	var e *exitError
	switch {
	case err == nil:
		return exitOK
	case errors.As(err, &e):
		return e.code
	case errors.Is(err, recording.ErrCorrupt), errors.Is(err, recording.ErrTruncated):
		return exitIncomplete
	case errors.Is(err, tracer.ErrPermission):
		return exitPrivileges
	case errors.Is(err, tracer.ErrNotSupported), errors.Is(err, feed.ErrUnavailable):
		return exitUnsupported
	}
	return exitFailure
}

// execute runs the command line and returns the exit code.
func execute(args []string, s streams) int {
	catchSIGPIPE()
	root := newRoot(s)
	root.SetArgs(args)
	cmd, err := root.ExecuteC()
	if err == nil || errors.Is(err, syscall.EPIPE) {
		return exitOK
	}
	code := exitCode(err)
	var e *exitError
	if !errors.As(err, &e) || e.err != nil {
		fmt.Fprintf(s.err, "%s: %v\n", cmd.CommandPath(), err)
	}
	if code == exitUsage {
		fmt.Fprintf(s.err, "See '%s --help'.\n", cmd.CommandPath())
	}
	return code
}

func newRoot(s streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "ummufeed",
		Short: "See every change of an address space",
		Long: `ummufeed shows what happens to the address spaces of programs: what is
unmapped, replaced, dropped, moved or protected, by whom and how, as it happens.
The programs are neither stopped nor changed.

` + exitHelp,
		SilenceErrors: true,
		SilenceUsage:  true,
		Version:       version(),
		Args:          cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return usagef("unknown command %q", args[0])
			}
			return cmd.Help()
		},
	}
	root.SetIn(s.in)
	root.SetOut(s.out)
	root.SetErr(s.err)
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &exitError{exitUsage, err} })
	root.AddCommand(newCheck(s), newRun(s), newTrace(s), newRecord(s), newReplay(s), newDemo(s), newServe(s), newStatus(s), newVersion(s), newSelfTestChild())
	return root
}

// args makes errors of a validator usage errors.
func args(v cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := v(cmd, args); err != nil {
			return &exitError{exitUsage, err}
		}
		return nil
	}
}

// buildVersion is set by the linker: -ldflags "-X main.buildVersion=v1.2.3".
var buildVersion string

func version() string {
	if buildVersion != "" {
		return buildVersion
	}
	if b, ok := debug.ReadBuildInfo(); ok && b.Main.Version != "" {
		return b.Main.Version
	}
	return "(devel)"
}

func newVersion(s streams) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(s.out, version())
			return err
		},
	}
}

// write sends what is left of a buffer and ignores nothing.
func write(w io.Writer, b []byte) error {
	_, err := w.Write(b)
	return err
}
