/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The mm tier: the few functions of mm/ through which page tables of pinned
 * memory change, whoever makes the change: keyed by the address space of the
 * VMA, not by the current task's. No MMU notifier is needed.
 *
 * How a change is followed. The kernel collects what it takes out of page
 * tables in a struct mmu_gather on the stack of the task: tlb_gather_mmu()
 * begins it, functions that are given it do the work, tlb_finish_mmu() ends
 * it: after the page tables have changed, before the address can be handed to
 * anybody else (the mmap lock, or the lock of the VMA or the file, is still
 * held) and before the call returns. So
 *
 *   begin: a function that does the work, with its exact range
 *   end:   tlb_finish_mmu of the same mmu_gather
 *   an end of which no begin was seen: a change that somebody missed. It has
 *   no range, so it is a loss.
 *
 * move_page_tables does without: it ends when it returns. Pages that a fault
 * replaces (copy on write) are not followed: from 5.19 on a page that is pinned
 * is its mapping's own, and is never copied (PageAnonExclusive, gup_must_unshare
 * in mm/gup.c).
 *
 * Each side is covered by two fentry programs and a kprobe, which the kernel
 * skips for different reasons (see range_start() in notifier.bpf.h). The first
 * to come does the work, the others find it done.
 *
 * A change that is in progress is known by where its mmu_gather (or the frame
 * of its function) is on the stack: stacks are aligned to their size, so 16
 * bits of the address tell. Changes nest; a task has a few entries, outermost
 * and highest on the stack first.
 */
#ifndef UMMU_MM_BPF_H
#define UMMU_MM_BPF_H

#include "syscall.bpf.h"
#include "life.bpf.h"
#include "notifier.bpf.h"
#include "core_fixes.bpf.h"

/* PARTNER_START_NS and _END_NS; tests, which are slower than hooks, set more. */
const volatile u64 mm_partner_start = PARTNER_START_NS;
const volatile u64 mm_partner_end = PARTNER_END_NS;

/* Functions that do the work. */
enum mm_function {
	MM_NONE,
	MM_UNMAP,	/* unmap_vmas */
	MM_ZAP,		/* zap_page_range_single and its successors */
	MM_PROTECT,	/* mprotect_fixup, change_protection */
	MM_MOVE,	/* move_page_tables */
};

/* Bits of inflight.entered beyond SAW_*: what gather and explain know. */
#define SAW_FIXUP 8	/* mprotect_fixup, by fentry or kprobe */
#define SAW_FIXUP_KPROBE 16
#define EXPLAINED 128	/* nothing of a pinned page changes */

/* Whether the mmu_gather is not known yet (inflight.abi): the function makes
 * its own. */
#define AWAITS_GATHER 1

/* What the programs pass on in one word: global functions take five scalars. */
#define PACK(function, saw, hook, awaits, sp) \
	((u64)(function) | (u64)(saw) << 8 | (u64)(hook) << 16 | (u64)(awaits) << 24 | ((u64)(sp) & 0xffff) << 32)
#define FUNCTION(what) ((what) & 0xff)
#define SAW(what) ((what) >> 8 & 0xff)
#define HOOK(what) ((what) >> 16 & 0xff)
#define AWAITS(what) ((what) >> 24 & 1)
#define PLACE(what) ((what) >> 32 & 0xffff)

/* Two mmu_gathers are further apart than this, hooks of one function agree
 * within it. */
#define PLACE_SLACK 64

static __always_inline bool at_place(const struct inflight *f, u64 place)
{
	return f->depth + PLACE_SLACK > place && place + PLACE_SLACK > f->depth;
}

/* Whether the mmu_gather at place is the one that f's function has made. */
static __always_inline bool is_gather_of(const struct inflight *f, u64 place)
{
	return f->abi == AWAITS_GATHER && place < f->depth;
}

/* An address space that nobody uses any more: exit_mmap tears it down, and
 * its watches die. */
static __always_inline bool is_dying(u64 mm)
{
	struct mm_struct___users *m = (void *)mm;

	return BPF_CORE_READ(m, mm_users.counter) == 0;
}

/*
 * What unmap_vmas does in a mremap: the source after its pages were moved, or
 * the end that is cut off; else what was at the destination.
 */
