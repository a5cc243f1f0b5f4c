// SPDX-License-Identifier: Apache-2.0

package selftest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/truth"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/extras"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

func isFit(t *testing.T, r *Report) {
	t.Helper()
	if !r.Fit || r.Missed != 0 || r.Subset != 0 || len(r.Reasons) != 0 {
		t.Errorf("%v: fit %v, missed %d, subset %d, %q", r.Tier, r.Fit, r.Missed, r.Subset, r.Reasons)
	}
	if r.FalseInvalidations != 0 {
		for _, op := range r.Operations {
			if op.FalsePages != 0 {
				t.Errorf("%v: %s: %d pages falsely invalidated", r.Tier, op.Name, op.FalsePages)
			}
		}
	}
	performed, seen := 0, 0
	for _, op := range r.Operations {
		if op.Seen != NotHere {
			performed++
		}
		if op.Seen == WasSeen {
			seen++
			if op.Hook == "" || op.Hook == "none" {
				t.Errorf("%v: %s: seen by no hook", r.Tier, op.Name)
			}
		}
	}
	if performed < 60 || seen < 60 {
		t.Errorf("%v: %d operations performed, %d seen: too few to prove anything", r.Tier, performed, seen)
	}
	t.Logf("%v: %d operations, %d seen, %.1f s, cost %+v", r.Tier, performed, seen, r.Seconds, r.Cost)
}

func TestSyscallTierIsFit(t *testing.T) {
	r, err := Run(t.Context(), Options{Tier: tracer.TierSyscall})
	if err != nil {
		t.Fatal(err)
	}
	isFit(t, r)
	for _, op := range r.Operations {
		// what hooks on system calls cannot see is told to be in a gap
		if op.Seen == InGap && op.Verdict == "cacheable" && strings.Trim(op.Changed, ".") != "" {
			t.Errorf("%s: pages %s changed unseen, and the memory is cacheable", op.Name, op.Changed)
		}
	}
}

func TestChooseTakesTheStrongestThatIsFit(t *testing.T) {
	machine.NeedKVM(t)
	tried, err := Choose(t.Context(), Tiers())
	if err != nil {
		t.Fatal(err)
	}
	for i, a := range tried {
		if a.Tier != Tiers()[i] {
			t.Errorf("tier %d tested is %v, want %v", i, a.Tier, Tiers()[i])
		}
		if last := i == len(tried)-1; last != (a.Err == nil && a.Report.Fit) {
			t.Errorf("%v: last %v, error %v", a.Tier, last, a.Err)
		}
	}
	r := tried[len(tried)-1].Report
	if r == nil || r.Tier != tracer.TierNotifierProbe && r.Tier != tracer.TierNotifierTracepoint {
		for _, a := range tried {
			t.Errorf("%v: %v, %+v", a.Tier, a.Err, a.Report)
		}
		t.FailNow()
	}
	isFit(t, r)
	for _, op := range r.Operations {
		if op.Seen == InGap || op.Verdict != "cacheable" {
			t.Errorf("%s: %s, %s: this tier has no gap", op.Name, op.Seen, op.Verdict)
		}
	}
}

