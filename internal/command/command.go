// SPDX-License-Identifier: Apache-2.0

// Package command is what the commands have in common: exit codes, standard
// streams, flags, signals, and how text from other programs is printed.
package command

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/tracer"
)

// Exit codes. A command that starts a program passes on the code of that.
const (
	ExitOK          = 0
	ExitFailure     = 1
	ExitUsage       = 2
	ExitUnsupported = 3
	ExitPrivileges  = 4
	ExitIncomplete  = 5
	ExitStale       = 6

	ExitNotExecutable = 126 // as a shell
	ExitNotFound      = 127
)

// ExitHelp is what help says about exit codes.
const ExitHelp = `Exit codes: 0 ok, 1 failure, 2 usage, 3 not supported by this kernel,
4 privileges are missing, 5 data is incomplete, 6 stale registrations were found.`

// Streams are the standard streams of a command. A started program gets them
// as they are; so they are files.
type Streams struct{ In, Out, Err *os.File }

// Standard are the process's own.
func Standard() Streams { return Streams{os.Stdin, os.Stdout, os.Stderr} }

// Log writes messages for people to the error stream, without times.
func (s Streams) Log() *slog.Logger {
	return slog.New(slog.NewTextHandler(s.Err, &slog.HandlerOptions{
		ReplaceAttr: func(groups []string, a slog.Attr) slog.Attr {
			if a.Key == slog.TimeKey && len(groups) == 0 {
				return slog.Attr{}
			}
			return a
		},
	}))
}

// IsTerminal reports whether f is one.
func IsTerminal(f *os.File) bool {
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}

// Colourful reports whether to write colours to f (no-color.org).
func Colourful(f *os.File) bool {
	return os.Getenv("NO_COLOR") == "" && os.Getenv("TERM") != "dumb" && IsTerminal(f)
}

// Error is an error with an exit code of its own. A nil Err is a code about
// which everything has been said.
type Error struct {
	Code int
	Err  error
}

func (e *Error) Error() string {
	if e.Err == nil {
		return fmt.Sprintf("exit code %d", e.Code)
	}
	return e.Err.Error()
}

// Unwrap returns Err.
func (e *Error) Unwrap() error { return e.Err }

// Exit returns an [*Error].
func Exit(code int, err error) error { return &Error{Code: code, Err: err} }

// Usagef returns an error of the command line.
func Usagef(format string, args ...any) error { return Exit(ExitUsage, fmt.Errorf(format, args...)) }

// ExitCode is the code for an error of a command.
func ExitCode(err error) int {
	var e *Error
	switch {
	case err == nil:
		return ExitOK
	case errors.As(err, &e):
		return e.Code
	case errors.Is(err, recording.ErrCorrupt), errors.Is(err, recording.ErrTruncated):
		return ExitIncomplete
	case errors.Is(err, tracer.ErrPermission):
		return ExitPrivileges
	case errors.Is(err, tracer.ErrNotSupported), errors.Is(err, feed.ErrUnavailable):
		return ExitUnsupported
	}
	return ExitFailure
}

// Execute runs the command line, prints the error, and returns the exit code.
// A reader who went away is no error.
func Execute(root *cobra.Command, args []string, s Streams) int {
	catchSIGPIPE()
	root.SilenceErrors, root.SilenceUsage = true, true
	root.SetIn(s.In)
	root.SetOut(s.Out)
	root.SetErr(s.Err)
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return Exit(ExitUsage, err) })
	root.SetArgs(args)
	cmd, err := root.ExecuteC()
	if err == nil || errors.Is(err, syscall.EPIPE) {
		return ExitOK
	}
	code := ExitCode(err)
	var e *Error
	if !errors.As(err, &e) || e.Err != nil {
		fmt.Fprintf(s.Err, "%s: %v\n", cmd.CommandPath(), err)
	}
	if code == ExitUsage {
		fmt.Fprintf(s.Err, "See '%s --help'.\n", cmd.CommandPath())
	}
	return code
}

// Args makes errors of a validator usage errors.
func Args(v cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := v(cmd, args); err != nil {
			return Exit(ExitUsage, err)
		}
		return nil
	}
}

// buildVersion is set by the linker:
// -ldflags "-X github.com/ummu/ummu/internal/command.buildVersion=v1.2.3".
var buildVersion string

// Version is the version of this build.
func Version() string {
	if buildVersion != "" {
		return buildVersion
	}
	if b, ok := debug.ReadBuildInfo(); ok && b.Main.Version != "" {
		return b.Main.Version
	}
	return "(devel)"
}
