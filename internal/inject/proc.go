// SPDX-License-Identifier: Apache-2.0

package inject

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// state is the letter of /proc/TID/stat, '?' if the task is gone.
func state(tid int) byte {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", tid))
	if err != nil {
		return '?'
	}
	// comm may hold anything, the last ")" ends it
	if i := bytes.LastIndexByte(b, ')'); i >= 0 && i+2 < len(b) {
		return b[i+2]
	}
	return '?'
}

// processOf is the process that a task belongs to.
func processOf(tid int) (int, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "Tgid:"); ok {
			return strconv.Atoi(strings.TrimSpace(rest))
		}
	}
	return 0, fmt.Errorf("task %d has no process", tid)
}

func comm(tid int) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", tid))
	if err != nil {
		return "?"
	}
	return strings.TrimSuffix(string(b), "\n")
}

// sameSpace reports whether two processes share their address space (kcmp(2),
// which kernels may lack; then nobody does).
func sameSpace(a, b int) bool {
	const kcmpVM = 1
	n, _, e := unix.Syscall6(unix.SYS_KCMP, uintptr(a), uintptr(b), kcmpVM, 0, 0, 0)
	return e == 0 && n == 0
}