// What was found is not tested again: a verdict is believed, and a tier that
// cannot be tested is passed over with its reason.
func TestAuto(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	bad := tracer.Tier(99)
	var tested []tracer.Tier
	ask := func(tiers ...tracer.Tier) (tracer.Tier, string) {
		t.Helper()
		tested = nil
		tier, why, err := Auto(t.Context(), tiers, func(tier tracer.Tier) { tested = append(tested, tier) })
		if err != nil {
			t.Fatal(err)
		}
		return tier, why
	}
	if tier, why := ask(tracer.TierSyscall); tier != tracer.TierSyscall || why != "" || len(tested) != 0 {
		t.Errorf("the only one: %v, %q, tested %v", tier, why, tested)
	}
	if tier, why := ask(bad, tracer.TierSyscall); tier != tracer.TierSyscall || !strings.Contains(why, "cannot be opened") || !slices.Equal(tested, []tracer.Tier{bad}) {
		t.Errorf("untestable: %v, %q, tested %v", tier, why, tested)
	}
	if tier, why := ask(tracer.TierSyscall, bad); tier != tracer.TierSyscall || !strings.Contains(why, "passed") || len(tested) != 1 {
		t.Errorf("tested now: %v, %q, tested %v", tier, why, tested)
	}
	if tier, why := ask(tracer.TierSyscall, bad); tier != tracer.TierSyscall || !strings.Contains(why, "passed") || len(tested) != 0 {
		t.Errorf("tested before: %v, %q, tested %v", tier, why, tested)
	}
	unfit := []Attempt{{Tier: tracer.TierSyscall, Report: &Report{Reasons: []string{"planted"}}}}
	if err := Remember(unfit); err != nil {
		t.Fatal(err)
	}
	if tier, why := ask(tracer.TierSyscall, bad); tier != bad || why != "syscall: planted" || len(tested) != 0 {
		t.Errorf("unfit before: %v, %q, tested %v", tier, why, tested)
	}
}

func TestCancelled(t *testing.T) {
	cause := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	o := Options{Tier: tracer.TierSyscall, tamper: func(_ string, records []mm.Record) []mm.Record {
		cancel(cause)
		return records
	}}
	if r, err := Run(ctx, o); !errors.Is(err, cause) || r != nil {
		t.Errorf("cancelled: report %v, error %v", r, err)
	}
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil || len(tasks) == 0 {
		t.Fatalf("tasks %v, %v", tasks, err)
	}
	for _, name := range tasks {
		if b, err := os.ReadFile(name); err == nil && len(b) != 0 {
			t.Errorf("%s: child processes %s are left", name, b)
		}
	}
}

func TestBadChild(t *testing.T) {
	for _, args := range [][]string{nil, {"nonsense"}, {roleBusy, "1"}} {
		cmd := child(args...)
		cmd.Stderr = nil
		b, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.HasPrefix(string(b), "self-test: ") {
			t.Errorf("child %q: %v, %s", args, err, b)
		}
	}
}

// What a faulty hook would deliver makes an operation missed, or a subset,
// and the tier unfit.
func TestFaultsAreNoticed(t *testing.T) {
	page := mm.Addr(mm.PageSize())
	each := func(f func(*mm.Record)) func([]mm.Record) []mm.Record {
		return func(rs []mm.Record) []mm.Record {
			for i := range rs {
				f(&rs[i])
			}
			return rs
		}
	}
	shift := each(func(r *mm.Record) { r.Range = mm.Range{Start: r.Range.Start + page, End: r.Range.End + page} })
	faults := map[string]struct {
		what  string
		fault func([]mm.Record) []mm.Record
		seen  Seen
		rng   Range
	}{
		"munmap-mmap":    {"hook dropped", func([]mm.Record) []mm.Record { return nil }, Missed, RangeNone},
		"dontneed-byte":  {"shifted by a page", shift, Missed, RangeNone},
		"mmap-fixed":     {"shifted by a page", shift, WasSeen, RangeSubset},
		"mprotect-none":  {"last page left out", each(func(r *mm.Record) { r.Range.End -= page }), WasSeen, RangeSubset},
		"mremap-away":    {"old range forgotten", each(func(r *mm.Record) { r.Range = mm.Range{} }), Missed, RangeNone},
		"storm-madvise":  {"skipped once", func(rs []mm.Record) []mm.Record { return rs[1:] }, WasSeen, RangeSubset},
		"storm-mprotect": {"skipped once", func(rs []mm.Record) []mm.Record { return rs[:len(rs)-1] }, WasSeen, RangeSubset},
		"munmap-unaligned": {"what did not happen", func([]mm.Record) []mm.Record {
			return []mm.Record{{Kind: mm.Unmap, Range: mm.Whole}}
		}, False, RangeSuperset},
	}
	for _, tier := range []tracer.Tier{tracer.TierSyscall, tracer.TierNotifierTracepoint, tracer.TierMM} {
		t.Run(tier.String(), func(t *testing.T) {
			need(t, tier.String())
			o := Options{Tier: tier, tamper: func(name string, rs []mm.Record) []mm.Record { return faults[name].fault(rs) }}
			for name := range faults {
				o.Only = append(o.Only, name)
			}
			r, err := Run(t.Context(), o)
			if err != nil {
				t.Fatal(err)
			}
			if len(r.Operations) != len(faults) || r.Fit || r.Missed != 3 || r.Subset != 4 || r.FalseInvalidations != 8 {
				t.Errorf("%d operations, fit %v, missed %d, subset %d, false %d", len(r.Operations), r.Fit, r.Missed, r.Subset, r.FalseInvalidations)
			}
			for _, op := range r.Operations {
				f := faults[op.Name]
				told := slices.ContainsFunc(r.Reasons, func(s string) bool { return strings.HasPrefix(s, op.Name+": ") })
				if op.Seen != f.seen || op.Range != f.rng || told != (f.seen != False) {
					t.Errorf("%s: %s: reasons %q, operation %+v", op.Name, f.what, r.Reasons, op)
				}
			}
		})
	}
}

