/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* Lifecycle: tasks come and go, address spaces are born and die. */
#ifndef UMMU_LIFE_BPF_H
#define UMMU_LIFE_BPF_H

#include "watch.bpf.h"

/*
 * The process that loaded the programs, as the kernel knows it: its thread
 * group in the initial pid namespace, its address space. When it ends or
 * executes another program its descriptors are closed and the hooks go; so
 * every watch must be dead by then. Three events tell, each of which comes
 * before that (the numbers are those of kernel/exit.c and fs/exec.c):
 *
 *   exit_mmap            in exit_mm(), or in exec_mmap(): before exit_files(),
 *                        but later if others use the address space too
 *   sched_process_exit   before exit_files(), of the last task
 *   sched_process_exec   descriptors were closed before, by work that the
 *                        task does on its way back to user mode
 */
u32 owner;
u64 owner_mm;

static __always_inline void owner_ends(void)
{
	struct ummu_epoch *e = epoch_page();

	owner = 0;
	owner_mm = 0;
	if (e && ON(GUARD_OWNER_DEATH)) {
		add_ordered(&e->deaths, 1);
		ADD(&e->word, UMMU_GEN_DEATH);
	}
}

/* Each program of the three events asks first, before it finds that another
 * one has done the rest. */
static __always_inline void owner_exec(struct task_struct *task)
{
	if ((u32)BPF_CORE_READ(task, tgid) == owner)
		owner_ends();
}

static __always_inline void owner_exit(struct task_struct *task)
{
	if ((u32)BPF_CORE_READ(task, tgid) == owner && !BPF_CORE_READ(task, signal, live.counter))
		owner_ends();
}

static __always_inline void owner_death(u64 mm)
{
	if (mm == owner_mm)
		owner_ends();
}

/* Lifecycle events borrow an entry for a moment; key is an address that only
 * this event can have now: of the task or of the address space. */
static __always_inline struct inflight *life_event(u64 key, u8 kind, u8 hook, u64 mm)
{
	struct inflight *f = bpf_map_lookup_elem(&requests, &key);
	struct change *c;

	if (f && f->active) {	/* of whatever had this address before */
		count(COUNT_STALE);
		deliver(key, DO_END | OF_REQUEST);
	}
	f = request_entry(key, mm);
	if (!f)
		return NULL;
	f->c = no_inflight.c;
	c = &f->c;
	c->kind = kind;
	c->phase = UMMU_END;
	c->hook = hook;
	c->abi = UMMU_ABI_NONE;
	c->mm = mm;
	return f;
}

static __always_inline void life_done(u64 key, u32 how)
{
	deliver(key, how | OF_REQUEST);
	bpf_map_delete_elem(&requests, &key);
}

/*
 * Puts a reference into an inherited place of an address space (mm not 0) or
 * of a process. A follower too many, or no room, is a loss to that follower.
 */
__noinline int give(u64 mm, u32 tgid, u32 place, u64 ref)
{
	struct ummu_status *st;
	struct space *s;
	u64 i = place;

	asm volatile("" : "+r"(i)); /* one register: the bound below holds */
	if (mm) {
		bpf_map_update_elem(&spaces, &mm, &no_space, BPF_NOEXIST);
		s = bpf_map_lookup_elem(&spaces, &mm);
	} else {
		bpf_map_update_elem(&procs, &tgid, &no_space, BPF_NOEXIST);
		s = bpf_map_lookup_elem(&procs, &tgid);
	}
	if (s && i < SPACE_REFS) {
		s->ref[i] = ref;
		return 0;
	}
	count(COUNT_SPACES_FULL);
	st = status_of(ref);
	if (st) {
		add_ordered(&st->lost, 1);
		ADD(&st->generation, UMMU_GEN_LOSS);
	}
	return 0;
}

/* Gives the watches that follow a process to a new address space or process. */
__noinline int inherit(u32 from, u64 mm, u32 tgid)
{
	struct space *p = bpf_map_lookup_elem(&procs, &from);
	u32 place = DIRECT_REFS;

	if (!p)
		return 0;
	for (u32 i = 0; i < SPACE_REFS; i++) {
		u64 ref = p->ref[i];

		if ((ref & REF_FOLLOW) && conf_of(ref))
			give(mm, tgid, place++, ref);
	}
	return 0;
}

/* sched_process_fork runs in kernel_clone() after copy_process() and before
 * the child can run, so the child is watched from its first instruction. */
