/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The notifier tiers: what the kernel tells MMU notifiers. They hear of every
 * change of an address space that has (or had) a notifier, whoever makes it
 * and by whatever path, before the page tables change, with the exact range
 * (include/linux/mmu_notifier.h). Nothing here runs for other processes.
 */
#ifndef UMMU_NOTIFIER_BPF_H
#define UMMU_NOTIFIER_BPF_H

#include "syscall.bpf.h"

/* What an event is to its reader, by the call the task is in. */
struct cause {
	u64 nr;
	u32 call;	/* enum call, CALL_NONE for all others */
	bool own;	/* changes nothing but the caller's own address space */
	bool fork;
	u64 a[2];
};

static __always_inline bool is_fork(u64 nr)
{
#if defined(__TARGET_ARCH_x86)
	return nr == 56 || nr == 57 || nr == 58 || nr == 435; /* clone fork vfork clone3 */
#else
	return nr == 220 || nr == 435; /* clone clone3 */
#endif
}

/* The registers a task entered the kernel with. */
static __always_inline struct pt_regs *entry_regs(struct task_struct *task)
{
	if (bpf_core_enum_value_exists(enum bpf_func_id___regs, BPF_FUNC_task_pt_regs___regs))
		return (struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf());
	return BPF_CORE_READ(task, stack) + THREAD_SIZE - bpf_core_type_size(struct pt_regs);
}

/*
 * Inside these calls a task can change no other address space, so an event is
 * about its own: unlike truncation, process_madvise, ptrace, a fault, or
 * advice that is about pages and not about the mapping (REMOVE, PAGEOUT,
 * COLLAPSE, POPULATE_WRITE, HWPOISON, ...). Calls of other ABIs are not
 * looked at.
 *
 * Inside: until the call has a result. On its way back to user mode the task
 * does work for others under the same call number, io_uring's requests and
 * the last close of files among it. On x86-64 ax is -ENOSYS until then
 * (arch/x86/entry); arm64 has no such mark, and no such tracepoint.
 */
static __always_inline void cause_of(struct cause *why, struct task_struct *task)
{
	struct pt_regs *regs = entry_regs(task);
	struct call_site site = {};
	bool marked = false;
	u64 advice;

#if defined(__TARGET_ARCH_x86)
	marked = true;
	why->nr = BPF_CORE_READ(regs, orig_ax);
	why->a[0] = BPF_CORE_READ(regs, ip);
	why->a[1] = BPF_CORE_READ(regs, sp);
	advice = (u32)BPF_CORE_READ(regs, dx);
#else
	why->nr = (u32)BPF_CORE_READ(regs, syscallno);
	why->a[0] = BPF_CORE_READ(regs, pc);
	why->a[1] = BPF_CORE_READ(regs, sp);
	advice = (u32)BPF_CORE_READ(regs, regs[2]);
#endif
	if (BPF_CORE_READ(task, flags) & (PF_IO_WORKER | PF_KTHREAD))
		return;
	if (why->nr >= NR_MAX)
		return;
#if defined(__TARGET_ARCH_x86)
	if ((s64)BPF_CORE_READ(regs, ax) != -ENOSYS)
		return;
#endif
	identify(&site, task, why->nr);
	if (site.abi != UMMU_ABI_NATIVE)
		return;
	if (is_fork(why->nr)) {
		why->fork = why->own = marked;
		return;
	}
	why->call = site.call;
	switch (site.call) {
	case CALL_MUNMAP: case CALL_MMAP: case CALL_MREMAP: case CALL_MPROTECT:
	case CALL_PKEY_MPROTECT: case CALL_BRK: case CALL_SHMAT: case CALL_SHMDT:
		why->own = marked;
		return;
	case CALL_MADVISE:	/* DONTNEED, FREE, DONTNEED_LOCKED, GUARD_INSTALL */
		why->own = marked && (advice == 4 || advice == 8 || advice == 24 || advice == 102);
		return;
	}
}

static __always_inline u8 kind_of(const struct cause *why)
{
	switch (why->call) {
	case CALL_MUNMAP: case CALL_BRK: case CALL_SHMDT:
		return UMMU_UNMAP;
	case CALL_MMAP: case CALL_SHMAT: case CALL_REMAP_FILE_PAGES:
		return UMMU_REPLACE;
	case CALL_MREMAP:
		return UMMU_MOVE;
	case CALL_MPROTECT: case CALL_PKEY_MPROTECT:
		return UMMU_PROTECT;
	}
	return UMMU_ZAP;
}

static __always_inline struct ummu_epoch *epoch_page(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&epoch, &zero);
}

/* A change of nobody-knows-whose address space ends. */
static __always_inline void foreign_end(struct inflight *f)
{
	struct ummu_epoch *e = epoch_page();

	if (e)
		ADD(&e->ended, 1);
	f->foreign = 0;
}

