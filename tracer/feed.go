// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/mm"
)

// FeedOptions configure [Tracer.OpenFeed]. The zero value works.
type FeedOptions struct {
	// RingBytes is the size of the ring: a power of two, at least the page
	// size. 0: 256 KiB, about 1,900 changes between two drains.
	RingBytes int
	// NoWakeup: nobody will wait for the ring's descriptor, so the kernel
	// side need not wake it up, which is the dearest part of a record.
	NoWakeup bool
	// NoRing leaves the ring out: each change of what is interesting counts
	// as a loss, so the client drops everything. Coarse, and right.
	NoRing bool
	// Witness promises that a virtual machine of the target's address space
	// lives as long as the feed ([MakeNotifier], package internal/inject), so
	// that KVM's tracepoint is behind the notifier probes. Where the kernel
	// preempts its own code OpenFeed of that tier refuses without it.
	Witness bool
	// Unprivileged: the feed goes to somebody who must not learn of other
	// processes. A change that touches its interest, and that the hook cannot
	// tell whose it is (notifier/tracepoint), is a loss to it instead of a
	// record: everything is dropped. Records of changes that another process
	// made of this address space have no process and thread id.
	Unprivileged bool
}

const defaultFeedRingBytes = 256 << 10

// ErrInFlight is returned by [Tracer.OpenFeed] if the target did not come to
// rest: a change that began before the feed was opened is still under way.
var ErrInFlight = errors.New("a change of the address space is still in flight")

// ErrNoWitness is returned by [Tracer.OpenFeed] of the notifier/probe tier on
// kernels that preempt their own code (preempt=full, lazy; see [Preemptible]):
// they may skip all probes of the begin of a change, and only KVM's tracepoint,
// where a virtual machine lives, tells before it is done.
var ErrNoWitness = errors.New("this kernel may skip the notifier probes, and no virtual machine is kept whose tracepoint would tell")

// ErrNotMarked is returned by [Feed.Close] and [Tracer.Close] if the kernel side
// could not mark the watch dead. Then it stays as it is, memory and hooks: whoever
// reads it would take it for alive, and must go on hearing of changes. Close
// may be called again; the end of the process marks every watch.
var ErrNotMarked = errors.New("the watch could not be marked dead, and stays")

// settleLimit bounds how long OpenFeed waits for changes in flight.
const settleLimit = 2 * time.Second

// Feed is the kernel side of one feed watch: the shared memory of bpf/ummu.h
// by its descriptors, for package feed to map. Status and epoch pages are
// frozen: nobody but the kernel side can write them.
type Feed struct {
	t         *Tracer
	slot      *slot
	space     uint64
	ringBytes int

	closing  sync.Mutex // held by Close; guards the two that follow
	freed    bool
	closeErr error

	mu     sync.Mutex // held while the maps are used
	closed bool
}

// changeKinds are the kinds that a feed gets records of.
const changeKinds = 1<<mm.Unmap | 1<<mm.Replace | 1<<mm.Zap | 1<<mm.Move | 1<<mm.Protect

// shape is what the maps of such a feed depend on.
func (o FeedOptions) shape() shape {
	sh := shape{ring: o.RingBytes, track: true}
	if sh.ring == 0 {
		sh.ring = defaultFeedRingBytes
	}
	if o.NoRing {
		sh.ring = 0
	}
	return sh
}

// OpenFeed opens a watch for a registration cache over the address space of
// target, which must be one process. When it returns no change that began
// before is under way, so everything from here on is seen at its begin. It
// fails like [Tracer.Watch], with [ErrNoWitness], and with [ErrInFlight] after 2 s.
//
// It waits for the kernel to let go of what it had, some 20 ms, unless a feed
// is ready ([Options].Ready); others do not wait for it.
func (t *Tracer) OpenFeed(target Target, o FeedOptions) (*Feed, error) {
	if err := (WatchOptions{RingBytes: o.RingBytes}).Validate(); err != nil {
		return nil, err
	}
	if target.kind == targetAll {
		return nil, errors.New("a feed is for one address space, not for all")
	}
	if t.coverage.Tier == TierNotifierProbe && !o.Witness && Preemptible() && !guard.Off(guard.WitnessAsked) {
		return nil, ErrNoWitness
	}
	if err := t.begin(); err != nil {
		return nil, err
	}
	defer t.ops.Done()
	if err := t.use(); err != nil {
		return nil, err
	}
	var f *Feed
	err := errMoved
	for tries := 0; errors.Is(err, errMoved) && tries < 5; tries++ {
		f, err = t.openFeed(target, o)
	}
	if err != nil {
		t.unuse()
		return nil, err
	}
	t.mu.Lock()
	t.feeds[f] = struct{}{}
	t.mu.Unlock()
	return f, nil
}

