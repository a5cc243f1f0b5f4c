// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// Runs of a hook are counted, with their time, while somebody counts.
func TestRuns(t *testing.T) {
	tr := openReady(t, Options{})
	count := func() map[mm.Hook]HookRuns {
		all, err := tr.Runs()
		if err != nil {
			t.Fatal(err)
		}
		by := make(map[mm.Hook]HookRuns)
		for _, h := range all {
			by[h.Hook] = h
		}
		if len(by) != len(tr.Coverage().Hooks) {
			t.Fatalf("%d hooks, coverage has %d", len(by), len(tr.Coverage().Hooks))
		}
		return by
	}
	counting, err := CountRuns()
	if err != nil {
		t.Fatal(err)
	}
	defer counting.Close()
	before := count()
	const calls = 1000
	for range calls {
		unix.Syscall(unix.SYS_MUNMAP, 0, 0, 0)
	}
	after := count()
	for _, h := range []mm.Hook{layout.HookSysEnter, layout.HookSysExit, layout.HookEnterMunmap} {
		runs := after[h].Runs - before[h].Runs
		if runs < calls || after[h].Time <= before[h].Time || after[h].Name != HookName(h) {
			t.Errorf("%s: %d runs of %d, %v", HookName(h), runs, calls, after[h].Time-before[h].Time)
		}
	}
	tr.Close()
	if _, err := tr.Runs(); err != os.ErrClosed {
		t.Errorf("after Close: %v", err)
	}
}
