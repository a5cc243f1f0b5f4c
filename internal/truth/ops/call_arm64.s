// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func cloneCall(flags, nr, a0, a1, a2, a3, a4, a5 uintptr) int64
//
// The child keeps everything in registers: it may share the parent's stack.
// clone's other arguments are ignored without the flags that ask for them.
TEXT ·cloneCall(SB), NOSPLIT, $0-72
	MOVD flags+0(FP), R0
	MOVD nr+8(FP), R9
	MOVD a0+16(FP), R10
	MOVD a1+24(FP), R11
	MOVD a2+32(FP), R2
	MOVD a3+40(FP), R3
	MOVD a4+48(FP), R4
	MOVD a5+56(FP), R5
	MOVD $0, R1
	MOVD $220, R8 // SYS_clone
	SVC
	CBZ  R0, child
	MOVD R0, ret+64(FP)
	RET
child:
	MOVD R10, R0
	MOVD R11, R1
	MOVD R9, R8
	SVC
	MOVD $0, R0
	MOVD $93, R8 // SYS_exit
	SVC
	BRK
