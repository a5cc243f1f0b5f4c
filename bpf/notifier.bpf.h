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
#include "life.bpf.h"

/* What an event is to its reader, by the call the task is in. */
struct cause {
	u64 nr;
	u32 call;	/* enum call, CALL_NONE for all others */
	u32 advice;	/* of CALL_MADVISE */
	bool own;	/* changes nothing but the caller's own address space */
	bool fork;
	bool native;	/* surely inside a system call of the native ABI */
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

#if defined(__TARGET_ARCH_x86)
/* Whether descriptor fd of the current task is a userfaultfd. */
static __always_inline bool is_userfaultfd(struct task_struct *task, u32 fd)
{
	struct fdtable *fdt = BPF_CORE_READ(task, files, fdt);
	struct file *f = NULL, **at = BPF_CORE_READ(fdt, fd);
	char name[14] = {};

	if (fd >= BPF_CORE_READ(fdt, max_fds))
		return false;
	bpf_probe_read_kernel(&f, sizeof(f), at + fd);
	if (BPF_CORE_READ(f, f_inode, i_sb, s_magic) != 0x09041934) /* ANON_INODE_FS_MAGIC */
		return false;
	bpf_probe_read_kernel_str(name, sizeof(name), BPF_CORE_READ(f, f_path.dentry, d_name.name));
	return !__builtin_memcmp(name, "[userfaultfd]", sizeof(name));
}

static __always_inline bool advice_spares(u32 advice)
{
	return advice == 8 || advice == 20 || advice == 21 || advice == 25;
}

/*
 * Calls that move, drop or collapse pages, but none that is pinned, in
 * whatever address space: they find its reference and put it back. The event
 * comes before they look.
 */
static __always_inline bool spares_pinned(const struct cause *why, struct task_struct *task)
{
	struct pt_regs *regs = entry_regs(task);

	if (!why->native)
		return false;
	switch (why->nr) {
	case 237: case 256: case 279:	/* mbind migrate_pages move_pages */
		return true;
	case 28:			/* madvise: FREE COLD PAGEOUT COLLAPSE */
		return advice_spares(why->advice);
	case 440:			/* process_madvise, of whomever */
		return advice_spares((u32)BPF_CORE_READ(regs, r10));
	case 16:			/* ioctl: UFFDIO_MOVE */
		return (u32)BPF_CORE_READ(regs, si) == 0xc028aa05 &&
		       is_userfaultfd(task, BPF_CORE_READ(regs, di));
	}
	return false;
}
#else
#define spares_pinned(why, task) false	/* there is no such tracepoint */
#endif

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
	u32 advice;

#if defined(__TARGET_ARCH_x86)
	marked = true;
	why->nr = BPF_CORE_READ(regs, orig_ax);
	why->a[0] = BPF_CORE_READ(regs, ip);
	why->a[1] = BPF_CORE_READ(regs, sp);
	advice = BPF_CORE_READ(regs, dx);
#else
	why->nr = (u32)BPF_CORE_READ(regs, syscallno);
	why->a[0] = BPF_CORE_READ(regs, pc);
	why->a[1] = BPF_CORE_READ(regs, sp);
	advice = BPF_CORE_READ(regs, regs[2]);
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
	why->native = marked;
	why->advice = advice;
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
	case CALL_MUNMAP: case CALL_BRK: case CALL_SHMDT: case CALL_IO_DESTROY:
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

static __always_inline bool same_place(const struct inflight *f, const struct cause *why)
{
	return f->nr == (u32)why->nr && f->a[0] == why->a[0] && f->a[1] == why->a[1];
}

/* A change of nobody-knows-whose address space cannot be tracked: every watch
 * of this tier is dead. */
static __always_inline void untracked_foreign(void)
{
	struct ummu_epoch *e = epoch_page();

	if (e) {
		add_ordered(&e->untracked, 1);
		ADD(&e->word, UMMU_GEN_DEATH);
	}
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

	if (*slot >= slots_end)
		return 1;	/* none of the rest */
	if (!(conf->flags & SLOT_TRACK) || !x->f)
		return 0;
	st = status_of(ref);
	if (st)
		post(&x->f->c, ref, conf, st, x->f->c.flags, true);
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
 * each time, so the position of our arguments on the stack tells. (It differs
 * between calls where the kernel moves the stack at random at their entry; a
 * call that comes again from the same place may then look nested in the one
 * before, which stays in flight for it.)
 *
 * An event outside the calls of cause_of() goes to every watch that it
 * touches; to one in foreign hands as a loss, because it may be about others.
 */
static __always_inline int kvm_unmap(u64 start, u64 end, u64 depth, u8 hook, u8 saw)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u64 mm = (u64)BPF_CORE_READ(task, mm);
	struct cause why = {};
	struct inflight *f;
	bool nested;

	if (!ON(GUARD_HOOK_THERE) || is_skipped())
		return 0;
	if (!ON(GUARD_ARGS_ORDER)) {
		u64 first = start;

		start = end;
		end = first;
	}
	cause_of(&why, task);
	if (why.own && !space_of(mm))
		return 0;
	if (why.fork) {	/* write protection for the child; pinned pages were copied */
		if (saw == SAW_MAIN)
			count(COUNT_FORK);
		return 0;
	}
	if (spares_pinned(&why, task)) {
		if (saw == SAW_MAIN)
			count(COUNT_HARMLESS);
		return 0;
	}
	f = bpf_map_lookup_elem(&tasks, &tid);
	nested = f && (f->active || f->foreign) && same_place(f, &why) && (f->foreign != 0) == !why.own;
	if (copies && nested && !(f->entered & saw) && f->mm == mm && f->c.start == start && f->c.end == end &&
	    bpf_ktime_get_ns() - f->seen_ns < PARTNER_START_NS) {
		f->entered |= saw;	/* another copy was first */
		return 0;
	}
	/* off the stack nothing is known: what is in progress goes on */
	nested = nested && (depth < f->depth || (copies && !f->depth));
	if (f && !nested)
		close_previous(f, tid);	/* of the space it was in then */
	f = task_entry(tid, mm);
	if (!f) {
		if (!why.own)
			untracked_foreign();
		return 0;
	}
	if (!nested || !f->depth)
		f->depth = depth;
	f->c = no_inflight.c;
	f->c.mm = mm;
	f->c.start = start;
	f->c.end = end;
	f->c.kind = kind_of(&why);
	f->c.phase = UMMU_BEGIN;
	f->c.hook = hook;
	f->c.abi = why.call ? UMMU_ABI_NATIVE : UMMU_ABI_NONE;
	f->c.nr = why.call ? why.nr : 0;
	f->nr = why.nr;
	f->a[0] = why.a[0];
	f->a[1] = why.a[1];
	if (copies) {
		f->entered = saw;
		f->seen_ns = bpf_ktime_get_ns();
	}
	if (why.own) {
		deliver(tid, DO_BEGIN | DO_POST | (nested ? DO_NESTED : 0));
	} else {
		struct foreign x = { .f = f };

		if (!nested)
			foreign_begin(f);
		bpf_for_each_map_elem(&slot_conf, post_foreign, &x, 0);
	}
	return 0;
}

SEC("raw_tp/kvm_unmap_hva_range")
int hook_kvm_unmap(u64 *ctx)
{
	return kvm_unmap(ctx[0], ctx[1], (u64)ctx, UMMU_HOOK_KVM_UNMAP, SAW_MAIN);
}

/* ---- probes of the notifier calls themselves ---- */

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)
/* include/linux/mmu_notifier.h, since 5.2 */
enum mmu_notifier_event {
	MMU_NOTIFY_UNMAP,
	MMU_NOTIFY_CLEAR,
	MMU_NOTIFY_PROTECTION_VMA,
	MMU_NOTIFY_PROTECTION_PAGE,
	MMU_NOTIFY_SOFT_DIRTY,
	MMU_NOTIFY_RELEASE,
};
struct mmu_notifier_range {
	struct mm_struct *mm;
	unsigned long start, end;
	enum mmu_notifier_event event;
};
#pragma clang attribute pop

