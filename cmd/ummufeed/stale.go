// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"fmt"
	"slices"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/detector"
	"github.com/ummu/ummu/internal/findings"
	"github.com/ummu/ummu/internal/pairs"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/tracer"
)

// staleOptions are the flags of commands that look for stale registrations.
type staleOptions struct {
	registrations bool
	failOnStale   bool
}

func (o *staleOptions) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.BoolVar(&o.registrations, "registrations", false,
		"look for stale registrations of io_uring and libibverbs: who registered, who took the memory away")
	fl.BoolVar(&o.failOnStale, "fail-on-stale", false,
		"exit code 6 if a registration went stale, 5 if that is not certain or something was not seen")
}

func (o *staleOptions) validate() error {
	if o.failOnStale && !o.registrations {
		return command.Usagef("--fail-on-stale is for --registrations")
	}
	return nil
}

// ringForStacks is the size of the ring where records have stacks, unless
// another is asked for.
const ringForStacks = 64 << 20

// finder is a sink that shows findings. final: nothing more is added to it.
type finder interface {
	finds(p *detector.Report)
	finding(f *findings.Finding, final bool) error
}

// stacker is a sink that writes stacks.
type stacker interface {
	stacks(frames func(uint32) []symbol.Frame)
}

// hunt is the search for stale registrations in the records of a view.
type hunt struct {
	*detector.Detector
	err error // first error of the sink
}

// newHunt makes the detector of a live session; its owner closes it. t must
// have been opened with registrations.
func newHunt(t *tracer.Tracer, all bool) (*hunt, error) {
	d, err := detector.New(t, all, detector.Options{BeginsOnly: pairs.BeginsOnly(t.Coverage().Tier.String())})
	return &hunt{Detector: d}, err
}

// show lets a sink show what is found; before the first record.
func (h *hunt) show(sk sink, m *recording.Meta) error {
	t, err := calls.For(m.Arch)
	if err != nil {
		return err
	}
	if s, ok := sk.(stacker); ok {
		s.stacks(h.Frames)
	}
	f, ok := sk.(finder)
	if ok {
		f.finds(&detector.Report{Calls: t, Zero: m.MonotonicZero, Frames: h.Frames})
	}
	tell := func(x *findings.Finding, final bool) {
		if ok && h.err == nil {
			h.err = f.finding(x, final)
		}
	}
	h.Tell(t, func(x *findings.Finding) { tell(x, false) }, func(x *findings.Finding) { tell(x, true) })
	return nil
}

// end completes the summary.
func (h *hunt) end(s *recording.Summary) error {
	h.End()
	s.Registrations, s.Stale = h.Engine().Stats().Registrations, uint64(len(h.Engine().Findings()))
	for _, g := range h.Gaps() {
		s.Gaps = append(s.Gaps, recording.Gap{Name: g.Name, What: g.What})
	}
	return h.err
}

// exit is the error of --fail-on-stale, nil if all is well.
func (h *hunt) exit(s *recording.Summary) error {
	for _, f := range h.Engine().Findings() {
		if f.Certain {
			return command.Exit(command.ExitStale, nil)
		}
	}
	if len(h.Engine().Findings()) > 0 || incomplete(s) {
		return command.Exit(command.ExitIncomplete, nil)
	}
	return nil
}

// found is the text of findings, for the end of a stream.
type found struct {
	report   *detector.Report
	findings []*findings.Finding
}

// foundOf is how many registrations that one change hit are printed; a program
// may have thousands in memory that it gives up at once.
const foundOf = 3

func (t *found) finds(p *detector.Report) { t.report = p }

func (t *found) finding(f *findings.Finding, final bool) error {
	if final {
		t.findings = append(t.findings, f)
	}
	return nil
}

// text is all of them, in the order in which they were found.
func (t *found) text() (b []byte) {
	slices.SortFunc(t.findings, func(a, b *findings.Finding) int { return cmp.Compare(a.ID, b.ID) })
	n := 0
	for i, f := range t.findings {
		if i > 0 && f.Change.Seq == t.findings[i-1].Change.Seq {
			n++
		} else {
			n = 0
		}
		last := i+1 == len(t.findings) || t.findings[i+1].Change.Seq != f.Change.Seq
		switch {
		case n < foundOf:
			b = t.report.AppendText(b, f, command.Printable)
		case last:
			b = fmt.Appendf(b, "stale registrations %d to %d: by the same change\n", f.ID-n+foundOf, f.ID)
		}
	}
	return b
}
