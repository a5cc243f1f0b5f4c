/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Registrations of programs that know nothing of us: io_uring's fixed buffers
 * by the system call, memory regions of RDMA by probes of libibverbs. For
 * streams only; loaded where they are asked for, with any tier.
 *
 * A call that registers has a begin record for each buffer, before anything is
 * pinned, and an end record with its result: between them the kernel pins.
 * Buffers also go without such a call: when the ring or the device is closed,
 * with the address space (exit, exec), which has records of its own.
 */
#ifndef UMMU_REGISTRATIONS_BPF_H
#define UMMU_REGISTRATIONS_BPF_H

#include "core_fixes.bpf.h"
#include "life.bpf.h"
#include "syscall.bpf.h"

/* include/uapi/linux/io_uring.h */
#define REGISTER_BUFFERS	0
#define UNREGISTER_BUFFERS	1
#define REGISTER_BUFFERS2	15	/* 5.13 */
#define REGISTER_BUFFERS_UPDATE	16	/* 5.13 */
#define CLONE_BUFFERS		30	/* 6.12 */
#define USE_REGISTERED_RING	(1U << 31)
#define RSRC_REGISTER_SPARSE	1
#define MAX_BUFFERS		16384	/* IORING_MAX_REG_BUFFERS, io_uring/rsrc.c */

/* struct io_uring_rsrc_register and io_uring_rsrc_update2 */
struct rsrc_register {
	u32 nr, flags;
	u64 resv2, data, tags;
};
struct rsrc_update2 {
	u32 offset, resv;
	u64 data, tags;
	u32 nr, resv2;
};

/* Calls, by what they do to rings. */
enum ring_call {
	RING_NONE,
	RING_REGISTER,
	RING_CLOSE,
	RING_CLOSE_RANGE,
	RING_DUP,	/* dup2, dup3: closes the second */
};

static __always_inline u32 ring_call(u64 nr, bool compat)
{
	switch (nr) {
	case 427:
		return RING_REGISTER;
	case 436:
		return RING_CLOSE_RANGE;
	}
#if defined(__TARGET_ARCH_x86)
	if (!compat)
		return nr == 3 ? RING_CLOSE : nr == 33 || nr == 292 ? RING_DUP : RING_NONE;
	return nr == 6 ? RING_CLOSE : nr == 63 || nr == 330 ? RING_DUP : RING_NONE;
#else
	if (!compat)
		return nr == 57 ? RING_CLOSE : nr == 24 ? RING_DUP : RING_NONE;
	return nr == 6 ? RING_CLOSE : nr == 63 || nr == 358 ? RING_DUP : RING_NONE;
#endif
}

/* The registering call that a task is in. */
struct regcall {
	u64 mm;
	u64 ring;	/* struct file */
	u64 data;	/* of the elements, in user memory */
	u64 tags;
	u64 start, end;	/* the hull of what was read */
	u32 fd;
	u32 nr;		/* of the call */
	u32 opcode;
	u32 first;	/* slot */
	u32 n;
	u32 done;	/* elements that have their record */
	u8 abi;
	u8 unread;	/* an element could not be read at the entry */
	u8 empty;	/* slots without buffers */
	u8 posted;	/* there is a begin record */
	u8 pad[4];
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, u32);
	__type(value, struct regcall);
} regcalls SEC(".maps");

/* Rings with buffers, of an address space. Those of processes that ended stay
 * until there is no room. */
struct ring_key {
	u64 ring, mm;
};
struct {
	__uint(type, BPF_MAP_TYPE_LRU_HASH);
	__uint(max_entries, 16384);
	__type(key, struct ring_key);
	__type(value, u8);
} rings SEC(".maps");

static const struct regcall no_regcall;

/* What is registered is of interest from here on, to streams that take stacks
 * of changes that touch it. It stays so: too many stacks are not wrong. */
#define MARK_GRANULES 64