static __always_inline u8 kind_in_mremap(u64 start, struct task_struct *task)
{
	struct pt_regs *regs = entry_regs(task);
	u64 old, len;

#if defined(__TARGET_ARCH_x86)
	old = BPF_CORE_READ(regs, di);
	len = BPF_CORE_READ(regs, si);
#else
	old = UNTAG(BPF_CORE_READ(regs, orig_x0));
	len = BPF_CORE_READ(regs, regs[1]);
#endif
	return start >= old && start - old < page_up(len) ? UMMU_UNMAP : UMMU_REPLACE;
}

static __always_inline u8 kind_in_mm(u64 function, const struct cause *why, u64 start,
				     struct task_struct *task)
{
	switch (function) {
	case MM_PROTECT:
		return UMMU_PROTECT;
	case MM_MOVE:
		return UMMU_MOVE;
	case MM_UNMAP:
		if (why->call == CALL_MREMAP)
			return kind_in_mremap(start, task);
		return kind_of(why) == UMMU_REPLACE ? UMMU_REPLACE : UMMU_UNMAP;
	}
	return UMMU_ZAP;
}

/*
 * A function is about to change [start, end) of mm; to is where a move goes.
 * No record is ever saved because of an earlier one, except by the hooks of
 * one and the same call of the function.
 */
__noinline int mm_begin(u64 what, u64 mm, u64 start, u64 end, u64 to)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u32 tid = (u32)bpf_get_current_pid_tgid(), level, how = DO_BEGIN | DO_POST | OF_REQUEST;
	u64 key = 0, place = PLACE(what), now = bpf_ktime_get_ns();
	u8 function = FUNCTION(what), saw = SAW(what);
	struct cause why = {};
	struct inflight *f;

	if (!ON(GUARD_ARGS_ORDER)) {
		u64 swap = start;

		start = end;
		end = swap;
	}
	cause_of(&why, task);
	for (level = 0; level < RANGE_LEVELS; level++) {
		key = range_key(tid, level);
		f = bpf_map_lookup_elem(&requests, &key);
		if (!f || !f->active)
			break;
		if (f->mm == mm && f->call == function && f->c.start == start && f->c.end == end &&
		    !(f->entered & saw) && now - f->seen_ns < mm_partner_start &&
		    at_place(f, place)) {
			f->entered |= saw;
			return 0;
		}
		if (f->mm == mm && at_place(f, place) && same_place(f, &why)) {
			how |= DO_NESTED;	/* another range of the same mmu_gather */
			break;
		}
		if (place >= f->depth || !same_place(f, &why) || level == RANGE_LEVELS - 1) {
			close_ranges(tid, level);
			break;
		}
	}
	f = request_entry(key, mm);
	if (!f)
		return 0;
	f->c = no_inflight.c;
	f->c.mm = mm;
	f->c.start = start;
	f->c.end = end;
	if (function == MM_MOVE) {
		f->c.to_start = to;
		f->c.to_end = to + (end - start);
	}
	f->c.kind = kind_in_mm(function, &why, start, task);
	f->c.phase = UMMU_BEGIN;
	f->c.hook = HOOK(what);
	f->c.abi = why.call ? UMMU_ABI_NATIVE : UMMU_ABI_NONE;
	f->c.nr = why.call ? why.nr : 0;
	f->nr = why.nr;
	f->a[0] = why.a[0];
	f->a[1] = why.a[1];
	f->depth = place;
	f->seen_ns = now;
	f->call = function;
	f->abi = AWAITS(what) ? AWAITS_GATHER : 0;
	f->entered = saw;
	f->exited = 0;
	deliver(key, how);
	return 0;
}

/* An mmu_gather begins. What follows is known to be its work; what is open
 * at a lower place of the stack is over. */
__noinline int mm_gather(u64 what, u64 mm)
{
	u32 tid = (u32)bpf_get_current_pid_tgid(), level;
	u64 key = 0, place = PLACE(what);
	struct inflight *f;

	for (level = 0; level < RANGE_LEVELS; level++) {
		key = range_key(tid, level);
		f = bpf_map_lookup_elem(&requests, &key);
		if (!f || !f->active)
			break;
		if (f->mm == mm && is_gather_of(f, place)) {
			f->depth = place;
			f->abi = 0;
			return 0;
		}
		if (place + PLACE_SLACK > f->depth) {
			close_ranges(tid, level);
			break;
		}
	}
	if (level == RANGE_LEVELS)
		return 0;
	f = request_entry(key, mm);
	if (!f)
		return 0;
	f->depth = place;
	f->call = MM_NONE;
	f->abi = 0;
	f->entered = 0;
	f->exited = 0;
	return 0;
}

