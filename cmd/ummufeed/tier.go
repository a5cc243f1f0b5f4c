// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/internal/inject"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/selftest"
	"github.com/ummu/ummu/tracer"
)

const tierHelp = `Tiers: syscall sees calls at their entry and exit; notifier sees what the kernel
does to page tables, by any path, before it does it, with exact ranges and without
results, but only in address spaces that have an MMU notifier: by probes where they
exist (notifier/probe), else by KVM's tracepoint (notifier/tracepoint). mm sees the same
in every address space, where the kernel's memory management can be probed. auto is the
strongest that passes its self-test (check --self-test, made when it is not known since
the boot) and needs nothing done to the program: a notifier is made only if asked for.`

// registerTier adds --tier to a command that shows streams.
func registerTier(cmd *cobra.Command, f *tierFlag) {
	*f = "auto"
	cmd.Flags().Var(f, "tier", "how changes are seen: "+strings.Join(tierNames, ", "))
	complete(cmd, "tier", tierNames)
}

// open loads the kernel side for a stream, and says why it is that tier. A
// tier that is asked for is had, or it is an error.
func (f tierFlag) open(ctx context.Context, log *slog.Logger) (t *tracer.Tracer, why string, err error) {
	if f == "auto" {
		tier, why, err := selftest.Auto(ctx, streamTiers(), func(t tracer.Tier) {
			log.Info("testing a tier, once per boot", "tier", t)
		})
		if err != nil {
			return nil, "", err
		}
		t, err = tracer.Open(tracer.Options{Tier: tier})
		return t, strings.Join(slices.DeleteFunc([]string{why, noInjection}, func(s string) bool { return s == "" }), "; "), err
	}
	tiers, err := f.tiers()
	for _, tier := range tiers {
		if t, err = tracer.Open(tracer.Options{Tier: tier}); err == nil {
			break
		}
	}
	return t, "asked for", err
}

// own is the tier for a feed of this program itself, and why.
func (f tierFlag) own() (tracer.Tier, string, error) {
	if f == "auto" {
		tier, why := local.Choose()
		return tier, why, nil
	}
	tiers, err := f.tiers()
	if err != nil {
		return tracer.TierNone, "", err
	}
	for _, t := range tiers[:len(tiers)-1] {
		if c := tracer.ProbeTier(t); c.Tier == t {
			return t, "asked for", nil
		}
	}
	return tiers[len(tiers)-1], "asked for", nil
}

const noInjection = "the notifier tiers need a notifier in the program, which is made only if asked for (--tier notifier)"

// streamTiers are the tiers that can be opened and need nothing done to a
// program, strongest first.
func streamTiers() []tracer.Tier {
	return slices.DeleteFunc([]tracer.Tier{tracer.TierMM, tracer.TierSyscall}, func(t tracer.Tier) bool {
		return tracer.Options{Tier: t}.Validate() != nil
	})
}

func (f tierFlag) notifier() bool { return strings.HasPrefix(string(f), "notifier") }

// beginsOnly reports whether streams of a tier have records before a change
// and none after it, and neither arguments nor results of calls.
func beginsOnly(tier string) bool { return strings.HasPrefix(tier, "notifier/") || tier == "mm" }

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
