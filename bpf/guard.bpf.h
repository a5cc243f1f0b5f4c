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
};

const volatile u64 guards_off;

#define ON(guard) (!(guards_off & (1ULL << (guard))))

#endif
