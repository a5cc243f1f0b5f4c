// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
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

// How a slot is used (bpf/watch.bpf.h).
const (
	slotTrack    = 1
	slotSpace    = 2
	slotNoWakeup = 4

	refFollow = 1 << 16
)

type slotConf struct {
	Incarnation, Flags, BeginKinds, EndKinds uint32
}

// slot is one watch of the kernel side: its place, and the maps behind it.
type slot struct {
	index                  int
	ref                    uint64
	status, interest, ring *ebpf.Map
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
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, os.ErrClosed
	}
	sl, err := t.openSlot(slotConf{Flags: slotSpace, BeginKinds: kinds, EndKinds: kinds}, o.RingBytes)
	if err != nil {
		return nil, err
	}
	s, err := newStream(t, sl, target.kind == targetAll)
	if err != nil {
		t.closeSlot(sl)
		return nil, err
	}
	if _, err := t.bind(sl, target, o.Follow); err != nil {
		s.reader.Close()
		t.closeSlot(sl)
		return nil, err
	}
	t.streams[s] = struct{}{}
	return s, nil
}

// openSlot makes the maps of a watch and publishes them; t.mu is held.
func (t *Tracer) openSlot(conf slotConf, ringBytes int) (_ *slot, err error) {
	index := slices.Index(t.slots, false) // the lowest: see slots_end
	if index < 0 {
		return nil, &LimitError{LimitWatches}
	}
	sl := &slot{index: index}
	t.slots[index] = true
	if err := t.setSlotsEnd(); err != nil {
		t.slots[index] = false
		return nil, err
	}
	defer func() {
		if err != nil {
			t.closeSlot(sl)
		}
	}()

	statusSpec, interestSpec, ringSpec := t.inner.status.Copy(), t.inner.interest.Copy(), t.inner.ring.Copy()
	statusSpec.Contents = []ebpf.MapKV{{Key: uint32(0), Value: &layout.Status{
		Generation: layout.GenStart, Version: layout.Version, Size: uint32(unsafe.Sizeof(layout.Status{})),
		Tier: uint32(t.coverage.Tier), Gaps: gapBits(t.coverage.Tier),
	}}}
	interestSpec.Contents = []ebpf.MapKV{{Key: uint32(0), Value: &layout.Interest{
		Version: layout.Version, Size: uint32(unsafe.Sizeof(layout.Interest{})),
	}}}
	ringSpec.MaxEntries = uint32(ringBytes)
	if sl.status, err = ebpf.NewMap(statusSpec); err != nil {
		return nil, fmt.Errorf("create status page: %w", err)
	}
	if ringBytes != 0 {
		if sl.ring, err = ebpf.NewMap(ringSpec); err != nil {
			return nil, fmt.Errorf("create ring of %d bytes: %w", ringBytes, err)
		}
	}
	// from now on only the kernel side can write it
	if !guard.Off(guard.PagesFrozen) {
		if err = sl.status.Freeze(); err != nil {
			return nil, fmt.Errorf("freeze status page: %w", err)
		}
	}
	key := uint32(index)
	if conf.Flags&slotTrack != 0 {
		if sl.interest, err = ebpf.NewMap(interestSpec); err != nil {
			return nil, fmt.Errorf("create interest page: %w", err)
		}
	}
	if err = t.eachSlotMap(sl, func(outer, inner *ebpf.Map) error {
		if inner == nil {
			return nil
		}
		return outer.Put(key, inner)
	}); err != nil {
		return nil, fmt.Errorf("publish maps: %w", err)
	}
	var old slotConf
	if err = t.objs.SlotConf.Lookup(key, &old); err != nil {
		return nil, fmt.Errorf("read slot: %w", err)
	}
	conf.Incarnation = old.Incarnation + 1
	if conf.Incarnation == 0 {
		conf.Incarnation = 1
	}
	if err = t.objs.SlotConf.Put(key, conf); err != nil {
		return nil, fmt.Errorf("publish slot: %w", err)
	}
	sl.ref = uint64(conf.Incarnation)<<32 | uint64(index)
	return sl, nil
}