/* What goes on in the mmu_gather takes no pinned page away. */
__noinline int mm_explain(u64 what, u64 mm)
{
	u32 tid = (u32)bpf_get_current_pid_tgid(), level;
	u64 key = 0, place = PLACE(what);
	struct inflight *f;

	for (level = 0; level < RANGE_LEVELS; level++) {
		key = range_key(tid, level);
		f = bpf_map_lookup_elem(&requests, &key);
		if (!f || !f->active)
			break;
		if (f->mm == mm && at_place(f, place))
			return 0;	/* it does other things as well */
	}
	if (level == RANGE_LEVELS)
		return 0;
	f = request_entry(key, mm);
	if (!f)
		return 0;
	f->depth = place;
	f->entered = EXPLAINED;
	f->exited = 0;
	f->seen_ns = bpf_ktime_get_ns();
	return 0;
}

/* Whether another hook of the same end has closed f. */
static __always_inline bool is_partner_of_end(const struct inflight *f, u8 saw, u64 now)
{
	return f->exited && !(f->exited & saw) && now - f->seen_ns < mm_partner_end;
}

/* An mmu_gather is finished, or a function without one returns. */
__noinline int mm_end(u64 what, u64 mm)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u64 key = 0, place = PLACE(what), now = bpf_ktime_get_ns();
	u32 tid = (u32)bpf_get_current_pid_tgid(), level;
	bool gathered = false, inner = false;
	u8 saw = SAW(what);
	struct cause why = {};
	struct inflight *f;

	for (level = 0; level < RANGE_LEVELS; level++) {
		key = range_key(tid, level);
		f = bpf_map_lookup_elem(&requests, &key);
		if (!f)
			break;
		if (f->active) {
			if (f->mm == mm && (at_place(f, place) || is_gather_of(f, place))) {
				close_ranges(tid, level + 1);
				count_missed(f->entered, COUNT_MISSED_START);
				f->depth = place;
				f->abi = 0;
				f->exited = saw;
				f->seen_ns = now;
				f->c.phase = UMMU_END;
				f->c.hook = HOOK(what);
				/* a loss to a watch that was opened meanwhile */
				deliver(key, DO_POST | DO_PAIR | DO_END | OF_REQUEST);
				return 0;
			}
			inner = inner || (f->mm == mm && place < f->depth);
			continue;
		}
		if (f->mm == mm && at_place(f, place)) {
			if (f->entered == EXPLAINED && now - f->seen_ns < mm_partner_end) {
				count(COUNT_HARMLESS);
				return 0;
			}
			if (is_partner_of_end(f, saw, now)) {
				f->exited |= saw;
				return 0;
			}
			gathered = f->call == MM_NONE;
		}
		break;
	}
	cause_of(&why, task);
	/* hugetlb makes one of its own inside mprotect and mremap, by
	 * tlb_gather_mmu_vma() */
	if (inner && !gathered)
		return 0;
	if (is_housekeeper(task) || spares_pinned(&why, task)) {
		count(COUNT_HARMLESS);
		return 0;
	}
	count(COUNT_UNPAIRED);
	if (level == RANGE_LEVELS) {
		level--;
		close_ranges(tid, level);
	}
	f = request_entry(key, mm);
	if (!f)
		return 0;
	f->c = no_inflight.c;
	f->c.mm = mm;
	f->c.start = 0;
	f->c.end = TO_TOP;
	f->c.flags = UMMU_F_SUPERSET;
	f->c.kind = UMMU_ZAP;
	f->c.phase = UMMU_END;
	f->c.hook = HOOK(what);
	f->c.abi = UMMU_ABI_NONE;
	f->depth = place;
	f->seen_ns = now;
	f->call = MM_NONE;
	f->entered = 0;
	f->exited = saw;
	deliver(key, DO_POST | DO_PAIR | OF_REQUEST);
	return 0;
}

/* ---- what the functions are given ---- */

static __always_inline u64 space_of_vma(u64 vma)
{
	struct vm_area_struct *v = (void *)vma;

	return (u64)BPF_CORE_READ(v, vm_mm);
}

static __always_inline u64 space_of_gather(u64 tlb)
{
	struct mmu_gather *t = (void *)tlb;

	return (u64)BPF_CORE_READ(t, mm);
}

static __always_inline bool is_watched(u64 mm)
{
	if (!ON(GUARD_HOOK_THERE) || is_skipped())
		return false;
	return mm && watched(mm) && !is_dying(mm);
}

