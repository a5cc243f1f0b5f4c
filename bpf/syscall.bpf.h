/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/* The syscall tier: what a task asks for, at the entry and exit of its calls. */
#ifndef UMMU_SYSCALL_BPF_H
#define UMMU_SYSCALL_BPF_H

#include "watch.bpf.h"

/* One system call as a hook saw it. */
struct call_site {
	struct args k;
	u64 raw[2];	/* the first two arguments as passed, which partners compare */
	u32 nr;
	u32 call;	/* enum call */
	u8 abi;
	u8 hook;
	u8 saw;		/* SAW_* */
};

static __always_inline bool known_nr(u64 nr)
{
	nr &= ~(u64)X32_BIT;
	return nr < NR_MAX && (native_calls[nr] | compat_calls[nr]);
}

/* Fills abi and call from the number; the ABI is the task's mode right now. */
static __always_inline void identify(struct call_site *s, struct task_struct *task, u64 nr)
{
	s->abi = UMMU_ABI_NATIVE;
#if defined(__TARGET_ARCH_x86)
	/* TS_COMPAT is set while a task is in int 0x80 or sysenter
	 * (arch/x86/entry); the classic tracepoints do not fire there. */
	if (BPF_CORE_READ(task, thread_info.status) & 2)
		s->abi = UMMU_ABI_COMPAT;
	else if (nr & X32_BIT)
		s->abi = UMMU_ABI_X32;
#else
	/* TIF_32BIT, arch/arm64/include/asm/thread_info.h */
	if (BPF_CORE_READ(task, thread_info.flags) & (1UL << 22))
		s->abi = UMMU_ABI_COMPAT;
#endif
	nr &= ~(u64)X32_BIT;
	s->nr = nr;
	asm volatile("" : "+r"(nr)); /* 6.1's verifier wants to see the bound */
	nr &= NR_MAX - 1;
	s->call = s->abi == UMMU_ABI_COMPAT ? compat_calls[nr] : native_calls[nr];
	if (s->abi == UMMU_ABI_COMPAT && !ON(GUARD_COMPAT_ABI))
		s->call = CALL_NONE;
}

static __always_inline void read_args(struct call_site *s, struct pt_regs *regs)
{
#if defined(__TARGET_ARCH_x86)
	if (s->abi == UMMU_ABI_COMPAT) {
		s->k.a[0] = (u32)regs->bx;
		s->k.a[1] = (u32)regs->cx;
		s->k.a[2] = (u32)regs->dx;
		s->k.a[3] = (u32)regs->si;
		s->k.a[4] = (u32)regs->di;
		s->k.a[5] = (u32)regs->bp;
		return;
	}
	s->k.a[0] = regs->di;
	s->k.a[1] = regs->si;
	s->k.a[2] = regs->dx;
	s->k.a[3] = regs->r10;
	s->k.a[4] = regs->r8;
	s->k.a[5] = regs->r9;
#else
	s->k.a[0] = regs->orig_x0;	/* regs[0] is the result at the exit */
	s->k.a[1] = regs->regs[1];
	s->k.a[2] = regs->regs[2];
	s->k.a[3] = regs->regs[3];
	s->k.a[4] = regs->regs[4];
	s->k.a[5] = regs->regs[5];
	if (s->abi == UMMU_ABI_COMPAT) {
		for (int i = 0; i < 6; i++)
			s->k.a[i] = (u32)s->k.a[i];
	}
#endif
}

/* i386's first mmap passes a pointer to its six arguments. False if they
 * cannot be read: then the range is unknown. */
static __always_inline bool load_old_mmap(struct call_site *s)
{
	u32 m[6];

	if (bpf_probe_read_user(m, sizeof(m), (void *)s->k.a[0]))
		return false;
	for (int i = 0; i < 6; i++)
		s->k.a[i] = m[i];
	return true;
}

/* The first two arguments are what the hooks of one call agree on: a partner
 * knows no more arguments than its call has. */
static __always_inline bool same_args(const struct inflight *f, const struct call_site *site)
{
	return f->raw[0] == site->raw[0] && f->raw[1] == site->raw[1];
}

/* The call of site is the one that f is about. */
static __always_inline void is_about(struct inflight *f, const struct call_site *site)
{
	f->nr = site->nr;
	f->abi = site->abi;
	f->raw[0] = site->raw[0];
	f->raw[1] = site->raw[1];
}

static __always_inline void whole(struct change *c, u8 kind)
{
	c->kind = kind;
	c->start = 0;
	c->end = TO_TOP;
	c->flags |= UMMU_F_SUPERSET;
}

