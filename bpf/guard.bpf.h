/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Steps of the protocol that a test can switch off to see its test fail
 * (internal/guard). guards_off is read-only data: in a normal load it is 0
 * and the verifier removes the test and the other branch.
 */
#ifndef UMMU_GUARD_BPF_H
#define UMMU_GUARD_BPF_H

#include "core.bpf.h"

/* In the order of internal/guard. */
enum guard {
	GUARD_COMMIT_FIRST,
	GUARD_LOSS_COUNTS,
	GUARD_DEATH_COUNTS,
	GUARD_COUNT_ALL,
	GUARD_UNPAIRED_LOSS,
	GUARD_STALE_CLOSED,
	GUARD_EXIT_CLOSED,
	GUARD_SPACE_REMOVED,
	GUARD_INCARNATION,
	GUARD_COMPAT_ABI,
	GUARD_URING_MADVISE,
	GUARD_BRK_RACE,
	GUARD_VECTOR_LIMIT,
	GUARD_DESTINATION,
	GUARD_ROUND_OUTWARD,
	GUARD_PARTNER_RESCUE,
	GUARD_REPLACE_SEEN,
	GUARD_UNTRACKED,
	GUARD_FILTERED,
	GUARD_OWNER_DEATH,
	GUARD_WATCHDOG,
	GUARD_URING_CHAIN,
	GUARD_IO_DESTROY,
	GUARD_HOLDER,
	GUARD_MARKER,
	GUARD_FOREIGN,
	GUARD_HIDDEN,
	/* faults */
	GUARD_HOOK_THERE,
	GUARD_RANGE_PLACE,
	GUARD_RANGE_WHOLE,
	GUARD_ARGS_ORDER,
	GUARD_NEVER_MISSED,
};

const volatile u64 guards_off;

/* Set where copies of raw tracepoint programs are attached (copies.bpf.h). */
const volatile u64 copies;

#define ON(guard) (!(guards_off & (1ULL << (guard))))

/* Whether a program behaves as if the kernel had skipped it, and nobody had
 * counted it: for an eighth of a millisecond now and then. */
static __always_inline bool is_skipped(void)
{
	return !ON(GUARD_NEVER_MISSED) && (bpf_ktime_get_ns() >> 17 & 1);
}

#endif
