// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func clone(flags uintptr, script *call, n int) (pid int)
//
// The child uses no stack, so it may have the parent's.
TEXT ·clone(SB),NOSPLIT|NOFRAME,$0-32
	MOVQ	flags+0(FP), DI
	MOVQ	script+8(FP), R13
	MOVQ	n+16(FP), R12
	MOVQ	$0, SI
	MOVQ	$0, DX
	MOVQ	$0, R10
	MOVQ	$0, R8
	MOVQ	$56, AX // clone
	SYSCALL
	CMPQ	AX, $0
	JEQ	child
	MOVQ	AX, pid+24(FP)
	RET
child:
	MOVQ	0(R13), AX
	MOVQ	8(R13), DI
	MOVQ	16(R13), SI
	MOVQ	24(R13), DX
	MOVQ	32(R13), R10
	MOVQ	40(R13), R8
	MOVQ	48(R13), R9
	SYSCALL
	MOVQ	AX, 56(R13)
	ADDQ	$64, R13
	DECQ	R12
	JNE	child
	MOVQ	$0, DI
	MOVQ	$231, AX // exit_group
	SYSCALL
	INT	$3