/*
 * brk: the range needs the break of before, which another thread may move
 * between our look and the kernel's. A brk that enters while another one of
 * the same space is in flight is reported as the whole space, so whichever
 * of two overlapping calls comes second covers what the first did not know.
 */
static __always_inline void begin_brk(struct change *c, struct inflight *f, struct space *s,
				      const struct args *k, u64 mm)
{
	struct mm_struct *m = (struct mm_struct *)mm;
	u64 want = UNTAG(k->a[0]), old, low, data;

	if (s) {
		ADD(&s->brks, 1);
		f->brk = 1;
	}
	old = BPF_CORE_READ(m, brk);
	low = BPF_CORE_READ(m, start_brk);
	data = BPF_CORE_READ(m, end_data); /* the limit with CONFIG_COMPAT_BRK */
	f->brk_old = old;
	if (want < low && want < data)
		return;		/* a question, or refused */
	if (s && s->brks > 1 && ON(GUARD_BRK_RACE))
		whole(c, UMMU_UNMAP);
	else if (page_up(want) < page_up(old)) {
		c->kind = UMMU_UNMAP;
		c->start = page_up(want);
		c->end = page_up(old);
	}
}

#define VECTOR_MAX 16

/*
 * process_madvise: one zap per element of the vector. The kernel reads the
 * vector after us; elements we cannot read, or more than we look at, make it
 * the whole space. Only the caller's own space can lose pages this way
 * (process_madvise_remote_valid(), mm/madvise.c, as of 6.18).
 */
static __always_inline void post_vector(struct inflight *f, u32 tid, const struct call_site *site)
{
	struct change *c = &f->c;
	u64 base = site->k.a[1], n = site->k.a[2], hull_start = TO_TOP, hull_end = 0;
	bool compat = site->abi != UMMU_ABI_NATIVE; /* x32 passes short ones too */

	c->arg[0] = (u32)site->k.a[3];
	if (n > VECTOR_MAX && ON(GUARD_VECTOR_LIMIT))
		goto all;
	for (u32 i = 0; i < VECTOR_MAX; i++) {
		u64 v[2];

		if (i >= n)
			break;
		if (compat) {
			u32 v32[2];

			if (bpf_probe_read_user(v32, sizeof(v32), (void *)(base + i * 8)))
				goto all;
			v[0] = v32[0];
			v[1] = v32[1];
		} else if (bpf_probe_read_user(v, sizeof(v), (void *)(base + i * 16))) {
			goto all;
		}
		c->kind = UMMU_NONE;
		decode_madvise(c, v[0], v[1], c->arg[0]);
		if (c->kind == UMMU_NONE)
			continue;
		c->flags = UMMU_F_VECTOR | UMMU_F_MAYBE;
		deliver(tid, DO_POST);
		if (c->start < hull_start)
			hull_start = c->start;
		if (c->end > hull_end)
			hull_end = c->end;
	}
	c->kind = hull_end ? UMMU_ZAP : UMMU_NONE;
	c->start = hull_start;
	c->end = hull_end;
	return;
all:
	whole(c, UMMU_ZAP);
	c->flags |= UMMU_F_MAYBE;
	deliver(tid, DO_POST);
}

/* The entry of a call that may change the address space. */
static __always_inline int enter(struct call_site *site, struct task_struct *task)
{
	u64 mm = (u64)BPF_CORE_READ(task, mm);
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct change c = {};
	struct inflight *f;

	if (!mm || !watched(mm))
		return 0;

	site->raw[0] = site->k.a[0];
	site->raw[1] = site->k.a[1];
	f = bpf_map_lookup_elem(&tasks, &tid);
	if (f && f->active) {
		if (!(f->entered & site->saw) && f->nr == site->nr && f->abi == site->abi &&
		    same_args(f, site)) {
			f->entered |= site->saw;	/* the partner was first */
			return 0;
		}
		count(COUNT_STALE);	/* its end was missed */
		if (ON(GUARD_STALE_CLOSED))
			deliver(tid, DO_END);
	}

	if (!ON(GUARD_ARGS_ORDER)) {	/* the length, and what comes after it */
		u64 second = site->k.a[1];

		site->k.a[1] = site->k.a[2];
		site->k.a[2] = second;
	}
	c.nr = site->nr;
	c.abi = site->abi;
	c.hook = site->hook;
	c.phase = UMMU_BEGIN;
	c.mm = mm;
	if (site->call == CALL_OLD_MMAP && !load_old_mmap(site))
		whole(&c, UMMU_REPLACE);
	else if (site->call == CALL_PROCESS_MADVISE)
		c.kind = advice_drops((u32)site->k.a[3]) && site->k.a[2] ? UMMU_ZAP : UMMU_NONE;
	else
		decode(&c, site->call, &site->k, task, mm);
	if (c.kind == UMMU_NONE && site->call != CALL_BRK)
		return 0;

	f = task_entry(tid, mm);
	if (!f)
		return 0;
	is_about(f, site);
	f->call = site->call;
	f->entered = site->saw;
	f->exited = 0;
	f->a[0] = site->k.a[0];
	f->a[1] = site->k.a[1];
	f->a[2] = site->k.a[2];
	f->a[3] = site->k.a[3];
	f->a[4] = site->k.a[4];
	if (site->call == CALL_BRK)
		begin_brk(&c, f, space_of(mm), &site->k, mm);
	f->c = c;
	if (site->call == CALL_PROCESS_MADVISE) {
		deliver(tid, DO_BEGIN);
		post_vector(f, tid, site);
	} else {
		deliver(tid, c.kind ? DO_BEGIN | DO_POST : DO_BEGIN);
	}
	return 0;
}

