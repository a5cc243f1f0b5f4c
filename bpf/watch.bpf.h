/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Watches: who wants to know about which address space, and how one change
 * reaches them. Order of one change for one watch (design: the client's proof
 * in feed/ rests on it):
 *
 *   begin: begun[bank]++  ->  interest read  ->  record committed  ->  generation++
 *   (the kernel changes the page tables)
 *   end:   record committed (streams only)  ->  ended[bank]++
 *
 * No step uses the result of an atomic operation.
 */
#ifndef UMMU_WATCH_BPF_H
#define UMMU_WATCH_BPF_H

#include "core.bpf.h"
#include "calls.bpf.h"
#include "ummu.h"

/*
 * A reference to a watch: its slot, flags, and the incarnation of the slot.
 * A reference whose incarnation is not the slot's is dead and may be
 * overwritten; closing a watch is one store to slot_conf.
 */
#define REF_SLOT	0xffffULL
#define REF_FOLLOW	(1ULL << 16)	/* children and executed programs too */
#define REF_SHIFT	32

#define MAX_SLOTS	1024	/* the loader may change it, up to REF_SLOT */
/* References of one address space: direct ones are added by user space, one
 * writer at a time; inherited ones by fork and exec. Two areas, so that the
 * two never choose the same free place. An address space with more direct
 * ones than usual has a crowd of them elsewhere, so that all others need not
 * have room for so many. */
#define DIRECT_REFS	12
#define INHERIT_REFS	4
#define SPACE_REFS	(DIRECT_REFS + INHERIT_REFS)
#define CROWD_REFS	116
#define MAX_CROWDS	1024
#define ALL_REFS	4		/* watches of every address space */
#define ALL_FIRST	(SPACE_REFS + CROWD_REFS)
#define REFS		(ALL_FIRST + ALL_REFS)

struct space {
	u64 ref[SPACE_REFS];
	u64 brks;	/* brk calls in flight */
	u64 crowd;	/* places of its crowd that are looked at; 0: it has none */
};

struct crowd {
	u64 ref[CROWD_REFS];
};

#define SLOT_TRACK	1	/* a feed: begun/ended words, interest filter */
#define SLOT_SPACE	2	/* fill record.space and comm: a stream for people */
#define SLOT_NO_WAKEUP	4
#define SLOT_STACKS	8	/* with an interest page that the kernel side itself fills */
/* A feed in the hands of somebody without privileges, who must not learn of
 * other processes: what may be another's change is a loss without range, and
 * who changed this address space from outside is not said. */
#define SLOT_GUEST	8

struct slot_conf {
	u32 incarnation;	/* never the same for two watches; 0: not in use */
	u32 flags;
	u32 begin_kinds;	/* 1 << kind */
	u32 end_kinds;
};

/*
 * What a task is in the middle of. One entry per task that was seen changing
 * a watched address space, kept until the task exits: changes are tracked by
 * task, not counted, so that one whose end was missed is closed by the task's
 * next call or by its exit.
 */
struct inflight {
	/* By place of the reference: the incarnation of the watch that got the
	 * begin, and what was done for it. */
	u32 id[REFS];
	u8 did[REFS];	/* BEGUN_* */
	u64 mm;
	struct change c;
	u32 nr;
	u64 at;		/* opened, when the change began */
	u8 abi;
	u8 active;
	u8 entered;	/* SAW_* of the hooks that saw the begin */
	u8 exited;
	u8 call;
	u8 foreign;	/* counted in the epoch page instead: 1 + bank */
	u8 brk;		/* counted in space.brks */
	u8 pad[1];
	u64 brk_old;
	u64 depth;	/* notifier: where on the stack the event was */
	u64 seen_ns;	/* notifier probes: when the first of two hooks saw it */
	u64 a[6];
	u64 raw[2];	/* first arguments of the call, as its hooks compare them */
};
#define BEGUN_COUNTED	2	/* its begun word was moved */
#define BEGUN_BANK	1	/* ... the one of this bank */
#define SAW_MAIN	1	/* tp_btf/sys_enter, sys_exit */
#define SAW_CLASSIC	2	/* the tracepoint of one call; no arguments at the exit */
#define SAW_COPY	4	/* tp_btf/sys_enter, sys_exit again: from 7.0 */
#define SAW_ANY_CALL	8	/* tracepoint/raw_syscalls/...: from 7.0 */