static __always_inline int on_fork(struct task_struct *parent, struct task_struct *child)
{
	u64 mm = (u64)BPF_CORE_READ(parent, mm), child_mm = (u64)BPF_CORE_READ(child, mm);
	u32 tgid = BPF_CORE_READ(parent, tgid), child_tgid = BPF_CORE_READ(child, tgid);
	u64 key = (u64)child;
	struct inflight *f;

	if (!mm)
		return 0;
	if (child_tgid != tgid)
		inherit(tgid, 0, child_tgid);
	if (child_mm && child_mm != mm)
		inherit(tgid, child_mm, 0);
	if (!watched(mm))
		return 0;
	f = life_event(key, UMMU_FORK, UMMU_HOOK_SCHED_FORK, mm);
	if (!f)
		return 0;
	f->c.child_pid = child_tgid;
	f->c.child_tid = BPF_CORE_READ(child, pid);
	if (child_tgid != tgid)
		f->c.flags |= UMMU_F_NEW_PROCESS;
	if (child_mm == mm)
		f->c.flags |= UMMU_F_SHARES_SPACE;
	life_done(key, DO_POST);
	return 0;
}

/* Ends the change that a task was in, if its end was missed: the task is in
 * another address space now, or in none. */
static __always_inline void leave_change(struct inflight *f, u32 tid)
{
	if (f->active) {
		count(COUNT_STALE);
		if (ON(GUARD_EXIT_CLOSED))
			deliver(tid, DO_END);
	}
	if (f->foreign)
		foreign_end(f);
}

/* sched_process_exec runs after exec_mmap(): task->mm is the new space, which
 * user space has not run in. */
static __always_inline int on_exec(struct task_struct *task, u32 old_tid)
{
	u64 mm = (u64)BPF_CORE_READ(task, mm);
	u32 tgid = BPF_CORE_READ(task, tgid), tid = BPF_CORE_READ(task, pid);
	u64 key = (u64)task;
	struct inflight *f;

	f = bpf_map_lookup_elem(&tasks, &old_tid);
	if (f)
		leave_change(f, old_tid);
	if (old_tid != tid)
		bpf_map_delete_elem(&tasks, &old_tid);
	inherit(tgid, mm, 0);
	if (!watched(mm))
		return 0;
	f = life_event(key, UMMU_EXEC, UMMU_HOOK_SCHED_EXEC, mm);
	if (!f)
		return 0;
	f->c.child_tid = old_tid;
	life_done(key, DO_POST);
	return 0;
}

/*
 * Per task, from do_exit(). Up to 6.15 the task's mm is gone by then, so the
 * watches are found by thread group; those of the address space hear of its
 * death instead. signal->live was lowered before, the last task sees 0.
 */
static __always_inline int on_exit(struct task_struct *task)
{
	u32 tgid = BPF_CORE_READ(task, tgid), tid = BPF_CORE_READ(task, pid);
	struct inflight *f = bpf_map_lookup_elem(&tasks, &tid);
	struct space *p = bpf_map_lookup_elem(&procs, &tgid);
	bool last = BPF_CORE_READ(task, signal, live.counter) == 0;
	u64 key = (u64)task, mm = (u64)BPF_CORE_READ(task, mm);
	bool late;

	if (f) {
		leave_change(f, tid);
		bpf_map_delete_elem(&tasks, &tid);
	}
	forget_ranges(tid);
	/* Of several tasks that exit at once the first to come here may find live
	 * at 0 and remove the process. The others are found by their address
	 * space, which they still have from 6.16 on; before, they are not seen. */
	late = !p && last && mm && space_of(mm);
	if (!p && !late && !all_refs())
		return 0;
	f = life_event(key, UMMU_EXIT, UMMU_HOOK_SCHED_EXIT, mm);
	if (f) {
		if (last && !late)
			f->c.flags |= UMMU_F_LAST_TASK;
		life_done(key, late ? DO_POST : DO_POST | OF_PROC);
	}
	if (last && p)
		bpf_map_delete_elem(&procs, &tgid);
	return 0;
}

/* mmap:exit_mmap (6.1 and later) fires in exit_mmap(), when the last user of
 * the address space is gone: nobody can look up in it, nobody holds its entry. */
static __always_inline int on_space_death(u64 mm, u8 hook)
{
	struct inflight *f;

	if (!watched(mm))
		return 0;
	f = life_event(mm, UMMU_EXIT, hook, mm);
	if (f) {
		f->c.flags |= UMMU_F_SPACE_DEATH;
		f->c.end = TO_TOP;
		life_done(mm, DO_POST | DO_DEATH);
	}
	/* from 6.16 on a task lets its mm go after sched_process_exit */
	forget_ranges((u32)bpf_get_current_pid_tgid());
	if (ON(GUARD_SPACE_REMOVED)) {
		bpf_map_delete_elem(&crowds, &mm);
		bpf_map_delete_elem(&spaces, &mm);
	}
	return 0;
}

#endif
