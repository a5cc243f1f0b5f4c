//go:build ignore
// SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause
/*
 * The syscall tier: attachments. Logic is in *.bpf.h.
 *
 * It sees what tasks ask for: munmap, mmap over something, mremap, mprotect,
 * pkey_mprotect, madvise, process_madvise, brk, shmat, shmdt,
 * remap_file_pages and io_uring's madvise, in the native and the 32-bit ABI.
 * It misses what others do to the pages behind a mapping: truncation and hole
 * punching of files, O_DIRECT writes, userfaultfd write protection.
 */
#include "syscall.bpf.h"
#include "life.bpf.h"
#include "notifier.bpf.h"
#include "mm.bpf.h"
#include "copies.bpf.h"
#include "registrations.bpf.h"
#include "watchdog.bpf.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/*
 * raw_syscalls:sys_enter. In syscall_trace_enter() (kernel/entry/common.c),
 * after ptrace and seccomp had their say, before the call runs: what is
 * decoded here is what the kernel will do. All ABIs, every task. Raw
 * tracepoint programs are not skipped up to 6.x; 7.x runs them preemptible
 * and may skip one that interrupts itself: see the partners below, and
 * copies.bpf.h.
 */
SEC("tp_btf/sys_enter")
int hook_sys_enter(u64 *ctx)
{
	return any_enter((struct pt_regs *)ctx[0], ctx[1], UMMU_HOOK_SYS_ENTER, SAW_MAIN);
}

/*
 * raw_syscalls:sys_exit. In syscall_exit_work(), after the call, before the
 * task sees the result. Also the information records: new mappings.
 */
SEC("tp_btf/sys_exit")
int hook_sys_exit(u64 *ctx)
{
	return any_exit((struct pt_regs *)ctx[0], ctx[1], UMMU_HOOK_SYS_EXIT, SAW_MAIN);
}

/*
 * Partners: the classic per-call tracepoints of the three calls that matter
 * most. Another program type with another way of being skipped (perf buffers
 * and bpf_prog_active instead of the per-program counter); whichever of the
 * two sees a call first makes the record. They do not fire for 32-bit calls.
 */
/* Reading past the call's last argument would be refused at attach time
 * (trace_event_get_offsets(), kernel/trace/trace_events.c): n is exact. */
static __always_inline int classic_enter(struct enter_record *r, u32 call, u8 hook, int n)
{
	struct call_site site = {
		.hook = hook, .saw = SAW_CLASSIC, .call = call, .nr = r->nr & ~X32_BIT,
		.abi = r->nr & X32_BIT ? UMMU_ABI_X32 : UMMU_ABI_NATIVE,
	};

	if (!ON(GUARD_PARTNER_RESCUE))
		return 0;
	for (int i = 0; i < n; i++)
		site.k.a[i] = r->args[i];
	return enter(&site, (void *)bpf_get_current_task());
}

static __always_inline int classic_leave(struct exit_record *r, u32 call, u8 hook)
{
	struct call_site site = {
		.hook = hook, .saw = SAW_CLASSIC, .call = call, .nr = r->nr & ~X32_BIT,
		.abi = r->nr & X32_BIT ? UMMU_ABI_X32 : UMMU_ABI_NATIVE,
	};

	return leave(&site, (void *)bpf_get_current_task(), r->ret);
}

SEC("tracepoint/syscalls/sys_enter_munmap")
int hook_enter_munmap(struct enter_record *r)
{
	return classic_enter(r, CALL_MUNMAP, UMMU_HOOK_ENTER_MUNMAP, 2);
}

SEC("tracepoint/syscalls/sys_enter_mremap")
int hook_enter_mremap(struct enter_record *r)
{
	return classic_enter(r, CALL_MREMAP, UMMU_HOOK_ENTER_MREMAP, 5);
}

SEC("tracepoint/syscalls/sys_enter_mprotect")
int hook_enter_mprotect(struct enter_record *r)
{
	return classic_enter(r, CALL_MPROTECT, UMMU_HOOK_ENTER_MPROTECT, 3);
}