struct inner_status {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(key_size, sizeof(u32));
	__uint(value_size, sizeof(struct ummu_status));
};

struct inner_interest {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__uint(key_size, sizeof(u32));
	__uint(value_size, sizeof(struct ummu_interest));
};

struct inner_ring {
	__uint(type, BPF_MAP_TYPE_RINGBUF);
	__uint(max_entries, 4096);
};

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_SLOTS);
	__type(key, u32);
	__array(values, struct inner_status);
} slot_status SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_SLOTS);
	__type(key, u32);
	__array(values, struct inner_interest);
} slot_interest SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, MAX_SLOTS);
	__type(key, u32);
	__array(values, struct inner_ring);
} slot_ring SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, MAX_SLOTS);
	__type(key, u32);
	__type(value, struct slot_conf);
} slot_conf SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__uint(map_flags, BPF_F_MMAPABLE);
	__type(key, u32);
	__type(value, struct ummu_epoch);
} epoch SEC(".maps");

/* mm_struct -> its watches. An entry is removed only when the address space
 * dies, when nobody can be reading it: hash elements are reused at once. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u64);
	__type(value, struct space);
} spaces SEC(".maps");

/* tgid -> watches that follow the process through fork and exec. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__type(key, u32);
	__type(value, struct space);
} procs SEC(".maps");

/* mm -> its direct references that have no place in spaces. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, MAX_CROWDS);
	__type(key, u64);
	__type(value, struct crowd);
} crowds SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, u32);
	__type(value, struct inflight);
} tasks SEC(".maps");

/* io_kiocb -> its madvise, from submission to completion; range_key() -> a
 * change that a task has told MMU notifiers of. */
struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 65536);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, u64);
	__type(value, struct inflight);
} requests SEC(".maps");

/* Watches of every address space; like spaces, written in place. */
struct all_refs {
	u64 ref[ALL_REFS];
	u64 any;	/* nonzero while one is live */
};
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct all_refs);
} all_spaces SEC(".maps");

/* Named counters of what went wrong or was rescued, summed over CPUs. */
enum counter {
	COUNT_RESCUED_ENTER,	/* the main hook missed, its partner saw it */
	COUNT_RESCUED_EXIT,
	COUNT_STALE,		/* a begin whose end was never seen, closed later */
	COUNT_UNPAIRED,		/* an end whose begin was not seen */
	COUNT_TASKS_FULL,	/* no room to track a task: its watches are dead */
	COUNT_SPACES_FULL,	/* no room to follow a child: its watches lost events */
	COUNT_FORK,		/* notifier events of fork: no pinned page moves */
	COUNT_HARMLESS,		/* notifier events of causes that move no pinned page */
	COUNT_MISSED_START,	/* by hook, in the order of SAW_*: a notifier probe */
	COUNT_MISSED_START_KPROBE, /* missed what a partner saw */
	COUNT_MISSED_START_FENTRY2,
	COUNT_MISSED_END,
	COUNT_MISSED_END_KPROBE,
	COUNT_MISSED_END_FENTRY2,
	COUNT_WITNESS,		/* all three missed a start, KVM's tracepoint told */
	COUNT_MAX,
};

/* The last event of an address space that nobody watches. */
struct unwatched {
	u64 start, end, ns;
	u32 tid;
	u8 seen;	/* SAW_WITNESS* of those that found it here */
	u8 pad[3];
};
struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, 1);
	__type(key, u32);
	__type(value, struct unwatched);
} last_unwatched SEC(".maps");

struct {
	__uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
	__uint(max_entries, COUNT_MAX);
	__type(key, u32);
	__type(value, u64);
} counters SEC(".maps");

u32 slots_end; /* no slot from here on is in use; set by the loader */
const volatile u64 space_key = 1; /* odd; hides kernel pointers in record.space */

u64 opened; /* moves when a watch is bound to an address space */

static const struct inflight no_inflight;
static const struct space no_space;
static const struct crowd no_crowd;

static __always_inline void count(u32 which)
{
	u64 *n = bpf_map_lookup_elem(&counters, &which);

	if (n)
		*n += 1;
}