#define EVENT(name) bpf_core_enum_value(enum mmu_notifier_event, MMU_NOTIFY_##name)

#define SAW_FENTRY SAW_MAIN
#define SAW_KPROBE SAW_CLASSIC
#define SAW_FENTRY2 4
#define SAW_HOOKS 3
/* Each program of the witness finds an event once: what it finds again is
 * another event of the same range, of which the probes saw nothing. */
#define SAW_WITNESS 16
#define SAW_WITNESS_COPY 32
#define SAW_WITNESS_CLASSIC 64

/* Kernel threads that move and unmap pages, but none that is pinned. */
static __always_inline bool is_housekeeper(struct task_struct *task)
{
	u64 comm = 0;

	if (!(BPF_CORE_READ(task, flags) & PF_KTHREAD))
		return false;
	bpf_core_read(&comm, sizeof(comm), &task->comm);
	return comm == 0x746361706d6f636b ||		/* kcompact(d) */
	       comm == 0x676170656775686b ||		/* khugepag(ed) */
	       (comm & 0xffffffffffff) == 0x64706177736b || /* kswapd */
	       (comm & 0xffffffffff) == 0x646d736b;	/* ksmd */
}

/*
 * Causes that take no pinned page away: the kernel writes about itself in the
 * event, or says by who does it. Reclaim and migration unmap a page, find it
 * pinned, and put it back.
 */
