// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package ops

import "syscall"

// I386 fails with ENOSYS: only x86-64 has a second ABI for one program.
func I386(uintptr, [6]uintptr) int64 { return -int64(syscall.ENOSYS) }