/* Nobody reads these: they put the types of what is shared into the object,
 * for the test that compares them with Go. */
const struct ummu_record *const type_record;
const struct ummu_stack *const type_stack;
const struct ummu_status *const type_status;
const struct ummu_interest *const type_interest;

#define ADD(p, v) ((void)__sync_fetch_and_add((p), (v)))

/*
 * Addition and full barrier, for begun before the interest is read: the
 * client sets its interest, fences, then reads begun. Also for a counter that
 * explains a move of the generation, which must be visible before it. Plain atomic adds are
 * full barriers on x86-64; on arm64 only the form that returns the old value
 * is (needs 5.12), so there the result is kept alive.
 */
static __always_inline void add_ordered(u64 *p, u64 v)
{
#if defined(__TARGET_ARCH_arm64)
	u64 old = __sync_fetch_and_add(p, v);

	asm volatile("" : : "r"(old) : "memory");
#else
	ADD(p, v);
	asm volatile("" : : : "memory");
#endif
}

static __always_inline struct ummu_epoch *epoch_page(void)
{
	u32 zero = 0;

	return bpf_map_lookup_elem(&epoch, &zero);
}

/*
 * A change of nobody-knows-whose address space. Nobody may write the page that
 * its watches share, so the bank of new ones changes by itself, every
 * millisecond: meanwhile the other one dries up, and feed.Begin waits two.
 */
static __always_inline void foreign_begin(struct inflight *f)
{
	struct ummu_epoch *e = epoch_page();
	u32 bank = bpf_ktime_get_ns() >> 20 & 1;

	if (!e)
		return;
	f->foreign = 1 + bank;	/* before it counts: see deliver() */
	if (ON(GUARD_FOREIGN))
		add_ordered(&e->begun[bank], 1);
}

static __always_inline void foreign_end(struct inflight *f)
{
	struct ummu_epoch *e = epoch_page();

	if (e && ON(GUARD_FOREIGN))
		ADD(&e->ended[(f->foreign - 1) & 1], 1);
	f->foreign = 0;
}

static __always_inline struct slot_conf *conf_of(u64 ref)
{
	u32 slot = ref & REF_SLOT;
	struct slot_conf *conf;

	if (!ref)
		return NULL;
	conf = bpf_map_lookup_elem(&slot_conf, &slot);
	if (!conf || (conf->incarnation != ref >> REF_SHIFT && ON(GUARD_INCARNATION)))
		return NULL;
	return conf;
}

static __always_inline struct ummu_status *status_of(u64 ref)
{
	u32 slot = ref & REF_SLOT, zero = 0;
	void *inner = bpf_map_lookup_elem(&slot_status, &slot);

	return inner ? bpf_map_lookup_elem(inner, &zero) : NULL;
}

static __always_inline struct ummu_interest *interest_of(u64 ref)
{
	u32 slot = ref & REF_SLOT, zero = 0;
	void *inner = bpf_map_lookup_elem(&slot_interest, &slot);

	return inner ? bpf_map_lookup_elem(inner, &zero) : NULL;
}

/*
 * Whether [start, end) may touch what the client of a watch is interested in.
 * A global function (verified once; scalars, because pointers need 5.12).
 */
__noinline int interesting(u64 ref, u64 start, u64 end)
{
	struct ummu_interest *in = interest_of(ref);
	u32 shift = UMMU_INTEREST_SHIFT0;

	if (!in || in->all)
		return 1;
	if (end <= start)
		return 0;
	for (u32 level = 0; level < UMMU_INTEREST_LEVELS; level++, shift += 8) {
		u64 first = start >> shift, n = ((end - 1) >> shift) - first;
		u32 hit = 0;

		if (n >= UMMU_INTEREST_SPAN || in->dense[level])
			continue;
		for (u32 i = 0; i < UMMU_INTEREST_SPAN; i++) {
			u64 g = first + (i < n ? i : n);
			u64 bit = UMMU_INTEREST_HASH(g);

			hit |= (in->bits[level][bit / 64] >> (bit % 64)) & 1;
		}
		return hit;
	}
	return 1;
}

/*
 * Waking a reader costs the watched task more than its record. The reader of
 * a stream looks by itself every few milliseconds, so it is only woken when
 * the ring fills up: by a few records on the way past a quarter.
 */
