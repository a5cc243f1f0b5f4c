// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// ErrNoKVM is returned by [MakeNotifier] where KVM cannot be used.
var ErrNoKVM = errors.New("no KVM")

// Notifier keeps an MMU notifier registered for the calling process, by an
// empty virtual machine: the kernel tells KVM, and so the notifier tiers, of
// each change of the address space. Nothing ever runs in the machine.
type Notifier struct {
	page unsafe.Pointer // a page of its virtual CPU
	size uintptr
}

// ioctl numbers of linux/kvm.h.
const (
	kvmCreateVM        = 0xae01
	kvmGetVCPUMmapSize = 0xae04
	kvmCreateVCPU      = 0xae41
)

// MakeNotifier registers one for the calling process. It needs read and write
// access to /dev/kvm and fails with [ErrNoKVM] without it. The cost grows
// with the number of mappings (10 to 16 ms at 60,000, measured): the kernel
// locks each of them once (mm_take_all_locks(), mm/mmap.c).
//
// No descriptor is left that the program could close by accident, as
// close_range(3, ~0) does: a mapping of the machine's virtual CPU keeps it.
func MakeNotifier() (*Notifier, error) {
	kvm, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/kvm: %w: %w", ErrNoKVM, err)
	}
	defer unix.Close(kvm)
	vm, err := ioctlRetry(kvm, kvmCreateVM, 0)
	if err != nil {
		return nil, fmt.Errorf("create virtual machine: %w: %w", ErrNoKVM, err)
	}
	defer unix.Close(vm)
	size, err := ioctlRetry(kvm, kvmGetVCPUMmapSize, 0)
	if err != nil {
		return nil, fmt.Errorf("size of virtual CPU: %w", err)
	}
	vcpu, err := ioctlRetry(vm, kvmCreateVCPU, 0)
	if err != nil {
		return nil, fmt.Errorf("create virtual CPU: %w: %w", ErrNoKVM, err)
	}
	defer unix.Close(vcpu)
	// The mapping holds the descriptor's file, that the machine
	// (kvm_create_vcpu(), virt/kvm/kvm_main.c), that the notifier.
	size = min(size, os.Getpagesize())
	p, err := unix.MmapPtr(vcpu, 0, nil, uintptr(size), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map virtual CPU: %w", err)
	}
	// A child must not keep the parent's machine.
	b := unsafe.Slice((*byte)(p), size)
	if err := unix.Madvise(b, unix.MADV_DONTFORK); err != nil {
		unix.MunmapPtr(p, uintptr(size))
		return nil, fmt.Errorf("keep virtual CPU from children: %w", err)
	}
	return &Notifier{p, uintptr(size)}, nil
}

// Holder is the start of the page that keeps the notifier: as long as it is
// mapped, changes are seen. It is 0 after Close.
func (n *Notifier) Holder() mm.Addr { return mm.Addr(uintptr(n.page)) }

// Alive reports whether the page is still there, and the notifier with it.
func (n *Notifier) Alive() (bool, error) {
	if n.page == nil {
		return false, nil
	}
	return isVCPU(n.Holder())
}

// Close lets the notifier go. It is not safe for concurrent use; a second
// call does nothing. If the program has unmapped the page, or mapped
// something else there, Close leaves that alone.
func (n *Notifier) Close() error {
	if n.page == nil {
		return nil
	}
	p := n.page
	n.page = nil
	ours, err := isVCPU(mm.Addr(uintptr(p)))
	if err != nil {
		return fmt.Errorf("close notifier: %w", err)
	}
	if !ours {
		return nil
	}
	return unix.MunmapPtr(p, n.size)
}

// isVCPU reports whether a virtual CPU is mapped at address a of this process.
func isVCPU(a mm.Addr) (bool, error) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return false, err
	}
	for line := range strings.Lines(string(maps)) {
		if strings.HasPrefix(line, fmt.Sprintf("%08x-", uint64(a))) {
			return strings.Contains(line, " anon_inode:kvm-vcpu:"), nil
		}
	}
	return false, nil
}

// ioctlRetry is an ioctl that returns a number; KVM_CREATE_VM is interrupted
// by signals while it takes the locks of many mappings.
func ioctlRetry(fd int, op, arg uintptr) (int, error) {
	for {
		n, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), op, arg)
		switch e {
		case 0:
			return int(n), nil
		case unix.EINTR:
			continue
		}
		return 0, e
	}
}
