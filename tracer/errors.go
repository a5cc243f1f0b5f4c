// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Errors of this package; use errors.Is.
var (
	// ErrNotSupported: the kernel lacks what a hook needs.
	ErrNotSupported = errors.New("not supported by this kernel")
	// ErrPermission: the caller may not load or attach BPF programs.
	ErrPermission = errors.New("not permitted")
	// ErrNoProcess: the target does not exist or has ended.
	ErrNoProcess = errors.New("no such process")
	// ErrNoSpace: the target has no user address space (a kernel thread, or a
	// process that is already exiting).
	ErrNoSpace = errors.New("process has no address space")
	// ErrTooMany: a limit of watches is reached; the text names it.
	ErrTooMany = errors.New("too many watches")
	// ErrFlushed: everything recorded before [Stream.Flush] was read.
	ErrFlushed = errors.New("stream flushed")
	// ErrCorrupt: bytes in a ring are not a record of a known layout.
	ErrCorrupt = errors.New("record is corrupt")
)

// Limit names a limit of a [Tracer].
type Limit uint8

const (
	// LimitWatches: streams and feeds of one tracer.
	LimitWatches Limit = iota + 1
	// LimitPerSpace: streams and feeds of one address space.
	LimitPerSpace
	// LimitSpaces: address spaces watched at once ([Options].MaxSpaces).
	LimitSpaces
)

// String says what there are too many of.
func (l Limit) String() string {
	switch l {
	case LimitWatches:
		return "every place of the tracer is taken"
	case LimitPerSpace:
		return "the address space has the most it can have"
	case LimitSpaces:
		return "Options.MaxSpaces address spaces are watched"
	}
	return fmt.Sprintf("limit(%d)", uint8(l))
}

// LimitError says which limit is reached. It answers [ErrTooMany] through
// errors.Is. Nothing was opened; what is open is not affected.
type LimitError struct{ Limit Limit }

func (e *LimitError) Error() string { return ErrTooMany.Error() + ": " + e.Limit.String() }

// Is answers ErrTooMany.
func (e *LimitError) Is(target error) bool { return target == ErrTooMany }

// HookError says why a hook could not be loaded or attached and what to try.
// It answers [ErrPermission] or [ErrNotSupported] through errors.Is.
type HookError struct {
	Hook   string // as the kernel names it
	Kernel string // release of the running kernel
	Need   string // capability or kernel version the hook needs
	Try    string // what an administrator can do
	Err    error

	refused bool // the capabilities are there, and yet it is not permitted
}

func (e *HookError) Error() string {
	var b strings.Builder
	fmt.Fprintf(&b, "attach %s on kernel %s: %v", e.Hook, e.Kernel, e.Err)
	if e.Need != "" {
		fmt.Fprintf(&b, " (needs %s", e.Need)
		if e.Try != "" {
			fmt.Fprintf(&b, "; try: %s", e.Try)
		}
		b.WriteString(")")
	}
	return b.String()
}

// Unwrap returns the cause.
func (e *HookError) Unwrap() error { return e.Err }

// Is answers the sentinel that fits the cause.
func (e *HookError) Is(target error) bool {
	switch target {
	case ErrPermission:
		return errors.Is(e.Err, os.ErrPermission) && !e.refused // EPERM, EACCES
	case ErrNotSupported:
		return !e.Is(ErrPermission)
	}
	return false
}

// hooksSince has the releases of hooks that kernels with BTF may be too old for.
var hooksSince = map[string]string{
	"raw_tp/exit_mmap":                 "6.1",
	"raw_tp/io_uring_submit_req":       "6.0",
	"raw_tp/io_uring_queue_async_work": "6.0",
	"raw_tp/io_uring_complete":         "5.17",
}

// kernelRelease is uname -r, for messages.
func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

func hookError(hook string, err error) *HookError {
	e := &HookError{Hook: hook, Kernel: kernelRelease(), Err: err}
	if e.Is(ErrPermission) && mayTrace() {
		// Some kernels answer EPERM to whole types of programs, fentry above all.
		e.refused = true
		e.Need = "a kernel that takes programs of this type; the capabilities are there"
		e.Try = "another tier (ummufeed check); in a container allow bpf(2) and perf_event_open(2); " +
			"check lockdown in /sys/kernel/security/lockdown"
		return e
	}
	if e.Is(ErrPermission) {
		e.Need = "CAP_BPF and CAP_PERFMON, or CAP_SYS_ADMIN"
		e.Try = "run as root; in a container grant both capabilities and allow bpf(2) and perf_event_open(2); " +
			"check lockdown in /sys/kernel/security/lockdown"
		return e
	}
	e.Need = "a kernel with BTF (CONFIG_DEBUG_INFO_BTF, /sys/kernel/btf/vmlinux) and this tracepoint"
	if since, ok := hooksSince[hook]; ok {
		e.Need = "Linux " + since + " or later"
	}
	e.Try = "ummufeed check"
	return e
}

// mayTrace reports whether this thread has the capabilities that loading and
// attaching need.
func mayTrace() bool {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d [2]unix.CapUserData
	if unix.Capget(&h, &d[0]) != nil {
		return false
	}
	has := func(c uint) bool { return d[c/32].Effective>>(c%32)&1 != 0 }
	return has(unix.CAP_SYS_ADMIN) || has(unix.CAP_BPF) && has(unix.CAP_PERFMON)
}
