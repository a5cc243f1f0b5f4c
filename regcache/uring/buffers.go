// SPDX-License-Identifier: Apache-2.0

package uring

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

var (
	_ regcache.Registrar[Buf] = (*Ring)(nil)
	_ regcache.Limiter        = (*Ring)(nil)
)

// Buf is a registered buffer: a value to copy and compare. It is good for
// transfers from [Ring.Register] to [Ring.Deregister]; afterwards they return
// [ErrNotRegistered], also when the slot has been used again. The zero Buf was
// never registered.
type Buf struct {
	rng  mm.Range
	gen  uint32
	slot uint16
}

// Range is what was registered, to the byte.
func (b Buf) Range() mm.Range { return b.rng }

// Slot is the index in the ring's buffer table.
func (b Buf) Slot() int { return int(b.slot) }

type slot struct {
	gen  uint32 // of the registration in the slot, or of the last one
	live bool
}

// slotArgs are the arguments of a register call.
type slotArgs struct {
	iov    [2]uint64 // struct iovec
	tag    uint64
	update rsrcUpdate
}

// Register pins the pages behind rng and puts them into a free slot. Any
// address and any length from 1 byte to 1 GiB will do. The access rights are
// not used: the kernel pins for writing and allows both directions.
//
// Errors: [*TableError] when no slot is free, [*MemlockError] when the kernel
// refuses to pin more, both to be answered by deregistering something. Before
// the latter it waits up to 2 s for buffers that are being released.
// Others are
// [ErrTooLong]; os.ErrClosed; EFAULT for memory that is not mapped, not
// writable, or (EOPNOTSUPP before Linux 6.5) of a file other than shmem and
// hugetlbfs.
func (r *Ring) Register(rng mm.Range, _ regcache.Access) (Buf, error) {
	b, err := r.register(rng)
	if err != nil {
		return Buf{}, fmt.Errorf("register buffer %v: %w", rng, err)
	}
	return b, nil
}

func (r *Ring) register(rng mm.Range) (Buf, error) {
	switch {
	case rng.Empty():
		return Buf{}, mm.ErrEmptyRange
	case rng.Len() > maxBuffer:
		return Buf{}, ErrTooLong
	}
	r.mu.Lock()
	if r.closing {
		r.mu.Unlock()
		return Buf{}, os.ErrClosed
	}
	if len(r.unused) == 0 {
		r.mu.Unlock()
		return Buf{}, &TableError{Slots: len(r.slots)}
	}
	i := r.unused[len(r.unused)-1]
	r.unused = r.unused[:len(r.unused)-1]
	r.busy++
	r.mu.Unlock()

	err := r.update(i, rng)
	if errors.Is(err, unix.ENOMEM) {
		err = r.retry(i, rng)
	}

	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy--
	if err != nil {
		r.unused = append(r.unused, i)
		return Buf{}, err
	}
	s := &r.slots[i]
	s.gen++
	s.live = true
	r.stats.Registered++
	r.stats.RegisteredBytes += rng.Len()
	return Buf{rng, s.gen, i}, nil
}

const (
	releaseWait = 2 * time.Second
	releaseStep = 5 * time.Millisecond
	// lateSteps: kernels that release late say so just before they do it
	// (__io_rsrc_put_work).
	lateSteps = 10
)

// retry registers again and again while deregistered buffers still hold
// memory, for a bounded time.
func (r *Ring) retry(i uint16, rng mm.Range) error {
	steps := r.lateSteps
	for deadline := time.Now().Add(releaseWait); time.Now().Before(deadline); steps-- {
		if r.Stats().Releasing > 0 {
			steps = r.lateSteps + 1
		}
		if steps == 0 {
			break
		}
		time.Sleep(releaseStep)
		if err := r.update(i, rng); !errors.Is(err, unix.ENOMEM) {
			return err
		}
	}
	limit, use := r.Limit()
	return &MemlockError{Limit: limit, Used: use, Need: rng.Pages().Len()}
}

