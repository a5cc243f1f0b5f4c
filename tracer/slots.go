// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/cilium/ebpf"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
)

// How a slot is used (bpf/watch.bpf.h).
const (
	slotTrack    = 1
	slotSpace    = 2
	slotNoWakeup = 4
	slotStacks   = 8
	slotGuest    = 8

	refFollow = 1 << 16
	maxSlots  = refFollow
)

type slotConf struct {
	Incarnation, Flags, BeginKinds, EndKinds uint32
}

// shape is what the maps of a slot depend on.
type shape struct {
	ring  int  // bytes; 0: none
	track bool // with an interest page
}

// slot is one watch of the kernel side: its place, and the maps behind it.
type slot struct {
	index                  int
	ref                    uint64 // 0: no program can find it
	space                  uint64 // the address space that refers to it
	status, interest, ring *ebpf.Map
}

func (sl *slot) maps() []*ebpf.Map { return []*ebpf.Map{sl.status, sl.interest, sl.ring} }

// close closes the descriptors; what is published lives on.
func (sl *slot) close() error {
	var errs []error
	for _, m := range sl.maps() {
		if m != nil {
			errs = append(errs, m.Close())
		}
	}
	return errors.Join(errs...)
}

// slots hands out the places of the kernel side. Each change of an array of
// maps waits until no program runs that may have seen it before
// (maybe_wait_bpf_programs(), kernel/bpf/syscall.c): 10 to 20 ms. So one
// goroutine makes the changes, for all who wait at once; and it keeps some
// slots ready for those who must not wait.
//
// A place is used again only after its maps are gone from the arrays, so a
// program that looked a reference up while it was good finds the maps of that
// watch, or none.
type slots struct {
	objs  *kernelSide
	inner struct{ status, interest, ring *ebpf.MapSpec }
	tier  Tier
	shape shape // of the ready ones
	keep  int   // how many to keep ready
	max   int   // watches

	kick   chan struct{} // capacity 1: there is work
	done   chan struct{} // closed when the goroutine has ended
	single atomic.Bool   // the kernel has no batches for arrays of maps

	mu          sync.Mutex // guards the fields below; nothing is waited for under it
	taken       []bool     // by place
	open        int        // slots in use, or waited for
	ready       []*slot
	wishes      []*wish
	gone        []*slot // closed, but still published
	incarnation uint32  // of the last watch; no two have the same
	failed      bool    // making a slot ready failed: not until the next wish
	closed      bool
}

// wish is a slot that is waited for: its maps are made, it has no place.
type wish struct {
	sl   *slot
	done chan error // capacity 1
}

// batchMax bounds the slots published at once.
const batchMax = 128

func newSlots(objs *kernelSide, spec *ebpf.CollectionSpec, tier Tier, o Options) *slots {
	s := &slots{
		objs: objs, tier: tier, keep: o.Ready, max: o.watches(), shape: o.ReadyFeed.shape(),
		kick: make(chan struct{}, 1), done: make(chan struct{}),
		taken: make([]bool, o.watches()+o.Ready),
	}
	for _, m := range []struct {
		spec **ebpf.MapSpec
		of   string
	}{{&s.inner.status, "slot_status"}, {&s.inner.interest, "slot_interest"}, {&s.inner.ring, "slot_ring"}} {
		c := spec.Maps[m.of].InnerMap.Copy()
		c.Key, c.Value = nil, nil // types would be loaded each time
		*m.spec = c
	}
	go s.run()
	s.wake()
	return s
}

// take makes a slot, or takes a ready one, to which nothing refers. Who has
// it returns it by retire.
func (s *slots) take(sh shape) (*slot, error) {
	s.mu.Lock()
	switch {
	case s.closed:
		s.mu.Unlock()
		return nil, os.ErrClosed
	case s.open >= s.max:
		s.mu.Unlock()
		return nil, &LimitError{LimitWatches}
	}
	s.open++
	s.failed = false
	if n := len(s.ready); n > 0 && sh == s.shape {
		sl := s.ready[n-1]
		s.ready = s.ready[:n-1]
		s.mu.Unlock()
		s.wake()
		return sl, nil
	}
	s.mu.Unlock()
	sl, err := s.make(sh)
	if err == nil {
		w := &wish{sl, make(chan error, 1)}
		s.mu.Lock()
		if s.closed {
			w.done <- os.ErrClosed
		} else {
			s.wishes = append(s.wishes, w)
		}
		s.mu.Unlock()
		s.wake()
		if err = <-w.done; err != nil {
			sl.close()
		}
	}
	if err != nil {
		s.mu.Lock()
		s.open--
		s.mu.Unlock()
		return nil, err
	}
	return sl, nil
}

