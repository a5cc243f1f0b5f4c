// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// Target names the address space to watch. A pid is only how a person names
// one: what is watched is the address space that the process has at the call.
type Target struct {
	kind targetKind
	n    int
}

type targetKind uint8

const (
	targetPID targetKind = iota + 1
	targetPIDFD
	targetAll
)

// PID targets the process with this pid in the caller's pid namespace.
func PID(pid int) Target { return Target{targetPID, pid} }

// PIDFD targets the process behind a pidfd, which stays the caller's. It
// cannot be confused by the reuse of pids.
func PIDFD(fd int) Target { return Target{targetPIDFD, fd} }

// Self targets the calling process.
func Self() Target { return Target{targetPID, os.Getpid()} }

// All targets every address space of the machine.
func All() Target { return Target{targetAll, 0} }

// WatchOptions configure [Tracer.Watch]. The zero value works.
type WatchOptions struct {
	// Follow includes the children that the target creates from now on, and
	// the programs that any of them executes.
	Follow bool
	// Kinds selects the kinds of records; empty selects all. Losses are
	// always reported.
	Kinds []mm.Kind
	// Registrations includes records of kind Register and Deregister, which
	// the tracer must have been opened for ([Options].Registrations), and user
	// stacks of them and of the changes that touch what was registered
	// ([Stream.Stack]). A record with a stack takes 4 KiB of the ring.
	Registrations bool
	// StacksOf are ranges whose changes have stacks too, where Registrations is
	// set.
	StacksOf []mm.Range
	// RingBytes is the size of the ring between the kernel side and Read: a
	// power of two, at least the page size. 0: 8 MiB, about 61,000 records.
	RingBytes int
}

const defaultRingBytes = 8 << 20

// Validate reports options out of range.
func (o WatchOptions) Validate() error {
	if n := o.RingBytes; n != 0 && (n < os.Getpagesize() || n&(n-1) != 0 || n > 1<<30) {
		return fmt.Errorf("RingBytes %d is not a power of two from %d to %d", n, os.Getpagesize(), 1<<30)
	}
	return nil
}

// Watch opens a stream of the records of target. Changes whose call begins
// after Watch has returned are never missing from it: they are read, or
// counted as lost. The stream ends with Close; the death of the target is a
// record of kind exit with the flag SpaceDeath.
//
// It fails with [ErrNoProcess] or [ErrNoSpace] if there is nothing to watch
// and with [ErrTooMany] if a limit is reached.
func (t *Tracer) Watch(target Target, o WatchOptions) (*Stream, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.RingBytes == 0 {
		o.RingBytes = defaultRingBytes
	}
	kinds := ^uint32(0)
	if len(o.Kinds) != 0 {
		kinds = 0
		for _, k := range o.Kinds {
			kinds |= 1 << k
		}
	}
	if o.Registrations && t.verbs == nil {
		return nil, errNoRegistrations
	}
	if err := t.begin(); err != nil {
		return nil, err
	}
	defer t.ops.Done()
	if err := t.use(); err != nil {
		return nil, err
	}
	s, err := t.watch(target, o, kinds)
	if err != nil {
		t.unuse()
		return nil, err
	}
	t.mu.Lock()
	t.streams[s] = struct{}{}
	t.mu.Unlock()
	return s, nil
}

func (t *Tracer) watch(target Target, o WatchOptions, kinds uint32) (*Stream, error) {
	flags := uint32(slotSpace)
	if o.Registrations {
		flags |= slotStacks
	} else {
		kinds &^= 1<<mm.Register | 1<<mm.Deregister
	}
	sl, err := t.slots.take(shape{ring: o.RingBytes, track: o.Registrations})
	if err != nil {
		return nil, err
	}
	if err := t.slots.activate(sl, slotConf{Flags: flags, BeginKinds: kinds, EndKinds: kinds}); err != nil {
		return nil, errors.Join(err, t.slots.retire(sl))
	}
	if len(o.StacksOf) > 0 && sl.interest != nil {
		if err := markInterest(sl.interest, o.StacksOf); err != nil {
			return nil, errors.Join(err, t.slots.retire(sl))
		}
	}
	s, err := newStream(t, sl, target.kind == targetAll)
	if err != nil {
		return nil, errors.Join(err, t.slots.retire(sl))
	}
	if s.all {
		err = t.control(ctlWatchAll, 0, 0, sl.ref)
		if err != nil {
			err = fmt.Errorf("watch all address spaces: %w", tooMany(err))
		}
	} else {
		err = t.bind(sl, target, o.Follow)
	}
	if err != nil {
		return nil, errors.Join(err, s.reader.Close(), t.unbind(sl), t.slots.retire(sl))
	}
	return s, nil
}