static __always_inline bool is_harmless(u32 event, struct task_struct *task, const struct cause *why)
{
	if (event == EVENT(PROTECTION_PAGE) ||	/* fork, write-back: the page stays */
	    event == EVENT(SOFT_DIRTY) || event == EVENT(RELEASE))
		return true;
	return is_housekeeper(task) || spares_pinned(why, task);
}

/* Counts the hooks of one side that did not see what others saw. */
static __always_inline void count_missed(u8 seen_by, u32 first)
{
	for (u32 i = 0; i < SAW_HOOKS; i++) {
		if (!(seen_by & (1 << i)))
			count(first + i);
	}
}

/* Whether an event at address at is the one that the partner of saw counted. */
static __always_inline bool is_partner(const struct inflight *f, u8 seen_by, u8 saw, u64 at,
				       u64 window)
{
	return f->depth == at && seen_by && !(seen_by & saw) && bpf_ktime_get_ns() - f->seen_ns < window;
}

/* Begins a change of the current task, at its level of nesting. */
static __always_inline int begin_range(struct cause *why, u32 tid, u64 mm, u64 start, u64 end,
				       u32 event, u8 hook, u8 saw, u64 at)
{
	struct inflight *f;
	u64 key = 0;
	u32 level;

	for (level = 0; level < RANGE_LEVELS; level++) {
		key = range_key(tid, level);
		f = bpf_map_lookup_elem(&requests, &key);
		if (!f || !f->active)
			break;
		if (f->depth <= at || !same_place(f, why) || level == RANGE_LEVELS - 1) {
			close_ranges(tid, level);
			break;
		}
	}
	f = request_entry(key, mm);
	if (!f)
		return 0;
	if (f->exited)
		count_missed(f->exited, COUNT_MISSED_END);
	f->c = no_inflight.c;
	f->c.mm = mm;
	f->c.start = start;
	f->c.end = end;
	f->c.kind = kind_of(why);
	if (event == EVENT(PROTECTION_VMA))
		f->c.kind = UMMU_PROTECT;
	else if (f->c.kind == UMMU_PROTECT)
		f->c.kind = UMMU_ZAP;
	f->c.phase = UMMU_BEGIN;
	f->c.hook = hook;
	f->c.abi = why->call ? UMMU_ABI_NATIVE : UMMU_ABI_NONE;
	f->c.nr = why->call ? why->nr : 0;
	f->nr = why->nr;
	f->a[0] = why->a[0];
	f->a[1] = why->a[1];
	f->depth = at;
	f->seen_ns = bpf_ktime_get_ns();
	f->entered = saw;
	f->exited = 0;
	deliver(key, DO_BEGIN | DO_POST | OF_REQUEST);
	return 0;
}