// A kernel side with one step left out is unfit, and the operation that needs
// the step says so.
func TestGuards(t *testing.T) {
	const refused Seen = "refused" // the tier tries its hooks, and does not open
	bin, err := extras.Build(t.Context(), t.TempDir(), "selftest-guards")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		guard, tier, operation string
		seen                   Seen
		rng                    Range
	}{
		{"", "syscall", "mmap-fixed", WasSeen, RangeExact},
		{"", "notifier/tracepoint", "mmap-fixed", WasSeen, RangeExact},
		{"replace-seen", "syscall", "mmap-fixed", Missed, RangeNone},
		{"round-outward", "syscall", "munmap-page-and-byte", WasSeen, RangeSubset},
		{"uring-madvise", "syscall", "uring-madvise-async", Missed, RangeNone},
		{"compat-abi", "syscall", "i386-munmap", Missed, RangeNone},
		{"destination", "syscall", "mremap-onto", Missed, RangeNone},
		{"vector-limit", "syscall", "process-madvise-1024", WasSeen, RangeSubset},
		{"death-counts", "syscall", "exec", Missed, RangeNone},
		// planted faults
		{"hook-there", "syscall", "dontneed-byte", Missed, RangeNone},
		{"range-place", "syscall", "dontneed-byte", Missed, RangeNone},
		{"range-whole", "syscall", "mmap-fixed", WasSeen, RangeSubset},
		{"args-order", "syscall", "mmap-fixed", WasSeen, RangeSubset},
		{"never-missed", "syscall", "storm-madvise", WasSeen, RangeSubset},
		{"hook-there", "notifier/tracepoint", "dontneed-byte", Missed, RangeNone},
		{"range-place", "notifier/tracepoint", "dontneed-byte", Missed, RangeNone},
		{"range-whole", "notifier/tracepoint", "mmap-fixed", WasSeen, RangeSubset},
		{"args-order", "notifier/tracepoint", "mmap-fixed", Missed, RangeNone},
		{"never-missed", "notifier/tracepoint", "storm-madvise", WasSeen, RangeSubset},
		{"", "notifier/probe", "mmap-fixed", WasSeen, RangeExact},
		{"hook-there", "notifier/probe", "dontneed-byte", Missed, RangeNone},
		{"range-place", "notifier/probe", "dontneed-byte", Missed, RangeNone},
		{"range-whole", "notifier/probe", "mmap-fixed", WasSeen, RangeSubset},
		{"args-order", "notifier/probe", "mmap-fixed", Missed, RangeNone},
		{"never-missed", "notifier/probe", "storm-madvise", WasSeen, RangeSubset},
		{"", "mm", "mmap-fixed", WasSeen, RangeExact},
		{"range-whole", "mm", "mmap-fixed", WasSeen, RangeSubset},
		{"hook-there", "mm", "dontneed-byte", refused, RangeNone},
		{"range-place", "mm", "dontneed-byte", refused, RangeNone},
		{"args-order", "mm", "mmap-fixed", refused, RangeNone},
		{"never-missed", "mm", "storm-madvise", refused, RangeNone},
	} {
		t.Run(c.guard+"/"+c.tier, func(t *testing.T) {
			need(t, c.tier)
			switch c.guard {
			case "compat-abi":
				machine.NeedCompat(t)
			case "vector-limit":
				needProcessDiscard(t)
			case "args-order":
				if c.tier == "notifier/probe" && tracer.Preemptible() {
					t.Skip("KVM's tracepoint is behind the probes on this kernel, and has the right range")
				}
			}
			cmd := exec.Command(bin, roleTest, c.tier, c.operation)
			cmd.Env = append(os.Environ(), "UMMU_GUARD_OFF="+c.guard)
			var errout bytes.Buffer
			cmd.Stderr = &errout
			out, err := cmd.Output()
			if c.seen == refused {
				if err == nil || !strings.Contains(errout.String(), "attached, but not called") {
					t.Errorf("%v: %s%s", err, out, errout.String())
				}
				return
			}
			if err != nil {
				t.Fatalf("%v: %s", err, errout.String())
			}
			var r struct {
				Fit        bool
				Operations []struct {
					Seen  Seen
					Range Range
				}
			}
			if err := json.Unmarshal(out, &r); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			if len(r.Operations) != 1 || r.Operations[0].Seen != c.seen || r.Operations[0].Range != c.rng || r.Fit != (c.guard == "") {
				t.Errorf("%s", out)
			}
		})
	}
}

