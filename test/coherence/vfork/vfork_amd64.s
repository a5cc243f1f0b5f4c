// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func Clone(signal uintptr) (pid int)
//
// The child goes on with this stack and overwrites what lies below it, the
// return address of this function included. So that is kept in a register.
TEXT ·Clone(SB),NOSPLIT|NOFRAME,$0-16
	MOVQ	signal+0(FP), DI
	ORQ	$0x4100, DI // CLONE_VM|CLONE_VFORK
	MOVQ	$0, SI
	MOVQ	$0, DX
	MOVQ	$0, R10
	MOVQ	$0, R8
	MOVQ	$56, AX // clone
	POPQ	R12
	SYSCALL
	PUSHQ	R12
	MOVQ	AX, pid+8(FP)
	RET