#define WAKE_WINDOW 2048

static __always_inline u64 wakeup(void *ring, const struct slot_conf *conf)
{
	u64 past;

	if (conf->flags & SLOT_NO_WAKEUP)
		return BPF_RB_NO_WAKEUP;
	if (!(conf->flags & SLOT_SPACE))
		return 0;
	past = bpf_ringbuf_query(ring, BPF_RB_AVAIL_DATA) - bpf_ringbuf_query(ring, BPF_RB_RING_SIZE) / 4;
	return past < WAKE_WINDOW ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP;
}

/* Set where the probes alone may all miss a begin: the kernel preempts its own
 * code. There KVM's tracepoint has to be behind them. */
const volatile u64 witness_needed;

static __always_inline bool is_kvm_event(u8 hook)
{
	return hook == UMMU_HOOK_KVM_UNMAP || hook == UMMU_HOOK_KVM_UNMAP_COPY || hook == UMMU_HOOK_KVM_UNMAP_CLASSIC;
}

static __always_inline bool is_notifier_probe(u8 hook)
{
	return hook == UMMU_HOOK_NOTIFIER_START_FENTRY || hook == UMMU_HOOK_NOTIFIER_START_FENTRY2 ||
	       hook == UMMU_HOOK_NOTIFIER_START_KPROBE || hook == UMMU_HOOK_KVM_WITNESS ||
	       hook == UMMU_HOOK_KVM_WITNESS_COPY || hook == UMMU_HOOK_KVM_WITNESS_CLASSIC;
}

/*
 * Whether the change takes away what keeps the notifier of a watch's tier
 * registered: from then on nothing would be seen. (Whose mapping it is cannot
 * always be known; another's at that very address ends the watch as well.)
 * Advice leaves a mapping where it is. So does what concerns everything: it is
 * soft-dirty tracking that begins anew (clear_refs_write(), fs/proc/task_mmu.c);
 * exit_mmap() lets the notifiers go before it unmaps.
 */
static __always_inline bool silences(const struct change *c, u64 ref)
{
	struct ummu_interest *in;

	if (!is_kvm_event(c->hook) && !(witness_needed && is_notifier_probe(c->hook)))
		return false;
	if (c->kind == UMMU_PROTECT || (c->kind == UMMU_ZAP && c->abi == UMMU_ABI_NATIVE) ||
	    (!c->start && c->end >= TO_TOP - page_size))
		return false;
	in = interest_of(ref);
	return in && in->holder && c->start <= in->holder && in->holder < c->end && ON(GUARD_HOLDER);
}

/* Whether the current task is in another address space, or in none. */
static __always_inline bool is_outsider(u64 mm)
{
	struct task_struct *task = (void *)bpf_get_current_task();

	return (u64)BPF_CORE_READ(task, mm) != mm;
}

/* The registers a task entered the kernel with. */
static __always_inline struct pt_regs *entry_regs(struct task_struct *task)
{
	if (bpf_core_enum_value_exists(enum bpf_func_id___regs, BPF_FUNC_task_pt_regs___regs))
		return (struct pt_regs *)bpf_task_pt_regs(bpf_get_current_task_btf());
	return BPF_CORE_READ(task, stack) + THREAD_SIZE - bpf_core_type_size(struct pt_regs);
}

/* Set where user stacks are taken (registrations.bpf.h). */
const volatile u64 stacks;

/* A record with its stack. */
struct stacked_record {
	struct ummu_record r;
	struct ummu_stack s;
};

/*
 * Whether the record of c gets a stack: the one before the change, or the only
 * one. Of a change only if it may touch what was registered, so that others
 * cost no more than they do anyway.
 */
static __always_inline bool wants_stack(const struct change *c, u64 ref, u16 flags)
{
	if (c->kind == UMMU_REGISTER || c->kind == UMMU_DEREGISTER)
		return !(c->more & MORE_QUIET);
	if (c->kind > UMMU_PROTECT || (c->phase != UMMU_BEGIN && !(flags & UMMU_F_UNPAIRED)))
		return false;
	return interesting(ref, c->start, c->end) || interesting(ref, c->to_start, c->to_end);
}

#define STACK_CHUNK 256