// activate lets programs find the slot by its reference, which is new.
func (s *slots) activate(sl *slot, conf slotConf) error {
	s.mu.Lock()
	s.incarnation++
	if s.incarnation == 0 {
		s.incarnation = 1
	}
	conf.Incarnation = s.incarnation
	s.mu.Unlock()
	if err := s.objs.SlotConf.Put(uint32(sl.index), conf); err != nil {
		return fmt.Errorf("publish slot: %w", err)
	}
	sl.ref = uint64(conf.Incarnation)<<32 | uint64(sl.index)
	return nil
}

// retire ends every reference to a slot and closes its maps; their memory is
// freed when no program uses them, soon.
func (s *slots) retire(sl *slot) error {
	var errs []error
	if sl.ref != 0 { // no incarnation: every reference is dead
		errs = append(errs, s.objs.SlotConf.Put(uint32(sl.index), slotConf{}))
	}
	errs = append(errs, sl.close())
	s.mu.Lock()
	s.open--
	s.gone = append(s.gone, sl)
	s.mu.Unlock()
	s.wake()
	return errors.Join(errs...)
}

// make makes the maps of a slot.
func (s *slots) make(sh shape) (_ *slot, err error) {
	sl := new(slot)
	defer func() {
		if err != nil {
			sl.close()
		}
	}()
	spec := s.inner.status.Copy()
	spec.Contents = []ebpf.MapKV{{Key: uint32(0), Value: &layout.Status{
		Generation: layout.GenStart, Version: layout.Version, Size: uint32(unsafe.Sizeof(layout.Status{})),
		Tier: uint32(s.tier), Gaps: gapBits(s.tier),
	}}}
	if sl.status, err = ebpf.NewMap(spec); err != nil {
		return nil, fmt.Errorf("create status page: %w", err)
	}
	// from now on only the kernel side can write it
	if !guard.Off(guard.PagesFrozen) {
		if err = sl.status.Freeze(); err != nil {
			return nil, fmt.Errorf("freeze status page: %w", err)
		}
	}
	if sh.ring != 0 {
		spec := s.inner.ring.Copy()
		spec.MaxEntries = uint32(sh.ring)
		if sl.ring, err = ebpf.NewMap(spec); err != nil {
			return nil, fmt.Errorf("create ring of %d bytes: %w", sh.ring, err)
		}
	}
	if sh.track {
		spec := s.inner.interest.Copy()
		spec.Contents = []ebpf.MapKV{{Key: uint32(0), Value: &layout.Interest{
			Version: layout.Version, Size: uint32(unsafe.Sizeof(layout.Interest{})),
		}}}
		if sl.interest, err = ebpf.NewMap(spec); err != nil {
			return nil, fmt.Errorf("create interest page: %w", err)
		}
	}
	return sl, nil
}

// gapBits are the gaps of a tier that a feed must classify for.
func gapBits(tier Tier) uint32 {
	if tier == TierSyscall {
		return layout.GapFile | layout.GapDriver
	}
	return layout.GapDriver
}

func (s *slots) wake() {
	select {
	case s.kick <- struct{}{}:
	default:
	}
}

// close ends the goroutine and frees what is ready. Nobody may be waiting in
// take, and every slot must be retired.
func (s *slots) close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.wake()
	<-s.done
	var errs []error
	for _, sl := range s.ready {
		errs = append(errs, sl.close())
	}
	s.ready = nil
	return errors.Join(errs...)
}

func (s *slots) run() {
	defer close(s.done)
	for range s.kick {
		for s.round() {
		}
		s.mu.Lock()
		closed := s.closed
		s.mu.Unlock()
		if closed {
			return
		}
	}
}