// errMoved: the process executed another program while the feed was opened.
var errMoved = fmt.Errorf("the process goes on executing programs: %w", ErrInFlight)

func (t *Tracer) openFeed(target Target, o FeedOptions) (*Feed, error) {
	sh := o.shape()
	sl, err := t.slots.take(sh)
	if err != nil {
		return nil, err
	}
	conf := slotConf{Flags: slotTrack, BeginKinds: changeKinds}
	if o.NoWakeup {
		conf.Flags |= slotNoWakeup
	}
	if o.Unprivileged {
		conf.Flags |= slotGuest
	}
	f := &Feed{t: t, slot: sl, ringBytes: sh.ring}
	err = t.slots.activate(sl, conf)
	if err == nil {
		f.space, err = t.bindFeed(sl, target)
	}
	if err == nil && !f.Alive() {
		err = errMoved
	}
	if err != nil {
		return nil, errors.Join(err, t.unbind(sl), t.slots.retire(sl))
	}
	return f, nil
}

// bindFeed makes the address space of target refer to the slot and returns
// it, when no task of it is inside a change that was not counted as begun.
// If the process has another one by then, the slot may have heard of a third
// in between, and must not be used: errMoved.
func (t *Tracer) bindFeed(sl *slot, target Target) (space uint64, err error) {
	pid, err := target.pid()
	if err != nil {
		return 0, err
	}
	space, _, err = t.spaceOf(pid)
	if err != nil {
		return 0, err
	}
	// not for the process: a feed is not told of tasks
	if err := t.control(ctlWatchSpace, space, 0, sl.ref); err != nil {
		return 0, fmt.Errorf("watch process %d: %w", pid, tooMany(err))
	}
	sl.space = space
	// Only now is it certain that it was not torn down before, so that its
	// teardown will be seen: it is still the process's.
	settle := !t.coverage.Tier.seesEnds() && !guard.Off(guard.OpenSettles)
	q := question{pid: uint32(pid), ref: sl.ref}
	if settle {
		q.space = space
		if err := t.objs.Opened.Get(&q.opened); err != nil {
			return 0, fmt.Errorf("read the kernel side's state: %w", err)
		}
	}
	pause := 100 * time.Microsecond
	for start := time.Now(); ; pause = min(2*pause, 10*time.Millisecond) {
		still, busy := false, false
		err := t.eachTask(q, func(l *task) bool {
			still = still || int(l.PID) == pid && l.MM == space
			busy = busy || l.Busy != 0
			return !still || !busy
		})
		switch {
		case err != nil:
			return 0, err
		case !still:
			return 0, t.movedOrGone(pid)
		case !busy:
			return space, nil
		case time.Since(start) > settleLimit:
			return 0, ErrInFlight
		}
		select {
		case <-t.closing:
			return 0, os.ErrClosed
		case <-time.After(pause):
		}
	}
}

// movedOrGone says why a process has not the address space any more.
func (t *Tracer) movedOrGone(pid int) error {
	if _, _, err := t.spaceOf(pid); err != nil {
		return err
	}
	return errMoved
}

// What the task iterator is asked (iter_called in bpf/syscall.bpf.c).
const iterEvents = uint32(1)

// Settled reports that no change which began before the call is in flight
// any more, as far as the task iterator can tell: false is no proof of the
// contrary. It is for the tiers below the calls: the tracepoint sees no ends, probes
// may miss one, which stays counted as in flight until the task's next
// change or its exit. It takes some 100 us and more with the number of tasks
// of the machine.
func (f *Feed) Settled() bool {
	t := f.t
	if t.begin() != nil {
		return false
	}
	defer t.ops.Done()
	busy := false
	err := t.eachTask(question{space: f.space, called: iterEvents}, func(l *task) bool {
		busy = l.Busy != 0
		return !busy
	})
	return err == nil && !busy
}

// Descriptors of the shared memory. They stay the Feed's and are closed by
// its Close.