__noinline int mark(u64 ref, u64 start, u64 end)
{
	struct slot_conf *conf = conf_of(ref);
	u32 shift = UMMU_INTEREST_SHIFT0;
	struct ummu_interest *in;

	if (!conf || !(conf->flags & SLOT_STACKS) || end <= start)
		return 0;
	in = interest_of(ref);
	if (!in)
		return 0;
	for (u32 level = 0; level < UMMU_INTEREST_LEVELS; level++, shift += 8) {
		u64 first = start >> shift, n = ((end - 1) >> shift) - first;

		if (n >= MARK_GRANULES) {
			in->dense[level] = 1;
			continue;
		}
		for (u32 i = 0; i < MARK_GRANULES; i++) {
			u64 g = first + (i < n ? i : n);
			u64 bit = UMMU_INTEREST_HASH(g);

			__sync_fetch_and_or(&in->bits[level][bit / 64], 1ULL << (bit % 64));
			if (i >= n)
				break;
		}
	}
	return 0;
}

__noinline int mark_all(u64 mm, u64 start, u64 end)
{
	struct space *s = bpf_map_lookup_elem(&spaces, &mm);
	struct all_refs *all = all_refs();

	if (s) {
		for (u32 i = 0; i < SPACE_REFS; i++) {
			if (s->ref[i])
				mark(s->ref[i], start, end);
		}
	}
	if (all) {
		for (u32 i = 0; i < ALL_REFS; i++) {
			if (all->ref[i])
				mark(all->ref[i], start, end);
		}
	}
	return 0;
}

/* The entry of requests that the current task's records of registrations are
 * made in; no other event has this key. */
static __always_inline u64 reg_key(void)
{
	return bpf_get_current_task() | 1;
}

static __always_inline struct change *reg_change(u64 key, u64 mm, u8 kind, u8 phase, u8 hook)
{
	struct inflight *f = request_entry(key, mm);
	struct change *c;

	if (!f)
		return NULL;
	f->c = no_inflight.c;
	c = &f->c;
	c->kind = kind;
	c->phase = phase;
	c->hook = hook;
	c->abi = UMMU_ABI_NONE;
	c->mm = mm;
	return c;
}

static __always_inline struct change *ring_change(u64 key, const struct regcall *rc, u8 kind, u8 phase, u8 hook)
{
	struct change *c = reg_change(key, rc->mm, kind, phase, hook);

	if (!c)
		return NULL;
	c->abi = rc->abi;
	c->nr = rc->nr;
	c->by = UMMU_BY_IO_URING;
	c->to_start = rc->ring * space_key;
	c->child_pid = rc->fd;
	c->arg[0] = rc->opcode;
	return c;
}

/* The next element of the call, as a begin record. */
static long begin_buffer(u32 unused, void *ctx)
{
	u32 tid = (u32)bpf_get_current_pid_tgid(), i;
	struct regcall *rc = bpf_map_lookup_elem(&regcalls, &tid);
	bool unread = false, at_exit = *(u32 *)ctx;
	u64 key = reg_key(), v[2] = {};
	struct change *c;
	u8 kind;

	if (!rc)
		return 1;
	i = rc->done;
	if (rc->abi != UMMU_ABI_NATIVE) {
		u32 v32[2] = {};

		unread = bpf_probe_read_user(v32, sizeof(v32), (void *)(rc->data + (u64)i * 8));
		v[0] = v32[0];
		v[1] = v32[1];
	} else {
		unread = bpf_probe_read_user(v, sizeof(v), (void *)(rc->data + (u64)i * 16));
	}
	if (unread && !at_exit) {
		rc->unread = 1;	/* the kernel will read it, so at the exit it is there */
		return 1;
	}
	rc->done = i + 1;
	/* no buffer: the slot is cleared */
	kind = unread || v[0] || v[1] ? UMMU_REGISTER : UMMU_DEREGISTER;
	if (kind == UMMU_DEREGISTER && rc->opcode != REGISTER_BUFFERS_UPDATE)
		return 0;
	c = ring_change(key, rc, kind, UMMU_BEGIN, at_exit ? UMMU_HOOK_REGISTER_EXIT : UMMU_HOOK_REGISTER_ENTER);
	if (!c)
		return 1;
	c->to_end = rc->first + i;
	c->flags = UMMU_F_VECTOR;
	if (i || kind == UMMU_DEREGISTER)
		c->more = MORE_QUIET;
	rc->posted = 1;
	if (unread) {
		c->flags |= UMMU_F_UNKNOWN_LENGTH;
	} else if (kind == UMMU_REGISTER) {
		c->start = UNTAG(v[0]);
		c->end = c->start + v[1];
		if (c->start < rc->start)
			rc->start = c->start;
		if (c->end > rc->end)
			rc->end = c->end;
		mark_all(rc->mm, c->start & ~(page_size - 1), page_up(c->end));
	}
	deliver(key, DO_POST | OF_REQUEST);
	return unread ? 1 : 0;
}