// round does what there is to do, in one wait; false: nothing.
func (s *slots) round() bool {
	s.mu.Lock()
	if s.closed {
		for _, w := range s.wishes {
			w.done <- os.ErrClosed
		}
		s.wishes = nil
		s.mu.Unlock()
		return false
	}
	gone := s.gone
	s.gone = nil
	var wishes []*wish
	for len(s.wishes) > 0 && len(wishes) < batchMax {
		index, ok := s.place()
		if !ok {
			break // gone ones are places after this round
		}
		w := s.wishes[0]
		s.wishes = s.wishes[1:]
		w.sl.index = index
		wishes = append(wishes, w)
	}
	var fresh []*slot
	if len(wishes) == 0 && !s.failed {
		for len(s.ready)+len(fresh) < s.keep && len(fresh) < batchMax {
			index, ok := s.place()
			if !ok {
				break
			}
			fresh = append(fresh, &slot{index: index})
		}
	}
	endErr := s.setEnd()
	s.mu.Unlock()
	if len(gone)+len(wishes)+len(fresh) == 0 {
		return false
	}

	var add, unused []*slot
	for i, sl := range fresh {
		made, err := s.make(s.shape)
		if err != nil {
			unused = fresh[i:] // whoever wants one then learns why
			fresh = fresh[:i]
			break
		}
		made.index = sl.index
		fresh[i] = made
	}
	add = append(add, fresh...)
	for _, w := range wishes {
		add = append(add, w.sl)
	}
	err := errors.Join(endErr, s.publish(add, gone))

	s.mu.Lock()
	for _, sl := range unused {
		s.taken[sl.index] = false
	}
	s.failed = len(unused) != 0 || err != nil
	if err == nil {
		for _, sl := range gone {
			s.taken[sl.index] = false
		}
		s.ready = append(s.ready, fresh...)
	} else { // whatever of it is published
		s.gone = append(append(s.gone, gone...), add...)
	}
	s.setEnd() // larger than need be if it fails
	s.mu.Unlock()
	if err != nil {
		for _, sl := range fresh {
			sl.close()
		}
	}
	for _, w := range wishes {
		w.done <- err
	}
	return err == nil
}

// setEnd tells the kernel side which place is the last that may be in use, for
// what concerns all watches; mu is held.
func (s *slots) setEnd() error {
	end := len(s.taken)
	for end > 0 && !s.taken[end-1] {
		end--
	}
	if err := s.objs.SlotsEnd.Set(uint32(end)); err != nil {
		return fmt.Errorf("set the number of slots: %w", err)
	}
	return nil
}

// place takes the lowest free place; mu is held.
func (s *slots) place() (int, bool) {
	for i, taken := range s.taken {
		if !taken {
			s.taken[i] = true
			return i, true
		}
	}
	return 0, false
}

// publish puts the maps of some slots into the arrays and takes those of
// others out, and returns when every program sees it.
func (s *slots) publish(add, remove []*slot) error {
	outer := [...]*ebpf.Map{s.objs.SlotStatus, s.objs.SlotInterest, s.objs.SlotRing}
	var errs [2 * len(outer)]error
	var wg sync.WaitGroup
	for i, m := range outer {
		var keys, fds, dead []uint32
		for _, sl := range add {
			if inner := sl.maps()[i]; inner != nil {
				keys, fds = append(keys, uint32(sl.index)), append(fds, uint32(inner.FD()))
			}
		}
		for _, sl := range remove {
			if sl.maps()[i] != nil {
				dead = append(dead, uint32(sl.index))
			}
		}
		if len(keys) != 0 {
			wg.Go(func() { errs[2*i] = s.update(m, keys, fds) })
		}
		if len(dead) != 0 {
			wg.Go(func() { errs[2*i+1] = s.delete(m, dead) })
		}
	}
	wg.Wait()
	if err := errors.Join(errs[:]...); err != nil {
		return fmt.Errorf("publish maps: %w", err)
	}
	return nil
}

func (s *slots) update(m *ebpf.Map, keys, fds []uint32) error {
	if !s.single.Load() {
		_, err := m.BatchUpdate(keys, fds, nil)
		if !errors.Is(err, ebpf.ErrNotSupported) {
			return err
		}
		s.single.Store(true)
	}
	return each(keys, func(i int) error { return m.Put(keys[i], fds[i]) })
}

func (s *slots) delete(m *ebpf.Map, keys []uint32) error {
	if !s.single.Load() {
		if _, err := m.BatchDelete(keys, nil); err == nil {
			return nil
		}
	}
	return each(keys, func(i int) error {
		if err := m.Delete(keys[i]); !errors.Is(err, ebpf.ErrKeyNotExist) {
			return err
		}
		return nil
	})
}

// each runs f for each key, some at a time: they wait for the same thing.
func each(keys []uint32, f func(i int) error) error {
	const atOnce = 16
	errs := make([]error, len(keys))
	var wg sync.WaitGroup
	gate := make(chan struct{}, atOnce)
	for i := range keys {
		gate <- struct{}{}
		wg.Go(func() {
			errs[i] = f(i)
			<-gate
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}
