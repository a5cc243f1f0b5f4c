// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/selftest"
	"github.com/ummu/ummu/internal/target"
	"github.com/ummu/ummu/tracer"
)

// selfTestReport is what check --self-test prints as JSON: the report of the
// last tier that was tested, and what became of those before it.
type selfTestReport struct {
	*selftest.Report
	Tried []triedTier `json:"tried"`
}

type triedTier struct {
	Tier   tracer.Tier `json:"tier"`
	Fit    bool        `json:"fit"`
	Reason string      `json:"reason,omitempty"`
}

func selfTest(ctx context.Context, s command.Streams, format string, tier target.Tier) error {
	tiers, err := tier.Tiers()
	if err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(ctx, command.Interrupts...)
	defer stop()
	tried, err := selftest.Choose(ctx, tiers)
	if err != nil {
		return err
	}
	if err := selftest.Remember(tried); err != nil {
		s.Log().Warn("self-tests are not remembered", "error", err)
	}
	return showSelfTest(s.Out, format, tried)
}

func showSelfTest(w io.Writer, format string, tried []selftest.Attempt) error {
	r := selfTestReport{Tried: []triedTier{}}
	var failure error // of the last tier that could not be tested
	for _, a := range tried {
		t := triedTier{Tier: a.Tier}
		switch {
		case a.Err != nil:
			t.Reason, failure = a.Err.Error(), a.Err
		case a.Report.Fit:
			t.Fit = true
		default:
			t.Reason = strings.Join(a.Report.Reasons, "; ")
		}
		if a.Report != nil {
			r.Report = a.Report
		}
		r.Tried = append(r.Tried, t)
	}
	if r.Report == nil { // no tier got as far as an operation
		if errors.Is(failure, tracer.ErrNoKVM) {
			code := command.ExitUnsupported
			if errors.Is(failure, os.ErrPermission) {
				code = command.ExitPrivileges
			}
			return command.Exit(code, failure)
		}
		return failure
	}
	var err error
	if format == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		err = e.Encode(r)
	} else {
		err = r.table(w)
	}
	if err != nil || r.Fit {
		return err
	}
	return command.Exit(command.ExitFailure, fmt.Errorf("tier %v is unfit: %s", r.Tier, strings.Join(r.Reasons, "; ")))
}

func (r *selfTestReport) table(w io.Writer) error {
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "OPERATION\tSEEN\tRANGE\tCHANGED\tREPORTED\tCACHED\tBEGIN\tEND\tFALSE\tHOOK")
	for i := range r.Operations {
		op := &r.Operations[i]
		if op.Seen == selftest.NotHere {
			fmt.Fprintf(t, "%s\t%s\n", op.Name, op.Seen)
			continue
		}
		begin := "-"
		if op.Begin {
			begin = "yes"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", op.Name, op.Seen, op.Range, op.Changed, op.Reported,
			op.Verdict, begin, op.End, op.FalsePages, op.Hook)
	}
	t.Flush()

	b.WriteString("\nHOOKS (operations that each saw first)\n")
	names := make([]string, 0, len(r.Hooks))
	for name := range r.Hooks {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(t, "%d\t%s\n", r.Hooks[name], name)
	}
	t.Flush()

	for i := range r.Operations {
		if op := &r.Operations[i]; op.Changes != 0 {
			fmt.Fprintf(t, "\n%s\t%d changes, %d neither seen nor told as lost, %.0f ns each", op.Name, op.Changes, op.Uncovered, op.Cost)
		}
	}
	fmt.Fprintln(t)
	t.Flush()
	fmt.Fprintf(&b, "\nCOST of mmap, touch and munmap of a page nobody registered: %.0f ns without the tier, %.0f unwatched, %.0f watched\n",
		r.Cost.Bare, r.Cost.Unwatched, r.Cost.Watched)
	for _, a := range r.Tried {
		if !a.Fit {
			fmt.Fprintf(&b, "tier %v: %s\n", a.Tier, a.Reason)
		}
	}
	verdict := "FIT"
	if !r.Fit {
		verdict = "UNFIT"
	}
	fmt.Fprintf(&b, "tier %v: %s: %d operations in %.1f s, %d missed, %d subset, %d false invalidations, %d lost\n",
		r.Tier, verdict, len(r.Operations), r.Seconds, r.Missed, r.Subset, r.FalseInvalidations, r.Lost)
	return write(w, []byte(b.String()))
}
