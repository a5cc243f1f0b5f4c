// SPDX-License-Identifier: Apache-2.0

package ibv

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

var (
	// ErrNotBuilt: the program was built without this package's C part.
	ErrNotBuilt = errors.New("built without RDMA: build with CGO_ENABLED=1, a C compiler, and the headers of rdma-core (apt-get install gcc libibverbs-dev librdmacm-dev)")
	// ErrNoLibrary: libibverbs or librdmacm cannot be opened.
	ErrNoLibrary = errors.New("the RDMA libraries are not installed (apt-get install libibverbs1 ibverbs-providers librdmacm1)")
	// ErrNoDevice: there is no RDMA device, or none of that name.
	ErrNoDevice = errors.New("no such RDMA device")
	// ErrRemoved: the device was removed, or its driver was unloaded. What was
	// registered is not any more.
	ErrRemoved = errors.New("the RDMA device was removed")
	// ErrNotRegistered: the MR was deregistered, or is another PD's.
	ErrNotRegistered = errors.New("memory region is not registered")
	// ErrGoMemory: the garbage collector owns the memory.
	ErrGoMemory = errors.New("memory of the Go heap that is not pinned (use RegisterBytes, a runtime.Pinner, or memory from mmap)")
	// ErrOutside: the addresses of a transfer are not all in its memory region.
	ErrOutside = errors.New("outside of memory region")
)

// BusyError says what has to be closed first.
type BusyError struct {
	What        string // what was to be closed
	PDs         int
	MRs, Queues int
}

func (e *BusyError) Error() string {
	var used []string
	for _, u := range []struct {
		n    int
		what string
	}{{e.PDs, "protection domains"}, {e.MRs, "memory regions"}, {e.Queues, "queue pairs"}} {
		if u.n > 0 {
			used = append(used, fmt.Sprintf("%d %s", u.n, u.what))
		}
	}
	return fmt.Sprintf("close %s: still used by %s: close the cache first, then the queue pairs, the protection domain, the device", e.What, strings.Join(used, ", "))
}

// Is answers EBUSY.
func (e *BusyError) Is(target error) bool { return target == unix.EBUSY }

// RegisterError says why the kernel or the library did not register or
// deregister a range. It answers errors.Is for its Errno; for
// [regcache.ErrLimit] where something is used up that deregistering gives
// back; for [ErrRemoved] where the device is gone.
type RegisterError struct {
	Op    string // register or deregister
	Range mm.Range
	Flags string // as in ibv_reg_mr(3)
	Errno syscall.Errno

	// Memlock is RLIMIT_MEMLOCK of this process in bytes; 0: none, or it does
	// not bind (CAP_IPC_LOCK). Pinned is what the process has pinned, Need the
	// pages of Range; bytes.
	Memlock, Pinned, Need uint64
	// Live is how many memory regions this process has on the device. Max is
	// how many the device says it can have, of all processes; 0: not known.
	Live, Max int
	// MaxSize is the longest region that the device says it can have, in
	// bytes; 0: not known.
	MaxSize uint64
	// Removed: the device is gone.
	Removed bool
}

func (e *RegisterError) Error() string {
	return fmt.Sprintf("%s %v (%s): %v: %s", e.Op, e.Range, e.Flags, e.Errno, e.why())
}

// Unwrap returns the errno.
func (e *RegisterError) Unwrap() error { return e.Errno }

// Is answers [regcache.ErrLimit] and [ErrRemoved].
func (e *RegisterError) Is(target error) bool {
	switch target {
	case ErrRemoved:
		return e.Removed
	case regcache.ErrLimit:
		return e.limit()
	}
	return false
}

// limit: a device that is full says so in different ways.
func (e *RegisterError) limit() bool {
	switch e.Errno {
	case unix.ENOMEM, unix.EAGAIN, unix.ENOSPC:
		return true
	case unix.EINVAL, unix.EBUSY:
		return e.Op == opRegister && e.full()
	}
	return false
}

func (e *RegisterError) full() bool { return e.Max > 0 && e.Live >= e.Max }

const (
	opRegister   = "register"
	opDeregister = "deregister"
)