/* The stack of the current task. One of a 32-bit task is left out. */
static __noinline void take_stack(struct ummu_stack *s)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct pt_regs *regs = entry_regs(task);

	s->pc = s->sp = s->fp = s->lr = 0;
	s->size = 0;
	s->reserved = 0;
#if defined(__TARGET_ARCH_x86)
	if (BPF_CORE_READ(task, thread_info.status) & 2) /* TS_COMPAT */
		return;
	s->pc = BPF_CORE_READ(regs, ip);
	s->sp = BPF_CORE_READ(regs, sp);
	s->fp = BPF_CORE_READ(regs, bp);
#else
	if (BPF_CORE_READ(task, thread_info.flags) & (1UL << 22)) /* TIF_32BIT */
		return;
	s->pc = BPF_CORE_READ(regs, pc);
	s->sp = BPF_CORE_READ(regs, sp);
	s->fp = BPF_CORE_READ(regs, regs[29]);
	s->lr = BPF_CORE_READ(regs, regs[30]);
#endif
	for (u32 i = 0; i < UMMU_STACK_BYTES / STACK_CHUNK; i++) {
		/* fails at the end of the stack's mapping, and clears the chunk */
		if (bpf_probe_read_user(s->memory + i * STACK_CHUNK, STACK_CHUNK, (void *)(s->sp + i * STACK_CHUNK)))
			break;
		s->size += STACK_CHUNK;
	}
}

/* Writes the record of f for one watch. Every way to fail is counted. foreign:
 * nobody knows whose address space it is. */
static __always_inline void post(const struct change *c, u64 ref, struct slot_conf *conf,
				 struct ummu_status *st, u16 flags, bool foreign)
{
	bool guest = (conf->flags & SLOT_GUEST) && ON(GUARD_HIDDEN);
	u32 kinds = c->phase == UMMU_BEGIN ? conf->begin_kinds : conf->end_kinds;
	u32 slot = ref & REF_SLOT;
	u64 *comm, id, start = c->start, end = c->end;
	struct ummu_record *r;
	void *ring;

	if (!ON(GUARD_RANGE_PLACE) && end != TO_TOP) {
		start += page_size;
		end += page_size;
	}
	if (!ON(GUARD_RANGE_WHOLE) && end - start > page_size)
		end -= page_size;
	if (!(kinds & (1u << (c->kind & 31))))
		return;
	if ((conf->flags & SLOT_TRACK) && silences(c, ref)) {
		add_ordered(&st->deaths, 1);
		ADD(&st->generation, UMMU_GEN_DEATH);
		return;
	}
	if ((conf->flags & SLOT_TRACK) && c->kind <= UMMU_PROTECT && ON(GUARD_FILTERED) &&
	    !interesting(ref, start, end) &&
	    (!ON(GUARD_DESTINATION) || !interesting(ref, c->to_start, c->to_end))) {
		ADD(&st->filtered, 1);
		return;
	}
	if (foreign && guest) {
		ADD(&st->foreign, 1);
		add_ordered(&st->lost, 1);
		ADD(&st->generation, UMMU_GEN_LOSS);
		return;
	}
	if (!ON(GUARD_COMMIT_FIRST)) {
		ADD(&st->records, 1);
		ADD(&st->generation, UMMU_GEN_RECORD);
		for (int i = 0; i < 100; i++) /* for some microseconds */
			bpf_ktime_get_ns();
	}
	ring = bpf_map_lookup_elem(&slot_ring, &slot);
	r = NULL;
	if (ring && stacks && (conf->flags & SLOT_STACKS) && wants_stack(c, ref, flags)) {
		struct stacked_record *sr = bpf_ringbuf_reserve(ring, sizeof(*sr), 0);

		if (sr) {
			take_stack(&sr->s);
			r = &sr->r;
		}
	} else if (ring) {
		r = bpf_ringbuf_reserve(ring, sizeof(*r), 0);
	}
	if (!r) {
		if (ON(GUARD_LOSS_COUNTS)) {
			add_ordered(&st->lost, 1);
			ADD(&st->generation, UMMU_GEN_LOSS);
		}
		return;
	}
	id = guest && is_outsider(c->mm) ? 0 : bpf_get_current_pid_tgid();
	r->time_ns = bpf_ktime_get_ns();
	r->start = start;
	r->end = end;
	r->to_start = c->to_start;
	r->to_end = c->to_end;
	r->lost = st->lost;
	r->arg[0] = c->arg[0];
	r->arg[1] = c->arg[1];
	r->ret = c->ret;
	r->pid = id >> 32;
	r->tid = (u32)id;
	r->child_pid = c->child_pid;
	r->child_tid = c->child_tid;
	r->nr = c->nr;
	r->flags = flags;
	r->kind = c->kind;
	r->phase = c->phase;
	r->hook = c->hook;
	r->abi = c->abi;
	r->by = c->by;
	r->all = c->more & MORE_ALL;
	__builtin_memset(r->reserved, 0, sizeof(r->reserved));
	comm = (u64 *)r->comm;
	comm[0] = 0;
	comm[1] = 0;
	r->space = 0;
	if (conf->flags & SLOT_SPACE) {
		r->space = c->mm * space_key;
		bpf_get_current_comm(r->comm, sizeof(r->comm));
	}
	bpf_ringbuf_submit(r, wakeup(ring, conf));
	if (ON(GUARD_COMMIT_FIRST)) {
		ADD(&st->records, 1);
		ADD(&st->generation, UMMU_GEN_RECORD);
	}
}