/* A change of nobody-knows-whose address space cannot be tracked: every watch
 * of this tier is dead. */
static __always_inline void untracked_foreign(void)
{
	struct ummu_epoch *e = epoch_page();

	if (e)
		ADD(&e->word, UMMU_GEN_DEATH);
}

static __always_inline void close_previous(struct inflight *f, u32 tid)
{
	if (f->active)
		deliver(tid, DO_END);
	if (f->foreign)
		foreign_end(f);
}

struct foreign {
	struct inflight *f;
};

/* One slot of slot_conf: any watch whose interest the range touches. */
static long post_foreign(void *map, u32 *slot, struct slot_conf *conf, struct foreign *x)
{
	u64 ref = (u64)conf->incarnation << REF_SHIFT | *slot;
	struct ummu_status *st;

	if (!(conf->flags & SLOT_TRACK) || !x->f)
		return 0;
	st = status_of(ref);
	if (st)
		post(&x->f->c, ref, conf, st, x->f->c.flags);
	return 0;
}

/*
 * kvm:kvm_unmap_hva_range(start, end), x86 from 5.13: in KVM's
 * invalidate_range_start, for a process that holds a virtual machine, even an
 * empty one. Before the change, exact; no address space, no cause, no end.
 *
 * An end is what comes next of the same task: its next event, or its exit.
 * Until then the change counts as in flight (whoever registers asks the task
 * iterator, see list_tasks). Events nest (a huge page is split inside a zap):
 * one that comes from deeper in the stack of the same call is part of the
 * change that is in progress. The notifier is called through the same frames
 * each time, so the position of our arguments on the stack tells.
 *
 * An event outside the calls of cause_of() goes to every watch that it
 * touches.
 */
SEC("raw_tp/kvm_unmap_hva_range")
int hook_kvm_unmap(u64 *ctx)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u64 mm = (u64)BPF_CORE_READ(task, mm), depth = (u64)ctx;
	struct cause why = {};
	struct inflight *f;
	bool nested;

	cause_of(&why, task);
	if (why.own && !space_of(mm))
		return 0;
	if (why.fork) {	/* write protection for the child; pinned pages were copied */
		count(COUNT_FORK);
		return 0;
	}
	f = bpf_map_lookup_elem(&tasks, &tid);
	nested = f && (f->active || f->foreign) && f->nr == (u32)why.nr && f->a[0] == why.a[0] &&
		 f->a[1] == why.a[1] && depth < f->depth && (f->foreign != 0) == !why.own;
	if (f && !nested)
		close_previous(f, tid);	/* of the space it was in then */
	f = task_entry(tid, mm);
	if (!f) {
		if (!why.own)
			untracked_foreign();
		return 0;
	}
	if (!nested)
		f->depth = depth;
	f->c = no_inflight.c;
	f->c.mm = mm;
	f->c.start = ctx[0];
	f->c.end = ctx[1];
	f->c.kind = kind_of(&why);
	f->c.phase = UMMU_BEGIN;
	f->c.hook = UMMU_HOOK_KVM_UNMAP;
	f->c.abi = why.call ? UMMU_ABI_NATIVE : UMMU_ABI_NONE;
	f->c.nr = why.call ? why.nr : 0;
	f->nr = why.nr;
	f->a[0] = why.a[0];
	f->a[1] = why.a[1];
	if (why.own) {
		deliver(tid, nested ? DO_POST : DO_BEGIN | DO_POST);
	} else {
		struct ummu_epoch *e = epoch_page();
		struct foreign x = { .f = f };

		if (e && !nested) {
			f->foreign = 1;	/* before it counts: see deliver() */
			add_ordered(&e->begun, 1);
		}
		bpf_for_each_map_elem(&slot_conf, post_foreign, &x, 0);
	}
	return 0;
}

/* ---- probes of the notifier calls themselves ---- */

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
struct mmu_notifier_range {
	struct mm_struct *mm;
	unsigned long start, end;
	unsigned int event;
};
#pragma clang attribute pop

/* enum mmu_notifier_event: causes that take no pinned page away. */
#define MMU_NOTIFY_PROTECTION_VMA 2
#define MMU_NOTIFY_PROTECTION_PAGE 3
#define MMU_NOTIFY_SOFT_DIRTY 4
#define MMU_NOTIFY_RELEASE 5

#define SAW_FENTRY SAW_MAIN
#define SAW_KPROBE SAW_CLASSIC

/*
 * A change is known by the address of its mmu_notifier_range, which lies on
 * the stack of the task that makes it from start to end; ranges nest. Each
 * side is covered twice, by fentry and kprobe, which the kernel skips for
 * different reasons; the second to come finds the first's work done.
 */
