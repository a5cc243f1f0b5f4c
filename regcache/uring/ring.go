// SPDX-License-Identifier: Apache-2.0

// Package uring registers memory with the kernel as io_uring fixed buffers:
// the backend of regcache that needs no hardware. A registered buffer pins
// its physical pages, as an RDMA memory region does, and [Ring.ReadFixed] and
// [Ring.WriteFixed] go to those pages whatever the virtual address has come
// to mean since. Keep registrations in a regcache.Cache, which drops them
// when the address space changes.
//
// # Kernels
//
// Single slots of a buffer table can be updated from Linux 5.13 on (and from
// 5.10.162, which has the io_uring of 5.15); older kernels are refused with
// [ErrNotSupported]. From 5.19 on the table is made
// sparse, before that from empty entries. A Ring never has more than 16384
// slots (IORING_MAX_REG_BUFFERS) and a buffer at most 1 GiB.
//
// # What a registration is
//
//   - Always for writing: the kernel pins with FOLL_WRITE | FOLL_LONGTERM, so
//     that memory mapped read-only is refused (EFAULT) whatever access was
//     asked for, and the access rights of a [Buf] are not enforced.
//   - Anonymous, shmem, memfd and hugetlb memory. Pages of other files are
//     refused, with EOPNOTSUPP before Linux 6.5 and EFAULT from 6.5 on.
//   - Charged to two counters (io_uring/rsrc.c, io_account_mem): VmPin of the
//     process that opened the ring, and the locked pages of its user, which
//     are held against RLIMIT_MEMLOCK unless the ring was opened with
//     CAP_IPC_LOCK. The user's counter is shared by all its processes and
//     cannot be read. A page of a huge page is charged as the whole huge
//     page, once a ring. The memory of the ring itself is charged up to
//     Linux 5.11, and on 6.18.
//   - Released late: [Ring.Deregister] empties the slot at once, so that no
//     new transfer finds it, but the pages stay pinned and charged until the
//     transfers that use them are done: before Linux 6.13 all transfers that
//     were in flight, and before 6.4 a second longer. [Stats.Releasing] counts
//     such buffers.
//
// # Concurrency
//
// All methods may be called from several goroutines. A transfer blocks its
// caller and takes no memory from the heap. Requests of one ring are
// submitted one at a time, as the kernel does itself (uring_lock), so that
// one that completes inline, such as a read from the page cache, delays the
// others by its own length: use a ring per worker where that matters.
// Registering holds no lock of this package. The kernel cancels the requests
// of a thread that exits, with ECANCELED: do not transfer from a goroutine
// that ends locked to its thread.
package uring

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Options of [Open]. The zero value works.
type Options struct {
	// Slots is the size of the buffer table: how many buffers can be
	// registered at a time. 0 means 1024; at most 16384.
	Slots int
	// Requests is how many transfers can be in flight at a time; more wait.
	// 0 means 64; at most 4096.
	Requests int
}

const (
	defaultSlots    = 1024
	defaultRequests = 64
	maxRequests     = 4096
)

// Validate reports the first field that is out of range.
func (o Options) Validate() error {
	switch {
	case o.Slots < 0 || o.Slots > maxSlots:
		return fmt.Errorf("slots %d: not in 0..%d", o.Slots, maxSlots)
	case o.Requests < 0 || o.Requests > maxRequests:
		return fmt.Errorf("requests %d: not in 0..%d", o.Requests, maxRequests)
	}
	return nil
}

// Ring is an io_uring instance with a table of registered buffers. It
// implements regcache.Registrar[Buf].
type Ring struct {
	fd          int
	rings, sqes []byte // mapped from the kernel
	sqHead      *uint32
	sqTail      *uint32
	sqFlags     *uint32
	sqMask      uint32
	sq          []sqe
	cqHead      *uint32
	cqTail      *uint32
	cqMask      uint32
	cq          []cqe

	// args are the arguments of register calls; args[i] belongs to whoever
	// took slot i. On the heap because the kernel gets their addresses.
	args []slotArgs

	lateSteps int // how often to try again after the last release; constant

	mu   sync.Mutex // guards everything below, both queues and slots
	cond sync.Cond  // a request completed, or nobody waits in the kernel any more

	requests []request
	idle     []uint32 // requests not in use
	inFlight int
	waiting  bool // a goroutine is in the kernel for completions; only it consumes them

	slots  []slot
	unused []uint16 // slots not in use
	busy   int      // registrations and deregistrations under way
	stats  Stats

	closing, closed bool
}

type request struct {
	state requestState
	res   int32
}

type requestState uint8

const (
	idle requestState = iota
	submitted
	completed
)

// Stats are counters of one [Ring]. Bytes are those of the registered ranges,
// not of the pages they touch.
type Stats struct {
	// Slots is the size of the buffer table.
	Slots int
	// Registered buffers and their bytes.
	Registered      int
	RegisteredBytes uint64
	// Releasing buffers are deregistered, but the kernel still holds their
	// pages: for transfers in flight, or because it releases late.
	Releasing      int
	ReleasingBytes uint64
	// Requests counts what was submitted: transfers and calls of Madvise.
	Requests uint64
}

// Open sets up a ring and an empty buffer table. It needs Linux 5.13. Errors
// are [ErrDisabled] where a sysctl, a seccomp filter or a security module
// refuses io_uring, [ErrNotSupported] on older kernels, and those of
// io_uring_setup(2).
func Open(o Options) (*Ring, error) {
	r, err := open(o, true)
	if err != nil {
		return nil, fmt.Errorf("open ring: %w", err)
	}
	return r, nil
}

