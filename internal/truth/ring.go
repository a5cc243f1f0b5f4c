// SPDX-License-Identifier: Apache-2.0

package truth

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// Slots is how many buffers a [Ring] can have registered at a time.
const Slots = 64

// Ring is an io_uring of a program: the device of the oracle. Its registered
// buffers pin pages as memory regions of a network card do; a transfer into
// one goes to the pages that were there when it was registered. It is driven
// from outside, by system calls and by reading and writing the program's
// memory, so that the programs need no code for it. Kernel 5.19.
type Ring struct {
	p      *Proc
	fd     int64
	poll   bool
	rings  mm.Range // both queues
	sqes   mm.Range
	source mm.Addr // view of the file that transfers read
	file   int64
	tail   uint32
	head   uint32
	off    struct{ sqTail, cqHead, cqTail, cqes uint32 }
}

const (
	ringEntries = 8
	sourceBytes = 8 << 20 // the largest transfer

	uringSetupSQPoll       = 1 << 1 // IORING_SETUP_SQPOLL
	uringFeatSingleMmap    = 1 << 0
	uringOffSQEs           = 0x10000000
	uringEnterGetEvents    = 1 << 0
	uringEnterSQWakeup     = 1 << 1
	uringRegisterBuffers2  = 15
	uringBuffersUpdate     = 16
	uringRsrcSparse        = 1 << 0
	uringOpReadFixed       = 4
	uringOpFallocate       = 17
	uringOpMadvise         = 25
	uringOpFtruncate       = 55
	uringSQEAsync          = 1 << 4 // IOSQE_ASYNC
	offsetOfParamsSQOff    = 40
	offsetOfParamsFeatures = 20
)

// Ring returns the program's ring, made when first asked for.
func (p *Proc) Ring() (*Ring, error) {
	if p.ring == nil {
		r, err := p.newRing(0)
		if err != nil {
			return nil, err
		}
		p.ring = r
	}
	return p.ring, p.err
}

func (p *Proc) newRing(flags uint64) (*Ring, error) {
	r := &Ring{p: p, poll: flags&uringSetupSQPoll != 0}
	params := p.scratch + scratchRing
	p.Poke(8, params, make([]uint64, 15)...)
	p.Poke(4, params+8, flags)
	if r.fd = p.Syscall(unix.SYS_IO_URING_SETUP, ringEntries, params); r.fd < 0 {
		return nil, fmt.Errorf("set up io_uring (sysctl kernel.io_uring_disabled must be 0): %w", unix.Errno(-r.fd))
	}
	w := p.Peek(params, 15)
	at := func(byteOffset int) uint32 { return uint32(w[byteOffset/8] >> (byteOffset % 8 * 8)) }
	if at(offsetOfParamsFeatures)&uringFeatSingleMmap == 0 {
		return nil, fmt.Errorf("set up io_uring: no IORING_FEAT_SINGLE_MMAP: %w", unix.ENOSYS)
	}
	// struct io_sqring_offsets {head, tail, ring_mask, ring_entries, flags,
	// dropped, array, ...}, then io_cqring_offsets {head, tail, ring_mask,
	// ring_entries, overflow, cqes, ...} 40 bytes behind it.
	const sq, cq = offsetOfParamsSQOff, offsetOfParamsSQOff + 40
	r.off.sqTail, r.off.cqHead, r.off.cqTail, r.off.cqes = at(sq+4), at(cq), at(cq+4), at(cq+20)
	array := at(sq + 24)
	size := max(r.off.cqes+2*ringEntries*16, array+ringEntries*4)
	shared := func(length, offset uint64) mm.Range {
		a := p.Syscall(unix.SYS_MMAP, 0, length, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE, r.fd, offset)
		if a < 0 && p.err == nil {
			p.err = fmt.Errorf("map io_uring: %w", unix.Errno(-a))
		}
		return mm.Range{Start: mm.Addr(a), End: mm.Addr(a) + mm.Addr(length)}
	}
	r.rings, r.sqes = shared(uint64(size), 0), shared(ringEntries*64, uringOffSQEs)
	for i := range mm.Addr(ringEntries) {
		p.Poke(4, r.rings.Start+mm.Addr(array)+4*i, uint64(i))
	}
	if r.poll {
		return r, p.err
	}

	p.Poke(8, params, Slots|uringRsrcSparse<<32, 0, 0, 0) // struct io_uring_rsrc_register
	if e := p.Syscall(unix.SYS_IO_URING_REGISTER, r.fd, uringRegisterBuffers2, params, 32); e < 0 {
		return nil, fmt.Errorf("register table of io_uring buffers: %w", unix.Errno(-e))
	}
	if r.file = p.Syscall(unix.SYS_MEMFD_CREATE, "source", unix.MFD_CLOEXEC); r.file < 0 {
		return nil, fmt.Errorf("create source file: %w", unix.Errno(-r.file))
	}
	p.Syscall(unix.SYS_FTRUNCATE, r.file, sourceBytes)
	a := p.Syscall(unix.SYS_MMAP, 0, sourceBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED, r.file, 0)
	if a < 0 {
		return nil, fmt.Errorf("map source file: %w", unix.Errno(-a))
	}
	r.source = mm.Addr(a)
	return r, p.err
}