static __always_inline void begin_buffers(struct regcall *rc, u32 at_exit)
{
	u32 n = rc->n;

	if (n > MAX_BUFFERS || rc->empty)
		return;		/* refused; slots without buffers */
	bpf_loop(n - rc->done, begin_buffer, &at_exit, 0);
}

static __always_inline u64 file_at(struct task_struct *task, u64 fd)
{
	struct fdtable *fdt = BPF_CORE_READ(task, files, fdt);
	struct file **fds = BPF_CORE_READ(fdt, fd);
	u64 f = 0;

	if (fd >= BPF_CORE_READ(fdt, max_fds))
		return 0;
	bpf_probe_read_kernel(&f, sizeof(f), fds + fd);
	return f;
}

static __always_inline u64 ring_of(struct task_struct *task, u32 fd, bool registered)
{
	struct io_uring_task *t;
	u64 f = 0;

	if (!registered)
		return file_at(task, fd);
	t = BPF_CORE_READ(task, io_uring);
	if (!t || fd >= 16 || !bpf_core_field_exists(t->registered_rings))
		return 0;
	bpf_probe_read_kernel(&f, sizeof(f), (void *)t + bpf_core_field_offset(t->registered_rings) + fd * 8);
	return f;
}

/* ---- io_uring_register ---- */

static __always_inline int enter_register(const struct call_site *site, struct task_struct *task, u64 mm)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	u32 opcode = (u32)site->k.a[1] & ~USE_REGISTERED_RING;
	bool registered = (u32)site->k.a[1] & USE_REGISTERED_RING;
	u64 arg = site->k.a[2], key = reg_key();
	struct regcall *rc;
	struct change *c;

	if (opcode != REGISTER_BUFFERS && opcode != UNREGISTER_BUFFERS && opcode != REGISTER_BUFFERS2 &&
	    opcode != REGISTER_BUFFERS_UPDATE && opcode != CLONE_BUFFERS)
		return 0;
	bpf_map_update_elem(&regcalls, &tid, &no_regcall, BPF_ANY);
	rc = bpf_map_lookup_elem(&regcalls, &tid);
	if (!rc) {
		untracked(mm);
		return 0;
	}
	rc->mm = mm;
	rc->nr = site->nr;
	rc->abi = site->abi;
	rc->opcode = opcode;
	rc->fd = registered ? ~0U : (u32)site->k.a[0];
	rc->start = TO_TOP;
	rc->ring = ring_of(task, (u32)site->k.a[0], registered);
	if (!rc->ring)
		return 0;	/* refused; the exit deletes it */
	if (opcode != UNREGISTER_BUFFERS) {
		/* now, since another thread may close it before this call is seen to end */
		struct ring_key k = { rc->ring, mm };
		u8 one = 1;

		bpf_map_update_elem(&rings, &k, &one, BPF_ANY);
	}
	switch (opcode) {
	case REGISTER_BUFFERS:
		rc->data = arg;
		rc->n = (u32)site->k.a[3];
		break;
	case REGISTER_BUFFERS2: {
		struct rsrc_register r;

		if (bpf_probe_read_user(&r, sizeof(r), (void *)arg)) {
			rc->unread = 1;
			rc->data = arg;
			return 0;
		}
		rc->data = r.data;
		rc->n = r.nr;
		rc->empty = (r.flags & RSRC_REGISTER_SPARSE) || !r.data;
		break;
	}
	case REGISTER_BUFFERS_UPDATE: {
		struct rsrc_update2 r;

		if (bpf_probe_read_user(&r, sizeof(r), (void *)arg)) {
			rc->unread = 1;
			rc->data = arg;
			return 0;
		}
		rc->data = r.data;
		rc->n = r.nr;
		rc->first = r.offset;
		break;
	}
	case UNREGISTER_BUFFERS:
		c = ring_change(key, rc, UMMU_DEREGISTER, UMMU_BEGIN, site->hook);
		rc->posted = 1;
		if (c) {
			c->more = MORE_ALL | MORE_QUIET;
			deliver(key, DO_POST | OF_REQUEST);
		}
		bpf_map_delete_elem(&requests, &key);
		return 0;
	case CLONE_BUFFERS:	/* of another ring, whose buffers they are is not followed */
		c = ring_change(key, rc, UMMU_REGISTER, UMMU_BEGIN, site->hook);
		rc->posted = 1;
		if (c) {
			c->flags = UMMU_F_VECTOR | UMMU_F_UNKNOWN_LENGTH;
			deliver(key, DO_POST | OF_REQUEST);
		}
		bpf_map_delete_elem(&requests, &key);
		return 0;
	}
	begin_buffers(rc, 0);
	bpf_map_delete_elem(&requests, &key);
	return 0;
}

