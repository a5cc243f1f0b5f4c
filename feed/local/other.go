// SPDX-License-Identifier: Apache-2.0

package local

import (
	"errors"
	"fmt"
	"io"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/inject"
	"github.com/ummu/ummu/tracer"
)

// openOther opens a watch of a notifier tier over another process.
func openOther(tier tracer.Tier, o Options) (*feed.Watch, error) {
	// Nothing is done to the process before the kernel side is there to see it,
	// nor if it cannot be; and the notifier comes before the watch, which
	// then waits for the changes that began before the notifier.
	k, err := acquire(tier)
	if err != nil {
		return nil, err
	}
	machine, err := machineOf(o)
	if err != nil {
		return nil, errors.Join(err, release(tier))
	}
	free := func() error { return errors.Join(machine.Close(), release(tier)) }
	w, err := open(k, tier, o, 0, free)
	if err != nil {
		return nil, errors.Join(err, free())
	}
	return w, nil
}

// machineOf is the machine that keeps the notifier of another process.
func machineOf(o Options) (io.Closer, error) {
	switch {
	case o.VM != nil:
		return keep(o.VM)
	case o.Inject:
		return inject.Process(o.PID)
	}
	return nil, fmt.Errorf("process %d has no notifier: pass Options.VM or set Options.Inject", o.PID)
}

// keep makes a duplicate of a machine of another process, which nobody else
// can close.
func keep(vm *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(vm.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate virtual machine: %w", err)
	}
	file := os.NewFile(uintptr(fd), "kvm-vm")
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err == nil && name != "anon_inode:kvm-vm" {
		err = fmt.Errorf("Options.VM is %s, not a virtual machine", name)
	}
	// The kernel refuses all calls from an address space that is not the
	// machine's (kvm_vm_ioctl(), virt/kvm/kvm_main.c).
	if err == nil {
		const checkExtension, userMemory = 0xae03, 3 // KVM_CHECK_EXTENSION, linux/kvm.h
		if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), checkExtension, userMemory); e != unix.EIO {
			err = errors.New("Options.VM was made by this process, not by the watched one")
		}
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	return file, nil
}