// need skips the test where the machine cannot have the tier.
func need(t *testing.T, tier string) {
	t.Helper()
	switch tier {
	case "notifier/probe":
		machine.NeedProbes(t)
		machine.NeedKVM(t)
	case "notifier/tracepoint":
		machine.NeedKVM(t)
	case "mm":
		machine.NeedProbes(t)
	}
}

// needProcessDiscard skips the test where process_madvise discards no pages,
// as up to 6.12.
func needProcessDiscard(t *testing.T) {
	t.Helper()
	if ok, err := truth.ProcessDiscard.Available(); err != nil {
		t.Fatal(err)
	} else if !ok {
		t.Skip("process_madvise discards no pages on this kernel")
	}
}

// One program on each side, where the kernel may skip it, is unfit, whether it
// was skipped this time or not.
func TestSingleProgramIsUnfit(t *testing.T) {
	machine.NeedProbes(t)
	machine.NeedKVM(t)
	bin, err := extras.Build(t.Context(), t.TempDir(), "selftest-guards")
	if err != nil {
		t.Fatal(err)
	}
	for _, off := range []string{"", "copies"} {
		cmd := exec.Command(bin, roleTest, "notifier/probe", "mmap-fixed")
		cmd.Env = append(os.Environ(), "UMMU_GUARD_OFF="+off)
		cmd.Stderr = os.Stderr
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		var r struct {
			Fit     bool
			Reasons []string
		}
		if err := json.Unmarshal(out, &r); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		want := off == "" || !tracer.Preemptible()
		if r.Fit != want || want != (len(r.Reasons) == 0) || !want && !strings.Contains(strings.Join(r.Reasons, "; "), "fentry2/") {
			t.Errorf("%q off: fit %v, want %v: %q", off, r.Fit, want, r.Reasons)
		}
	}
}