/*
 * A change is known by the address of its mmu_notifier_range, on the stack of
 * the task that makes it from start to end. They nest (a huge page is split
 * inside a zap; memory is reclaimed inside anything), so a task has a few
 * entries, outermost and highest address first. One at a lower address than a
 * new one, or of another call, is over: its end was missed.
 *
 * Each side is covered three times, by two fentry programs and a kprobe, which
 * the kernel skips for different reasons: the same program is still running in
 * another task that was preempted on this processor; any process in the middle
 * of a bpf(2) map update there. The first to come does the work, the others
 * find it done. Nobody hears of a change only if all six are skipped.
 */
static __always_inline int range_start(struct mmu_notifier_range *r, u8 hook, u8 saw)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u64 mm = (u64)BPF_CORE_READ(r, mm), at = (u64)r, key = 0;
	u32 tid = (u32)bpf_get_current_pid_tgid(), event = BPF_CORE_READ(r, event);
	u64 start = BPF_CORE_READ(r, start), end = BPF_CORE_READ(r, end);
	struct cause why = {};
	struct inflight *f;
	u32 level;

	if (!ON(GUARD_HOOK_THERE) || is_skipped())
		return 0;
	if (!ON(GUARD_ARGS_ORDER)) {
		u64 first = start;

		start = end;
		end = first;
	}
	if (!space_of(mm)) {
		set_aside(tid, start, end);
		return 0;
	}
	for (level = 0; level < RANGE_LEVELS; level++) {
		key = range_key(tid, level);
		f = bpf_map_lookup_elem(&requests, &key);
		if (!f || !f->active)
			break;
		if (f->mm == mm && f->c.start == start && f->c.end == end && is_partner(f, f->entered, saw, at, PARTNER_START_NS)) {
			f->entered |= saw;
			return 0;
		}
	}
	cause_of(&why, task);
	if (is_harmless(event, task, &why)) {
		count(COUNT_HARMLESS);
		set_aside(tid, start, end);
		return 0;
	}
	return begin_range(&why, tid, mm, start, end, event, hook, saw, at);
}

static __always_inline int range_end(struct mmu_notifier_range *r, u8 hook, u8 saw)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u64 mm = (u64)BPF_CORE_READ(r, mm), at = (u64)r, key = 0;
	u64 start = BPF_CORE_READ(r, start), end = BPF_CORE_READ(r, end);
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct cause why = {};
	struct inflight *f;
	u32 level;

	if (!ON(GUARD_HOOK_THERE) || is_skipped())
		return 0;
	if (!space_of(mm)) {
		take_back(tid, start, end);
		return 0;
	}
	for (level = 0; level < RANGE_LEVELS; level++) {
		key = range_key(tid, level);
		f = bpf_map_lookup_elem(&requests, &key);
		if (!f)
			break;
		if (f->active && f->mm == mm && (f->depth == at || (!f->depth && f->c.start == start && f->c.end == end))) {
			count_missed(f->entered, COUNT_MISSED_START);
			f->depth = at;
			close_ranges(tid, level + 1);
			f->exited = saw;
			f->seen_ns = bpf_ktime_get_ns();
			f->c.phase = UMMU_END;
			f->c.hook = hook;
			/* a loss to a watch that was opened meanwhile */
			deliver(key, DO_POST | DO_PAIR | DO_END | OF_REQUEST);
			return 0;
		}
		if (f->active)
			continue;
		if (f->mm == mm && is_partner(f, f->exited, saw, at, PARTNER_END_NS)) {
			f->exited |= saw;
			return 0;
		}
		break;
	}
	cause_of(&why, task);
	if (is_harmless(BPF_CORE_READ(r, event), task, &why)) {
		take_back(tid, start, end);
		return 0;
	}
	/* neither hook saw the start, or the change is older than the watch */
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
	f->c.start = start;
	f->c.end = end;
	f->c.kind = UMMU_ZAP;
	f->c.phase = UMMU_END;
	f->c.hook = hook;
	f->c.abi = UMMU_ABI_NONE;
	f->depth = at;
	f->seen_ns = bpf_ktime_get_ns();
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