static __always_inline int range_start(struct mmu_notifier_range *r, u8 hook, u8 saw)
{
	u64 mm = (u64)BPF_CORE_READ(r, mm), key = (u64)r;
	u64 start = BPF_CORE_READ(r, start), end = BPF_CORE_READ(r, end);
	u32 event = BPF_CORE_READ(r, event);
	struct cause why = {};
	struct inflight *f;

	if (!space_of(mm))
		return 0;
	if (event == MMU_NOTIFY_PROTECTION_PAGE || event == MMU_NOTIFY_SOFT_DIRTY ||
	    event == MMU_NOTIFY_RELEASE) {
		count(COUNT_HARMLESS);
		return 0;
	}
	f = bpf_map_lookup_elem(&requests, &key);
	if (f && f->active) {
		if (!(f->entered & saw) && f->mm == mm && f->c.start == start && f->c.end == end) {
			f->entered |= saw;
			return 0;
		}
		count(COUNT_STALE);
		deliver(key, DO_END | OF_REQUEST);
	}
	f = request_entry(key, mm);
	if (!f)
		return 0;
	cause_of(&why, (void *)bpf_get_current_task());
	f->c = no_inflight.c;
	f->c.mm = mm;
	f->c.start = start;
	f->c.end = end;
	f->c.kind = event == MMU_NOTIFY_PROTECTION_VMA ? UMMU_PROTECT : kind_of(&why);
	f->c.phase = UMMU_BEGIN;
	f->c.hook = hook;
	f->c.abi = why.call ? UMMU_ABI_NATIVE : UMMU_ABI_NONE;
	f->c.nr = why.call ? why.nr : 0;
	f->entered = saw;
	f->exited = 0;
	deliver(key, DO_BEGIN | DO_POST | OF_REQUEST);
	return 0;
}

static __always_inline int range_end(struct mmu_notifier_range *r, u8 hook, u8 saw)
{
	u64 mm = (u64)BPF_CORE_READ(r, mm), key = (u64)r;
	u32 event = BPF_CORE_READ(r, event);
	struct inflight *f;

	if (!space_of(mm))
		return 0;
	if (event == MMU_NOTIFY_PROTECTION_PAGE || event == MMU_NOTIFY_SOFT_DIRTY ||
	    event == MMU_NOTIFY_RELEASE)
		return 0;
	f = bpf_map_lookup_elem(&requests, &key);
	if (f && f->active) {
		f->exited = saw;
		deliver(key, DO_END | OF_REQUEST);
		return 0;
	}
	if (f && f->exited && !(f->exited & saw) && f->mm == mm) {
		bpf_map_delete_elem(&requests, &key);	/* the partner was first */
		return 0;
	}
	/* neither hook saw the start */
	count(COUNT_UNPAIRED);
	f = request_entry(key, mm);
	if (!f)
		return 0;
	f->c = no_inflight.c;
	f->c.mm = mm;
	f->c.start = BPF_CORE_READ(r, start);
	f->c.end = BPF_CORE_READ(r, end);
	f->c.kind = UMMU_ZAP;
	f->c.phase = UMMU_END;
	f->c.hook = hook;
	f->c.abi = UMMU_ABI_NONE;
	f->exited = saw;
	deliver(key, DO_POST | DO_PAIR | OF_REQUEST);
	return 0;
}

/*
 * mm/mmu_notifier.c, called through an inline that first tests whether the
 * address space has notifiers; not inlined itself on 5.10 to 7.3.
 */
SEC("fentry/__mmu_notifier_invalidate_range_start")
int hook_start_fentry(u64 *ctx)
{
	return range_start((void *)ctx[0], UMMU_HOOK_NOTIFIER_START_FENTRY, SAW_FENTRY);
}

SEC("fentry/__mmu_notifier_invalidate_range_end")
int hook_end_fentry(u64 *ctx)
{
	return range_end((void *)ctx[0], UMMU_HOOK_NOTIFIER_END_FENTRY, SAW_FENTRY);
}

#if defined(__TARGET_ARCH_x86)
#define FIRST_ARG(regs) ((void *)(regs)->di)
#else
#define FIRST_ARG(regs) ((void *)(regs)->regs[0])
#endif

/* The kprobe's context is the register frame itself, not a kernel pointer. */
struct probe_regs {
#if defined(__TARGET_ARCH_x86)
	u64 r15, r14, r13, r12, bp, bx, r11, r10, r9, r8, ax, cx, dx, si, di;
#else
	u64 regs[31];
#endif
};

SEC("kprobe/__mmu_notifier_invalidate_range_start")
int hook_start_kprobe(struct probe_regs *regs)
{
	return range_start(FIRST_ARG(regs), UMMU_HOOK_NOTIFIER_START_KPROBE, SAW_KPROBE);
}

SEC("kprobe/__mmu_notifier_invalidate_range_end")
int hook_end_kprobe(struct probe_regs *regs)
{
	return range_end(FIRST_ARG(regs), UMMU_HOOK_NOTIFIER_END_KPROBE, SAW_KPROBE);
}

#endif