// What moves no pinned page invalidates nothing, on any tier, while the kernel
// merges pages as well.
func TestNothingFalse(t *testing.T) {
	harmless := []string{
		"fork-write", "fork-child-write", "fork-child-munmap", "mremap-grow-in-place", "mremap-may-grow-in-place", "brk-grow",
		"munmap-neighbour", "mbind-move", "move-pages", "migrate-pages", "compaction", "uffd-move-pinned", "collapse-pinned",
		"cold", "pageout", "free", "mergeable", "unmergeable",
	}
	const ksm = "/sys/kernel/mm/ksm/"
	for file, value := range map[string]string{"run": "1", "sleep_millisecs": "1", "pages_to_scan": "1000"} {
		before, err := os.ReadFile(ksm + file)
		if err == nil {
			err = os.WriteFile(ksm+file, []byte(value), 0)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.WriteFile(ksm+file, before, 0) })
	}
	for _, tier := range Tiers() {
		t.Run(tier.String(), func(t *testing.T) {
			need(t, tier.String())
			// Where the kernel skips programs a side that all of them missed
			// is a loss: now and then, but not for the same operation again
			// and again.
			left, here := harmless, 0
			for try := range 3 {
				r, err := Run(t.Context(), Options{Tier: tier, Only: left})
				if err != nil {
					t.Fatal(err)
				}
				if len(r.Operations) != len(left) {
					t.Errorf("%d operations, want %d", len(r.Operations), len(left))
				}
				left = nil
				for _, op := range r.Operations {
					if op.Seen != NotHere && try == 0 {
						here++
					}
					if op.FalsePages != 0 || op.Seen == False || op.Lost != 0 {
						t.Logf("%+v", op)
						left = append(left, op.Name)
					}
				}
				if len(left) == 0 || !tracer.Preemptible() {
					break
				}
			}
			if len(left) != 0 {
				t.Errorf("false: %q", left)
			}
			if here < len(harmless)-3 {
				t.Errorf("only %d of %d operations can be performed", here, len(harmless))
			}
		})
	}
}

// A few operations that no planted fault leaves fit (see internal/guard).
func TestPlanted(t *testing.T) {
	for _, tier := range Tiers() {
		t.Run(tier.String(), func(t *testing.T) {
			need(t, tier.String())
			r, err := Run(t.Context(), Options{Tier: tier, Only: []string{"dontneed-byte", "mmap-fixed", "munmap-mmap", "storm-madvise"}})
			if err != nil {
				t.Fatal(err)
			}
			if !r.Fit || len(r.Operations) != 4 {
				t.Errorf("%d operations: %q", len(r.Operations), r.Reasons)
			}
		})
	}
}

// Every operation can be missed: no verdict is right whatever is reported.
func TestEveryOperationCanFail(t *testing.T) {
	const unit = 4096
	buffer := mm.Range{Start: 1 << 20, End: 1<<20 + 8*unit}
	for i := range truth.Rows {
		row := &truth.Rows[i]
		if row.Refused != 0 {
			continue
		}
		r := &truth.Run{Row: row, Base: buffer.Start, Unit: unit, Pages: len(row.Want)}
		whole := []mm.Record{{Kind: mm.Unmap, Phase: mm.PhaseBegin, Range: r.Buffer()}}
		look := func(o observation) Operation {
			o.end = endCounted
			return judge(row, r, row.Want, feed.Cacheable, tracer.Coverage{}, &o)
		}
		silent := look(observation{})
		seen := look(observation{invalid: true, begun: true, records: whole})
		late := look(observation{begun: true, records: whole})
		uncounted := look(observation{invalid: true, records: whole})
		if row.Changes() || row.Oracle == truth.CPUOnly {
			if silent.Seen != Missed || silent.unfit == "" {
				t.Errorf("%s: nothing reported: %+v", row.Name, silent)
			}
			if seen.Seen != WasSeen || seen.unfit != "" || seen.Range == RangeSubset {
				t.Errorf("%s: the buffer reported: %+v", row.Name, seen)
			}
			if late.unfit == "" || uncounted.unfit == "" {
				t.Errorf("%s: reported late %+v, or not in flight %+v", row.Name, late, uncounted)
			}
		} else {
			if silent.Seen != Nothing || silent.unfit != "" {
				t.Errorf("%s: nothing reported: %+v", row.Name, silent)
			}
			if !slices.Contains(row.May, mm.Unmap) && (seen.Seen != False || seen.FalsePages != r.Pages) {
				t.Errorf("%s: the buffer reported: %+v", row.Name, seen)
			}
		}
	}
}