// StatusFD maps to struct ummu_status, read-only.
func (f *Feed) StatusFD() int { return f.slot.status.FD() }

// EpochFD maps to struct ummu_epoch, read-only; all feeds of a tracer share it.
func (f *Feed) EpochFD() int { return f.t.objs.Epoch.FD() }

// InterestFD maps to struct ummu_interest, writable.
func (f *Feed) InterestFD() int { return f.slot.interest.FD() }

// RingFD maps to the BPF ring buffer and polls readable when it has records.
// It is -1 for a feed without a ring.
func (f *Feed) RingFD() int {
	if f.slot.ring == nil {
		return -1
	}
	return f.slot.ring.FD()
}

// RingBytes is the size of the ring's data area in bytes, 0 without a ring.
func (f *Feed) RingBytes() int { return f.ringBytes }

// FeedStats are the totals of one feed, as the kernel side counts them on the
// status page.
type FeedStats struct {
	Records   uint64 // written to the ring
	Lost      uint64 // not written: the ring was full, or there is none
	Filtered  uint64 // changes outside the interest
	Unpaired  uint64 // ends of changes whose begin was not seen: each a loss
	Deaths    uint64 // not 0: the watch is dead
	Untracked uint64 // likewise
	Foreign   uint64 // of Lost: changes of nobody-knows-whose address space, see [FeedOptions].Unprivileged
}

// Stats returns the totals so far. It copies the status page, by one system
// call.
func (f *Feed) Stats() (FeedStats, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return FeedStats{}, os.ErrClosed
	}
	var st layout.Status
	if err := f.slot.status.Lookup(uint32(0), &st); err != nil {
		return FeedStats{}, fmt.Errorf("read status page: %w", err)
	}
	return FeedStats{st.Records, st.Lost, st.Filtered, st.Unpaired, st.Deaths, st.Untracked, st.Foreign}, nil
}

// Alive reports whether the watch has not ended: its address space lives, the
// feed is open, and nothing happened that could not be tracked.
func (f *Feed) Alive() bool {
	st, err := f.Stats()
	return err == nil && st.Deaths|st.Untracked == 0
}

// Bytes is the kernel memory of the watch, without the hooks that all share:
// what the kernel charges for its maps (memlock in /proc/self/fdinfo).
func (f *Feed) Bytes() (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return 0, os.ErrClosed
	}
	sum := 0
	for _, m := range f.slot.maps() {
		if m == nil {
			continue
		}
		info, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", m.FD()))
		if err != nil {
			return 0, fmt.Errorf("size of map: %w", err)
		}
		n, ok := 0, false
		for line := range strings.Lines(string(info)) {
			if rest, found := strings.CutPrefix(line, "memlock:"); found {
				n, err = strconv.Atoi(strings.TrimSpace(rest))
				ok = err == nil
			}
		}
		if !ok {
			return 0, errors.New("size of map: the kernel does not say")
		}
		sum += n
	}
	return sum, nil
}

// Close marks the watch dead, so that nothing is valid any more, then frees
// it. It is idempotent, once it has not failed with [ErrNotMarked].
func (f *Feed) Close() error { return f.close(false) }

// close; marked: the watch is dead already, as all others are.
func (f *Feed) close(marked bool) error {
	f.closing.Lock()
	defer f.closing.Unlock()
	if f.freed {
		return f.closeErr
	}
	t := f.t
	var errs []error
	if !guard.Off(guard.CloseMarks) {
		err := t.control(ctlKill, layout.GenDeath, 0, f.slot.ref)
		if err != nil && !marked && !guard.Off(guard.UnmarkedKept) {
			t.mu.Lock()
			t.unmarked[f] = struct{}{}
			t.mu.Unlock()
			return fmt.Errorf("close feed: %w: %w", ErrNotMarked, err)
		}
		errs = append(errs, err)
	}
	f.mu.Lock()
	f.closed = true
	f.mu.Unlock()
	errs = append(errs, t.unbind(f.slot), t.slots.retire(f.slot))
	f.freed, f.closeErr = true, errors.Join(errs...)
	t.unuse()
	t.mu.Lock()
	delete(t.feeds, f)
	delete(t.unmarked, f)
	t.mu.Unlock()
	return f.closeErr
}

// Unmarked is how many feeds are open only because closing them failed
// ([ErrNotMarked]).
func (t *Tracer) Unmarked() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	return len(t.unmarked)
}
