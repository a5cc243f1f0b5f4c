// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"runtime"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// cloneArgs is struct clone_args (linux/sched.h).
type cloneArgs struct {
	flags, pidfd, childTID, parentTID, exitSignal, stack, stackSize, tls, setTID, setTIDSize, cgroup uint64
}

// spawnAs starts a program under a pid of our choice, which must be free. All
// descriptors without FD_CLOEXEC are passed on.
func spawnAs(pid int, path string, argv, env []string) error {
	p, err := syscall.BytePtrFromString(path)
	if err != nil {
		return err
	}
	av, err := syscall.SlicePtrFromStrings(argv)
	if err != nil {
		return err
	}
	ev, err := syscall.SlicePtrFromStrings(env)
	if err != nil {
		return err
	}
	tid := int32(pid)
	a := &cloneArgs{exitSignal: uint64(unix.SIGCHLD), setTID: uint64(uintptr(unsafe.Pointer(&tid))), setTIDSize: 1}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	got, e := cloneExec(a, p, &av[0], &ev[0])
	runtime.KeepAlive(&tid)
	if e != 0 {
		return fmt.Errorf("clone3 as pid %d: %w", pid, e)
	}
	if int(got) != pid {
		return fmt.Errorf("pid %d, want %d", got, pid)
	}
	return nil
}

//go:noinline
//go:norace
//go:nosplit
func cloneExec(a *cloneArgs, path *byte, argv, env **byte) (uintptr, syscall.Errno) {
	pid, _, e := unix.RawSyscall(unix.SYS_CLONE3, uintptr(unsafe.Pointer(a)), unsafe.Sizeof(*a), 0)
	if e == 0 && pid == 0 {
		unix.RawSyscall(unix.SYS_EXECVE, uintptr(unsafe.Pointer(path)), uintptr(unsafe.Pointer(argv)), uintptr(unsafe.Pointer(env)))
		unix.RawSyscall(unix.SYS_EXIT_GROUP, 127, 0, 0)
	}
	return pid, e
}

// forkIdle makes a child that has everything its parent has, and does nothing
// until it is killed.
//
//go:noinline
//go:norace
//go:nosplit
func forkIdle() (uintptr, syscall.Errno) {
	pid, _, e := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if e == 0 && pid == 0 {
		for {
			unix.RawSyscall6(unix.SYS_PPOLL, 0, 0, 0, 0, 0, 0)
		}
	}
	return pid, e
}

// forkExit makes a child that ends at once.
//
//go:noinline
//go:norace
//go:nosplit
func forkExit() (uintptr, syscall.Errno) {
	pid, _, e := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if e == 0 && pid == 0 {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	}
	return pid, e
}

// inheritable lets a descriptor survive an execve.
func inheritable(fd int) error {
	_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0)
	return err
}

func waitFor(pid int) (unix.WaitStatus, error) {
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &ws, 0, nil)
		if err != unix.EINTR {
			return ws, err
		}
	}
}
