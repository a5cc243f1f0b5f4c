// SPDX-License-Identifier: Apache-2.0

package target

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/internal/selftest"

	"github.com/ummu/ummu/tracer"
)

// A tier that is asked for by its name is the only one tried.
func TestTierNames(t *testing.T) {
	probe, tracepoint := tracer.TierNotifierProbe, tracer.TierNotifierTracepoint
	want := map[string][]tracer.Tier{
		"auto":                selftest.Tiers(),
		"notifier":            {probe, tracepoint},
		"notifier/probe":      {probe},
		"notifier/tracepoint": {tracepoint},
		"mm":                  {tracer.TierMM},
		"syscall":             {tracer.TierSyscall},
	}
	for _, name := range TierNames {
		var f Tier
		if err := f.Set(name); err != nil {
			t.Fatal(err)
		}
		got, err := f.Tiers()
		if d := cmp.Diff(want[name], got); d != "" {
			t.Errorf("%s:\n%s", name, d)
		}
		if err != nil {
			t.Errorf("%s: error %v", name, err)
		}
	}
}
