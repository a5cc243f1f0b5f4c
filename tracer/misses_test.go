// SPDX-License-Identifier: Apache-2.0

package tracer

import "testing"

// One hook alone has lost what was skipped since the last look; several what
// all of them were skipped for within two.
func TestLostOf(t *testing.T) {
	for _, c := range []struct {
		name string
		each [][3]uint64
		want uint64
	}{
		{"none", nil, 0},
		{"alone", [][3]uint64{{9, 7, 0}}, 2},
		{"alone, nothing new", [][3]uint64{{9, 9, 0}}, 0},
		{"one of two", [][3]uint64{{9, 7, 7}, {5, 5, 5}}, 0},
		{"both", [][3]uint64{{9, 7, 7}, {6, 5, 5}}, 1},
		{"both, not at the same look", [][3]uint64{{9, 7, 7}, {6, 6, 5}}, 1},
		{"both, long apart", [][3]uint64{{9, 7, 7}, {6, 6, 6}}, 0},
		{"two of three", [][3]uint64{{9, 7, 7}, {6, 5, 5}, {1, 1, 1}}, 0},
		{"a counter that goes back", [][3]uint64{{1, 7, 7}}, 0},
	} {
		if got := lostOf(c.each); got != c.want {
			t.Errorf("%s: %d, want %d", c.name, got, c.want)
		}
	}
}

// Every hook that the kernel may skip is in one group at most, and no group is
// about a hook that does not exist.
func TestGroups(t *testing.T) {
	seen := map[string]bool{}
	for _, group := range together {
		for _, id := range group {
			name := HookName(id)
			if seen[name] || name == "none" || name[len(name)-1] == ')' {
				t.Errorf("hook %s", name)
			}
			seen[name] = true
		}
	}
	for _, tier := range []Tier{TierSyscall, TierNotifierTracepoint, TierNotifierProbe} {
		for _, h := range hooksOf(tier) {
			if h.required && !seen[h.name] && h.name != "fentry/__mmu_notifier_invalidate_range_end" {
				t.Errorf("%v: nobody looks whether %s was skipped", tier, h.name)
			}
		}
	}
}

func TestIsPreemptible(t *testing.T) {
	for _, c := range []struct {
		build, model, args string
		want               bool
	}{
		{"#1 SMP Debian 5.10.1-1", "", "", false},
		{"#1 SMP PREEMPT_DYNAMIC Debian 6.1.1-1", "none (voluntary) full \n", "", false},
		{"#1 SMP PREEMPT_DYNAMIC Debian 6.1.1-1", "none voluntary (full) \n", "preempt=none", true},
		{"#1 SMP PREEMPT_DYNAMIC Debian 7.3.1-1", "full (lazy) \n", "", true},
		{"#1 SMP PREEMPT_DYNAMIC", "(none) voluntary full \n", "", false},
		{"#1 SMP PREEMPT_DYNAMIC", "", "quiet preempt=full preempt=none", false},
		{"#1 SMP PREEMPT_DYNAMIC", "", "quiet preempt=voluntary ro", false},
		{"#1 SMP PREEMPT_DYNAMIC", "", "quiet", true},
		{"#1 SMP PREEMPT_RT", "", "preempt=none", true},
		{"#1 SMP PREEMPT", "", "", true},
	} {
		if got := isPreemptible(c.build, c.model, c.args); got != c.want {
			t.Errorf("%q, %q, %q: %v", c.build, c.model, c.args, got)
		}
	}
}