static __always_inline int leave_register(const struct call_site *site, struct task_struct *task, u64 mm, s64 ret)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct regcall *rc = bpf_map_lookup_elem(&regcalls, &tid);
	u64 key = reg_key();
	struct change *c;
	u8 kind;

	if (!rc)
		return 0;
	if (rc->unread && !is_error(ret)) {
		if (!rc->n && rc->opcode == REGISTER_BUFFERS2) {
			struct rsrc_register r = {};

			bpf_probe_read_user(&r, sizeof(r), (void *)rc->data);
			rc->data = r.data;
			rc->n = r.nr;
			rc->empty = (r.flags & RSRC_REGISTER_SPARSE) || (r.nr && !r.data);
		} else if (!rc->n) {
			struct rsrc_update2 r = {};

			bpf_probe_read_user(&r, sizeof(r), (void *)rc->data);
			rc->data = r.data;
			rc->n = r.nr;
			rc->first = r.offset;
		}
		if (!rc->n)
			rc->n = 1;	/* still unreadable: one record says so */
		begin_buffers(rc, 1);
	}
	kind = rc->opcode == UNREGISTER_BUFFERS ? UMMU_DEREGISTER : UMMU_REGISTER;
	if (rc->ring && rc->posted) {
		c = ring_change(key, rc, kind, UMMU_END, site->hook);
		if (c) {
			c->ret = ret;
			c->more = MORE_QUIET;
			if (kind == UMMU_DEREGISTER)
				c->more |= MORE_ALL;
			else
				c->flags = UMMU_F_VECTOR;
			if (rc->end) {
				c->start = rc->start;
				c->end = rc->end;
			}
			deliver(key, DO_POST | OF_REQUEST);
		}
	}
	bpf_map_delete_elem(&requests, &key);
	bpf_map_delete_elem(&regcalls, &tid);
	return 0;
}

/* ---- rings are closed ---- */

/*
 * A ring without a descriptor cannot be given work any more; the kernel lets
 * its buffers go when nobody refers to it. What else may refer to it (its
 * mappings, another process) is not looked at: descriptors of this process are,
 * as many as these.
 */
#define MAX_FDS 65536

struct close_scan {
	u64 mm, ring;
	u32 from, to;	/* descriptors that are closed */
	u32 fd;
	u32 nr;
	u8 abi;
	u8 found;
};

static long find_other(u32 i, void *ctx)
{
	struct close_scan *s = ctx;

	if (i >= s->from && i <= s->to)
		return 0;
	if (file_at((void *)bpf_get_current_task(), i) == s->ring) {
		s->found = 1;
		return 1;
	}
	return 0;
}

static __always_inline u32 descriptors(struct task_struct *task)
{
	u32 n = BPF_CORE_READ(task, files, fdt, max_fds);

	return n < MAX_FDS ? n : MAX_FDS;
}

static __always_inline void close_ring(struct close_scan *s)
{
	struct ring_key k = { s->ring, s->mm };
	u64 key = reg_key();
	struct regcall rc = {};
	struct change *c;

	if (!s->ring || !bpf_map_lookup_elem(&rings, &k))
		return;
	s->found = 0;
	bpf_loop(descriptors((void *)bpf_get_current_task()), find_other, s, 0);
	if (s->found)
		return;
	bpf_map_delete_elem(&rings, &k);
	rc.mm = s->mm;
	rc.ring = s->ring;
	rc.fd = s->fd;
	rc.nr = s->nr;
	rc.abi = s->abi;
	c = ring_change(key, &rc, UMMU_DEREGISTER, UMMU_END, UMMU_HOOK_REGISTER_ENTER);
	if (c) {
		c->more = MORE_ALL | MORE_QUIET;
		deliver(key, DO_POST | OF_REQUEST);
	}
	bpf_map_delete_elem(&requests, &key);
}