SEC("tracepoint/syscalls/sys_exit_munmap")
int hook_exit_munmap(struct exit_record *r)
{
	return classic_leave(r, CALL_MUNMAP, UMMU_HOOK_EXIT_MUNMAP);
}

SEC("tracepoint/syscalls/sys_exit_mremap")
int hook_exit_mremap(struct exit_record *r)
{
	return classic_leave(r, CALL_MREMAP, UMMU_HOOK_EXIT_MREMAP);
}

SEC("tracepoint/syscalls/sys_exit_mprotect")
int hook_exit_mprotect(struct exit_record *r)
{
	return classic_leave(r, CALL_MPROTECT, UMMU_HOOK_EXIT_MPROTECT);
}

/*
 * io_uring:io_uring_submit_req (6.3; io_uring_submit_sqe before). In
 * io_submit_sqe() after the request was prepared, before it can run; current
 * is the submitter or the SQPOLL thread, both in the ring's address space.
 */
SEC("raw_tp/io_uring_submit_req")
int hook_uring_submit(u64 *ctx)
{
	return uring_begin((void *)ctx[0], UMMU_HOOK_URING_SUBMIT, SAW_MAIN);
}

/* io_uring:io_uring_queue_async_work. Each madvise passes here on its way to
 * a worker: also one submitted before the watch was there. */
SEC("raw_tp/io_uring_queue_async_work")
int hook_uring_queue(u64 *ctx)
{
	return uring_begin((void *)ctx[0], UMMU_HOOK_URING_QUEUE, SAW_MAIN);
}

/* io_uring:io_uring_complete(ctx, req, ...), 5.17 and later: when the result
 * is about to be visible, before the next request of the chain runs, which a
 * worker does without another event. Between two there may be a timeout of the
 * first. A request without a result (CQE_SKIP_SUCCESS) has
 * no such event: it stays open until its memory is used for another. */
SEC("raw_tp/io_uring_complete")
int hook_uring_complete(u64 *ctx)
{
	return uring_complete((void *)ctx[1], UMMU_HOOK_URING_COMPLETE);
}

/* Lifecycle. With copies (copies.bpf.h) the one that runs first, in whatever
 * order the kernel has them, does it. */

/* sched:sched_process_fork(parent, child) */
SEC("raw_tp/sched_process_fork")
int hook_fork(u64 *ctx)
{
	struct task_struct *parent = (void *)ctx[0], *child = (void *)ctx[1];

	return copies && has_inherited(parent, child) ? 0 : on_fork(parent, child);
}

/* sched:sched_process_exec(task, old pid, bprm) */
SEC("raw_tp/sched_process_exec")
int hook_exec(u64 *ctx)
{
	struct task_struct *task = (void *)ctx[0];

	owner_exec(task);
	return copies && has_kept(task) ? 0 : on_exec(task, (u32)ctx[1]);
}

/* sched:sched_process_exit(task) */
SEC("raw_tp/sched_process_exit")
int hook_exit(u64 *ctx)
{
	struct task_struct *task = (void *)ctx[0];
	u32 tid = (u32)bpf_get_current_pid_tgid();

	owner_exit(task);
	if (stacks)
		forget_registering(tid);
	return copies && was_set_aside(tid, ctx[0], ctx[0]) ? 0 : on_exit(task);
}

/* mmap:exit_mmap(mm), 6.1 and later */
SEC("raw_tp/exit_mmap")
int hook_space_death(u64 *ctx)
{
	u64 mm = ctx[0];
	u32 tid = (u32)bpf_get_current_pid_tgid();

	owner_death(mm);
	return copies && was_set_aside(tid, mm, mm) && !space_of(mm) ? 0 : on_space_death(mm, UMMU_HOOK_EXIT_MMAP);
}

/* ---- control: run by the owner through BPF_PROG_TEST_RUN ---- */

