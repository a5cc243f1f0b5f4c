// SPDX-License-Identifier: Apache-2.0

//go:build race

package oracle

// ownsBrk: with the race detector there is a libc whose malloc owns the
// program break.
const ownsBrk = false