static long close_one(u32 i, void *ctx)
{
	struct close_scan *s = ctx;

	s->fd = s->from + i;
	s->ring = file_at((void *)bpf_get_current_task(), s->fd);
	close_ring(s);
	return 0;
}

#define CLOSE_RANGE_CLOEXEC 4

/* raw_syscalls:sys_enter, as hook_sys_enter. */
SEC("tp_btf/sys_enter")
int hook_register_enter(u64 *ctx)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct call_site site = { .hook = UMMU_HOOK_REGISTER_ENTER };
	u64 nr = ctx[1] & ~(u64)X32_BIT, mm;
	struct close_scan s = {};
	u32 call;

	if (!ring_call(nr, false) && !ring_call(nr, true))
		return 0;
	mm = (u64)BPF_CORE_READ(task, mm);
	if (!mm || !watched(mm) || is_skipped())
		return 0;
	identify(&site, task, ctx[1]);
	read_args(&site, (struct pt_regs *)ctx[0]);
	call = ring_call(nr, site.abi == UMMU_ABI_COMPAT);
	if (call == RING_REGISTER)
		return enter_register(&site, task, mm);
	s.mm = mm;
	s.nr = site.nr;
	s.abi = site.abi;
	switch (call) {
	case RING_CLOSE:
		s.fd = s.from = s.to = (u32)site.k.a[0];
		s.ring = file_at(task, s.fd);
		close_ring(&s);
		break;
	case RING_DUP:
		if ((u32)site.k.a[0] == (u32)site.k.a[1])
			return 0;
		s.fd = s.from = s.to = (u32)site.k.a[1];
		s.ring = file_at(task, s.fd);
		if (s.ring != file_at(task, (u32)site.k.a[0]))
			close_ring(&s);
		break;
	case RING_CLOSE_RANGE: {
		u32 end = descriptors(task);

		s.from = (u32)site.k.a[0];
		s.to = (u32)site.k.a[1];
		if (((u32)site.k.a[2] & CLOSE_RANGE_CLOEXEC) || s.from > s.to || s.from >= end)
			return 0;
		bpf_loop((s.to < end ? s.to + 1 : end) - s.from, close_one, &s, 0);
		break;
	}
	}
	return 0;
}

/* raw_syscalls:sys_exit, as hook_sys_exit. */
SEC("tp_btf/sys_exit")
int hook_register_exit(u64 *ctx)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	struct call_site site = { .hook = UMMU_HOOK_REGISTER_EXIT };
	struct pt_regs *regs = (struct pt_regs *)ctx[0];
	u64 mm;
#if defined(__TARGET_ARCH_x86)
	u64 nr = regs->orig_ax;
#else
	u64 nr = (u32)regs->syscallno;
#endif

	if (ring_call(nr & ~(u64)X32_BIT, false) != RING_REGISTER || is_skipped())
		return 0;
	mm = (u64)BPF_CORE_READ(task, mm);
	if (!mm || !watched(mm))
		return 0;
	identify(&site, task, nr);
	read_args(&site, regs);
	return leave_register(&site, task, mm, (s64)ctx[1]);
}

/* ---- libibverbs ---- */

/*
 * Probes of the functions of infiniband/verbs.h, by address in the file: of
 * their newest versions, which the old ones (IBVERBS_1.0) call. One calls
 * another (ibv_reg_mr jumps to ibv_reg_mr_iova2), so that a call is the
 * outermost of those that are open, and what it returns is what the innermost
 * returns.
 *
 * A probe costs a task that calls the function a trap, about a microsecond,
 * whether it is watched or not.
 */
enum verb {
	VERB_REG_MR,	/* also ibv_reg_mr_iova, _iova2 */
	VERB_DEREG_MR,
	VERB_REREG_MR,
};

