// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/inject"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/tracer"
)

const tierHelp = `Tiers: syscall sees calls at their entry and exit; notifier sees what the kernel
does to page tables, by any path, before it does it, with exact ranges and without
results, but only in address spaces that have an MMU notifier: by probes where they
exist (notifier/probe), else by KVM's tracepoint (notifier/tracepoint). auto is syscall.`

// registerTier adds --tier to a command that shows streams.
func registerTier(cmd *cobra.Command, f *tierFlag) {
	*f = "auto"
	cmd.Flags().Var(f, "tier", "how changes are seen: "+strings.Join(tierNames, ", "))
	complete(cmd, "tier", tierNames)
}

// open loads the kernel side for a stream. A tier that is asked for is had, or
// it is an error.
func (f tierFlag) open() (t *tracer.Tracer, err error) {
	if f == "auto" {
		return tracer.Open(tracer.Options{})
	}
	tiers, err := f.tiers()
	for _, tier := range tiers {
		if t, err = tracer.Open(tracer.Options{Tier: tier}); err == nil {
			break
		}
	}
	return t, err
}

func (f tierFlag) notifier() bool { return strings.HasPrefix(string(f), "notifier") }

// beginsOnly reports whether streams of a tier have records before a change
// and none after it, and neither arguments nor results of calls.
func beginsOnly(tier string) bool { return strings.HasPrefix(tier, "notifier/") }

// streamGaps are what streams of a tier do not show, beyond its own gaps.
func streamGaps(tier tracer.Tier) []recording.Gap {
	if tier != tracer.TierNotifierTracepoint {
		return nil
	}
	return []recording.Gap{{
		Name: "other-causes",
		What: "changes by anything but the process's own mapping calls (truncation, hole punching, process_madvise, write faults, reclaim): " +
			"the tracepoint does not tell whose address space it is",
	}}
}

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
			What: fmt.Sprintf("process %d (%s): %v", g.PID, printable(g.Comm), g.Err),
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
		return &exitError{exitUnsupported, fmt.Errorf("%w; try --tier syscall", err)}
	case errors.Is(err, fs.ErrPermission):
		return &exitError{exitPrivileges, fmt.Errorf("%w; it needs /dev/kvm, CAP_SYS_PTRACE, and no other debugger", err)}
	}
	return err
}