static __always_inline struct all_refs *all_refs(void)
{
	u32 zero = 0;
	struct all_refs *all = bpf_map_lookup_elem(&all_spaces, &zero);

	return all && all->any ? all : NULL;
}

static __always_inline u32 id_of(u64 ref)
{
	return ref >> REF_SHIFT;
}

/* What deliver() does for each watch, in this order. */
#define DO_BEGIN	1	/* count the change as begun */
#define DO_POST		2	/* write the record */
#define DO_PAIR		4	/* ... as unpaired where the watch missed the begin */
#define DO_END		8	/* count the change as ended */
#define DO_DEATH	16	/* the address space is gone */
#define OF_REQUEST	32	/* the change is in requests, not in tasks */
#define OF_PROC		64	/* for the watches of the process, not of the space */
#define DO_NESTED	256	/* with DO_BEGIN: not for who has counted the outer one */
#define DO_REST		128	/* only for watches that the change did not begin for */

static __always_inline struct inflight *inflight_of(u64 key, u32 how)
{
	u32 tid = key;

	if (how & OF_REQUEST)
		return bpf_map_lookup_elem(&requests, &key);
	return bpf_map_lookup_elem(&tasks, &tid);
}

/*
 * Delivers a change to one watch: that of place i. A global
 * function, verified once; its arguments are scalars because pointers need
 * 5.12.
 */
__noinline int deliver_one(u64 key, u32 how, u32 index, u64 ref)
{
	u64 i = index;
	struct inflight *f = inflight_of(key, how);
	struct slot_conf *conf = conf_of(ref);
	struct ummu_status *st;

	asm volatile("" : "+r"(i)); /* one register: the bound below holds for every use */
	if (!f || i >= REFS || !conf)
		return 0;
	st = status_of(ref);
	if (!st || ((how & DO_REST) && f->id[i] == id_of(ref)))
		return 0;
	if ((how & DO_BEGIN) && !((how & DO_NESTED) && f->id[i] == id_of(ref))) {
		f->did[i] = 0;
		if (conf->flags & SLOT_TRACK) {
			struct ummu_interest *in = interest_of(ref);
			u32 bank = in ? in->bank & 1 : 0;

			/* nothing of the client's: it only shows where it is */
			if (in && in->marker && in->marker == f->c.start && f->c.end == f->c.start + page_size &&
			    f->c.kind == UMMU_ZAP && is_kvm_event(f->c.hook) && ON(GUARD_MARKER))
				return 0;
			/* off: only what is interesting when it begins */
			if (ON(GUARD_COUNT_ALL) || interesting(ref, f->c.start, f->c.end)) {
				add_ordered(&st->begun[bank], 1);
				f->did[i] = BEGUN_COUNTED | bank;
			}
		}
		f->id[i] = id_of(ref);
	}
	if (how & DO_POST) {
		u16 flags = f->c.flags;

		/* an end whose begin this watch did not get is a loss to it: the
		 * change may be older than what the watch knows */
		if ((how & DO_PAIR) && f->id[i] != id_of(ref) && ON(GUARD_UNPAIRED_LOSS)) {
			flags |= UMMU_F_UNPAIRED;
			add_ordered(&st->unpaired, 1);
			ADD(&st->generation, UMMU_GEN_LOSS);
		}
		post(&f->c, ref, conf, st, flags, false);
	}
	if ((how & DO_END) && f->id[i] == id_of(ref)) {
		if (f->did[i] & BEGUN_COUNTED)
			ADD(&st->ended[f->did[i] & BEGUN_BANK], 1);
		f->did[i] = 0;
		f->id[i] = 0;
	}
	if ((how & DO_DEATH) && (conf->flags & SLOT_TRACK) && ON(GUARD_DEATH_COUNTS)) {
		add_ordered(&st->deaths, 1);
		ADD(&st->generation, UMMU_GEN_DEATH);
	}
	return 0;
}