// eachSlotMap runs f for each map of a slot and the array it is in, at once:
// a change of an array of maps waits for the programs that are running
// (maybe_wait_bpf_programs, kernel/bpf/syscall.c), which takes 10 to 20 ms.
func (t *Tracer) eachSlotMap(sl *slot, f func(outer, inner *ebpf.Map) error) error {
	maps := [...][2]*ebpf.Map{
		{t.objs.SlotStatus, sl.status}, {t.objs.SlotRing, sl.ring}, {t.objs.SlotInterest, sl.interest},
	}
	var errs [len(maps)]error
	var wg sync.WaitGroup
	for i, m := range maps {
		wg.Go(func() { errs[i] = f(m[0], m[1]) })
	}
	wg.Wait()
	return errors.Join(errs[:]...)
}

// gapBits are the gaps of a tier that a feed must classify for.
func gapBits(tier Tier) uint32 {
	if tier == TierSyscall {
		return layout.GapFile | layout.GapDriver
	}
	return layout.GapDriver
}

// closeSlot ends every reference to a slot, waits until no program uses its
// maps, and frees them; t.mu is held.
func (t *Tracer) closeSlot(sl *slot) error {
	var errs []error
	key := uint32(sl.index)
	if sl.ref != 0 {
		var conf slotConf
		if err := t.objs.SlotConf.Lookup(key, &conf); err != nil {
			errs = append(errs, err)
		}
		// a later incarnation: every reference to the old one is dead
		errs = append(errs, t.objs.SlotConf.Put(key, slotConf{Incarnation: conf.Incarnation + 1}))
	}
	// when the maps are gone from the slot, whoever looks at it finds the
	// reference dead, so its place can be used again
	errs = append(errs, t.eachSlotMap(sl, func(outer, _ *ebpf.Map) error {
		if err := outer.Delete(key); err != nil && !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		return nil
	}))
	for _, m := range []*ebpf.Map{sl.ring, sl.status, sl.interest} {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	t.slots[sl.index] = false
	errs = append(errs, t.setSlotsEnd())
	return errors.Join(errs...)
}

// setSlotsEnd tells the kernel side which slot is the last in use, for what
// concerns all; t.mu is held.
func (t *Tracer) setSlotsEnd() error {
	end := len(t.slots)
	for end > 0 && !t.slots[end-1] {
		end--
	}
	if err := t.objs.SlotsEnd.Set(uint32(end)); err != nil {
		return fmt.Errorf("set the number of slots: %w", err)
	}
	return nil
}

// bind makes the address space of target refer to the slot and returns it;
// t.mu is held.
func (t *Tracer) bind(sl *slot, target Target, follow bool) (space uint64, err error) {
	if target.kind == targetAll {
		if err := t.control(ctlWatchAll, 0, 0, sl.ref); err != nil {
			return 0, fmt.Errorf("watch all address spaces: %w", tooMany(err))
		}
		return 0, nil
	}
	pid, err := target.pid()
	if err != nil {
		return 0, err
	}
	if follow {
		sl.ref |= refFollow
	}
	// After the space is bound look again: if it is still the process's, it
	// was not torn down before, so its teardown will be seen.
	for {
		space, tgid, err := t.spaceOf(pid)
		if err != nil {
			return 0, err
		}
		if err := t.control(ctlWatchSpace, space, uint64(tgid), sl.ref); err != nil {
			return 0, fmt.Errorf("watch process %d: %w", pid, tooMany(err))
		}
		again, _, err := t.spaceOf(pid)
		if err != nil {
			return 0, err
		}
		if again == space {
			return space, nil
		}
	}
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
	err = t.eachTask(func(l *task) bool {
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