// findLate finds out whether the kernel releases a buffer that no transfer
// uses before the call that removes it returns (from Linux 6.4 on), or by a
// work that is delayed by a second. Late is assumed where a page cannot be
// registered, which is not for this to report.
func (r *Ring) findLate() error {
	r.lateSteps = lateSteps
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer unix.Munmap(page)
	start := mm.Addr(address(&page[0]))
	b, err := r.register(mm.Range{Start: start, End: start + 1})
	if err != nil {
		return nil
	}
	if err := r.deregister(b); err != nil {
		return err
	}
	if r.stats.Releasing == 0 {
		r.lateSteps = 0
	}
	return nil
}

// Deregister empties b's slot. Transfers in flight go on; the pages are
// unpinned when the last of them is done, or later, see [Stats.Releasing]. It
// returns [ErrNotRegistered] if b is not registered (any more), os.ErrClosed
// after Close. On any other error b is still registered.
func (r *Ring) Deregister(b Buf) error {
	if err := r.deregister(b); err != nil {
		return fmt.Errorf("deregister buffer %v: %w", b.rng, err)
	}
	return nil
}

func (r *Ring) deregister(b Buf) error {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return os.ErrClosed
	}
	if !r.live(b) {
		r.mu.Unlock()
		return ErrNotRegistered
	}
	s := &r.slots[b.slot]
	s.live = false
	r.busy++
	r.stats.Registered--
	r.stats.RegisteredBytes -= b.rng.Len()
	// Before the call, as its completion may be consumed before it returns.
	r.stats.Releasing++
	r.stats.ReleasingBytes += b.rng.Len()
	r.mu.Unlock()

	err := r.update(b.slot, mm.Range{})

	r.mu.Lock()
	defer r.mu.Unlock()
	r.busy--
	if err != nil {
		s.live = true
		r.stats.Registered++
		r.stats.RegisteredBytes += b.rng.Len()
		r.stats.Releasing--
		r.stats.ReleasingBytes -= b.rng.Len()
		return err
	}
	r.unused = append(r.unused, b.slot)
	if !r.waiting {
		r.reap()
	}
	return nil
}

// live is called with mu held.
func (r *Ring) live(b Buf) bool {
	return int(b.slot) < len(r.slots) && r.slots[b.slot] == slot{b.gen, true}
}

// update puts rng, or nothing, into slot i, which the caller owns. The kernel
// posts a completion with the tag when it has released the buffer.
func (r *Ring) update(i uint16, rng mm.Range) error {
	a := &r.args[i]
	a.iov = [2]uint64{uint64(rng.Start), rng.Len()}
	a.update = rsrcUpdate{offset: uint32(i), data: address(&a.iov), nr: 1}
	if !rng.Empty() {
		a.tag = tagData | rng.Len()
		a.update.tags = address(&a.tag)
	}
	for {
		err := register(r.fd, regBuffersUpdate, unsafe.Pointer(&a.update), unsafe.Sizeof(a.update))
		if !errors.Is(err, unix.EINTR) {
			return err
		}
	}
}

// makeTable registers a table of n empty slots. sparse false takes the way of
// kernels before 5.19.
func (r *Ring) makeTable(n int, sparse bool) error {
	if sparse {
		reg := &rsrcRegister{nr: uint32(n), flags: rsrcSparse}
		err := register(r.fd, regBuffers2, unsafe.Pointer(reg), unsafe.Sizeof(*reg))
		if !errors.Is(err, unix.EINVAL) {
			return err
		}
	}
	empty := make([][2]uint64, n)
	var pin runtime.Pinner
	pin.Pin(&empty[0])
	defer pin.Unpin()
	reg := &rsrcRegister{nr: uint32(n), data: address(&empty[0])}
	return register(r.fd, regBuffers2, unsafe.Pointer(reg), unsafe.Sizeof(*reg))
}

// address of something on the heap that outlives the call it is used for.
func address[T any](p *T) uint64 { return uint64(uintptr(unsafe.Pointer(p))) }