/* ... to the first n of a crowd. */
__noinline int deliver_crowd(u64 key, u32 how, u32 n)
{
	struct inflight *f = inflight_of(key, how);
	struct crowd *crowd = f ? bpf_map_lookup_elem(&crowds, &f->mm) : NULL;

	if (!crowd)
		return 0;
	for (u32 i = 0; i < CROWD_REFS; i++) {
		if (i >= n)
			break;
		if (crowd->ref[i])
			deliver_one(key, how, SPACE_REFS + i, crowd->ref[i]);
	}
	return 0;
}

/*
 * Delivers the change of one task (or io_uring request, or lifecycle event)
 * to every watch it concerns.
 *
 * A watch closed between begin and end is skipped (its reference is dead),
 * and one that took its place is not the one that was counted.
 */
__noinline int deliver(u64 key, u32 how)
{
	struct inflight *f = inflight_of(key, how);
	struct all_refs *all = all_refs();
	struct space *s;

	if (!f)
		return 0;
	/* Before it is counted: whoever counted and is not active has ended, for
	 * one who looks at tasks and not at the words (in_last_event). */
	if (how & DO_BEGIN) {
		f->active = 1;
		f->at = opened;
	}
	if (how & OF_PROC) {
		u32 tgid = bpf_get_current_pid_tgid() >> 32;

		s = bpf_map_lookup_elem(&procs, &tgid);
	} else {
		s = bpf_map_lookup_elem(&spaces, &f->mm);
	}
	if (s) {
		for (u32 i = 0; i < SPACE_REFS; i++) {
			if (s->ref[i])
				deliver_one(key, how, i, s->ref[i]);
		}
		if (s->crowd)
			deliver_crowd(key, how, s->crowd);
	}
	if (all) {
		for (u32 i = 0; i < ALL_REFS; i++) {
			if (all->ref[i])
				deliver_one(key, how, ALL_FIRST + i, all->ref[i]);
		}
	}
	if (how & DO_END) {
		f->active = 0;
		if (f->brk && s)
			ADD(&s->brks, -1);
		f->brk = 0;
	}
	return 0;
}

/*
 * There is no room to keep the change: every watch of the address space is
 * told so, without its record.
 */
__noinline int untracked_one(u64 ref)
{
	struct ummu_status *st = conf_of(ref) ? status_of(ref) : NULL;

	if (st && ON(GUARD_UNTRACKED)) {
		add_ordered(&st->untracked, 1);
		add_ordered(&st->lost, 1);
		ADD(&st->generation, UMMU_GEN_DEATH);
	}
	return 0;
}

__noinline int untracked_crowd(u64 mm, u32 n)
{
	struct crowd *crowd = bpf_map_lookup_elem(&crowds, &mm);

	if (!crowd)
		return 0;
	for (u32 i = 0; i < CROWD_REFS; i++) {
		if (i >= n)
			break;
		untracked_one(crowd->ref[i]);
	}
	return 0;
}

__noinline int untracked(u64 mm)
{
	struct space *s = bpf_map_lookup_elem(&spaces, &mm);
	struct all_refs *all = all_refs();

	count(COUNT_TASKS_FULL);
	if (s) {
		for (u32 i = 0; i < SPACE_REFS; i++)
			untracked_one(s->ref[i]);
		if (s->crowd)
			untracked_crowd(mm, s->crowd);
	}
	if (all) {
		for (u32 i = 0; i < ALL_REFS; i++)
			untracked_one(all->ref[i]);
	}
	return 0;
}

