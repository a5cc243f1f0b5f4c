// SPDX-License-Identifier: Apache-2.0

// Package ops holds the programs that make one memory-management call at a
// time: ops.c, by libc's functions or by direct system calls, and goops, the
// same in Go. Package internal/truth builds and drives them.
package ops

import _ "embed"

// Source is ops.c. Compiled with -DDIRECT it makes its calls without libc.
//
//go:embed ops.c
var Source []byte

// GoProgram is the import path of the Go program.
const GoProgram = "github.com/ummu/ummu/test/ops/goops"