/* What the result of a call says beyond its arguments. */
static __always_inline void settle(struct change *c, u32 call, const u64 *a, s64 ret)
{
	c->ret = ret;
	c->phase = UMMU_END;
	if (call != CALL_MREMAP || is_error(ret))
		return;
	if (c->kind != UMMU_MOVE || c->to_end)
		return;
	if ((u64)ret == c->start && !(a[3] & MREMAP_DONTUNMAP)) {
		c->kind = UMMU_MAP;	/* grew in place */
		c->start = c->end;
		c->end = (u64)ret + page_up(a[2]);
		c->flags &= ~UMMU_F_MAYBE;
		return;
	}
	c->to_start = ret;
	c->to_end = (u64)ret + page_up(a[2]);
	c->flags &= ~UMMU_F_MAYBE;
}

/* A new mapping where there was none: information for people. */
static __always_inline void new_mapping(struct change *c, u32 call, const struct args *k, s64 ret)
{
	if (is_error(ret))
		return;
	switch (call) {
	case CALL_MMAP:
	case CALL_OLD_MMAP:
		c->start = ret;
		c->end = (u64)ret + page_up(k->a[1]);
		break;
	case CALL_SHMAT:
	case CALL_IPC:
		if (call == CALL_IPC) {
			u32 addr;

			if ((k->a[0] & 0xffff) != IPC_SHMAT)
				return;
			/* the address is stored through "third" */
			if (bpf_probe_read_user(&addr, sizeof(addr), (void *)k->a[3]))
				return;
			ret = addr;
		}
		c->start = ret;
		c->end = (u64)ret + page_size;
		c->flags |= UMMU_F_UNKNOWN_LENGTH;
		break;
	case CALL_MREMAP: {
		u64 old_len = page_up(k->a[1]), new_len = page_up(k->a[2]);

		if (new_len <= old_len)
			return;
		c->start = (u64)ret + old_len;
		c->end = (u64)ret + new_len;
		break;
	}
	default:
		return;
	}
	if (c->end > c->start)
		c->kind = UMMU_MAP;
}

/*
 * Whether the call that site leaves is the one that f entered. The exit
 * tracepoints of single calls have no arguments.
 */
static __always_inline bool same_call(const struct inflight *f, const struct call_site *site)
{
	return f->nr == site->nr && f->abi == site->abi && (site->saw == SAW_CLASSIC || same_args(f, site));
}

