// SPDX-License-Identifier: Apache-2.0

package ops

import "syscall"

// i386Call makes a call of the i386 ABI.
//
//go:noescape
func i386Call(nr, a0, a1, a2, a3, a4, a5 uintptr) int32

// I386 makes a system call of the i386 ABI through int $0x80 and returns the
// call's result or a negative errno: ENOSYS where the kernel has no such ABI,
// whose answer is a fault.
func I386(nr uintptr, a [6]uintptr) (ret int64) {
	defer catch(func() { ret = -int64(syscall.ENOSYS) })()
	r := i386Call(nr, a[0], a[1], a[2], a[3], a[4], a[5])
	if r < 0 && r >= -4095 {
		return int64(r)
	}
	return int64(uint32(r))
}
