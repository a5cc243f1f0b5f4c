// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func cloneCall(flags, nr, a0, a1, a2, a3, a4, a5 uintptr) int64
//
// The child keeps everything in registers: it may share the parent's stack.
// clone's other arguments are ignored without the flags that ask for them.
TEXT ·cloneCall(SB), NOSPLIT, $0-72
	MOVQ flags+0(FP), DI
	MOVQ nr+8(FP), R15
	MOVQ a0+16(FP), R12
	MOVQ a1+24(FP), R13
	MOVQ a2+32(FP), DX
	MOVQ a3+40(FP), R10
	MOVQ a4+48(FP), R8
	MOVQ a5+56(FP), R9
	XORL SI, SI
	MOVQ $56, AX // SYS_clone
	SYSCALL
	TESTQ AX, AX
	JEQ  child
	MOVQ AX, ret+64(FP)
	RET
child:
	MOVQ R12, DI
	MOVQ R13, SI
	MOVQ R15, AX
	SYSCALL
	XORL DI, DI
	MOVQ $60, AX // SYS_exit
	SYSCALL
	INT  $3

// func i386Call(nr, a0, a1, a2, a3, a4, a5 uintptr) int32
//
// The call's sixth argument goes in BP. Nothing here uses the stack between.
TEXT ·i386Call(SB), NOSPLIT, $0-60
	MOVQ nr+0(FP), AX
	MOVQ a0+8(FP), BX
	MOVQ a1+16(FP), CX
	MOVQ a2+24(FP), DX
	MOVQ a3+32(FP), SI
	MOVQ a4+40(FP), DI
	MOVQ a5+48(FP), R9
	MOVQ BP, R12
	MOVQ R9, BP
	INT  $0x80
	MOVQ R12, BP
	MOVL AX, ret+56(FP)
	RET
