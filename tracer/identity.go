// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"sync"

	"github.com/cilium/ebpf/btf"
	"golang.org/x/sys/unix"
)

// OpenFeedOf is [Tracer.OpenFeed] for a process that is not trusted: the watch
// is of the address space that the process behind pidfd has during the call,
// as the kernel's list of its tasks shows it. One thread that still has it is
// enough, the leader may have ended. A pid that was used again cannot be taken
// for the process: pidfd is alive before and after. pidfd stays the caller's.
//
// Where rings are not safe in foreign hands ([RingsSafe]) the feed has none.
//
// It fails with [ErrNoProcess] if the process has ended, or is not in this
// process's pid namespace, with [ErrNoSpace] if none of its threads has an
// address space, with [ErrTooMany] (a [*LimitError]), and with [ErrInFlight].
//
// What the process executes after the call has another address space: ask
// [Feed.StillOf] before the descriptors are handed out.
func (t *Tracer) OpenFeedOf(pidfd int, o FeedOptions) (*Feed, error) {
	safe, err := RingsSafe()
	if err != nil {
		return nil, err
	}
	o.NoRing = o.NoRing || !safe
	pid, err := PIDFD(pidfd).pid()
	if err != nil {
		return nil, err
	}
	return t.openFeedOf(pidfd, pid, o)
}

// openFeedOf does so for the pid that the process had a moment ago.
func (t *Tracer) openFeedOf(pidfd, pid int, o FeedOptions) (*Feed, error) {
	f, err := t.OpenFeed(PID(pid), o)
	if err != nil {
		return nil, err
	}
	if err := pidfdAlive(pidfd); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// StillOf reports whether the process behind pidfd has, at some moment of the
// call, the very address space that the feed watches, and the watch is alive.
// false is final. pidfd stays the caller's.
func (f *Feed) StillOf(pidfd int) (bool, error) {
	pid, err := PIDFD(pidfd).pid()
	if errors.Is(err, ErrNoProcess) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return f.stillOf(pidfd, pid)
}

func (f *Feed) stillOf(pidfd, pid int) (bool, error) {
	if err := f.t.begin(); err != nil {
		return false, err
	}
	defer f.t.ops.Done()
	space, _, err := f.t.spaceOf(pid)
	switch {
	case errors.Is(err, ErrNoProcess) || errors.Is(err, ErrNoSpace):
		return false, nil
	case err != nil:
		return false, err
	}
	// the pid was the process's while its tasks were looked at
	if err := pidfdAlive(pidfd); err != nil {
		if errors.Is(err, ErrNoProcess) {
			return false, nil
		}
		return false, err
	}
	// After the look: an address space that died and came back at the same
	// address has ended the watch before.
	return space == f.space && f.Alive(), nil
}

// pidfdAlive fails with ErrNoProcess if the process was waited for: from then
// on its pid can be another's.
func pidfdAlive(fd int) error {
	switch err := unix.PidfdSendSignal(fd, 0, nil, 0); {
	case err == nil || err == unix.EPERM:
		return nil
	case err == unix.ESRCH:
		return fmt.Errorf("pidfd %d: %w", fd, ErrNoProcess)
	default:
		return fmt.Errorf("pidfd %d: %w", fd, err)
	}
}

// RingsSafe reports whether the ring of a watch may be mapped by somebody who
// is not trusted. Its consumer page is writable, and before the ring had a
// pending position (CVE-2024-41009; Linux 6.10 and stable releases from 2024
// on) a reader who set the consumer position back made the kernel write records
// over records. The kernel's type information says which it is.
func RingsSafe() (bool, error) { return ringsSafeHere() }

// Reading the kernel's types takes longer than anything else.
var ringsSafeHere = sync.OnceValues(func() (bool, error) {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		return false, fmt.Errorf("read the kernel's types: %w", err)
	}
	return ringsSafe(kernel)
})

func ringsSafe(kernel *btf.Spec) (bool, error) {
	var ring *btf.Struct
	if err := kernel.TypeByName("bpf_ringbuf", &ring); err != nil {
		return false, fmt.Errorf("find struct bpf_ringbuf: %w", err)
	}
	for _, m := range ring.Members {
		if m.Name == "pending_pos" {
			return true, nil
		}
	}
	return false, nil
}
