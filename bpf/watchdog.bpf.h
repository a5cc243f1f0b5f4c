/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Where the kernel may skip programs, the loader reads the counters of skipped
 * runs ten times a second and turns a rise into a loss. While it does not (it
 * is stopped, or gets no processor) nobody would know of a skip. So a timer of
 * the kernel looks whether it does, and if not, is the loss itself, at each
 * turn, for as long as it lasts.
 *
 * Timers are from 5.15. They may not be in a map that a program of a
 * tracepoint or probe uses, so the heartbeat is a variable and the timer is
 * started by a program of its own type. It ends with the last descriptor of
 * its map.
 */
#ifndef UMMU_WATCHDOG_BPF_H
#define UMMU_WATCHDOG_BPF_H

#include "watch.bpf.h"

struct bpf_timer {
	__u64 opaque[2];
} __attribute__((aligned(8)));

struct watchdog {
	struct bpf_timer timer;
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct watchdog);
} watchdogs SEC(".maps");

#define WATCHDOG_PERIOD_NS 100000000ULL
#define WATCHDOG_LIMIT_NS 250000000LL

u64 beat_ns;	/* CLOCK_MONOTONIC: begin of the last look at the counters */
u32 watchdog_on; /* there are watches */
u64 barks;	/* losses made here */

static int look_at_loader(void *map, u32 *key, struct watchdog *w)
{
	struct ummu_epoch *e = epoch_page();

	if (!watchdog_on)
		return 0;
	if (e && (s64)(bpf_ktime_get_ns() - beat_ns) > WATCHDOG_LIMIT_NS && ON(GUARD_WATCHDOG)) {
		ADD(&barks, 1);
		add_ordered(&e->misses, 1);
		ADD(&e->word, UMMU_GEN_LOSS);
	}
	bpf_timer_start(&w->timer, WATCHDOG_PERIOD_NS, 0);
	return 0;
}

SEC("syscall")
int start_watchdog(void *ctx)
{
	u32 zero = 0;
	struct watchdog *w = bpf_map_lookup_elem(&watchdogs, &zero);

	if (!w)
		return -12;		/* ENOMEM */
	bpf_timer_init(&w->timer, &watchdogs, 1 /* CLOCK_MONOTONIC */); /* EBUSY: it is */
	bpf_timer_set_callback(&w->timer, look_at_loader);
	return bpf_timer_start(&w->timer, WATCHDOG_PERIOD_NS, 0);
}

#endif