struct verbcall {
	u64 mm;
	u64 sp;		/* of the outermost */
	u64 subject;
	u64 mr;		/* argument, or result of the innermost */
	u64 device;
	u64 start, end;
	u32 access;
	u32 depth;
	u8 verb;
	u8 translation;	/* IBV_REREG_MR_CHANGE_TRANSLATION */
};

struct {
	__uint(type, BPF_MAP_TYPE_HASH);
	__uint(max_entries, 16384);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, u32);
	__type(value, struct verbcall);
} verbcalls SEC(".maps");

static const struct verbcall no_verbcall;

/* Regions that went: as the kernel says, as the probes saw. */
u64 kernel_deregs, verbs_deregs;

/* infiniband/verbs.h: struct ibv_mr and struct ibv_pd begin with their context. */
struct ibv_mr {
	u64 context, pd, addr, length;
	u32 handle, lkey, rkey, pad;
};

#define IBV_REREG_CHANGE_TRANSLATION 1
#define IBV_REREG_CHANGE_ACCESS 4

static __always_inline u64 user_word(u64 at)
{
	u64 v = 0;

	bpf_probe_read_user(&v, sizeof(v), (void *)at);
	return v;
}

/* More levels than there are functions to call each other: returns were missed. */
#define MAX_DEPTH 4

/*
 * The call's entry, or NULL: it is inside one that has been seen, or of nobody.
 * One inside another is about the same: subject is the address that is
 * registered, or the region. Else the return of the former was missed, and
 * the reader of the records sees a begin without its end.
 */
static __always_inline struct verbcall *enter_verb(void *ctx, u8 verb, u64 subject)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u64 mm = (u64)BPF_CORE_READ(task, mm), sp = probed_sp(ctx);
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct verbcall *v;

	if (!mm || !watched(mm))
		return NULL;
	v = bpf_map_lookup_elem(&verbcalls, &tid);
	if (v && v->depth && v->depth < MAX_DEPTH && v->mm == mm && v->verb == verb && v->subject == subject &&
	    sp <= v->sp) {
		v->depth++;
		return NULL;
	}
	bpf_map_update_elem(&verbcalls, &tid, &no_verbcall, BPF_ANY);
	v = bpf_map_lookup_elem(&verbcalls, &tid);
	if (!v) {
		untracked(mm);
		return NULL;
	}
	v->mm = mm;
	v->sp = sp;
	v->depth = 1;
	v->verb = verb;
	v->subject = subject;
	return v;
}

static __always_inline struct change *verb_change(u64 key, const struct verbcall *v, u8 kind, u8 phase)
{
	struct change *c = reg_change(key, v->mm, kind, phase,
				      phase == UMMU_BEGIN ? UMMU_HOOK_VERBS : UMMU_HOOK_VERBS_RETURN);

	if (!c)
		return NULL;
	c->by = UMMU_BY_VERBS;
	c->to_start = v->device;
	c->to_end = v->mr;
	c->arg[1] = v->access;
	if (phase == UMMU_END)
		c->more = MORE_QUIET;
	return c;
}

static __always_inline void post_verb(u64 key)
{
	deliver(key, DO_POST | OF_REQUEST);
	bpf_map_delete_elem(&requests, &key);
}

static __always_inline int begin_reg(void *ctx, u64 access)
{
	struct verbcall *v = enter_verb(ctx, VERB_REG_MR, probed_arg(ctx, 1));
	u64 key = reg_key();
	struct change *c;

	if (!v)
		return 0;
	v->device = user_word(probed_arg(ctx, 0));
	v->start = UNTAG(probed_arg(ctx, 1));
	v->end = v->start + probed_arg(ctx, 2);
	if (v->end < v->start)
		v->end = TO_TOP;
	v->access = access;
	mark_all(v->mm, v->start & ~(page_size - 1), page_up(v->end));
	c = verb_change(key, v, UMMU_REGISTER, UMMU_BEGIN);
	if (!c)
		return 0;
	c->start = v->start;
	c->end = v->end;
	post_verb(key);
	return 0;
}

SEC("uprobe")
int verbs_reg_mr(struct probe_regs *ctx)	/* pd, addr, length, access */
{
	return begin_reg(ctx, probed_arg(ctx, 3));
}

