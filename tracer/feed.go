// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
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
}

const defaultFeedRingBytes = 256 << 10

// ErrInFlight is returned by [Tracer.OpenFeed] if the target did not come to
// rest: a change that began before the feed was opened is still under way.
var ErrInFlight = errors.New("a change of the address space is still in flight")

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
	closing   sync.Once
	closeErr  error
}

// changeKinds are the kinds that a feed gets records of.
const changeKinds = 1<<mm.Unmap | 1<<mm.Replace | 1<<mm.Zap | 1<<mm.Move | 1<<mm.Protect

// OpenFeed opens a watch for a registration cache over the address space of
// target, which must be one process. When it returns no change that began
// before is under way, so everything from here on is seen at its begin. It
// fails like [Tracer.Watch], and with [ErrInFlight] after 2 s.
func (t *Tracer) OpenFeed(target Target, o FeedOptions) (*Feed, error) {
	if err := (WatchOptions{RingBytes: o.RingBytes}).Validate(); err != nil {
		return nil, err
	}
	if target.kind == targetAll {
		return nil, errors.New("a feed is for one address space, not for all")
	}
	if o.RingBytes == 0 {
		o.RingBytes = defaultFeedRingBytes
	}
	conf := slotConf{Flags: slotTrack, BeginKinds: changeKinds}
	if o.NoWakeup {
		conf.Flags |= slotNoWakeup
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, os.ErrClosed
	}
	sl, err := t.openSlot(conf, o.RingBytes)
	if err != nil {
		return nil, err
	}
	space, err := t.bind(sl, target, false)
	if err == nil && t.coverage.Tier != TierNotifierProbe && !guard.Off(guard.OpenSettles) { // probes see the end
		err = t.settle(space, sl.ref)
	}
	if err != nil {
		return nil, errors.Join(err, t.closeSlot(sl))
	}
	f := &Feed{t: t, slot: sl, space: space, ringBytes: o.RingBytes}
	t.feeds[f] = struct{}{}
	return f, nil
}

// settle waits until no task of the address space is inside a change that
// was not counted as begun for the watch; t.mu is held, the iterator's
// parameters are global.
func (t *Tracer) settle(space, ref uint64) error {
	if err := errors.Join(t.objs.IterMm.Set(space), t.objs.IterRef.Set(ref)); err != nil {
		return fmt.Errorf("set iterator parameters: %w", err)
	}
	defer t.objs.IterMm.Set(uint64(0))
	pause := 100 * time.Microsecond
	for start := time.Now(); ; pause = min(2*pause, 10*time.Millisecond) {
		busy := false
		err := t.eachTask(func(l *task) bool {
			busy = l.MM == space && l.Busy != 0
			return !busy
		})
		switch {
		case err != nil:
			return err
		case !busy:
			return nil
		case time.Since(start) > settleLimit:
			return ErrInFlight
		}
		time.Sleep(pause)
	}
}

// What the task iterator is asked (iter_called in bpf/syscall.bpf.c).
const (
	iterEvents = uint32(1 + iota)
	iterSweep
)

// Settled reports that no change which began before the call is in flight
// any more, as far as the task iterator can tell: false is no proof of the
// contrary. It is for the notifier tiers: the tracepoint sees no ends, the
// probes may miss one, which is then counted as ended here. It takes some
// 100 us and more with the number of tasks of the machine.
func (f *Feed) Settled() bool {
	t := f.t
	t.mu.Lock()
	defer t.mu.Unlock()
	ask := iterEvents
	if t.coverage.Tier == TierNotifierProbe {
		ask = iterSweep
	}
	if t.closed || errors.Join(t.objs.IterMm.Set(f.space), t.objs.IterCalled.Set(ask)) != nil {
		return false
	}
	defer t.objs.IterMm.Set(uint64(0))
	defer t.objs.IterCalled.Set(uint32(0))
	busy := false
	err := t.eachTask(func(l *task) bool {
		busy = l.Busy != 0
		return !busy
	})
	return err == nil && !busy && ask == iterEvents
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
func (f *Feed) RingFD() int { return f.slot.ring.FD() }

// RingBytes is the size of the ring's data area in bytes.
func (f *Feed) RingBytes() int { return f.ringBytes }

// Close marks the watch dead, so that nothing is valid any more, then frees
// it. It is idempotent.
func (f *Feed) Close() error {
	f.closing.Do(func() {
		t := f.t
		t.mu.Lock()
		defer t.mu.Unlock()
		if !guard.Off(guard.CloseMarks) {
			f.closeErr = t.control(ctlKill, layout.GenDeath, 0, f.slot.ref)
		}
		f.closeErr = errors.Join(f.closeErr, t.closeSlot(f.slot))
		delete(t.feeds, f)
	})
	return f.closeErr
}
