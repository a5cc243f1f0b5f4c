// SPDX-License-Identifier: Apache-2.0

package selftest

import (
	"testing"

	"github.com/ummu/ummu/tracer"
)

func TestTiersAreFit(t *testing.T) {
	for _, tier := range []tracer.Tier{tracer.TierSyscall, tracer.TierNotifierTracepoint} {
		t.Run(tier.String(), func(t *testing.T) {
			r, err := Run(t.Context(), Options{Tier: tier})
			if err != nil {
				t.Fatal(err)
			}
			for _, op := range r.Operations {
				if op.Seen != Nothing && (op.Seen != WasSeen || op.Range != RangeExact || !op.Begin) || op.Verdict == "" {
					t.Logf("%-28s %-8s %-8s %s %s %s b=%v e=%s %s %d/%d/%d", op.Name, op.Seen, op.Range, op.Changed, op.Reported, op.Verdict, op.Begin, op.End, op.Hook, op.Changes, op.Uncovered, op.Lost)
				}
			}
			t.Logf("%v %+v false %d lost %d %.1fs %v", r.Hooks, r.Cost, r.FalseInvalidations, r.Lost, r.Seconds, r.Reasons)
		})
	}
}