SEC("fentry/__mmu_notifier_invalidate_range_start")
int hook_start_fentry2(u64 *ctx)
{
	return range_start((void *)ctx[0], UMMU_HOOK_NOTIFIER_START_FENTRY2, SAW_FENTRY2);
}

SEC("fentry/__mmu_notifier_invalidate_range_end")
int hook_end_fentry2(u64 *ctx)
{
	return range_end((void *)ctx[0], UMMU_HOOK_NOTIFIER_END_FENTRY2, SAW_FENTRY2);
}

/*
 * kvm:kvm_unmap_hva_range again, for processes that keep a virtual machine:
 * inside __mmu_notifier_invalidate_range_start, after its probes, with the
 * same range. A program of a raw tracepoint is never skipped before 7.0, so it
 * sees what all of them missed. In a call that changes only the caller's own
 * address space it begins the change itself, with depth 0 for unknown; for
 * others it is a loss to everybody.
 */
static __always_inline int witness(u64 start, u64 end, u8 hook, u8 saw)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u64 mm, now = bpf_ktime_get_ns();
	struct cause why = {};
	struct unwatched *aside;
	struct ummu_epoch *e;

	if (!ON(GUARD_HOOK_THERE) || is_skipped())
		return 0;
	for (u32 level = 0; level < RANGE_LEVELS; level++) {
		u64 key = range_key(tid, level);
		struct inflight *f = bpf_map_lookup_elem(&requests, &key);

		if (!f || !f->active)
			break;
		if (f->c.start == start && f->c.end == end && !(f->entered & saw) && now - f->seen_ns < PARTNER_END_NS) {
			f->entered |= saw;
			return 0;
		}
	}
	aside = is_aside(tid, start, end);
	if (aside && !(aside->seen & saw)) {
		aside->seen |= saw;
		return 0;
	}
	cause_of(&why, task);
	mm = (u64)BPF_CORE_READ(task, mm);
	if (why.fork || (why.own && !space_of(mm)))
		return 0;
	count(COUNT_WITNESS);
	if (why.own)
		return begin_range(&why, tid, mm, start, end, EVENT(UNMAP), hook, saw, 0);
	e = epoch_page();
	if (e) {
		add_ordered(&e->misses, 1);
		ADD(&e->word, UMMU_GEN_LOSS);
	}
	set_aside(tid, start, end);	/* told, for a copy of this program */
	aside = is_aside(tid, start, end);
	if (aside)
		aside->seen = saw;
	return 0;
}

SEC("raw_tp/kvm_unmap_hva_range")
int hook_kvm_witness(u64 *ctx)
{
	return witness(ctx[0], ctx[1], UMMU_HOOK_KVM_WITNESS, SAW_WITNESS);
}

#if defined(__TARGET_ARCH_x86)
#define FIRST_ARG(regs) ((void *)(regs)->di)
#else
#define FIRST_ARG(regs) ((void *)(regs)->regs[0])
#endif

/* exit_mmap(mm) itself, at its beginning, where there is no tracepoint in it. */
SEC("fentry/exit_mmap")
int hook_space_death_fentry(u64 *ctx)
{
	u64 pointer = ctx[0], mm = 0;

	/* before 5.12 a typed pointer must not be given to a global function */
	bpf_probe_read_kernel(&mm, sizeof(mm), &pointer);
	owner_death(mm);
	return on_space_death(mm, UMMU_HOOK_EXIT_MMAP_FENTRY);
}

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

SEC("kprobe/exit_mmap")
int hook_space_death_kprobe(struct probe_regs *regs)
{
	owner_death((u64)FIRST_ARG(regs));
	return on_space_death((u64)FIRST_ARG(regs), UMMU_HOOK_EXIT_MMAP_KPROBE);
}

#endif
