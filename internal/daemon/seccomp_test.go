// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Seccomp filters for client processes (linux/seccomp.h, linux/filter.h).
const (
	seccompSetModeFilter = 1
	seccompTSync         = 1
	seccompKillProcess   = 0x80000000
	seccompAllow         = 0x7fff0000
)

// forbid kills the process at the first of the system calls nrs of any thread.
func forbid(nrs ...uint32) error {
	f := []unix.SockFilter{{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}} // seccomp_data.nr
	for i, nr := range nrs {
		f = append(f, unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, Jt: uint8(len(nrs) - i), K: nr})
	}
	f = append(f,
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: seccompAllow},
		unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: seccompKillProcess})
	return install(f, seccompTSync)
}

// forbidAll kills the process at the next system call of the calling thread.
func forbidAll() error {
	f := []unix.SockFilter{{Code: unix.BPF_RET | unix.BPF_K, K: seccompKillProcess}}
	if raceDetector { // it maps memory for what it remembers
		f = append([]unix.SockFilter{
			{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // seccomp_data.nr
			{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_MMAP, Jf: 1},
			{Code: unix.BPF_RET | unix.BPF_K, K: seccompAllow},
		}, f...)
	}
	return install(f, 0)
}

func install(f []unix.SockFilter, flags uintptr) error {
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("set no_new_privs: %w", err)
	}
	prog := unix.SockFprog{Len: uint16(len(f)), Filter: &f[0]}
	if _, _, e := unix.RawSyscall(unix.SYS_SECCOMP, seccompSetModeFilter, flags, uintptr(unsafe.Pointer(&prog))); e != 0 {
		return fmt.Errorf("install seccomp filter: %w", e)
	}
	return nil
}
