// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/inject"
	"github.com/ummu/ummu/internal/recording"
)

var gapChildren = recording.Gap{
	Name: "no-notifier-in-children",
	What: "address spaces made after the injection, by fork or execve: they have no notifier",
}

// gapsOfTree are the address spaces that got no notifier.
func gapsOfTree(gaps []inject.Gap) []recording.Gap {
	var out []recording.Gap
	for _, g := range gaps {
		out = append(out, recording.Gap{
			Name: "no-notifier",
			What: fmt.Sprintf("process %d (%s): %v", g.PID, command.Printable(g.Comm), g.Err),
		})
	}
	return out
}

// injectError gives an error of injection its exit code, and says what to try.
func injectError(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, inject.ErrSeccomp), errors.Is(err, inject.ErrNotSupported), errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
		return command.Exit(command.ExitUnsupported, fmt.Errorf("%w; try --tier syscall", err))
	case errors.Is(err, fs.ErrPermission):
		return command.Exit(command.ExitPrivileges, fmt.Errorf("%w; it needs /dev/kvm, CAP_SYS_PTRACE, and no other debugger", err))
	}
	return err
}
