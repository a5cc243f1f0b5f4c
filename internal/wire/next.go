// SPDX-License-Identifier: Apache-2.0

//go:build ummu_next

package wire

// A version that does not exist yet, which differs from the current one in its
// number only: programs built so show that daemons and clients of two versions
// get on with each other (test/kill).
func init() { Supported.Max++ }