SEC("uprobe")
int verbs_reg_mr_iova(struct probe_regs *ctx)	/* pd, addr, length, iova, access */
{
	return begin_reg(ctx, probed_arg(ctx, 4));
}

SEC("uprobe")
int verbs_dereg_mr(struct probe_regs *ctx)	/* mr */
{
	struct verbcall *v = enter_verb(ctx, VERB_DEREG_MR, probed_arg(ctx, 0));
	u64 key = reg_key();
	struct change *c;

	if (!v)
		return 0;
	v->mr = probed_arg(ctx, 0);
	v->device = user_word(v->mr);
	c = verb_change(key, v, UMMU_DEREGISTER, UMMU_BEGIN);
	if (c) {
		c->more = MORE_QUIET;
		post_verb(key);
	}
	return 0;
}

SEC("uprobe")
int verbs_rereg_mr(struct probe_regs *ctx)	/* mr, flags, pd, addr, length, access */
{
	struct verbcall *v = enter_verb(ctx, VERB_REREG_MR, probed_arg(ctx, 0));
	u64 flags = (u32)probed_arg(ctx, 1), key = reg_key();
	struct ibv_mr mr = {};
	struct change *c;

	if (!v)
		return 0;
	v->mr = probed_arg(ctx, 0);
	bpf_probe_read_user(&mr, sizeof(mr), (void *)v->mr);
	v->device = mr.context;
	v->start = mr.addr;
	v->end = mr.addr + mr.length;
	v->access = flags & IBV_REREG_CHANGE_ACCESS ? probed_arg(ctx, 5) : 0;
	if (!(flags & IBV_REREG_CHANGE_TRANSLATION))
		return 0;	/* the same pages */
	v->translation = 1;
	v->start = UNTAG(probed_arg(ctx, 3));
	v->end = v->start + probed_arg(ctx, 4);
	mark_all(v->mm, v->start & ~(page_size - 1), page_up(v->end));
	c = verb_change(key, v, UMMU_REGISTER, UMMU_BEGIN);
	if (!c)
		return 0;
	c->start = v->start;
	c->end = v->end;
	post_verb(key);
	return 0;
}

/* The return of any of them. */
SEC("uretprobe")
int verbs_return(struct probe_regs *ctx)
{
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct verbcall *v = bpf_map_lookup_elem(&verbcalls, &tid);
	u64 key = reg_key(), ret = probed_result(ctx);
	struct change *c;

	if (!v)
		return 0;
	if (v->verb == VERB_REG_MR && ret && !v->mr)
		v->mr = ret;
	if (v->depth > 1) {
		v->depth--;
		return 0;
	}
	if (v->verb == VERB_DEREG_MR) {
		if (!ret)
			ADD(&verbs_deregs, 1);
		c = verb_change(key, v, UMMU_DEREGISTER, UMMU_END);
		if (c) {
			c->ret = (s32)ret;
			post_verb(key);
		}
	} else if (v->verb == VERB_REG_MR || v->translation) {
		bool failed = v->verb == VERB_REG_MR ? !ret : (s32)ret != 0;
		struct ibv_mr mr = {};

		if (!failed)
			bpf_probe_read_user(&mr, sizeof(mr), (void *)v->mr);
		c = verb_change(key, v, UMMU_REGISTER, UMMU_END);
		if (c) {
			c->start = v->start;
			c->end = v->end;
			c->child_pid = mr.lkey;
			c->child_tid = mr.rkey;
			c->ret = failed ? -1 : 0;
			post_verb(key);
		}
	}
	bpf_map_delete_elem(&verbcalls, &tid);
	return 0;
}

/*
 * rdma_core:mr_dereg, in ib_dereg_mr_user(): every region of user space that
 * goes, also of programs that speak to the kernel by themselves. Counted for
 * watched address spaces, to be compared with what the probes saw.
 */
SEC("raw_tp/mr_dereg")
int count_mr_dereg(u64 *ctx)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u64 mm = (u64)BPF_CORE_READ(task, mm);

	if (mm && watched(mm))
		ADD(&kernel_deregs, 1);
	return 0;
}

/* A task ends, maybe inside a call. */
static __always_inline void forget_registering(u32 tid)
{
	bpf_map_delete_elem(&regcalls, &tid);
	bpf_map_delete_elem(&verbcalls, &tid);
}

#endif