#define CTL_WATCH_SPACE	1	/* {op, mm, tgid or 0, ref}; tgid: followed, and told of exits */
#define CTL_WATCH_ALL	2	/* {op, 0, 0, ref} */
#define CTL_UNWATCH_ALL	3	/* {op, 0, 0, ref} */
#define CTL_EPOCH	4	/* {op, addend of the epoch word, misses, deaths} */
#define CTL_KILL	5	/* {op, addend of the generation, 0, ref} */
#define CTL_UNWATCH_SPACE 6	/* {op, mm, 0, ref} */
#define CTL_OWN		7	/* {op, 0, 0, 0}: the caller is the owner */

/* The place that was taken, or -1. */
static __always_inline int add_ref(u64 *refs, u32 n, u64 ref)
{
	for (u32 i = 0; i < n; i++) {
		if (!conf_of(refs[i])) {
			refs[i] = ref;
			return i;
		}
	}
	return -1;
}

static __always_inline int add_to(void *map, const void *key, u64 ref)
{
	struct space *s = bpf_map_lookup_elem(map, key);

	if (!s) {
		bpf_map_update_elem(map, key, &no_space, BPF_NOEXIST);
		s = bpf_map_lookup_elem(map, key);
		if (!s)
			return -12;	/* ENOMEM */
	}
	return add_ref(s->ref, DIRECT_REFS, ref) < 0 ? -28 : 0; /* ENOSPC */
}

/* The other direct references of an address space. */
static __always_inline int add_to_crowd(u64 mm, u64 ref)
{
	struct space *s = bpf_map_lookup_elem(&spaces, &mm);
	struct crowd *crowd = bpf_map_lookup_elem(&crowds, &mm);
	int i;

	if (!crowd) {
		bpf_map_update_elem(&crowds, &mm, &no_crowd, BPF_NOEXIST);
		crowd = bpf_map_lookup_elem(&crowds, &mm);
	}
	if (!s || !crowd)
		return -12;	/* ENOMEM */
	i = add_ref(crowd->ref, CROWD_REFS, ref);
	if (i < 0)
		return -28;
	if (s->crowd <= (u32)i)
		s->crowd = i + 1;
	return 0;
}

static __always_inline u32 remove_ref(u64 *refs, u32 n, u64 ref)
{
	u32 used = 0;

	for (u32 i = 0; i < n; i++) {
		if (refs[i] == ref)
			refs[i] = 0;
		if (refs[i])
			used = i + 1;
	}
	return used;
}

/*
 * The only writer of direct references, so that entries are changed in place:
 * an update from user space would replace the element, and a hook that is
 * reading the old one could see it reused. The caller runs one at a time.
 */
SEC("raw_tp/ummu_control")
int control(u64 *ctx)
{
	u64 op = ctx[0], mm = ctx[1], ref = ctx[3];
	u32 tgid = ctx[2], zero = 0;
	struct all_refs *all;
	int err;

	switch (op) {
	case CTL_WATCH_SPACE:
		err = add_to(&spaces, &mm, ref);
		if (err == -28 && !tgid)
			err = add_to_crowd(mm, ref);
		if (!err && tgid)
			err = add_to(&procs, &tgid, ref);
		add_ordered(&opened, 1);
		return err;
	case CTL_WATCH_ALL:
	case CTL_UNWATCH_ALL:
		all = bpf_map_lookup_elem(&all_spaces, &zero);
		if (!all)
			return -12;
		if (op == CTL_WATCH_ALL) {
			if (add_ref(all->ref, ALL_REFS, ref) < 0)
				return -28;
			all->any = 1;
			return 0;
		}
		all->any = 0;
		for (int i = 0; i < ALL_REFS; i++) {
			if (all->ref[i] == ref)
				all->ref[i] = 0;
			if (all->ref[i])
				all->any = 1;
		}
		return 0;
	case CTL_EPOCH: {
		struct ummu_epoch *e = epoch_page();

		if (!e)
			return -12;
		add_ordered(&e->misses, ctx[2]);
		add_ordered(&e->deaths, ctx[3]);
		ADD(&e->word, ctx[1]);
		return 0;
	}
	case CTL_KILL: {
		struct ummu_status *st = status_of(ref);

		if (!st)
			return -2;	/* ENOENT */
		ADD(&st->deaths, 1);
		ADD(&st->generation, ctx[1]);
		return 0;
	}
	case CTL_UNWATCH_SPACE: {
		struct space *s = bpf_map_lookup_elem(&spaces, &mm);
		struct crowd *crowd;

		if (!s)
			return 0;
		remove_ref(s->ref, DIRECT_REFS, ref);
		crowd = s->crowd ? bpf_map_lookup_elem(&crowds, &mm) : NULL;
		if (crowd)
			s->crowd = remove_ref(crowd->ref, CROWD_REFS, ref);
		return 0;
	}
	case CTL_OWN: {
		struct task_struct *task = (void *)bpf_get_current_task();

		owner = bpf_get_current_pid_tgid() >> 32;
		owner_mm = (u64)BPF_CORE_READ(task, mm);
		return 0;
	}
	}
	return -22;	/* EINVAL */
}

