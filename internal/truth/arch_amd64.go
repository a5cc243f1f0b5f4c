// SPDX-License-Identifier: Apache-2.0

package truth

import "golang.org/x/sys/unix"

// Programs of x86-64 can make system calls of the i386 ABI with addresses
// below 4 GiB.
const map32Bit = unix.MAP_32BIT // low 2 GiB
