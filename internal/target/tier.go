// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/selftest"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// Tier is --tier: of check the tier to test, else the tier to use.
type Tier string

func (f *Tier) String() string { return string(*f) }
func (f *Tier) Type() string   { return "TIER" }
func (f *Tier) Set(s string) error {
	if !slices.Contains(TierNames, s) {
		return fmt.Errorf("one of %s", strings.Join(TierNames, ", "))
	}
	*f = Tier(s)
	return nil
}

// TierNames are what --tier may be.
var TierNames = []string{"auto", "notifier", "notifier/probe", "notifier/tracepoint", "mm", "syscall"}

// Tiers are the tiers that the name stands for, strongest first.
func (f Tier) Tiers() ([]tracer.Tier, error) {
	switch f {
	case "notifier":
		return []tracer.Tier{tracer.TierNotifierProbe, tracer.TierNotifierTracepoint}, nil
	}
	for _, t := range selftest.Tiers() {
		if string(f) == t.String() {
			return []tracer.Tier{t}, nil
		}
	}
	return selftest.Tiers(), nil // auto
}

// TierHelp explains the tiers.
const TierHelp = `Tiers: syscall sees calls at their entry and exit; notifier sees what the kernel
does to page tables, by any path, before it does it, with exact ranges and without
results, but only in address spaces that have an MMU notifier: by probes where they
exist (notifier/probe), else by KVM's tracepoint (notifier/tracepoint). mm sees the same
in every address space, where the kernel's memory management can be probed. auto is the
strongest that passes its self-test (check --self-test, made when it is not known since
the boot) and needs nothing done to the program: a notifier is made only if asked for.`

// Register adds --tier to a command that shows streams.
func (f *Tier) Register(cmd *cobra.Command) {
	*f = "auto"
	cmd.Flags().Var(f, "tier", "how changes are seen: "+strings.Join(TierNames, ", "))
	command.Complete(cmd, "tier", TierNames)
}

// Open loads the kernel side for a stream, and says why it is that tier. A
// tier that is asked for is had, or it is an error.
func (f Tier) Open(ctx context.Context, log *slog.Logger) (t *tracer.Tracer, why string, err error) {
	return f.OpenWith(ctx, log, tracer.Options{})
}

// OpenWith is [Tier.Open] with other options; their tier is set.
func (f Tier) OpenWith(ctx context.Context, log *slog.Logger, o tracer.Options) (t *tracer.Tracer, why string, err error) {
	if f == "auto" {
		tier, why, err := selftest.Auto(ctx, StreamTiers(), func(t tracer.Tier) {
			log.Info("testing a tier, once per boot", "tier", t)
		})
		if err != nil {
			return nil, "", err
		}
		o.Tier = tier
		t, err = tracer.Open(o)
		return t, strings.Join(slices.DeleteFunc([]string{why, noInjection}, func(s string) bool { return s == "" }), "; "), err
	}
	tiers, err := f.Tiers()
	for _, tier := range tiers {
		o.Tier = tier
		if t, err = tracer.Open(o); err == nil {
			break
		}
	}
	return t, "asked for", err
}

// Own is the tier for a feed of this program itself, and why.
func (f Tier) Own() (tracer.Tier, string, error) {
	if f == "auto" {
		tier, why := local.Choose()
		return tier, why, nil
	}
	tiers, err := f.Tiers()
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

// StreamTiers are the tiers that can be opened and need nothing done to a
// program, strongest first.
func StreamTiers() []tracer.Tier {
	return slices.DeleteFunc([]tracer.Tier{tracer.TierMM, tracer.TierSyscall}, func(t tracer.Tier) bool {
		return tracer.Options{Tier: t}.Validate() != nil
	})
}

// Notifier reports whether it is one of the notifier tiers.
func (f Tier) Notifier() bool { return strings.HasPrefix(string(f), "notifier") }

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

// GapsOf are the gaps of a coverage.
func GapsOf(c tracer.Coverage) []recording.Gap {
	gaps := []recording.Gap{}
	for _, g := range c.Gaps {
		gaps = append(gaps, recording.Gap{Name: g.Name, What: g.What})
	}
	return gaps
}

// NewMeta describes a stream that begins now. reason says why it is that tier.
func NewMeta(c tracer.Coverage, reason string) (*recording.Meta, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return nil, fmt.Errorf("read kernel release: %w", err)
	}
	var mono unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono); err != nil {
		return nil, fmt.Errorf("read clock: %w", err)
	}
	now := time.Now().UTC().Round(0)
	return &recording.Meta{
		Schema: recording.Schema, Version: command.Version(), Host: unix.ByteSliceToString(u.Nodename[:]),
		Kernel: unix.ByteSliceToString(u.Release[:]), Arch: runtime.GOARCH,
		Tier: c.Tier.String(), TierReason: reason, Gaps: append(GapsOf(c), streamGaps(c.Tier)...), Start: now,
		MonotonicZero: now.Add(-time.Duration(mono.Nano())), PageSize: mm.PageSize(),
	}, nil
}

// NewSelfTestChild is what the processes of a self-test execute.
func NewSelfTestChild() *cobra.Command {
	return &cobra.Command{
		Use:                selftest.Argument,
		Hidden:             true,
		DisableFlagParsing: true,
		RunE: func(_ *cobra.Command, args []string) error {
			if code := selftest.Main(args); code != 0 {
				return command.Exit(code, nil)
			}
			return nil
		},
	}
}