// markInterest does what mark() of bpf/registrations.bpf.h does, before the
// kernel side can find the page.
func markInterest(m *ebpf.Map, ranges []mm.Range) error {
	var in layout.Interest
	if err := m.Lookup(uint32(0), &in); err != nil {
		return fmt.Errorf("read interest page: %w", err)
	}
	const granules = 64
	for _, r := range ranges {
		if r.Empty() {
			continue
		}
		for level, shift := range []uint{layout.InterestShift0, layout.InterestShift1, layout.InterestShift2} {
			first, last := uint64(r.Start)>>shift, uint64(r.End-1)>>shift
			if last-first >= granules {
				in.Dense[level] = 1
				continue
			}
			for g := first; g <= last; g++ {
				bit := g * 0x9E3779B97F4A7C15 >> 49 & (layout.InterestBits - 1) // UMMU_INTEREST_HASH
				in.Bits[level][bit/64] |= 1 << (bit % 64)
			}
		}
	}
	if err := m.Put(uint32(0), &in); err != nil {
		return fmt.Errorf("write interest page: %w", err)
	}
	return nil
}

// bind makes the address space and the process of target refer to the slot.
func (t *Tracer) bind(sl *slot, target Target, follow bool) error {
	pid, err := target.pid()
	if err != nil {
		return err
	}
	if follow {
		sl.ref |= refFollow
	}
	// After the space is bound look again: if it is still the process's, it
	// was not torn down before, so its teardown will be seen.
	for {
		space, tgid, err := t.spaceOf(pid)
		if err != nil {
			return err
		}
		if err := t.control(ctlWatchSpace, space, uint64(tgid), sl.ref); err != nil {
			return fmt.Errorf("watch process %d: %w", pid, tooMany(err))
		}
		sl.space = space
		again, _, err := t.spaceOf(pid)
		if err != nil {
			return err
		}
		if again == space {
			return nil
		}
		if err := t.unbind(sl); err != nil {
			return err
		}
	}
}

// unbind ends what bind did for the address space; that of the process ends
// with the slot.
func (t *Tracer) unbind(sl *slot) error {
	if sl.space == 0 {
		return nil
	}
	space := sl.space
	sl.space = 0
	return t.control(ctlUnwatchSpace, space, 0, sl.ref)
}

func tooMany(err error) error {
	switch {
	case errors.Is(err, unix.ENOSPC):
		return &LimitError{LimitPerSpace}
	case errors.Is(err, unix.ENOMEM):
		return &LimitError{LimitSpaces}
	}
	return err
}

// pid resolves the target to a pid of this process's namespace.
func (g Target) pid() (int, error) {
	switch g.kind {
	case targetPID:
		if g.n <= 0 {
			return 0, fmt.Errorf("pid %d: %w", g.n, ErrNoProcess)
		}
		return g.n, nil
	case targetPIDFD:
		info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", g.n))
		if err != nil {
			return 0, fmt.Errorf("read pidfd %d: %w", g.n, err)
		}
		for line := range strings.Lines(string(info)) {
			if rest, ok := strings.CutPrefix(line, "Pid:"); ok {
				pid, err := strconv.Atoi(strings.TrimSpace(rest))
				if err != nil || pid <= 0 {
					return 0, fmt.Errorf("pidfd %d: %w", g.n, ErrNoProcess)
				}
				return pid, nil
			}
		}
		return 0, fmt.Errorf("descriptor %d is not a pidfd: %w", g.n, unix.EBADF)
	}
	return 0, errors.New("target is not set: use PID, PIDFD, Self or All")
}

// spaceOf finds the address space and the global thread-group id of a process.
func (t *Tracer) spaceOf(pid int) (space uint64, tgid uint32, err error) {
	err = t.eachTask(question{pid: uint32(pid)}, func(l *task) bool {
		if int(l.PID) == pid {
			space, tgid = l.MM, l.TGID
			return false
		}
		return true
	})
	switch {
	case err != nil:
		return 0, 0, err
	case space != 0:
		return space, tgid, nil
	case unix.Kill(pid, 0) == unix.ESRCH:
		return 0, 0, fmt.Errorf("process %d: %w", pid, ErrNoProcess)
	}
	return 0, 0, fmt.Errorf("process %d: %w", pid, ErrNoSpace)
}
