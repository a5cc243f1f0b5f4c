// SPDX-License-Identifier: Apache-2.0

package inject

import "golang.org/x/sys/unix"

type registers = unix.PtraceRegs

func supported() error { return nil }

var syscallInstruction = []byte{0x0f, 0x05}

func getRegisters(tid int, r *registers) error { return unix.PtraceGetRegs(tid, r) }
func setRegisters(tid int, r *registers) error { return unix.PtraceSetRegs(tid, r) }

// native reports whether the task is in 64-bit code (__USER_CS).
func native(r *registers) bool { return r.Cs == 0x33 }

func instruction(r *registers) uint64 { return r.Rip }

// setCall makes r the registers of a system call that has yet to be made; it
// is not one that a signal interrupted.
func setCall(r *registers, site uint64, nr uintptr, a [6]uint64) {
	r.Rip, r.Rax, r.Orig_rax = site, uint64(nr), ^uint64(0)
	r.Rdi, r.Rsi, r.Rdx, r.R10, r.R8, r.R9 = a[0], a[1], a[2], a[3], a[4], a[5]
}

func result(r *registers) int64 { return int64(r.Rax) }

// interrupted are the calls that return EINTR after any stop, even one without
// a signal handler (signal(7)). They do so only if nothing was done yet.
var interrupted = map[uint64]bool{
	unix.SYS_EPOLL_WAIT: true, unix.SYS_EPOLL_PWAIT: true, unix.SYS_EPOLL_PWAIT2: true,
	unix.SYS_SEMOP: true, unix.SYS_SEMTIMEDOP: true, unix.SYS_RT_SIGTIMEDWAIT: true,
	unix.SYS_IO_GETEVENTS: true, unix.SYS_IO_PGETEVENTS: true, unix.SYS_IO_URING_ENTER: true,
	unix.SYS_RECVFROM: true, unix.SYS_RECVMSG: true, unix.SYS_SENDTO: true, unix.SYS_SENDMSG: true,
	unix.SYS_ACCEPT: true, unix.SYS_ACCEPT4: true,
}

// restart makes a call that our stop interrupted start again, as the kernel
// does with most by itself. It reports whether it changed r.
func restart(r *registers) bool {
	const restartNoHandler = 514 // ERESTARTNOHAND: EINTR if a handler runs, else restart
	if int64(r.Orig_rax) < 0 || int64(r.Rax) != -int64(unix.EINTR) || !interrupted[r.Orig_rax] {
		return false
	}
	r.Rax = ^uint64(restartNoHandler - 1)
	return true
}
