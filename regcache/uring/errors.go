// SPDX-License-Identifier: Apache-2.0

package uring

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/regcache"
)

var (
	// ErrDisabled: io_uring is there, but this process may not use it. The
	// message names the sysctl and its value.
	ErrDisabled = errors.New("io_uring is disabled")
	// ErrNotSupported: the kernel is too old or built without io_uring.
	ErrNotSupported = errors.New("not supported by this kernel")
	// ErrBusy: the ring still has registered buffers.
	ErrBusy = errors.New("still registered")
	// ErrNotRegistered: the buffer was deregistered, or never registered here.
	ErrNotRegistered = errors.New("buffer is not registered")
	// ErrOutside: the addresses of a transfer are not all in its buffer.
	ErrOutside = errors.New("outside of registered buffer")
	// ErrTooLong: a buffer can have 1 GiB.
	ErrTooLong = errors.New("longer than 1 GiB")
)

// TableError says that no slot of the buffer table is free. errors.Is finds
// [regcache.ErrLimit] in it.
type TableError struct {
	Slots int // of the table
}

func (e *TableError) Error() string {
	return fmt.Sprintf("all %d slots of the buffer table are in use", e.Slots)
}

// Unwrap returns [regcache.ErrLimit].
func (e *TableError) Unwrap() error { return regcache.ErrLimit }

// MemlockError says that the kernel refuses to pin more memory. errors.Is
// finds ENOMEM in it. All values are bytes.
type MemlockError struct {
	// Limit is RLIMIT_MEMLOCK of the process, which counts for all processes
	// of its user together; 0 if there is none, in which case the memory
	// itself is short.
	Limit uint64
	// Used is what this process has pinned (VmPin in /proc/self/status). The
	// user's other processes count as well but cannot be seen.
	Used uint64
	// Need is the pages of the range that was to be registered. A page of a
	// huge page costs the whole huge page.
	Need uint64
}

func (e *MemlockError) Error() string {
	limit := "unlimited"
	if e.Limit != 0 {
		limit = strconv.FormatUint(e.Limit, 10) + " bytes for all processes of the user"
	}
	return fmt.Sprintf("cannot pin %d bytes: memlock limit (RLIMIT_MEMLOCK, ulimit -l) %s, this process has %d pinned: %v",
		e.Need, limit, e.Used, unix.ENOMEM)
}

// Unwrap returns ENOMEM.
func (e *MemlockError) Unwrap() error { return unix.ENOMEM }

// Limit returns RLIMIT_MEMLOCK, 0 if there is none, and what this process has
// pinned, in bytes; see [MemlockError]. It implements [regcache.Limiter].
func (r *Ring) Limit() (limit, use uint64) {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l) == nil && l.Cur != unix.RLIM_INFINITY {
		limit = l.Cur
	}
	return limit, pinned()
}

// pinned returns VmPin of this process in bytes, 0 if it cannot be read.
func pinned() uint64 {
	status, _ := os.ReadFile("/proc/self/status")
	for line := range bytes.Lines(status) {
		if rest, ok := bytes.CutPrefix(line, []byte("VmPin:")); ok {
			kib, _ := strconv.ParseUint(string(bytes.TrimSpace(bytes.TrimSuffix(bytes.TrimSpace(rest), []byte("kB")))), 10, 64)
			return kib << 10
		}
	}
	return 0
}

const disabledSysctl = "/proc/sys/kernel/io_uring_disabled"

// explainSetup says why io_uring_setup failed with err; sysctl and rerr are
// what reading disabledSysctl (Linux 6.6) gave.
func explainSetup(err error, sysctl []byte, rerr error) error {
	value := string(bytes.TrimSpace(sysctl))
	switch {
	case errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("io_uring_setup: %w: needs Linux 5.13 with CONFIG_IO_URING: %w", ErrNotSupported, err)
	case !errors.Is(err, unix.EPERM):
		return fmt.Errorf("io_uring_setup: %w", err)
	case rerr == nil && value == "1":
		return fmt.Errorf("%w: sysctl kernel.io_uring_disabled is 1, only CAP_SYS_ADMIN and the group kernel.io_uring_group may use it: %w", ErrDisabled, err)
	case rerr == nil && value != "0":
		return fmt.Errorf("%w: sysctl kernel.io_uring_disabled is %s, set it to 0: %w", ErrDisabled, value, err)
	case rerr == nil:
		return fmt.Errorf("%w: sysctl kernel.io_uring_disabled is 0, so a seccomp filter (as in containers) or a security module refuses it: %w", ErrDisabled, err)
	}
	return fmt.Errorf("%w: a seccomp filter (as in containers) or a security module refuses it: %w", ErrDisabled, err)
}
