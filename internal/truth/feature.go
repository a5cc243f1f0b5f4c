// SPDX-License-Identifier: Apache-2.0

package truth

import (
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/truth/ops"
)

// Feature is something that the kernel may be too old for. What counts is
// what a kernel does, not its number: [Feature.Available] tries.
type Feature uint8

// The features that rows need.
const (
	Always         Feature = iota
	RegisterFile           // io_uring registers mappings of files that are not shmem
	MoveMappings           // mremap moves several mappings at once
	UserfaultMove          // UFFDIO_MOVE
	Guard                  // MADV_GUARD_INSTALL
	ProcessDiscard         // process_madvise discards pages, of the caller
	CompatABI              // calls of the i386 ABI
	UringTruncate          // IORING_OP_FTRUNCATE
)

// features has the release that each came with, for people and for the test
// of the attempts.
var features = [...]struct {
	name, since string
	try         func(scratch []byte) (bool, error)
	once        *attempt
}{
	RegisterFile:   {"io_uring buffers in files", "6.5", tryRegisterFile, &attempt{}},
	MoveMappings:   {"mremap of several mappings", "6.17", tryMoveMappings, &attempt{}},
	UserfaultMove:  {"UFFDIO_MOVE", "6.8", tryUserfaultMove, &attempt{}},
	Guard:          {"MADV_GUARD_INSTALL", "6.13", tryGuard, &attempt{}},
	ProcessDiscard: {"process_madvise(MADV_DONTNEED)", "6.13", tryProcessDiscard, &attempt{}},
	CompatABI:      {"the i386 ABI", "2.6.12", tryCompatABI, &attempt{}},
	UringTruncate:  {"IORING_OP_FTRUNCATE", "6.9", tryUringTruncate, &attempt{}},
}

type attempt struct {
	sync.Once
	available bool
	err       error
}

// String describes f.
func (f Feature) String() string {
	if f == Always {
		return "nothing"
	}
	return features[f].name
}

// Available reports whether the running kernel has f. An error means that it
// could not be found out.
func (f Feature) Available() (bool, error) {
	if f == Always {
		return true, nil
	}
	a := features[f].once
	a.Do(func() {
		scratch, err := unix.Mmap(-1, 0, 4*os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
		if err != nil {
			a.err = fmt.Errorf("find out about %v: %w", f, err)
			return
		}
		defer unix.Munmap(scratch)
		if a.available, a.err = features[f].try(scratch); a.err != nil {
			a.err = fmt.Errorf("find out about %v: %w", f, a.err)
		}
	})
	return a.available, a.err
}

// refused turns the error by which a kernel says that it does not know
// something into an answer.
func refused(err, unknown error) (bool, error) {
	switch err {
	case nil:
		return true, nil
	case unknown:
		return false, nil
	}
	return false, err
}

func tryGuard(m []byte) (bool, error) {
	return refused(unix.Madvise(m[:os.Getpagesize()], advGuardInstall), unix.EINVAL)
}

func tryProcessDiscard(m []byte) (bool, error) {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return false, err
	}
	defer unix.Close(fd)
	iov := unix.Iovec{Base: &m[0], Len: uint64(os.Getpagesize())}
	_, _, e := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(fd), uintptr(unsafe.Pointer(&iov)), 1, unix.MADV_DONTNEED, 0, 0)
	if e != 0 {
		return refused(e, unix.EINVAL)
	}
	return true, nil
}

func tryMoveMappings(m []byte) (bool, error) {
	size := os.Getpagesize()
	if err := unix.Madvise(m[:size], unix.MADV_DONTDUMP); err != nil { // now it is two mappings
		return false, err
	}
	at := unsafe.Pointer(&m[0])
	// onto pages 2 and 3, which the caller unmaps; 0 and 1 become a hole
	_, err := unix.MremapPtr(at, uintptr(2*size), unsafe.Add(at, 2*size), uintptr(2*size), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED)
	return refused(err, unix.EFAULT)
}

func tryUserfaultMove([]byte) (bool, error) {
	fd, _, e := unix.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|uffdUserModeOnly, 0, 0)
	if e != 0 {
		return false, e
	}
	defer unix.Close(int(fd))
	// version, features, ioctls; unasked for, all features are named
	api := [3]uint64{uffdVersion}
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, fd, uffdAPI, uintptr(unsafe.Pointer(&api))); e != 0 {
		return false, e
	}
	return api[1]&uffdFeatureMove != 0, nil
}

// int $0x80 is a fault where the kernel has no 32-bit system calls, or where
// the hypervisor runs 64-bit code only.
func tryCompatABI([]byte) (there bool, err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		if recover() != nil {
			there = false
		}
	}()
	const getpid = 20
	return ops.I386(getpid, [6]uintptr{}) == int64(os.Getpid()), nil
}

func tryUringTruncate([]byte) (bool, error) {
	var params [120]byte // struct io_uring_params
	ring, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if e != 0 {
		return false, e
	}
	defer unix.Close(int(ring))
	// struct io_uring_probe: a header of 16 bytes, then 8 for each operation
	const registerProbe, supported = 8, 1
	var probe [16 + 256*8]byte
	if _, _, e = unix.Syscall6(unix.SYS_IO_URING_REGISTER, ring, registerProbe, uintptr(unsafe.Pointer(&probe)), 256, 0, 0); e != 0 {
		return false, e
	}
	return probe[16+uringOpFtruncate*8+2]&supported != 0, nil
}

func tryRegisterFile([]byte) (bool, error) {
	// shared memory of System V is shmem, but its mappings are not
	id, err := unix.SysvShmGet(unix.IPC_PRIVATE, os.Getpagesize(), unix.IPC_CREAT|0o600)
	if err != nil {
		return false, err
	}
	m, err := unix.SysvShmAttach(id, 0, 0)
	if _, e := unix.SysvShmCtl(id, unix.IPC_RMID, nil); err == nil {
		err = e
	}
	if err != nil {
		return false, err
	}
	defer unix.SysvShmDetach(m)
	var params [120]byte // struct io_uring_params
	ring, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&params)), 0)
	if e != 0 {
		return false, e
	}
	defer unix.Close(int(ring))
	iov := unix.Iovec{Base: &m[0], Len: uint64(len(m))}
	var pin runtime.Pinner // iov points to it, and the kernel reads that
	pin.Pin(&iov)
	defer pin.Unpin()
	const registerBuffers = 0
	if _, _, e = unix.Syscall6(unix.SYS_IO_URING_REGISTER, ring, registerBuffers, uintptr(unsafe.Pointer(&iov)), 1, 0, 0); e != 0 {
		return refused(e, unix.EOPNOTSUPP)
	}
	return true, nil
}
