// SPDX-License-Identifier: Apache-2.0

package uring

import (
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The part of include/uapi/linux/io_uring.h that this package speaks.
const (
	opReadFixed   = 4
	opWriteFixed  = 5
	opAsyncCancel = 14
	opMadvise     = 25

	setupCQSize = 1 << 3

	featSingleMmap = 1 << 0
	featRsrcTags   = 1 << 10 // 5.13: buffer tables can be updated slot by slot

	offRings = 0
	offSQEs  = 0x10000000

	enterGetEvents = 1 << 0

	sqCQOverflow = 1 << 1

	regUnregisterBuffers = 1
	regBuffers2          = 15
	regBuffersUpdate     = 16

	rsrcSparse = 1 << 0

	maxSlots  = 1 << 14 // IORING_MAX_REG_BUFFERS
	maxBuffer = 1 << 30 // io_validate_user_buf_range
)

type sqe struct {
	opcode, flags uint8
	ioprio        uint16
	fd            int32
	off, addr     uint64
	len, opFlags  uint32
	userData      uint64
	bufIndex      uint16
	personality   uint16
	fileIndex     uint32
	_             [2]uint64
}

type cqe struct {
	userData uint64
	res      int32
	flags    uint32
}

type sqOffsets struct {
	head, tail, mask, entries, flags, dropped, array, _ uint32
	_                                                   uint64
}

type cqOffsets struct {
	head, tail, mask, entries, overflow, cqes, flags, _ uint32
	_                                                   uint64
}

type setupParams struct {
	sqEntries, cqEntries, flags, threadCPU, threadIdle, features, wqFD uint32
	_                                                                  [3]uint32
	sq                                                                 sqOffsets
	cq                                                                 cqOffsets
}

type rsrcRegister struct {
	nr, flags  uint32
	_          uint64
	data, tags uint64
}

type rsrcUpdate struct {
	offset, _  uint32
	data, tags uint64
	nr, _      uint32
}

func setup(entries uint32, p *setupParams) (int, error) {
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(entries), uintptr(unsafe.Pointer(p)), 0)
	return int(fd), errnoErr(errno)
}

func enter(fd int, submit, wait, flags uint32) error {
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(fd), uintptr(submit), uintptr(wait), uintptr(flags), 0, 0)
	return errnoErr(errno)
}

func register(fd int, op uint32, arg unsafe.Pointer, n uintptr) error {
	_, _, errno := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(fd), uintptr(op), uintptr(arg), n, 0, 0)
	return errnoErr(errno)
}

// errnoErr avoids a non-nil error that holds errno 0.
func errnoErr(errno syscall.Errno) error {
	if errno == 0 {
		return nil
	}
	return errno
}
