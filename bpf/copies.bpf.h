/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Copies of raw tracepoint programs. Kernel 7.0 runs these preemptible and
 * skips one that is still running in a task that was preempted in it on the
 * same processor (bpf_prog_get_recursion_context(), kernel/bpf/trampoline.c,
 * kernel/trace/bpf_trace.c). So there each event has a second program of the
 * same type, which is skipped only if a task was preempted in it too, and a
 * classic tracepoint, which is skipped while a process is in bpf(2) map calls
 * on the processor. The first to come does the work and leaves behind what
 * tells the others so. Not loaded on older kernels.
 */
#ifndef UMMU_COPIES_BPF_H
#define UMMU_COPIES_BPF_H

#include "syscall.bpf.h"
#include "life.bpf.h"
#include "notifier.bpf.h"

SEC("tp_btf/sys_enter")
int hook_sys_enter_copy(u64 *ctx)
{
	return any_enter((struct pt_regs *)ctx[0], ctx[1], UMMU_HOOK_SYS_ENTER_COPY, SAW_COPY);
}

SEC("tp_btf/sys_exit")
int hook_sys_exit_copy(u64 *ctx)
{
	return any_exit((struct pt_regs *)ctx[0], ctx[1], UMMU_HOOK_SYS_EXIT_COPY, SAW_COPY);
}

/* raw_syscalls:sys_enter and sys_exit by perf: unlike the tracepoints of
 * single calls they fire for every ABI. */
SEC("tracepoint/raw_syscalls/sys_enter")
int hook_sys_enter_classic(struct enter_record *r)
{
	struct call_site site = { .hook = UMMU_HOOK_SYS_ENTER_CLASSIC, .saw = SAW_ANY_CALL };
	struct task_struct *task;

	if (!known_nr(r->nr))
		return 0;
	task = (void *)bpf_get_current_task();
	identify(&site, task, r->nr);
	if (!site.call)
		return 0;
	for (int i = 0; i < 6; i++)
		site.k.a[i] = site.abi == UMMU_ABI_COMPAT ? (u32)r->args[i] : r->args[i];
	return enter(&site, task);
}

SEC("tracepoint/raw_syscalls/sys_exit")
int hook_sys_exit_classic(struct exit_record *r)
{
	return any_exit(entry_regs((void *)bpf_get_current_task()), r->ret, UMMU_HOOK_SYS_EXIT_CLASSIC, SAW_ANY_CALL);
}

SEC("raw_tp/io_uring_submit_req")
int hook_uring_submit_copy(u64 *ctx)
{
	return uring_begin((void *)ctx[0], UMMU_HOOK_URING_SUBMIT_COPY, SAW_COPY);
}

SEC("raw_tp/io_uring_queue_async_work")
int hook_uring_queue_copy(u64 *ctx)
{
	return uring_begin((void *)ctx[0], UMMU_HOOK_URING_QUEUE_COPY, SAW_COPY);
}

SEC("raw_tp/io_uring_complete")
int hook_uring_complete_copy(u64 *ctx)
{
	return uring_complete((void *)ctx[1], UMMU_HOOK_URING_COMPLETE_COPY);
}

/* io_uring's classic tracepoints: all three begin with the ring and the
 * request (include/trace/events/io_uring.h). */
struct uring_record {
	u64 common;
	void *ring, *req;
};

SEC("tracepoint/io_uring/io_uring_submit_req")
int hook_uring_submit_classic(struct uring_record *r)
{
	return uring_begin(r->req, UMMU_HOOK_URING_SUBMIT_CLASSIC, SAW_CLASSIC);
}

SEC("tracepoint/io_uring/io_uring_queue_async_work")
int hook_uring_queue_classic(struct uring_record *r)
{
	return uring_begin(r->req, UMMU_HOOK_URING_QUEUE_CLASSIC, SAW_CLASSIC);
}

SEC("tracepoint/io_uring/io_uring_complete")
int hook_uring_complete_classic(struct uring_record *r)
{
	return uring_complete(r->req, UMMU_HOOK_URING_COMPLETE_CLASSIC);
}

/* Whether a process has watches that follow it. */
static __always_inline bool is_followed(u32 tgid)
{
	struct space *p = bpf_map_lookup_elem(&procs, &tgid);

	if (!p)
		return false;
	for (u32 i = 0; i < SPACE_REFS; i++) {
		if ((p->ref[i] & REF_FOLLOW) && conf_of(p->ref[i]))
			return true;
	}
	return false;
}