static __always_inline int leave(struct call_site *site, struct task_struct *task, s64 ret)
{
	u64 mm = (u64)BPF_CORE_READ(task, mm);
	u32 tid = (u32)bpf_get_current_pid_tgid();
	struct change c = {};
	struct inflight *f;
	u32 how = DO_POST;

	if (!mm || !watched(mm))
		return 0;
	site->raw[0] = site->k.a[0];
	site->raw[1] = site->k.a[1];
	f = bpf_map_lookup_elem(&tasks, &tid);
	if (f && f->active && !same_call(f, site)) {
		count(COUNT_STALE);	/* its end was missed, and the begin of this one */
		deliver(tid, DO_END);
	}
	if (f && f->active) {
		/* known only now: which of two hooks runs first depends on who
		 * else has attached to the tracepoints */
		if (!(f->entered & (SAW_MAIN | SAW_COPY))) {
			count(COUNT_RESCUED_ENTER);
			f->c.flags |= UMMU_F_RESCUED;
		}
		f->exited = site->saw;
		f->c.hook = site->hook;
		settle(&f->c, f->call, f->a, ret);
		if (f->call == CALL_BRK) {
			u64 from = page_up(f->brk_old), to = page_up((u64)ret);

			if (to > from) {
				f->c.kind = UMMU_MAP;
				f->c.start = from;
				f->c.end = to;
				f->c.flags &= ~UMMU_F_SUPERSET;
			} else if (f->c.kind && !(f->c.flags & UMMU_F_SUPERSET)) {
				f->c.start = to;
			}
		}
		how = DO_END;
		if (f->c.kind)
			how |= DO_POST;
		if (f->c.kind != UMMU_MAP)
			how |= DO_PAIR;
		deliver(tid, how);
		return 0;
	}
	if (f && !f->active && f->exited && !(f->exited & site->saw) && same_call(f, site)) {
		f->exited |= site->saw;	/* the partner was first */
		return 0;
	}
	if (site->saw == SAW_CLASSIC)
		return 0;
	c.nr = site->nr;
	c.abi = site->abi;
	c.hook = site->hook;
	c.mm = mm;
	c.ret = ret;
	c.phase = UMMU_END;
	if (site->call == CALL_OLD_MMAP && !load_old_mmap(site))
		whole(&c, UMMU_REPLACE);
	else if (site->call == CALL_BRK)
		whole(&c, UMMU_UNMAP);	/* its begin is always tracked */
	else if (site->call == CALL_PROCESS_MADVISE && advice_drops((u32)site->k.a[3]) && site->k.a[2])
		whole(&c, UMMU_ZAP);
	else
		decode(&c, site->call, &site->k, task, mm);
	if (c.kind != UMMU_NONE) {
		/* in flight when the watch was opened, or its begin was missed */
		count(COUNT_UNPAIRED);
		settle(&c, site->call, site->k.a, ret);
		how |= DO_PAIR;
	} else {
		new_mapping(&c, site->call, &site->k, ret);
		if (c.kind == UMMU_NONE)
			return 0;
	}
	f = task_entry(tid, mm);
	if (!f)
		return 0;
	is_about(f, site);
	f->c = c;
	f->exited = site->saw;
	deliver(tid, how);
	return 0;
}

/* Whether the hook does nothing: faults that a test can plant. */
static __always_inline bool is_left_out(void)
{
	return !ON(GUARD_HOOK_THERE) || is_skipped();
}

/* The hooks that see every call, at its entry. */
static __always_inline int any_enter(struct pt_regs *regs, u64 nr, u8 hook, u8 saw)
{
	struct call_site site = { .hook = hook, .saw = saw };
	struct task_struct *task;

	if (!known_nr(nr))
		return 0;
	task = (void *)bpf_get_current_task();
	identify(&site, task, nr);
	if (!site.call)
		return 0;
	read_args(&site, regs);
	if (is_left_out())
		return 0;
	return enter(&site, task);
}

/* ... and at its exit, when the registers still have the arguments. */
static __always_inline int any_exit(struct pt_regs *regs, s64 ret, u8 hook, u8 saw)
{
	struct call_site site = { .hook = hook, .saw = saw };
	struct task_struct *task;
#if defined(__TARGET_ARCH_x86)
	u64 nr = BPF_CORE_READ(regs, orig_ax);
#else
	u64 nr = (u32)BPF_CORE_READ(regs, syscallno);
#endif

	if (!known_nr(nr))
		return 0;
	task = (void *)bpf_get_current_task();
	identify(&site, task, nr);
	if (!site.call)
		return 0;
	read_args(&site, regs);
	if (is_left_out())
		return 0;
	return leave(&site, task, ret);
}

/* ---- io_uring: madvise runs in a worker of the same address space ---- */

#define IORING_OP_MADVISE 25

/* The advice lies in the request's command area (io_uring/advise.c). */
static __always_inline bool read_madvise(void *req, u64 *addr, u64 *len, u32 *advice)
{
	struct io_kiocb *r = req;
	struct io_madvise *m = req;

	if (BPF_CORE_READ(r, opcode) != IORING_OP_MADVISE)
		return false;
	*addr = BPF_CORE_READ(m, addr);
	*advice = BPF_CORE_READ(m, advice);
	*len = 0;
	if (bpf_core_field_size(m->len) == 4) {
		u32 l = 0;

		bpf_core_read(&l, sizeof(l), &m->len);
		*len = l;
	} else {
		bpf_core_read(len, sizeof(*len), &m->len);
	}
	return true;
}

/*
 * A madvise request is submitted, or handed to a worker, or its predecessor in
 * a chain of requests completes, possibly long after the submission. All come
 * before it runs.
 */