static __always_inline u64 arg_of(void *ctx, bool probed, u64 n)
{
	return probed ? probed_arg(ctx, n) : traced_arg(ctx, n);
}

static __always_inline u64 sp_of(void *ctx, bool probed)
{
	return probed ? probed_sp(ctx) : traced_sp(ctx);
}

/*
 * unmap_vmas: munmap, what mmap and mremap put something over, brk, shmdt, an
 * mmap that failed half way. Called in vms_clear_ptes() and unmap_region()
 * (mm/vma.c, mm/mmap.c) with the mappings out of the tree and the mmap lock
 * held; also in exit_mmap(), which is_dying() leaves to its tracepoint.
 */
static __always_inline int on_unmap(void *ctx, bool probed, u8 hook, u8 saw)
{
	u64 tlb = arg_of(ctx, probed, unmap_tlb), mm = space_of_gather(tlb), start, end;

	if (!is_watched(mm))
		return 0;
	if (unmap_desc_at != NO_ARG) {
		struct unmap_desc *d = (void *)arg_of(ctx, probed, unmap_desc_at);

		start = BPF_CORE_READ(d, vma_start);
		end = BPF_CORE_READ(d, vma_end);
	} else {
		start = arg_of(ctx, probed, unmap_start);
		end = arg_of(ctx, probed, unmap_end);
	}
	return mm_begin(PACK(MM_UNMAP, saw, hook, 0, tlb), mm, start, end, 0);
}

SEC("fentry/unmap_vmas")
int hook_unmap_fentry(u64 *ctx)
{
	return on_unmap(ctx, false, UMMU_HOOK_UNMAP_FENTRY, SAW_FENTRY);
}

SEC("fentry/unmap_vmas")
int hook_unmap_fentry2(u64 *ctx)
{
	return on_unmap(ctx, false, UMMU_HOOK_UNMAP_FENTRY2, SAW_FENTRY2);
}

SEC("kprobe/unmap_vmas")
int hook_unmap_kprobe(struct probe_regs *ctx)
{
	return on_unmap(ctx, true, UMMU_HOOK_UNMAP_KPROBE, SAW_KPROBE);
}

/*
 * zap_page_range_single, or what it became (the loader chooses): pages go,
 * the mapping stays. Advice (DONTNEED, GUARD_INSTALL), and for each mapping of
 * a file that is truncated, punched, or written by O_DIRECT:
 * unmap_mapping_range_tree() (mm/memory.c), by whichever process, also for
 * hugetlb by advice. Up to 6.15 it is the function that makes the mmu_gather.
 */
static __always_inline int on_zap(void *ctx, bool probed, u8 hook, u8 saw)
{
	u64 mm = space_of_vma(arg_of(ctx, probed, zap_vma)), start;
	bool awaits = zap_tlb == NO_ARG;
	u64 at;

	if (!is_watched(mm))
		return 0;
	at = awaits ? sp_of(ctx, probed) : arg_of(ctx, probed, zap_tlb);
	start = arg_of(ctx, probed, zap_start);
	return mm_begin(PACK(MM_ZAP, saw, hook, awaits, at), mm, start,
			page_up(start + arg_of(ctx, probed, zap_size)), 0);
}

SEC("fentry/zap_page_range_single")
int hook_zap_fentry(u64 *ctx)
{
	return on_zap(ctx, false, UMMU_HOOK_ZAP_FENTRY, SAW_FENTRY);
}

SEC("fentry/zap_page_range_single")
int hook_zap_fentry2(u64 *ctx)
{
	return on_zap(ctx, false, UMMU_HOOK_ZAP_FENTRY2, SAW_FENTRY2);
}

SEC("kprobe/zap_page_range_single")
int hook_zap_kprobe(struct probe_regs *ctx)
{
	return on_zap(ctx, true, UMMU_HOOK_ZAP_KPROBE, SAW_KPROBE);
}

/*
 * unmap_hugepage_range: truncation and hole punching of hugetlbfs
 * (hugetlb_vmdelete_list(), fs/hugetlbfs/inode.c), and a write that finds no
 * huge page and takes it from a child (hugetlb_wp()). Makes its mmu_gather.
 */