// why explains the errno: what the kernel means by it here (ib_umem_get,
// ib_uverbs_reg_mr and drivers), with the figures.
func (e *RegisterError) why() string {
	switch {
	case e.Removed:
		return "the device was removed; close what uses it, and open it again when it is back"
	case e.Op == opDeregister && e.Errno == unix.EBUSY:
		return "something is bound to the region (a memory window): it is registered still, and is tried again"
	case e.Op == opDeregister:
		return "the region is registered still"
	}
	regions := fmt.Sprintf("%d memory regions of this process", e.Live)
	if e.Max > 0 {
		regions += fmt.Sprintf(", the device has %d for all", e.Max)
	}
	switch e.Errno {
	case unix.ENOMEM:
		if e.Memlock > 0 && e.Pinned+e.Need > e.Memlock {
			return fmt.Sprintf("more than may be locked: limit %d bytes (RLIMIT_MEMLOCK, ulimit -l), %d pinned now, %d needed; raise the limit or deregister something",
				e.Memlock, e.Pinned, e.Need)
		}
		limit := "no limit binds this process"
		if e.Memlock > 0 {
			limit = fmt.Sprintf("limit %d bytes", e.Memlock)
		}
		return fmt.Sprintf("memory or the device's room for regions is used up: %d bytes needed, %d pinned now, %s (RLIMIT_MEMLOCK); %s",
			e.Need, e.Pinned, limit, regions)
	case unix.EAGAIN:
		return "the limit of the rdma control group (rdma.max, hca_object) is reached; " + regions
	case unix.EINVAL:
		switch {
		case e.full():
			return "no region is free; " + regions
		case e.MaxSize > 0 && e.Range.Len() > e.MaxSize:
			return fmt.Sprintf("%d bytes, and the device can have %d in a region", e.Range.Len(), e.MaxSize)
		}
		return "the device does not take this combination of rights, address and length; " + regions
	case unix.EFAULT:
		return "part of the range is not mapped, or mapped without the right to write that local or remote writing needs, or is not memory (a device mapping)"
	case unix.EOPNOTSUPP:
		if strings.Contains(e.Flags, "ON_DEMAND") {
			return "this device or kernel has no on-demand paging for such a region"
		}
		return "this memory cannot be pinned for long (a file system with direct access), or the device has no such right"
	case unix.EPERM, unix.EACCES:
		return "not permitted by the access rights of the range, or by a security module"
	case unix.EBUSY, unix.ENOSPC:
		return "no region is free; " + regions
	case unix.ENOSYS:
		return "the provider library cannot do this"
	}
	return "not known what the driver means by it"
}

// OpenError says why a device was not opened. It answers errors.Is for its
// Errno, and for [ErrNoDevice] if there is none of the name.
type OpenError struct {
	Name  string
	Have  []string // the devices that there are
	Errno syscall.Errno
}

func (e *OpenError) Error() string {
	s := fmt.Sprintf("open RDMA device %q: %v: ", e.Name, e.Errno)
	switch e.Errno {
	case unix.ENODEV, unix.ENOSYS, unix.ENOENT:
		if len(e.Have) > 0 {
			return s + "there are: " + strings.Join(e.Have, ", ")
		}
		if e.Errno == unix.ENOSYS {
			return s + "the kernel has no RDMA, or its module ib_uverbs is not loaded"
		}
		return s + "there is no device (its provider library may be missing: ibverbs-providers; soft-RoCE: rdma link add rxe0 type rxe netdev eth0)"
	case unix.EACCES, unix.EPERM:
		return s + "/dev/infiniband/uverbs* must be readable and writable for this user (many systems have a group rdma)"
	case unix.ENOMEM, unix.EAGAIN:
		return s + "out of memory, or the limit of the rdma control group (rdma.max, hca_handle) is reached"
	}
	return s + "the driver refuses"
}

// Unwrap returns the errno.
func (e *OpenError) Unwrap() error { return e.Errno }

// Is answers [ErrNoDevice].
func (e *OpenError) Is(target error) bool {
	return target == ErrNoDevice && (e.Errno == unix.ENODEV || e.Errno == unix.ENOSYS || e.Errno == unix.ENOENT)
}

// TransferError is a transfer that the device says has failed. The queue pair
// is of no use any more.
type TransferError struct {
	Op     string
	Range  mm.Range // local
	Status uint32   // enum ibv_wc_status
	Vendor uint32   // the driver's word for it
	Text   string   // the library's words for Status
}

// Values of [TransferError.Status] with a meaning of their own (enum
// ibv_wc_status).
const (
	StatusLocalProtection uint32 = 4  // the local region does not allow it, or is gone
	StatusFlushed         uint32 = 5  // an earlier transfer failed, or the device is gone
	StatusRemoteAccess    uint32 = 10 // the remote region does not allow it, or is gone
	StatusRemoteOperation uint32 = 11 // the other side could not do it: an on-demand region over nothing
	StatusRetryExceeded   uint32 = 12 // the other side does not answer
)

func (e *TransferError) Error() string {
	s := fmt.Sprintf("%s of %v: %s (status %d, vendor %#x)", e.Op, e.Range, e.Text, e.Status, e.Vendor)
	switch e.Status {
	case StatusLocalProtection:
		s += ": the local memory region was deregistered, or lacks the right"
	case StatusRemoteAccess:
		s += ": the remote memory region was deregistered, lacks the right, or is shorter"
	case StatusRetryExceeded:
		s += ": the other side does not answer"
	}
	return s
}

// memlock returns RLIMIT_MEMLOCK, 0 if there is none or it does not bind this
// thread, and what the process has pinned, in bytes.
func memlock() (limit, pinned uint64) {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l) == nil && l.Cur != unix.RLIM_INFINITY {
		limit = l.Cur
	}
	// a thread's, not the process's: capabilities are of threads
	status, _ := os.ReadFile("/proc/thread-self/status")
	for line := range bytes.Lines(status) {
		name, value, _ := bytes.Cut(line, []byte(":"))
		s := string(bytes.TrimSpace(bytes.TrimSuffix(bytes.TrimSpace(value), []byte("kB"))))
		switch string(name) {
		case "VmPin":
			kib, _ := strconv.ParseUint(s, 10, 64)
			pinned = kib << 10
		case "CapEff":
			if caps, err := strconv.ParseUint(s, 16, 64); err == nil && caps&(1<<unix.CAP_IPC_LOCK) != 0 {
				limit = 0
			}
		}
	}
	return limit, pinned
}
