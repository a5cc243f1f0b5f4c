// SPDX-License-Identifier: Apache-2.0

package target

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/preflight"
	"github.com/ummu/ummu/tracer"
)

// Process is a running process that is watched.
type Process struct {
	PID, FD int
}

// Ended reports whether it has ended.
func (p *Process) Ended() bool {
	fds := []unix.PollFd{{Fd: int32(p.FD), Events: unix.POLLIN}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n > 0
}

// OpenProcess finds a process by its number.
func OpenProcess(pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, 0)
	switch {
	case err == unix.ESRCH:
		return nil, fmt.Errorf("watch process %d: %w", pid, tracer.ErrNoProcess)
	case err == unix.EINVAL, err == unix.ENOENT:
		return nil, fmt.Errorf("watch process %d: it is a thread; give its process: %w", pid, tracer.ErrNoProcess)
	case err != nil:
		return nil, fmt.Errorf("watch process %d: %w", pid, err)
	}
	return &Process{PID: pid, FD: fd}, nil
}

// MayWatch refuses addresses of processes that the caller could not trace.
func MayWatch(pids []int, all bool) error {
	facts, err := preflight.Gather()
	if err != nil {
		return err
	}
	if facts.Capabilities["CAP_SYS_PTRACE"] {
		return nil
	}
	if all {
		return command.Exit(command.ExitPrivileges, errors.New("watch every process: needs CAP_SYS_PTRACE"))
	}
	for _, pid := range pids {
		// The kernel checks PTRACE_MODE_READ at open (fs/proc/task_mmu.c).
		f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
		if errors.Is(err, os.ErrPermission) {
			return command.Exit(command.ExitPrivileges, fmt.Errorf("watch process %d: it is another user's: needs CAP_SYS_PTRACE", pid))
		}
		if err == nil {
			f.Close()
		}
	}
	return nil
}

// Close lets go of the process.
func (p *Process) Close() error { return unix.Close(p.FD) }

// AnyRuns reports whether one of them has not ended.
func AnyRuns(ps []*Process) bool {
	for _, p := range ps {
		if !p.Ended() {
			return true
		}
	}
	return false
}
