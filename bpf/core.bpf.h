/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * The kernel's types as far as we read them: minimal CO-RE structures instead
 * of a full vmlinux.h. The loader relocates each access against the running
 * kernel's BTF, so only the names matter here, not the order.
 */
#ifndef UMMU_CORE_BPF_H
#define UMMU_CORE_BPF_H

typedef unsigned char __u8;
typedef signed short __s16;
typedef unsigned short __u16;
typedef signed int __s32;
typedef unsigned int __u32;
typedef signed long long __s64;
typedef unsigned long long __u64;
typedef __u8 u8;
typedef __u16 u16;
typedef __u32 u32;
typedef __u64 u64;
typedef __s32 s32;
typedef __s64 s64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;
typedef _Bool bool;
#define true 1
#define false 0
#define NULL ((void *)0)

/* include/uapi/linux/bpf.h */
enum {
	BPF_MAP_TYPE_HASH = 1,
	BPF_MAP_TYPE_ARRAY = 2,
	BPF_MAP_TYPE_PERCPU_ARRAY = 6,
	BPF_MAP_TYPE_LRU_HASH = 9,
	BPF_MAP_TYPE_ARRAY_OF_MAPS = 12,
	BPF_MAP_TYPE_RINGBUF = 27,
};
enum { BPF_ANY = 0, BPF_NOEXIST = 1 };
enum { BPF_F_NO_PREALLOC = 1, BPF_F_MMAPABLE = 1 << 10 };
enum { BPF_RB_NO_WAKEUP = 1, BPF_RB_FORCE_WAKEUP = 2 };
enum { BPF_RB_AVAIL_DATA = 0, BPF_RB_RING_SIZE = 1 };

#include <bpf/bpf_helpers.h>
#include <bpf/bpf_core_read.h>

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct thread_info {
	unsigned long flags;
	u32 status;		/* x86: TS_COMPAT */
};

struct mm_struct {
	unsigned long brk, start_brk, end_data;
	struct {
		s64 counter;
	} hugetlb_usage;	/* CONFIG_HUGETLB_PAGE */
};

struct pid_namespace;
struct upid {
	int nr;
	struct pid_namespace *ns;
};
struct pid {
	unsigned int level;
	struct upid numbers[1];
};

struct signal_struct {
	struct {
		int counter;
	} live;
};

struct super_block {
	unsigned long s_blocksize;
	unsigned long s_magic;
};
struct inode {
	struct super_block *i_sb;
};
struct qstr {
	const unsigned char *name;
};
struct dentry {
	struct qstr d_name;
};
struct path {
	struct dentry *dentry;
};
struct file {
	struct inode *f_inode;
	struct path f_path;
};
struct fdtable {
	unsigned int max_fds;
	struct file **fd;
};
struct files_struct {
	struct fdtable *fdt;
};

/* io_uring_register may name a ring by its place here instead of a descriptor. */
struct io_uring_task {
	struct file *registered_rings[16];	/* IO_RINGFD_REG_MAX, 5.18 */
};

struct task_struct {
	struct thread_info thread_info;
	struct mm_struct *mm;
	void *stack;
	unsigned int flags;
	unsigned int __state;	/* "state" before 5.14 */
	int pid, tgid;
	struct task_struct *group_leader;
	struct pid *thread_pid;
	struct signal_struct *signal;
	struct files_struct *files;
	struct io_uring_task *io_uring;
	void *worker_private;	/* pf_io_worker before 5.17 */
	char comm[16];
};

struct task_struct___old {
	long state;
	void *pf_io_worker;
};

#if defined(__TARGET_ARCH_x86)
struct pt_regs {
	unsigned long bp, bx, r10, r9, r8, ax, cx, dx, si, di, orig_ax, ip, sp;
};
#elif defined(__TARGET_ARCH_arm64)
struct pt_regs {
	u64 regs[31];
	u64 sp, pc;
	u64 orig_x0;
	s32 syscallno;
};
#else
#error "unknown target architecture"
#endif

/* io_uring/advise.c; len was 32 bits wide before 6.9 */
struct io_madvise {
	u64 addr;
	u64 len;
	u32 advice;
};
struct io_kiocb {
	u8 opcode;
	struct io_kiocb *link;	/* what runs after it */
};

struct ib_mr;

struct seq_file;
struct bpf_iter_meta {
	struct seq_file *seq;
};
struct bpf_iter__task {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
};

/* Whether the kernel has the helper (5.15). */
enum bpf_func_id___regs {
	BPF_FUNC_task_pt_regs___regs = 175,
};

#pragma clang attribute pop

/* Classic syscall tracepoints: the record as the kernel lays it out for BPF
 * (kernel/trace/trace_syscalls.c, perf_call_bpf_enter/_exit). */
struct enter_record {
	u64 common;
	s64 nr;
	u64 args[6];
};
struct exit_record {
	u64 common;
	s64 nr;
	s64 ret;
};

#define ENOSYS 38
#define PF_IO_WORKER 0x10
#define PF_KTHREAD 0x200000
#define THREAD_SIZE (16 << 10)	/* only where bpf_task_pt_regs is missing: before 5.15 */
#define TASK_INTERRUPTIBLE 1
#define TASK_IDLE 0x402

#endif