static __always_inline bool is_submit(u8 hook)
{
	return hook == UMMU_HOOK_URING_SUBMIT || hook == UMMU_HOOK_URING_SUBMIT_COPY ||
	       hook == UMMU_HOOK_URING_SUBMIT_CLASSIC;
}

static __always_inline int uring_begin(void *req, u8 hook, u8 saw)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u64 mm = (u64)BPF_CORE_READ(task, mm), key = (u64)req, addr, len;
	struct change c = {};
	struct inflight *f;
	u32 advice;

	if (!mm || !ON(GUARD_URING_MADVISE) || !read_madvise(req, &addr, &len, &advice) || !watched(mm))
		return 0;
	c.abi = UMMU_ABI_IO_URING;
	c.nr = IORING_OP_MADVISE;
	c.hook = hook;
	c.phase = UMMU_BEGIN;
	c.mm = mm;
	c.flags = UMMU_F_ASYNC;
	decode_madvise(&c, addr, len, advice);
	if (c.kind == UMMU_NONE)
		return 0;
	f = bpf_map_lookup_elem(&requests, &key);
	if (f && f->active) {
		/* seen at its submission, though not by a watch that was opened
		 * while it waited in a chain of requests; or by a partner */
		bool again = !is_submit(hook) ||
			     (copies && !(f->entered & saw) && bpf_ktime_get_ns() - f->seen_ns < PARTNER_END_NS);

		if (again && f->mm == mm && f->a[0] == addr && f->a[1] == len) {
			if (is_submit(hook))
				f->entered |= saw;
			return deliver(key, DO_BEGIN | DO_POST | DO_REST | OF_REQUEST);
		}
		count(COUNT_STALE);	/* the kernel reuses requests */
		deliver(key, DO_END | OF_REQUEST);
	}
	f = request_entry(key, mm);
	if (!f)
		return 0;
	f->a[0] = addr;
	f->a[1] = len;
	f->c = c;
	if (copies) {
		f->entered = saw;
		f->seen_ns = bpf_ktime_get_ns();
	}
	deliver(key, DO_BEGIN | DO_POST | OF_REQUEST);
	return 0;
}

static __always_inline struct inflight *uring_unpaired(void *req, u64 key, u8 hook)
{
	struct task_struct *task = (void *)bpf_get_current_task();
	u64 mm = (u64)BPF_CORE_READ(task, mm), addr, len;
	struct change c = {};
	struct inflight *f;
	u32 advice;

	if (!mm || !ON(GUARD_URING_MADVISE) || !read_madvise(req, &addr, &len, &advice) || !watched(mm))
		return NULL;
	c.abi = UMMU_ABI_IO_URING;
	c.nr = IORING_OP_MADVISE;
	c.hook = hook;
	c.phase = UMMU_END;
	c.mm = mm;
	c.flags = UMMU_F_ASYNC;
	decode_madvise(&c, addr, len, advice);
	if (c.kind == UMMU_NONE)
		return NULL;
	count(COUNT_UNPAIRED);
	f = request_entry(key, mm);
	if (f)
		f->c = c;
	return f;
}

static __always_inline int uring_end(void *req, s64 res, u8 hook)
{
	u64 key = (u64)req;
	struct inflight *f = bpf_map_lookup_elem(&requests, &key);

	if (!f && copies && was_set_aside(0, key, key))
		return 0;	/* a partner has ended it */
	if (!f) {
		/* in a worker's hands since before the watch: the result is the
		 * first thing anybody can observe, so now is early enough */
		f = uring_unpaired(req, key, hook);
		if (!f)
			return 0;
		f->c.ret = res;
		deliver(key, DO_POST | DO_PAIR | OF_REQUEST);
	} else if (f->active) {
		f->c.phase = UMMU_END;
		f->c.hook = hook;
		f->c.ret = res;
		deliver(key, DO_POST | DO_PAIR | DO_END | OF_REQUEST);
	}
	bpf_map_delete_elem(&requests, &key);
	if (copies)
		set_aside(0, key, key);
	return 0;
}

/* A request completes, and the next ones of its chain may run. */
static __always_inline int uring_complete(struct io_kiocb *req, u8 hook)
{
	struct io_kiocb *next;

	uring_end(req, 0, hook);
	if (!ON(GUARD_URING_CHAIN))
		return 0;
	next = BPF_CORE_READ(req, link);
	if (next) {
		uring_begin(next, hook, 0);
		next = BPF_CORE_READ(next, link);
		if (next)
			uring_begin(next, hook, 0);
	}
	return 0;
}

#endif