func open(o Options, sparse bool) (_ *Ring, err error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.Slots == 0 {
		o.Slots = defaultSlots
	}
	if o.Requests == 0 {
		o.Requests = defaultRequests
	}
	// One completion per request, one per released buffer.
	p := setupParams{flags: setupCQSize, cqEntries: uint32(o.Requests*2 + o.Slots)}
	fd, err := setup(uint32(o.Requests), &p)
	if err != nil {
		disabled, rerr := os.ReadFile(disabledSysctl)
		return nil, explainSetup(err, disabled, rerr)
	}
	r := &Ring{fd: fd}
	defer func() {
		if err != nil {
			r.unmap()
		}
	}()
	if p.features&featSingleMmap == 0 || p.features&featRsrcTags == 0 {
		return nil, fmt.Errorf("update buffers: %w: needs Linux 5.13", ErrNotSupported)
	}
	if err := r.mapQueues(&p); err != nil {
		return nil, err
	}
	if err := r.makeTable(o.Slots, sparse); err != nil {
		return nil, fmt.Errorf("register table of %d buffers: %w", o.Slots, err)
	}
	r.cond.L = &r.mu
	r.requests = make([]request, o.Requests)
	r.idle = make([]uint32, o.Requests)
	for i := range r.idle {
		r.idle[i] = uint32(len(r.idle) - 1 - i)
	}
	r.args = make([]slotArgs, o.Slots)
	r.slots = make([]slot, o.Slots)
	r.unused = make([]uint16, o.Slots)
	for i := range r.unused {
		r.unused[i] = uint16(len(r.unused) - 1 - i)
	}
	r.stats.Slots = o.Slots
	if err := r.findLate(); err != nil {
		return nil, fmt.Errorf("see when buffers are released: %w", err)
	}
	return r, nil
}

func (r *Ring) mapQueues(p *setupParams) (err error) {
	const prot, flags = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED | unix.MAP_POPULATE
	size := max(uintptr(p.sq.array)+uintptr(p.sqEntries)*4, uintptr(p.cq.cqes)+uintptr(p.cqEntries)*unsafe.Sizeof(cqe{}))
	if r.rings, err = unix.Mmap(r.fd, offRings, int(size), prot, flags); err != nil {
		return fmt.Errorf("map queues: %w", err)
	}
	if r.sqes, err = unix.Mmap(r.fd, offSQEs, int(p.sqEntries)*int(unsafe.Sizeof(sqe{})), prot, flags); err != nil {
		return fmt.Errorf("map submission entries: %w", err)
	}
	word := func(off uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.rings[off])) }
	r.sqHead, r.sqTail, r.sqFlags, r.sqMask = word(p.sq.head), word(p.sq.tail), word(p.sq.flags), *word(p.sq.mask)
	r.cqHead, r.cqTail, r.cqMask = word(p.cq.head), word(p.cq.tail), *word(p.cq.mask)
	r.sq = unsafe.Slice((*sqe)(unsafe.Pointer(&r.sqes[0])), p.sqEntries)
	r.cq = unsafe.Slice((*cqe)(unsafe.Pointer(&r.rings[p.cq.cqes])), p.cqEntries)
	array := unsafe.Slice(word(p.sq.array), p.sqEntries)
	for i := range array {
		array[i] = uint32(i)
	}
	return nil
}

// unmap gives back everything that belongs to the kernel.
func (r *Ring) unmap() error {
	var err error
	for _, m := range [][]byte{r.rings, r.sqes} {
		if m != nil {
			err = errors.Join(err, unix.Munmap(m))
		}
	}
	return errors.Join(err, unix.Close(r.fd))
}

// Stats returns the counters as they are now.
func (r *Ring) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.closed && !r.waiting {
		r.reap()
	}
	return r.stats
}

// Close cancels the transfers in flight, waits for them and closes the ring;
// when it returns, nothing is pinned any more. While buffers are registered
// it changes nothing and returns [ErrBusy]: close the cache first. Closing
// again returns nil. Calls after Close, and the cancelled ones, return
// os.ErrClosed.
func (r *Ring) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := r.stats.Registered + r.busy; n > 0 {
		return fmt.Errorf("close ring: %d buffers: %w", n, ErrBusy)
	}
	if !r.closing {
		r.closing = true
		r.cond.Broadcast()
		for i := range r.requests {
			if r.requests[i].state == submitted {
				s := sqe{opcode: opAsyncCancel, fd: -1, addr: uint64(i), userData: cancelData}
				if err := r.submit(&s); err != nil {
					r.closing = false
					return fmt.Errorf("cancel transfer: %w", err)
				}
			}
		}
	}
	for r.inFlight > 0 {
		r.cond.Wait()
	}
	if r.closed {
		return nil
	}
	r.closed = true
	// Waits on kernels that release late; closing alone releases some time.
	err := register(r.fd, regUnregisterBuffers, nil, 0)
	for errors.Is(err, unix.EINTR) {
		err = register(r.fd, regUnregisterBuffers, nil, 0)
	}
	r.stats.Releasing, r.stats.ReleasingBytes = 0, 0
	if err := errors.Join(err, r.unmap()); err != nil {
		return fmt.Errorf("close ring: %w", err)
	}
	return nil
}
