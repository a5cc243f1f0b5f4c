/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * ummu.h - the memory that the kernel side, the Go client and the C client
 * share. This header is the only definition: BPF and C include it, Go is
 * generated from it (bpf/layout). Everything is little or native endian,
 * naturally aligned, without packing; a test compares every size and offset.
 *
 * Rules: fields are only added, in reserved space; each page begins with its
 * version and size; a reader refuses a version it does not know.
 */
#ifndef UMMU_H
#define UMMU_H

#ifndef __bpf__
#include <linux/types.h>
#endif

#define UMMU_LAYOUT_VERSION 1

/* Kinds (mm.Kind). UMMU_UNMAP..UMMU_PROTECT are changes. */
enum ummu_kind {
	UMMU_NONE = 0,
	UMMU_UNMAP = 1,
	UMMU_REPLACE = 2,
	UMMU_ZAP = 3,
	UMMU_MOVE = 4,
	UMMU_PROTECT = 5,
	UMMU_MAP = 6,
	UMMU_FORK = 7,
	UMMU_EXEC = 8,
	UMMU_EXIT = 9,
	UMMU_LOST = 10,
	UMMU_REGISTER = 11,
	UMMU_DEREGISTER = 12,
};

enum ummu_phase {
	UMMU_BEGIN = 1,	/* before the page tables change */
	UMMU_END = 2,	/* after it, or a single event */
};

/* Record flags (mm.Flags). */
enum ummu_flag {
	UMMU_F_SUPERSET = 1 << 0,
	UMMU_F_MAYBE = 1 << 1,
	UMMU_F_UNPAIRED = 1 << 2,
	UMMU_F_ASYNC = 1 << 3,
	UMMU_F_LAST_TASK = 1 << 4,
	UMMU_F_SPACE_DEATH = 1 << 5,
	UMMU_F_NEW_PROCESS = 1 << 6,
	UMMU_F_SHARES_SPACE = 1 << 7,
	UMMU_F_VECTOR = 1 << 8,
	UMMU_F_UNKNOWN_LENGTH = 1 << 9,
	UMMU_F_RESCUED = 1 << 10,
};

enum ummu_abi {
	UMMU_ABI_NATIVE = 0,
	UMMU_ABI_COMPAT = 1,
	UMMU_ABI_X32 = 2,
	UMMU_ABI_IO_URING = 3,
	UMMU_ABI_NONE = 4,
};

