// SPDX-License-Identifier: Apache-2.0

#include "textflag.h"

// func clone(flags uintptr, script *call, n int) (pid int)
//
// The child uses no stack, so it may have the parent's.
TEXT ·clone(SB),NOSPLIT|NOFRAME,$0-32
	MOVD	flags+0(FP), R0
	MOVD	script+8(FP), R19
	MOVD	n+16(FP), R20
	MOVD	ZR, R1
	MOVD	ZR, R2
	MOVD	ZR, R3
	MOVD	ZR, R4
	MOVD	$220, R8 // clone
	SVC
	CBZ	R0, child
	MOVD	R0, pid+24(FP)
	RET
child:
	MOVD	0(R19), R8
	MOVD	8(R19), R0
	MOVD	16(R19), R1
	MOVD	24(R19), R2
	MOVD	32(R19), R3
	MOVD	40(R19), R4
	MOVD	48(R19), R5
	SVC
	MOVD	R0, 56(R19)
	ADD	$64, R19
	SUB	$1, R20
	CBNZ	R20, child
	MOVD	ZR, R0
	MOVD	$94, R8 // exit_group
	SVC
	UNDEF
