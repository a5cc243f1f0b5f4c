// SPDX-License-Identifier: Apache-2.0

// Package bpf is the kernel side: C programs and maps, their shared layout,
// and generated Go bindings. It holds no policy; package tracer loads it.
package bpf

//go:generate go tool bpf2go -cc clang-16 -strip llvm-strip-16 -cflags "-O2 -g -mcpu=v3 -Wall -Wextra -Wno-unused-parameter -Wno-unused-function -Wno-missing-field-initializers -Werror" -target amd64,arm64 -no-global-types -output-stem syscall Syscall syscall.bpf.c
//go:generate sed -i "1a\\\\n// SPDX-License-Identifier: Apache-2.0\\n" syscall_x86_bpfel.go syscall_arm64_bpfel.go