/*
 * Tasks as the kernel knows them: a reader of this iterator learns the
 * address space behind a pid of its own pid namespace, and which tasks are in
 * the middle of a change that a watch does not know of. Fields as in struct
 * task of the loader.
 */
struct task_line {
	u64 mm;
	u32 pid, tid;	/* in the reader's pid namespace */
	u32 tgid;	/* in the initial pid namespace */
	u32 busy;	/* in iter_mm, and may be inside a change not counted for iter_ref */
};

u64 iter_ref; /* set by the loader before it reads */
u64 iter_mm;
u64 iter_opened; /* opened, after the watch was bound */
u32 iter_pid; /* the process asked about, in the reader's pid namespace */
u32 iter_called; /* enum below */
enum { ITER_SPACES, ITER_EVENTS }; /* for OpenFeed; for the notifier tiers */

static __always_inline int nr_in(struct pid *pid, u32 level)
{
	int nr = 0;

	bpf_probe_read_kernel(&nr, sizeof(nr), (void *)pid + bpf_core_field_offset(struct pid, numbers) +
			      level * bpf_core_type_size(struct upid) +
			      bpf_core_field_offset(struct upid, nr));
	return nr;
}

/*
 * The call a task is in. The register frame at the top of its kernel stack
 * has the number of a system call, or -1 for any other way into the kernel
 * (x86: orig_ax, arch/x86/include/asm/idtentry.h; arm64: syscallno). While a
 * task runs in user mode it is that of its last entry, so a finished call
 * looks unfinished until the task's next interrupt: never the other way round.
 */
static __always_inline u64 call_of(struct task_struct *task)
{
	struct pt_regs *regs;

	if (bpf_core_enum_value_exists(enum bpf_func_id___regs, BPF_FUNC_task_pt_regs___regs))
		regs = (struct pt_regs *)bpf_task_pt_regs(task);
	else
		regs = BPF_CORE_READ(task, stack) + THREAD_SIZE - bpf_core_type_size(struct pt_regs);
#if defined(__TARGET_ARCH_x86)
	return BPF_CORE_READ(regs, orig_ax);
#else
	return (u32)BPF_CORE_READ(regs, syscallno);
#endif
}

static __always_inline u32 task_state(struct task_struct *task)
{
	struct task_struct___old *old = (void *)task;

	if (bpf_core_field_exists(task->__state))
		return BPF_CORE_READ(task, __state);
	return BPF_CORE_READ(old, state);
}

/* Whether an io_uring thread is one of the workers (io-wq). */
static __always_inline bool is_worker(struct task_struct *task)
{
	struct task_struct___old *old = (void *)task;

	if (bpf_core_field_exists(task->worker_private))
		return BPF_CORE_READ(task, worker_private);
	if (bpf_core_field_exists(old->pf_io_worker))
		return BPF_CORE_READ(old, pf_io_worker);
	return true;
}

/*
 * Whether the task may be changing its address space without being counted
 * for the watch that is opening. io_uring's workers have no call; one that
 * waits for work, or for I/O, sleeps interruptibly, which madvise never does.
 * The thread that polls for submissions (SQPOLL) may never sleep; it hands
 * madvise to workers, of which it is none.
 */
