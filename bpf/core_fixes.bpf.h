/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Differences between kernels, in what the mm tier reads: arguments of
 * functions that no header promises. The loader finds the position of each by
 * its name in the kernel's BTF and sets it here (tracer/mm.go); a name that is
 * not there, and has no other way below, is a tier refused.
 *
 * What moved, as the types of Debian's 5.10, 6.1, 6.12, 6.18 and 7.3 say, and
 * why:
 *
 *   unmap_vmas(tlb, vma, start_addr, end_addr)		5.10
 *   unmap_vmas(tlb, mt, vma, start_addr, ...)		6.1: the list of VMAs became a maple tree
 *   unmap_vmas(tlb, mas, vma, start_addr, ..., tree_end, mm_wr_locked)	6.12: its iterator; per-VMA locks
 *   unmap_vmas(tlb, unmap_desc)			7.3: the ranges are in a struct
 *
 *   mprotect_fixup(vma, ...), change_protection(vma, ...)		5.10: mprotect has no mmu_gather, and so no end to be seen
 *   mprotect_fixup(tlb, vma, ...), change_protection(tlb, vma, ...)	6.1: it has
 *   mprotect_fixup(vmi, tlb, vma, ..., newflags)	6.12: VMA iterator; the seventh argument is on the stack
 *   change_protection without newprot			6.12: it is in the VMA
 *
 *   zap_page_range_single(vma, address, size)		5.10 to 6.12: every zap passes; it makes the mmu_gather
 *   zap_page_range_single_batched(tlb, vma, ...)	6.18: advice flushes once for several ranges; the former calls it
 *   zap_vma_range_batched(tlb, vma, ...)		7.3: the same under another name
 *
 *   move_page_tables(vma, old_addr, new_vma, new_addr, len)	5.10 to 6.12
 *   move_page_tables(pagetable_move_control)			6.18: the same in a struct
 */
#ifndef UMMU_CORE_FIXES_BPF_H
#define UMMU_CORE_FIXES_BPF_H

#include "core.bpf.h"

#define NO_ARG 255	/* the function has no such argument here */

const volatile u64 unmap_tlb, unmap_start, unmap_end, unmap_desc_at;
const volatile u64 zap_tlb, zap_vma, zap_start, zap_size;
const volatile u64 hugetlb_vma, hugetlb_start, hugetlb_end;
const volatile u64 fixup_tlb, fixup_vma, fixup_start, fixup_end, fixup_flags;
const volatile u64 protect_tlb, protect_vma, protect_start, protect_end, protect_cp;
const volatile u64 move_vma, move_from, move_to, move_len, move_control_at;

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct mm_struct___users {
	struct {
		int counter;
	} mm_users;
};

struct vm_area_struct {
	struct mm_struct *vm_mm;
	unsigned long vm_flags;
};

/* include/asm-generic/tlb.h */
struct mmu_gather {
	struct mm_struct *mm;
};

/* the argument of unmap_vmas, 7.3 */
struct unmap_desc {
	unsigned long vma_start, vma_end;
};

/* the argument of move_page_tables, 6.18 */
struct pagetable_move_control {
	struct vm_area_struct *old;
	unsigned long old_addr, old_end, new_addr;
};

#pragma clang attribute pop

/* Flags of change_protection(): macros of include/linux/mm.h, which the types do
 * not tell. */
#define MM_CP_PROT_NUMA 2
#define MM_CP_UFFD_WP_RESOLVE 8

/* Argument n of a traced function. The helper is of 5.17. */
static __always_inline u64 traced_arg(void *ctx, u64 n)
{
	u64 v = 0;

	bpf_get_func_arg(ctx, n, &v);
	return v;
}

/* The kprobe's context is the register frame itself. Arguments beyond the
 * sixth are on the stack, above the return address. */
#if defined(__TARGET_ARCH_x86)
#define REG_SP (19 * 8)	/* r15 r14 r13 r12 bp bx r11 r10 r9 r8 ax cx dx si di orig_ax ip cs flags sp */
#define REG_ARGS 6
#define REG_ARG(n) ((n) < 4 ? (14 - (n)) * 8 : (13 - (n)) * 8)
#define STACK_ARGS 8
#else
#define REG_SP (31 * 8)
#define REG_ARGS 8
#define REG_ARG(n) ((n) * 8)
#define STACK_ARGS 0
#endif

static __always_inline u64 probed_sp(void *ctx)
{
	u64 sp = 0;

	bpf_probe_read_kernel(&sp, sizeof(sp), ctx + REG_SP);
	return sp;
}

static __always_inline u64 probed_arg(void *ctx, u64 n)
{
	u64 v = 0;

	if (n < REG_ARGS)
		bpf_probe_read_kernel(&v, sizeof(v), ctx + REG_ARG(n));
	else
		bpf_probe_read_kernel(&v, sizeof(v), (void *)(probed_sp(ctx) + STACK_ARGS + (n - REG_ARGS) * 8));
	return v;
}

/* What a function returns, where it returns. */
static __always_inline u64 probed_result(void *ctx)
{
	u64 v = 0;

#if defined(__TARGET_ARCH_x86)
	bpf_probe_read_kernel(&v, sizeof(v), ctx + 10 * 8); /* ax */
#else
	bpf_probe_read_kernel(&v, sizeof(v), ctx);
#endif
	return v;
}

/*
 * Where the stack was at the entry of a traced function, within some words.
 * The trampoline keeps the arguments below its saved frame pointer, that is
 * below the return address into the function, and that below the caller's.
 */
static __always_inline u64 traced_sp(void *ctx)
{
	u64 pointer = (u64)ctx, at = 0;

	/* a number, which the verifier lets us calculate with */
	bpf_probe_read_kernel(&at, sizeof(at), &pointer);
	return at + bpf_get_func_arg_cnt(ctx) * 8 + 16;
}

#endif
