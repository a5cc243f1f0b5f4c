// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Preemptible reports whether the running kernel preempts its own code, as
// preempt=full and lazy do, so that programs of its probes may be skipped; true
// if that cannot be known. It is said by /sys/kernel/debug/sched/preempt where
// debugfs is mounted, by the command line, or by the kernel's build.
func Preemptible() bool {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return true
	}
	build := unix.ByteSliceToString(u.Version[:])
	model, _ := os.ReadFile("/sys/kernel/debug/sched/preempt")
	args, _ := os.ReadFile("/proc/cmdline")
	return isPreemptible(build, string(model), string(args))
}

// isPreemptible judges by uname's version string, by the file, which has all
// models and the one in force in parentheses ("none (voluntary) full"; 5.13), and
// by the command line.
func isPreemptible(build, model, args string) bool {
	if !strings.Contains(build, "PREEMPT") {
		return false
	}
	if _, after, ok := strings.Cut(model, "("); ok {
		name, _, _ := strings.Cut(after, ")")
		return name != "none" && name != "voluntary"
	}
	last := ""
	for word := range strings.FieldsSeq(args) {
		if m, ok := strings.CutPrefix(word, "preempt="); ok {
			last = m
		}
	}
	return !strings.Contains(build, "PREEMPT_DYNAMIC") || last != "none" && last != "voluntary"
}

func oneIf(is bool) uint64 {
	if is {
		return 1
	}
	return 0
}
