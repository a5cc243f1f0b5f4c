// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/mm"
)

// kindsFlag is a set of kinds.
type kindsFlag []mm.Kind

func (k *kindsFlag) String() string {
	var s []string
	for _, x := range *k {
		s = append(s, x.String())
	}
	return strings.Join(s, ",")
}
func (k *kindsFlag) Type() string { return "KIND,..." }
func (k *kindsFlag) Set(s string) error {
	for _, w := range strings.Split(s, ",") {
		kind, err := mm.ParseKind(w)
		if err != nil {
			return err
		}
		*k = append(*k, kind)
	}
	return nil
}

// rangesFlag are ranges as in /proc/PID/maps, 0x allowed.
type rangesFlag []mm.Range

func (r *rangesFlag) String() string { return "" }
func (r *rangesFlag) Type() string   { return "START-END" }
func (r *rangesFlag) Set(s string) error {
	from, to, ok := strings.Cut(s, "-")
	if !ok {
		return fmt.Errorf("START-END in hexadecimal, as in /proc/PID/maps")
	}
	var a [2]mm.Addr
	for i, w := range []string{from, to} {
		w = strings.TrimPrefix(strings.TrimPrefix(w, "0x"), "0X")
		n, err := strconv.ParseUint(w, 16, 64)
		if err != nil {
			return fmt.Errorf("%q is not a hexadecimal address", w)
		}
		a[i] = mm.Addr(n)
	}
	x := mm.Range{Start: a[0], End: a[1]}
	if x.Empty() {
		return fmt.Errorf("range %v is empty", x)
	}
	*r = append(*r, x)
	return nil
}

// filter selects records. The zero filter selects all.
type filter struct {
	kinds   kindsFlag
	ranges  rangesFlag
	pids    command.PIDs
	minSize command.Size
}

func (f *filter) register(cmd *cobra.Command) {
	fl := cmd.Flags()
	fl.Var(&f.kinds, "kind", "only these kinds: "+strings.Join(kindNames(), ", "))
	fl.Var(&f.ranges, "range", "only what touches this range of addresses (hexadecimal, repeatable)")
	fl.Var(&f.pids, "pid", "only these processes")
	fl.Var(&f.minSize, "min-size", "only ranges of at least this many bytes (suffix K, M, G, T)")
	command.Complete(cmd, "kind", kindNames())
}

func kindNames() []string {
	var s []string
	for _, k := range mm.Kinds() {
		s = append(s, k.String())
	}
	return s
}

// match reports whether r is selected. A loss always is: it may have been
// anything. Records without a range (fork, exec, exit) are not selected when
// a range or a size is asked for.
func (f *filter) match(r *mm.Record) bool {
	if r.Kind == mm.Lost {
		return true
	}
	if len(f.kinds) > 0 && !slices.Contains(f.kinds, r.Kind) {
		return false
	}
	if len(f.pids) > 0 && !slices.Contains(f.pids, int(r.PID)) {
		return false
	}
	if uint64(f.minSize) > max(r.Range.Len(), r.To.Len()) {
		return false
	}
	if len(f.ranges) == 0 {
		return true
	}
	for _, x := range f.ranges {
		if x.Overlaps(r.Range) || x.Overlaps(r.To) {
			return true
		}
	}
	return false
}

// streamFlags are common to all commands that show records.
type streamFlags struct {
	filter
	format     command.Format
	phase      command.Format
	output     string
	summary    bool
	failOnLoss bool
}

func (f *streamFlags) register(cmd *cobra.Command) {
	f.format = command.Format{Allowed: []string{"table", "json", "ndjson"}, Value: "table"}
	f.phase = command.Format{Allowed: []string{"begin", "end", "both"}}
	f.format.Register(cmd)
	f.filter.register(cmd)
	fl := cmd.Flags()
	fl.Var(&f.phase, "phase", "records before (begin) or after (end) the change, or both; default: table joins them, others have both")
	fl.BoolVarP(&f.summary, "summary-only", "c", false, "print the summary, no records")
	command.Complete(cmd, "phase", f.phase.Allowed)
	f.registerLoss(cmd)
}

func (f *streamFlags) registerLoss(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&f.failOnLoss, "fail-on-loss", false, "exit code 5 if events were lost")
}