static __always_inline int on_hugetlb(void *ctx, bool probed, u8 hook, u8 saw)
{
	u64 mm = space_of_vma(arg_of(ctx, probed, hugetlb_vma));

	if (!is_watched(mm))
		return 0;
	return mm_begin(PACK(MM_ZAP, saw, hook, 1, sp_of(ctx, probed)), mm,
			arg_of(ctx, probed, hugetlb_start), arg_of(ctx, probed, hugetlb_end), 0);
}

SEC("fentry/unmap_hugepage_range")
int hook_hugetlb_fentry(u64 *ctx)
{
	return on_hugetlb(ctx, false, UMMU_HOOK_HUGETLB_FENTRY, SAW_FENTRY);
}

SEC("fentry/unmap_hugepage_range")
int hook_hugetlb_fentry2(u64 *ctx)
{
	return on_hugetlb(ctx, false, UMMU_HOOK_HUGETLB_FENTRY2, SAW_FENTRY2);
}

SEC("kprobe/unmap_hugepage_range")
int hook_hugetlb_kprobe(struct probe_regs *ctx)
{
	return on_hugetlb(ctx, true, UMMU_HOOK_HUGETLB_KPROBE, SAW_KPROBE);
}

/*
 * mprotect_fixup: mprotect and pkey_mprotect, for each mapping, before
 * change_protection, which it does not call where the rights are what they
 * were: then there is an mmu_gather in which nothing happens.
 */
static __always_inline int on_fixup(void *ctx, bool probed, u8 hook, u8 saw)
{
	u64 tlb = arg_of(ctx, probed, fixup_tlb), mm = space_of_gather(tlb);
	struct vm_area_struct *vma = (void *)arg_of(ctx, probed, fixup_vma);

	if (!is_watched(mm))
		return 0;
	if (bpf_core_field_exists(vma->vm_flags) &&
	    BPF_CORE_READ(vma, vm_flags) == arg_of(ctx, probed, fixup_flags))
		return mm_explain(PACK(MM_PROTECT, saw, hook, 0, tlb), mm);
	return mm_begin(PACK(MM_PROTECT, saw, hook, 0, tlb), mm, arg_of(ctx, probed, fixup_start),
			arg_of(ctx, probed, fixup_end), 0);
}

SEC("fentry/mprotect_fixup")
int hook_fixup_fentry(u64 *ctx)
{
	return on_fixup(ctx, false, UMMU_HOOK_FIXUP_FENTRY, SAW_FIXUP);
}

SEC("kprobe/mprotect_fixup")
int hook_fixup_kprobe(struct probe_regs *ctx)
{
	return on_fixup(ctx, true, UMMU_HOOK_FIXUP_KPROBE, SAW_FIXUP_KPROBE);
}

/*
 * change_protection: every change of rights of pages that are there, by
 * mprotect and userfaultfd, hugetlb included. NUMA balancing, which does the
 * same to see who uses a page, moves no pinned one; a write protection of
 * userfaultfd that is lifted takes nothing away.
 */
static __always_inline int on_protect(void *ctx, bool probed, u8 hook, u8 saw)
{
	u64 tlb = arg_of(ctx, probed, protect_tlb), mm = space_of_gather(tlb), cp;

	if (!is_watched(mm))
		return 0;
	cp = arg_of(ctx, probed, protect_cp);
	if ((cp & MM_CP_PROT_NUMA) || cp == MM_CP_UFFD_WP_RESOLVE)
		return mm_explain(PACK(MM_PROTECT, saw, hook, 0, tlb), mm);
	return mm_begin(PACK(MM_PROTECT, saw, hook, 0, tlb), mm, arg_of(ctx, probed, protect_start),
			arg_of(ctx, probed, protect_end), 0);
}

SEC("fentry/change_protection")
int hook_protect_fentry(u64 *ctx)
{
	return on_protect(ctx, false, UMMU_HOOK_PROTECT_FENTRY, SAW_FENTRY);
}

SEC("fentry/change_protection")
int hook_protect_fentry2(u64 *ctx)
{
	return on_protect(ctx, false, UMMU_HOOK_PROTECT_FENTRY2, SAW_FENTRY2);
}

SEC("kprobe/change_protection")
int hook_protect_kprobe(struct probe_regs *ctx)
{
	return on_protect(ctx, true, UMMU_HOOK_PROTECT_KPROBE, SAW_KPROBE);
}

/*
 * move_page_tables: mremap, hugetlb and several mappings at once included. It
 * uses no mmu_gather. Its end is its return; should that be missed it is
 * closed by what follows: the source is unmapped, unless MREMAP_DONTUNMAP.
 */