/* Hooks (mm.Hook); their names are in tracer/hooks.go. */
enum ummu_hook {
	UMMU_HOOK_NONE = 0,
	UMMU_HOOK_SYS_ENTER = 1,
	UMMU_HOOK_SYS_EXIT = 2,
	UMMU_HOOK_ENTER_MUNMAP = 3,
	UMMU_HOOK_ENTER_MREMAP = 4,
	UMMU_HOOK_ENTER_MPROTECT = 5,
	UMMU_HOOK_EXIT_MUNMAP = 6,
	UMMU_HOOK_EXIT_MREMAP = 7,
	UMMU_HOOK_EXIT_MPROTECT = 8,
	UMMU_HOOK_URING_SUBMIT = 9,
	UMMU_HOOK_URING_QUEUE = 10,
	UMMU_HOOK_URING_COMPLETE = 11,
	UMMU_HOOK_SCHED_FORK = 12,
	UMMU_HOOK_SCHED_EXEC = 13,
	UMMU_HOOK_SCHED_EXIT = 14,
	UMMU_HOOK_EXIT_MMAP = 15,
	UMMU_HOOK_KVM_UNMAP = 16,
	UMMU_HOOK_NOTIFIER_START_FENTRY = 17,
	UMMU_HOOK_NOTIFIER_START_KPROBE = 18,
	UMMU_HOOK_NOTIFIER_END_FENTRY = 19,
	UMMU_HOOK_NOTIFIER_END_KPROBE = 20,
	UMMU_HOOK_EXIT_MMAP_FENTRY = 21,
	UMMU_HOOK_EXIT_MMAP_KPROBE = 22,
	UMMU_HOOK_NOTIFIER_START_FENTRY2 = 23,
	UMMU_HOOK_NOTIFIER_END_FENTRY2 = 24,
	UMMU_HOOK_KVM_WITNESS = 25,
	/* registrations, see bpf/registrations.bpf.h */
	UMMU_HOOK_REGISTER_ENTER = 26,
	UMMU_HOOK_REGISTER_EXIT = 27,
	UMMU_HOOK_VERBS = 28,
	UMMU_HOOK_VERBS_RETURN = 29,
	/* copies, where the kernel may skip a raw tracepoint program (7.0) */
	UMMU_HOOK_SYS_ENTER_COPY = 40,
	UMMU_HOOK_SYS_EXIT_COPY = 41,
	UMMU_HOOK_SYS_ENTER_CLASSIC = 42,
	UMMU_HOOK_SYS_EXIT_CLASSIC = 43,
	UMMU_HOOK_URING_SUBMIT_COPY = 44,
	UMMU_HOOK_URING_QUEUE_COPY = 45,
	UMMU_HOOK_URING_COMPLETE_COPY = 46,
	UMMU_HOOK_URING_SUBMIT_CLASSIC = 47,
	UMMU_HOOK_URING_QUEUE_CLASSIC = 48,
	UMMU_HOOK_URING_COMPLETE_CLASSIC = 49,
	UMMU_HOOK_SCHED_FORK_COPY = 50,
	UMMU_HOOK_SCHED_EXEC_COPY = 51,
	UMMU_HOOK_SCHED_EXIT_COPY = 52,
	UMMU_HOOK_EXIT_MMAP_COPY = 53,
	UMMU_HOOK_EXIT_MMAP_CLASSIC = 54,
	UMMU_HOOK_KVM_UNMAP_COPY = 55,
	UMMU_HOOK_KVM_UNMAP_CLASSIC = 56,
	UMMU_HOOK_KVM_WITNESS_COPY = 57,
	UMMU_HOOK_KVM_WITNESS_CLASSIC = 58,
	/* the mm tier, see bpf/mm.bpf.h */
	UMMU_HOOK_UNMAP_FENTRY = 64,
	UMMU_HOOK_UNMAP_FENTRY2 = 65,
	UMMU_HOOK_UNMAP_KPROBE = 66,
	UMMU_HOOK_ZAP_FENTRY = 67,
	UMMU_HOOK_ZAP_FENTRY2 = 68,
	UMMU_HOOK_ZAP_KPROBE = 69,
	UMMU_HOOK_HUGETLB_FENTRY = 70,
	UMMU_HOOK_HUGETLB_FENTRY2 = 71,
	UMMU_HOOK_HUGETLB_KPROBE = 72,
	UMMU_HOOK_FIXUP_FENTRY = 73,
	UMMU_HOOK_FIXUP_KPROBE = 74,
	UMMU_HOOK_PROTECT_FENTRY = 75,
	UMMU_HOOK_PROTECT_FENTRY2 = 76,
	UMMU_HOOK_PROTECT_KPROBE = 77,
	UMMU_HOOK_MOVE_FENTRY = 78,
	UMMU_HOOK_MOVE_FENTRY2 = 79,
	UMMU_HOOK_MOVE_KPROBE = 80,
	UMMU_HOOK_MOVE_FEXIT = 81,
	UMMU_HOOK_GATHER = 82,
	UMMU_HOOK_FINISH_FENTRY = 83,
	UMMU_HOOK_FINISH_FENTRY2 = 84,
	UMMU_HOOK_FINISH_KPROBE = 85,
	UMMU_HOOK_MAX = 96,
};

/* Tiers, weakest first. */
enum ummu_tier {
	UMMU_TIER_NONE = 0,
	UMMU_TIER_SYSCALL = 1,
	UMMU_TIER_MM = 2,
	UMMU_TIER_NOTIFIER_TRACEPOINT = 3,
	UMMU_TIER_NOTIFIER_PROBE = 4,
};

/* What a tier cannot see; a range it concerns is not cacheable there. */
enum ummu_gap {
	UMMU_GAP_DRIVER = 1 << 1, /* mappings of a device driver, and the kernel's own */
	UMMU_GAP_FILE = 1 << 0,	/* pages of a file or shared object, dropped by anybody who has it */
};

/* Who registers memory (mm.Registrar). */
enum ummu_registrar {
	UMMU_BY_NOBODY = 0,
	UMMU_BY_IO_URING = 1,
	UMMU_BY_VERBS = 2,
};

/*
 * One event, as it lies in a ring behind the kernel's 8-byte record header.
 * 128 bytes; a stream with stacks has a struct ummu_stack behind some.
 *
 * UMMU_REGISTER and UMMU_DEREGISTER use some fields for something else: start
 * and end are exact in bytes, to_start is the device, to_end the handle,
 * child_pid the lkey (io_uring: the ring's descriptor), child_tid the rkey,
 * arg[0] the opcode of io_uring_register, arg[1] the access flags.
 */
struct ummu_record {
	__u64 time_ns;		/* CLOCK_MONOTONIC */
	__u64 start, end;	/* half-open, page-rounded; end ~0 = to the top */
	__u64 to_start, to_end;	/* UMMU_MOVE: destination; 0,0 = not known yet */
	__u64 lost;		/* the ring's total of lost events before this one */
	__u64 space;		/* tells address spaces of one ring apart, else 0 */
	__u64 arg[2];		/* flag arguments of the call */
	__s64 ret;		/* UMMU_END of a call: its result */
	__u32 pid, tid;		/* initial pid namespace */
	__u32 child_pid, child_tid; /* UMMU_FORK; UMMU_EXEC: child_tid = old tid */
	__u32 nr;		/* call number within abi */
	__u16 flags;		/* enum ummu_flag */
	__u8 kind;		/* enum ummu_kind */
	__u8 phase;		/* enum ummu_phase */
	__u8 hook;		/* enum ummu_hook */
	__u8 abi;		/* enum ummu_abi */
	__u8 by;		/* enum ummu_registrar */
	__u8 all;		/* UMMU_DEREGISTER: everything of the device */
	__u8 reserved[4];
	char comm[16];
};