// close ends a ring without buffers.
func (r *Ring) close() {
	for _, m := range []mm.Range{r.rings, r.sqes} {
		r.p.Syscall(unix.SYS_MUNMAP, m.Start, m.Len())
	}
	r.p.Syscall(unix.SYS_CLOSE, r.fd)
}

// FD is the ring's descriptor in the program.
func (r *Ring) FD() int64 { return r.fd }

// Register registers the bytes of b as the buffer of slot, in place of the
// one that was there. It returns 0 or a negative errno.
func (r *Ring) Register(slot int, b mm.Range) int64 {
	iov := r.p.scratch + scratchRing
	update := iov + 16
	r.p.Poke(8, iov, uint64(b.Start), b.Len())
	// struct io_uring_rsrc_update2 {u32 offset, resv; u64 data, tags; u32 nr, resv2}
	r.p.Poke(8, update, uint64(slot), uint64(iov), 0, 1)
	n := r.p.Syscall(unix.SYS_IO_URING_REGISTER, r.fd, uringBuffersUpdate, update, 32)
	switch {
	case n < 0:
		return n
	case n != 1: // updated none
		return -int64(unix.EINVAL)
	}
	return 0
}

// Unregister empties slot.
func (r *Ring) Unregister(slot int) int64 { return r.Register(slot, mm.Range{}) }

// Write lets the device write n pages of unit bytes, each with the pattern of
// seed, to the address at through the buffer of slot. It returns the number of
// bytes or a negative errno.
func (r *Ring) Write(slot int, at mm.Addr, unit uint64, n int, seed uint64) int64 {
	if unit*uint64(n) > sourceBytes {
		return -int64(unix.E2BIG)
	}
	r.p.Fill(r.source, unit, n, seed)
	return r.submit(uringOpReadFixed, 0, r.file, 0, at, unit*uint64(n), 0, uint64(slot))
}

// Madvise makes the request IORING_OP_MADVISE, with flags of the request.
func (r *Ring) Madvise(b mm.Range, advice int, flags uint64) int64 {
	return r.submit(uringOpMadvise, flags, -1, 0, b.Start, b.Len(), uint64(advice), 0)
}

// Punch makes the request IORING_OP_FALLOCATE that drops length bytes of a
// file, which a worker executes.
func (r *Ring) Punch(fd int64, offset, length uint64) int64 {
	return r.submit(uringOpFallocate, 0, fd, offset, mm.Addr(length), fallocPunch, 0, 0)
}

// Truncate makes the request IORING_OP_FTRUNCATE, which a worker executes.
func (r *Ring) Truncate(fd int64, length uint64) int64 {
	return r.submit(uringOpFtruncate, 0, fd, length, 0, 0, 0, 0)
}

// submit makes one request and waits for its result.
func (r *Ring) submit(op, flags uint64, fd int64, offset uint64, at mm.Addr, length, opFlags, buffer uint64) int64 {
	p := r.p
	if p.err != nil {
		return -int64(unix.EIO)
	}
	sqe := r.sqes.Start + mm.Addr(r.tail%ringEntries)*64
	p.Poke(8, sqe, op|flags<<8|uint64(uint32(fd))<<32, offset, uint64(at), length|opFlags<<32, 0, buffer, 0, 0)
	r.tail++
	p.Poke(4, r.rings.Start+mm.Addr(r.off.sqTail), uint64(r.tail))
	enter := uint64(uringEnterGetEvents)
	if r.poll {
		enter |= uringEnterSQWakeup
	}
	// A wait that is interrupted after the submission returns success.
	for submit := 1; ; submit = 0 {
		if e := p.Syscall(unix.SYS_IO_URING_ENTER, r.fd, submit, 1, enter, 0, 0); e < 0 && e != -int64(unix.EINTR) {
			return e
		}
		tail := uint32(p.Peek(r.rings.Start+mm.Addr(r.off.cqTail), 1)[0])
		if p.err != nil {
			return -int64(unix.EIO)
		}
		if tail == r.head+1 {
			break
		}
	}
	cqe := p.Peek(r.rings.Start+mm.Addr(r.off.cqes+r.head%(2*ringEntries)*16), 2)
	r.head++
	p.Poke(4, r.rings.Start+mm.Addr(r.off.cqHead), uint64(r.head))
	return int64(int32(cqe[1]))
}