static __always_inline struct space *space_of(u64 mm)
{
	return bpf_map_lookup_elem(&spaces, &mm);
}

static __always_inline bool watched(u64 mm)
{
	return space_of(mm) || all_refs();
}

/* The entry of the current task, made if need be; NULL: counted as untracked. */
static __always_inline struct inflight *task_entry(u32 tid, u64 mm)
{
	struct inflight *f = bpf_map_lookup_elem(&tasks, &tid);

	if (!f) {
		bpf_map_update_elem(&tasks, &tid, &no_inflight, BPF_ANY);
		f = bpf_map_lookup_elem(&tasks, &tid);
		if (!f) {
			untracked(mm);
			return NULL;
		}
	}
	f->mm = mm;
	return f;
}

/* An entry for a request or a lifecycle event, under an address as key. */
static __always_inline struct inflight *request_entry(u64 key, u64 mm)
{
	struct inflight *f = bpf_map_lookup_elem(&requests, &key);

	if (!f) {
		bpf_map_update_elem(&requests, &key, &no_inflight, BPF_ANY);
		f = bpf_map_lookup_elem(&requests, &key);
		if (!f) {
			untracked(mm);
			return NULL;
		}
	}
	f->mm = mm;
	return f;
}

/*
 * The hooks of one function run one after the other. If they are further apart
 * than this they are taken for two events, of which each lost its partners: one
 * record too many at a begin, where that is cheap; at an end, a loss, so there
 * it is longer than tasks are usually preempted for.
 */
#define PARTNER_START_NS 200000ULL
#define PARTNER_END_NS 100000000ULL

/* Remembers an event that makes no entry, on this processor, for its other
 * hooks. */
static __always_inline void set_aside(u32 tid, u64 start, u64 end)
{
	u32 zero = 0;
	struct unwatched *u = bpf_map_lookup_elem(&last_unwatched, &zero);

	if (u) {
		u->start = start;
		u->end = end;
		u->tid = tid;
		u->seen = 0;
		u->ns = bpf_ktime_get_ns();
	}
}

/* ... is over: the task's next of the same range is another. */
static __always_inline void take_back(u32 tid, u64 start, u64 end)
{
	u32 zero = 0;
	struct unwatched *u = bpf_map_lookup_elem(&last_unwatched, &zero);

	if (u && u->tid == tid && u->start == start && u->end == end)
		u->tid = 0;
}

static __always_inline struct unwatched *is_aside(u32 tid, u64 start, u64 end)
{
	u32 zero = 0;
	struct unwatched *u = bpf_map_lookup_elem(&last_unwatched, &zero);

	if (u && u->tid == tid && u->start == start && u->end == end &&
	    bpf_ktime_get_ns() - u->ns < PARTNER_END_NS)
		return u;
	return NULL;
}

static __always_inline bool was_set_aside(u32 tid, u64 start, u64 end)
{
	return is_aside(tid, start, end) != NULL;
}

/* Changes of one task that are in progress, by nesting: small numbers, where
 * other keys of requests are kernel addresses. */
#define RANGE_LEVELS 4

static __always_inline u64 range_key(u32 tid, u32 level)
{
	return (u64)tid * RANGE_LEVELS + level;
}

/* Ends the changes of a task from a level of nesting on: their ends were missed. */
__noinline int close_ranges(u32 tid, u32 level)
{
	for (u32 i = 0; i < RANGE_LEVELS; i++) {
		u64 key = range_key(tid, i);
		struct inflight *f;

		if (i < level)
			continue;
		f = bpf_map_lookup_elem(&requests, &key);
		if (!f)
			break;
		if (f->active) {
			count(COUNT_STALE);
			f->c.phase = UMMU_END;
			deliver(key, DO_POST | DO_PAIR | DO_END | OF_REQUEST);
		}
	}
	return 0;
}

/* ... and forgets them: the task is at its end. */
static __always_inline void forget_ranges(u32 tid)
{
	close_ranges(tid, 0);
	for (u32 i = 0; i < RANGE_LEVELS; i++) {
		u64 key = range_key(tid, i);

		if (bpf_map_delete_elem(&requests, &key))
			break;
	}
}

#endif