/* The user stack at an event: registers, and memory from sp on. */
#define UMMU_STACK_BYTES 4096
struct ummu_stack {
	__u64 pc, sp, fp, lr;	/* pc 0: none; lr 0 where there is no link register */
	__u32 size;		/* bytes of memory that could be read */
	__u32 reserved;
	__u8 memory[UMMU_STACK_BYTES];
};

/*
 * The generation word of a watch and the epoch word: 64 bits, moved only by
 * additions whose result nobody needs. A client compares the whole word for
 * equality. The low 48 bits count every move, so that it takes 2^48 of them to
 * come back to an old value; the bits above say why it moved.
 */
#define UMMU_GEN_START	1ULL		/* 0 is never a live generation */
#define UMMU_GEN_RECORD	1ULL
#define UMMU_GEN_LOSS	((1ULL << 48) + 1)
#define UMMU_GEN_DEATH	((1ULL << 56) + 1)

/* Two banks of in-flight counters, as in SRCU; see feed.Watch.Begin. */
#define UMMU_BANKS 2

/*
 * Status page: one per watch. The kernel side writes, everybody else maps it
 * read-only. Hot words have cache lines of their own.
 */
struct ummu_status {
	/* 0: what a lookup reads */
	__u64 generation;
	__u32 version, size;
	__u32 tier;		/* enum ummu_tier */
	__u32 gaps;		/* enum ummu_gap: what the tier cannot see */
	__u64 reserved0[5];
	/* 64: every change of the address space, before the interest filter */
	__u64 begun[UMMU_BANKS];
	__u64 ended[UMMU_BANKS];
	__u64 reserved1[4];
	/* 128: counters */
	__u64 records;		/* written to the ring */
	__u64 lost;		/* ring full */
	__u64 filtered;		/* changes outside the interest */
	__u64 unpaired;		/* ends without a begin: each a loss */
	__u64 deaths;		/* address space torn down, watch closed */
	__u64 untracked;	/* changes that could not be tracked: watch is dead */
	__u64 foreign;		/* of lost: changes of nobody-knows-whose address space,
				 * of which a client without privileges is told no more */
	__u64 reserved2[1];
	/* 192 */
	__u64 reserved3[488];
};

/* Epoch page: one per loaded kernel side; the second word of validity. */
struct ummu_epoch {
	__u64 word;
	__u32 version, size;
	__u64 misses;		/* calls that some hook is known to have missed */
	/* Counters that move before the word does: 256 losses of it look like a
	 * death. Not 0 is the end of every watch, now and later; */
	__u64 deaths;
	/* a move ends the watches that there are. */
	__u64 untracked;
	__u64 reserved0[3];
	/* 64: changes whose address space the hook cannot know; they count for
	 * every watch. The kernel side takes the banks in turns, by the clock. */
	__u64 begun[UMMU_BANKS];
	__u64 ended[UMMU_BANKS];
	__u64 reserved1[500];
};

/*
 * Interest page: one per watch, written by the client, read by the kernel
 * side. A bloom-like filter with three granularities: a change is tested at
 * the finest level at which it spans at most UMMU_INTEREST_SPAN granules.
 * False positives are allowed, false negatives are not.
 */
#define UMMU_INTEREST_LEVELS	3
#define UMMU_INTEREST_BITS	32768
#define UMMU_INTEREST_SPAN	16
#define UMMU_INTEREST_SHIFT0	16	/* 64 KiB */
#define UMMU_INTEREST_SHIFT1	24	/* 16 MiB */
#define UMMU_INTEREST_SHIFT2	32	/* 4 GiB */

/* Bit of granule g (address >> shift), the same in every language. */
#define UMMU_INTEREST_HASH(g)	((((g) * 0x9E3779B97F4A7C15ULL) >> 49) & (UMMU_INTEREST_BITS - 1))

struct ummu_interest {
	__u32 version, size;
	__u32 bank;		/* 0 or 1: where new changes are counted */
	__u32 all;		/* nonzero: everything is interesting */
	__u64 dense[UMMU_INTEREST_LEVELS]; /* entries too large for this level's bits */
	__u64 marker;		/* a page whose zap only says: this task is here, see
				 * UMMU_TIER_NOTIFIER_TRACEPOINT; 0 = none */
	__u64 holder;		/* a page that keeps the tier's notifier registered: a
				 * change of it ends the watch; 0 = none */
	__u64 reserved[505];
	__u64 bits[UMMU_INTEREST_LEVELS][UMMU_INTEREST_BITS / 64];
};

#endif /* UMMU_H */