static __always_inline int on_move(void *ctx, bool probed, u8 hook, u8 saw)
{
	u64 mm, start, end, to;

	if (move_control_at != NO_ARG) {
		struct pagetable_move_control *c = (void *)arg_of(ctx, probed, move_control_at);

		mm = (u64)BPF_CORE_READ(c, old, vm_mm);
		start = BPF_CORE_READ(c, old_addr);
		end = BPF_CORE_READ(c, old_end);
		to = BPF_CORE_READ(c, new_addr);
	} else {
		mm = space_of_vma(arg_of(ctx, probed, move_vma));
		start = arg_of(ctx, probed, move_from);
		end = start + arg_of(ctx, probed, move_len);
		to = arg_of(ctx, probed, move_to);
	}
	if (!is_watched(mm))
		return 0;
	return mm_begin(PACK(MM_MOVE, saw, hook, 0, sp_of(ctx, probed)), mm, start, end, to);
}

SEC("fentry/move_page_tables")
int hook_move_fentry(u64 *ctx)
{
	return on_move(ctx, false, UMMU_HOOK_MOVE_FENTRY, SAW_FENTRY);
}

SEC("fentry/move_page_tables")
int hook_move_fentry2(u64 *ctx)
{
	return on_move(ctx, false, UMMU_HOOK_MOVE_FENTRY2, SAW_FENTRY2);
}

SEC("kprobe/move_page_tables")
int hook_move_kprobe(struct probe_regs *ctx)
{
	return on_move(ctx, true, UMMU_HOOK_MOVE_KPROBE, SAW_KPROBE);
}

SEC("fexit/move_page_tables")
int hook_move_fexit(u64 *ctx)
{
	u64 mm;

	if (move_control_at != NO_ARG) {
		struct pagetable_move_control *c = (void *)traced_arg(ctx, move_control_at);

		mm = (u64)BPF_CORE_READ(c, old, vm_mm);
	} else {
		mm = space_of_vma(traced_arg(ctx, move_vma));
	}
	if (!is_watched(mm))
		return 0;
	return mm_end(PACK(MM_MOVE, SAW_FENTRY, UMMU_HOOK_MOVE_FEXIT, 0, traced_sp(ctx)), mm);
}

/* tlb_gather_mmu(tlb, mm), mm/mmu_gather.c */
SEC("fentry/tlb_gather_mmu")
int hook_gather(u64 *ctx)
{
	u64 mm = traced_arg(ctx, 1);

	if (!is_watched(mm))
		return 0;
	return mm_gather(PACK(MM_NONE, SAW_FENTRY, UMMU_HOOK_GATHER, 0, traced_arg(ctx, 0)), mm);
}

/* tlb_finish_mmu(tlb), likewise. */
static __always_inline int on_finish(void *ctx, bool probed, u8 hook, u8 saw)
{
	u64 tlb = arg_of(ctx, probed, 0), mm = space_of_gather(tlb);

	if (!is_watched(mm))
		return 0;
	return mm_end(PACK(MM_NONE, saw, hook, 0, tlb), mm);
}

SEC("fentry/tlb_finish_mmu")
int hook_finish_fentry(u64 *ctx)
{
	return on_finish(ctx, false, UMMU_HOOK_FINISH_FENTRY, SAW_FENTRY);
}

SEC("fentry/tlb_finish_mmu")
int hook_finish_fentry2(u64 *ctx)
{
	return on_finish(ctx, false, UMMU_HOOK_FINISH_FENTRY2, SAW_FENTRY2);
}

SEC("kprobe/tlb_finish_mmu")
int hook_finish_kprobe(struct probe_regs *ctx)
{
	return on_finish(ctx, true, UMMU_HOOK_FINISH_KPROBE, SAW_KPROBE);
}

/*
 * Plays the kernel's part in tests of all this, on machines that have no
 * probes: {what to do, packed, address space, start, end, to}. Loaded for
 * nothing else.
 */
SEC("raw_tp/ummu_mm")
int mm_play(u64 *ctx)
{
	switch (ctx[0]) {
	case 0:
		return mm_gather(ctx[1], ctx[2]);
	case 1:
		return mm_begin(ctx[1], ctx[2], ctx[3], ctx[4], ctx[5]);
	case 2:
		return mm_explain(ctx[1], ctx[2]);
	case 3:
		return mm_end(ctx[1], ctx[2]);
	}
	return -22;	/* EINVAL */
}

#endif