/* A new process of a followed one has its watches once a fork was seen. */
static __always_inline bool has_inherited(struct task_struct *parent, struct task_struct *child)
{
	u32 from = BPF_CORE_READ(parent, tgid), to = BPF_CORE_READ(child, tgid);

	return from != to && is_followed(from) && bpf_map_lookup_elem(&procs, &to);
}

/* So has the new address space of a followed process. */
static __always_inline bool has_kept(struct task_struct *task)
{
	return is_followed(BPF_CORE_READ(task, tgid)) && space_of((u64)BPF_CORE_READ(task, mm));
}

SEC("raw_tp/sched_process_fork")
int hook_fork_copy(u64 *ctx)
{
	struct task_struct *parent = (void *)ctx[0], *child = (void *)ctx[1];
	u32 from = BPF_CORE_READ(parent, tgid);

	if (from == (u32)BPF_CORE_READ(child, tgid) || !is_followed(from) || has_inherited(parent, child))
		return 0;
	return on_fork(parent, child);
}

SEC("raw_tp/sched_process_exec")
int hook_exec_copy(u64 *ctx)
{
	struct task_struct *task = (void *)ctx[0];

	owner_exec(task);
	if (!is_followed(BPF_CORE_READ(task, tgid)) || has_kept(task))
		return 0;
	return on_exec(task, (u32)ctx[1]);
}

/* The last task of a watched process takes its entry along; any task what it
 * was in the middle of. */
SEC("raw_tp/sched_process_exit")
int hook_exit_copy(u64 *ctx)
{
	struct task_struct *task = (void *)ctx[0];
	u32 tgid = BPF_CORE_READ(task, tgid), tid = BPF_CORE_READ(task, pid);
	u64 key = range_key(tid, 0);

	owner_exit(task);
	if (!bpf_map_lookup_elem(&tasks, &tid) && !bpf_map_lookup_elem(&requests, &key) &&
	    (BPF_CORE_READ(task, signal, live.counter) || !bpf_map_lookup_elem(&procs, &tgid)))
		return 0;
	set_aside(tid, ctx[0], ctx[0]);
	return on_exit(task);
}

/* A dead address space has no entry. */
static __always_inline int death_copy(u64 mm, u8 hook)
{
	owner_death(mm);
	if (!space_of(mm))
		return 0;
	set_aside((u32)bpf_get_current_pid_tgid(), mm, mm);
	return on_space_death(mm, hook);
}

SEC("raw_tp/exit_mmap")
int hook_space_death_copy(u64 *ctx)
{
	return death_copy(ctx[0], UMMU_HOOK_EXIT_MMAP_COPY);
}

struct exit_mmap_record {
	u64 common;
	u64 mm;
};

SEC("tracepoint/mmap/exit_mmap")
int hook_space_death_classic(struct exit_mmap_record *r)
{
	return death_copy(r->mm, UMMU_HOOK_EXIT_MMAP_CLASSIC);
}

SEC("raw_tp/kvm_unmap_hva_range")
int hook_kvm_unmap_copy(u64 *ctx)
{
	return kvm_unmap(ctx[0], ctx[1], (u64)ctx, UMMU_HOOK_KVM_UNMAP_COPY, SAW_COPY);
}

struct hva_record {
	u64 common;
	u64 start, end;
};

/* Its context is no place on the stack: depth 0 for unknown. */
SEC("tracepoint/kvm/kvm_unmap_hva_range")
int hook_kvm_unmap_classic(struct hva_record *r)
{
	return kvm_unmap(r->start, r->end, 0, UMMU_HOOK_KVM_UNMAP_CLASSIC, SAW_CLASSIC);
}

SEC("raw_tp/kvm_unmap_hva_range")
int hook_kvm_witness_copy(u64 *ctx)
{
	return witness(ctx[0], ctx[1], UMMU_HOOK_KVM_WITNESS_COPY, SAW_WITNESS_COPY);
}

SEC("tracepoint/kvm/kvm_unmap_hva_range")
int hook_kvm_witness_classic(struct hva_record *r)
{
	return witness(r->start, r->end, UMMU_HOOK_KVM_WITNESS_CLASSIC, SAW_WITNESS_CLASSIC);
}

#endif
