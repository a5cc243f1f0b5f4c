// SPDX-License-Identifier: Apache-2.0

package bpf

import (
	"crypto/sha256"
	"encoding/hex"
)

// Digest names the kernel side: the SHA-256 of its object, in hexadecimal.
func Digest() string {
	sum := sha256.Sum256(_SyscallBytes)
	return hex.EncodeToString(sum[:])
}