static __always_inline bool uncounted(struct task_struct *task)
{
	struct call_site site = {};
	struct inflight *f;
	u64 nr;
	u32 tid;

	if (BPF_CORE_READ(task, flags) & PF_IO_WORKER)
		return is_worker(task) && task_state(task) != TASK_INTERRUPTIBLE;
	nr = call_of(task);
	if (!known_nr(nr))
		return false;
	identify(&site, task, nr);
	if (!site.call)
		return false;
	tid = BPF_CORE_READ(task, pid);
	f = bpf_map_lookup_elem(&tasks, &tid);
	if (!f)
		return true;
	if (!f->active)	/* over, and it may have been the one that is looked at */
		return f->at < iter_opened;
	for (int i = 0; i < REFS; i++) {
		if (f->id[i] == id_of(iter_ref))
			return false;
	}
	return true;
}

/*
 * The notifier tracepoint sees no ends, and its probes may miss one. A task has left the call of its last
 * event if it is not where it was: other registers, or another call. Kernel
 * threads have no registers; one that sleeps for work has finished the last.
 */
static __noinline bool in_event(struct task_struct *task, const struct inflight *f)
{
	struct pt_regs *regs;
	u64 ip, sp;

	if (BPF_CORE_READ(task, flags) & (PF_KTHREAD | PF_IO_WORKER))
		return !(task_state(task) & TASK_INTERRUPTIBLE) && task_state(task) != TASK_IDLE;
	if ((u32)call_of(task) != f->nr)
		return false;
	if (bpf_core_enum_value_exists(enum bpf_func_id___regs, BPF_FUNC_task_pt_regs___regs))
		regs = (struct pt_regs *)bpf_task_pt_regs(task);
	else
		return true;
#if defined(__TARGET_ARCH_x86)
	ip = BPF_CORE_READ(regs, ip);
#else
	ip = BPF_CORE_READ(regs, pc);
#endif
	sp = BPF_CORE_READ(regs, sp);
	return ip == f->a[0] && sp == f->a[1];
}

/* Nothing is written here: what a task has begun only the task itself ends, so
 * that it is counted once. */
static __always_inline bool in_last_event(struct task_struct *task)
{
	u32 tid = BPF_CORE_READ(task, pid);
	struct inflight *f = bpf_map_lookup_elem(&tasks, &tid);

	/* of the address space asked about, or of nobody knows which */
	if (f && (f->foreign || (f->active && f->mm == iter_mm)) && in_event(task, f))
		return true;
	for (u32 level = 0; level < RANGE_LEVELS; level++) {
		u64 key = range_key(tid, level);

		f = bpf_map_lookup_elem(&requests, &key);
		if (!f || !f->active)
			break;
		if (f->mm == iter_mm && in_event(task, f))
			return true;
	}
	return false;
}

SEC("iter/task")
int list_tasks(struct bpf_iter__task *ctx)
{
	struct task_struct *task = ctx->task, *self;
	struct task_line l = {};
	u32 level;

	if (!task)
		return 0;
	l.mm = (u64)BPF_CORE_READ(task, mm);
	if (iter_called == ITER_EVENTS) {
		l.busy = in_last_event(task);
		if (l.busy)
			bpf_seq_write(ctx->meta->seq, &l, sizeof(l));
		return 0;
	}
	if (!l.mm)
		return 0;
	self = (void *)bpf_get_current_task();
	level = BPF_CORE_READ(self, thread_pid, level);
	l.tid = nr_in(BPF_CORE_READ(task, thread_pid), level);
	l.pid = nr_in(BPF_CORE_READ(task, group_leader, thread_pid), level);
	l.tgid = BPF_CORE_READ(task, tgid);
	if (l.mm == iter_mm)
		l.busy = uncounted(task);
	if (l.pid != iter_pid && !l.busy)
		return 0;
	bpf_seq_write(ctx->meta->seq, &l, sizeof(l));
	return 0;
}
