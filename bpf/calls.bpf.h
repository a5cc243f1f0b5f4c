/* SPDX-License-Identifier: GPL-2.0-only OR BSD-2-Clause */
/*
 * Which system calls change an address space, under which number in which
 * ABI, and what their arguments say about the range. Sources: the kernel's
 * syscall tables (arch/x86/entry/syscalls, arch/arm64/tools/syscall_64.tbl,
 * arch/arm/tools/syscall.tbl) and mm/mmap.c, mm/mremap.c, mm/mprotect.c,
 * mm/madvise.c, ipc/shm.c, fs/aio.c for the checks that come before any change.
 */
#ifndef UMMU_CALLS_BPF_H
#define UMMU_CALLS_BPF_H

#include "core.bpf.h"
#include "guard.bpf.h"
#include "ummu.h"

enum call {
	CALL_NONE = 0,
	CALL_MUNMAP,
	CALL_MMAP,
	CALL_OLD_MMAP,		/* i386: arguments in memory */
	CALL_MREMAP,
	CALL_MPROTECT,
	CALL_PKEY_MPROTECT,
	CALL_MADVISE,
	CALL_PROCESS_MADVISE,
	CALL_BRK,
	CALL_SHMAT,
	CALL_SHMDT,
	CALL_IPC,		/* i386: multiplexer of shmat, shmdt */
	CALL_REMAP_FILE_PAGES,
	CALL_IO_DESTROY,	/* unmaps where the AIO ring was mapped, whatever is there now */
};

#define NR_MAX 512

#if defined(__TARGET_ARCH_x86)
static const u8 native_calls[NR_MAX] = {
	[9] = CALL_MMAP, [10] = CALL_MPROTECT, [11] = CALL_MUNMAP, [12] = CALL_BRK,
	[25] = CALL_MREMAP, [28] = CALL_MADVISE, [30] = CALL_SHMAT, [67] = CALL_SHMDT,
	[207] = CALL_IO_DESTROY, [216] = CALL_REMAP_FILE_PAGES, [329] = CALL_PKEY_MPROTECT,
	[440] = CALL_PROCESS_MADVISE,
};
static const u8 compat_calls[NR_MAX] = {
	[45] = CALL_BRK, [90] = CALL_OLD_MMAP, [91] = CALL_MUNMAP, [117] = CALL_IPC,
	[125] = CALL_MPROTECT, [163] = CALL_MREMAP, [192] = CALL_MMAP,
	[219] = CALL_MADVISE, [246] = CALL_IO_DESTROY, [257] = CALL_REMAP_FILE_PAGES,
	[380] = CALL_PKEY_MPROTECT, [397] = CALL_SHMAT, [398] = CALL_SHMDT,
	[440] = CALL_PROCESS_MADVISE,
};
/* x32 sets this bit and otherwise uses the native numbers for all of these. */
#define X32_BIT 0x40000000U
#define SHMLBA_PAGES 1
/* Linear address masking keeps a tag in bits 57..62 (arch/x86, 6.4+). */
#define UNTAG(a) ((s64)(a) >= 0 ? (a) & ((1ULL << 57) - 1) : (a))
#else
static const u8 native_calls[NR_MAX] = {
	[1] = CALL_IO_DESTROY, [196] = CALL_SHMAT, [197] = CALL_SHMDT, [214] = CALL_BRK, [215] = CALL_MUNMAP,
	[216] = CALL_MREMAP, [222] = CALL_MMAP, [226] = CALL_MPROTECT,
	[233] = CALL_MADVISE, [234] = CALL_REMAP_FILE_PAGES,
	[288] = CALL_PKEY_MPROTECT, [440] = CALL_PROCESS_MADVISE,
};
static const u8 compat_calls[NR_MAX] = {
	[45] = CALL_BRK, [91] = CALL_MUNMAP, [125] = CALL_MPROTECT, [163] = CALL_MREMAP,
	[192] = CALL_MMAP, [220] = CALL_MADVISE, [244] = CALL_IO_DESTROY, [253] = CALL_REMAP_FILE_PAGES,
	[305] = CALL_SHMAT, [306] = CALL_SHMDT, [394] = CALL_PKEY_MPROTECT,
	[440] = CALL_PROCESS_MADVISE,
};
#define X32_BIT 0
#define SHMLBA_PAGES 4
/* The top byte of a user address is ignored by the hardware (TBI). */
#define UNTAG(a) ((a) & ((1ULL << 56) - 1))
#endif

/* include/uapi: the flags that matter here */
#define MAP_FIXED		0x10
#define MAP_ANONYMOUS		0x20
#define MAP_HUGETLB		0x40000
#define MAP_HUGE_SHIFT		26
#define MAP_HUGE_MASK		0x3f
#define MAP_FIXED_NOREPLACE	0x100000
#define MREMAP_MAYMOVE		1
#define MREMAP_FIXED		2
#define MREMAP_DONTUNMAP	4
#define PROT_GROWSDOWN		0x01000000
#define PROT_GROWSUP		0x02000000
#define SHM_RND			020000
#define SHM_REMAP		040000
#define IPC_SHMAT		21
#define IPC_SHMDT		22
#define HUGETLBFS_MAGIC		0x958458f6

#define TO_TOP (~0ULL)
#define MAX_ERRNO 4095

/* Set by the loader. */
const volatile u64 page_size = 4096;
const volatile u64 huge_page_size = 2 << 20; /* the default of MAP_HUGETLB */

/* What a call will do, before it is addressed to anybody. */
struct change {
	u64 start, end;
	u64 to_start, to_end;
	u64 arg[2];
	s64 ret;
	u32 nr;
	u16 flags;
	u8 kind;
	u8 phase;
	u8 hook;
	u8 abi;
	u8 by;
	u8 more;	/* MORE_* */
	u32 child_pid, child_tid;
	u64 mm;
};
#define MORE_ALL 1	/* record.all */
#define MORE_QUIET 2	/* no stack: another record of the same call has it */

/* Arguments of a call as the task passed them. */
struct args {
	u64 a[6];
};

static __always_inline u64 page_up(u64 x)
{
	u64 m = page_size - 1;

	if (!ON(GUARD_ROUND_OUTWARD))
		return x & ~m;
	return x > TO_TOP - m ? TO_TOP : (x + m) & ~m;
}

static __always_inline bool unaligned(u64 x)
{
	return x & (page_size - 1);
}

static __always_inline bool is_error(s64 ret)
{
	return ret < 0 && ret >= -MAX_ERRNO;
}

/*
 * Advice after which pages of the range may be gone. Advice that cannot take
 * a pinned page away (FREE, COLD, PAGEOUT, COLLAPSE, ...) or only adds is not
 * listed; advice we do not know is taken for the worst.
 */
static __always_inline bool advice_drops(u64 advice)
{
	switch (advice) {
	case 4:		/* DONTNEED */
	case 9:		/* REMOVE */
	case 24:	/* DONTNEED_LOCKED */
	case 100:	/* HWPOISON */
	case 101:	/* SOFT_OFFLINE */
	case 102:	/* GUARD_INSTALL */
		return true;
	case 0: case 1: case 2: case 3:	/* NORMAL RANDOM SEQUENTIAL WILLNEED */
	case 8:				/* FREE: a pinned page stays */
	case 10: case 11:		/* DONTFORK DOFORK */
	case 12: case 13:		/* MERGEABLE UNMERGEABLE */
	case 14: case 15:		/* HUGEPAGE NOHUGEPAGE */
	case 16: case 17:		/* DONTDUMP DODUMP */
	case 18: case 19:		/* WIPEONFORK KEEPONFORK */
	case 20: case 21:		/* COLD PAGEOUT */
	case 22: case 23:		/* POPULATE_READ POPULATE_WRITE */
	case 25:			/* COLLAPSE */
	case 103:			/* GUARD_REMOVE */
		return false;
	}
	return true;
}

/*
 * A file on hugetlbfs: mmap rounds the length up to its page size. Walks the
 * task's descriptor table; returns 0 for anything that is not hugetlbfs.
 */
static __always_inline u64 hugetlbfs_page(struct task_struct *task, u64 fd)
{
	struct fdtable *fdt = BPF_CORE_READ(task, files, fdt);
	struct file **fds = BPF_CORE_READ(fdt, fd);
	struct super_block *sb;
	struct file *f = NULL;

	if (fd >= BPF_CORE_READ(fdt, max_fds))
		return 0;
	bpf_probe_read_kernel(&f, sizeof(f), fds + fd);
	sb = BPF_CORE_READ(f, f_inode, i_sb);
	if (BPF_CORE_READ(sb, s_magic) != HUGETLBFS_MAGIC)
		return 0;
	return BPF_CORE_READ(sb, s_blocksize);
}

static __always_inline u64 round_up_to(u64 x, u64 unit)
{
	return unit && x <= TO_TOP - unit ? (x + unit - 1) & ~(unit - 1) : x;
}

/* mmap: only MAP_FIXED without NOREPLACE can hit an existing mapping. */
static __always_inline void decode_mmap(struct change *c, const struct args *k,
					struct task_struct *task)
{
	u64 addr = k->a[0], len = k->a[1], flags = (u32)k->a[3], huge = 0;

	c->arg[0] = (u32)k->a[2];
	c->arg[1] = flags;
	if (!(flags & MAP_FIXED) || (flags & MAP_FIXED_NOREPLACE) || !ON(GUARD_REPLACE_SEEN))
		return;
	if (!len || unaligned(addr))
		return;
	if (flags & MAP_ANONYMOUS) {
		if (flags & MAP_HUGETLB) {
			u64 shift = (flags >> MAP_HUGE_SHIFT) & MAP_HUGE_MASK;

			huge = shift ? 1ULL << shift : huge_page_size;
		}
	} else {
		huge = hugetlbfs_page(task, (u32)k->a[4]);
	}
	if (huge)
		len = round_up_to(len, huge);
	if (addr + len < addr)
		return;
	c->kind = UMMU_REPLACE;
	c->start = addr;
	c->end = page_up(addr + len);
}

/* The largest page of hugetlbfs that can begin at an address, 0: none. */
static __always_inline u64 huge_page_at(u64 addr)
{
	if (!(addr & ((1ULL << 30) - 1)))
		return 1ULL << 30;
#if defined(__TARGET_ARCH_arm64)
	if (!(addr & ((512ULL << 20) - 1)))
		return 512ULL << 20;
	if (!(addr & ((32ULL << 20) - 1)))
		return 32ULL << 20;
#endif
	if (!(addr & ((2ULL << 20) - 1)))
		return 2ULL << 20;
#if defined(__TARGET_ARCH_arm64)
	if (!(addr & ((64ULL << 10) - 1)))
		return 64ULL << 10;
#endif
	return 0;
}

/*
 * mremap. Lengths of hugetlb mappings are rounded up to their page, and their
 * addresses must be multiples of it (mm/mremap.c). We cannot see the VMA here:
 * what may be one by its addresses is taken for one. At the source only while
 * the space has hugetlb pages at all: what has none loses none; at the
 * destination always.
 */
static __always_inline void decode_mremap(struct change *c, const struct args *k, u64 mm)
{
	u64 old = UNTAG(k->a[0]), old_len = page_up(k->a[1]), new_len = page_up(k->a[2]);
	u64 flags = k->a[3], to = k->a[4], huge;
	bool grows = new_len > old_len;	/* of ordinary pages; wider ones may be equal */

	c->arg[0] = flags;
	if (unaligned(old) || !new_len || (flags & ~7ULL) || old + old_len < old ||
	    old_len == TO_TOP || new_len == TO_TOP)
		return;
	if ((flags & (MREMAP_FIXED | MREMAP_DONTUNMAP)) && !(flags & MREMAP_MAYMOVE))
		return;
	if ((flags & MREMAP_DONTUNMAP) && old_len != new_len)
		return;
	huge = huge_page_at(old);
	if (flags & MREMAP_FIXED) {
		u64 other = huge_page_at(to);

		if (other < huge)
			huge = other;
	}
	if (huge) {
		u64 o = round_up_to(old_len, huge), n = round_up_to(new_len, huge);
		bool has = true;

		if (bpf_core_field_exists(((struct mm_struct *)0)->hugetlb_usage)) {
			struct mm_struct *m = (struct mm_struct *)mm;

			has = BPF_CORE_READ(m, hugetlb_usage.counter);
		}
		if (has) {
			if (o != old_len || n != new_len)
				c->flags |= UMMU_F_SUPERSET;
			old_len = o;
		}
		/* a shrink below leaves as little as the exact length */
		if ((flags & MREMAP_FIXED) || (has && grows)) {
			if (n != new_len)
				c->flags |= UMMU_F_SUPERSET;
			new_len = n;
		}
	}
	if (flags & MREMAP_FIXED) {
		if (unaligned(to) || to + new_len < to)
			return;
		if (!old_len) {	/* a second mapping of shared memory */
			c->kind = UMMU_REPLACE;
			c->start = to;
			c->end = to + new_len;
			return;
		}
		c->kind = UMMU_MOVE;
		c->start = old;
		c->end = old + old_len;
		c->to_start = to;
		c->to_end = to + new_len;
		return;
	}
	if (!old_len)
		return;
	if (flags & MREMAP_DONTUNMAP) {
		c->kind = UMMU_MOVE;
	} else if (new_len < old_len) {
		c->kind = UMMU_UNMAP;
		c->start = old + new_len;
		c->end = old + old_len;
		return;
	} else if (grows && (flags & MREMAP_MAYMOVE)) {
		c->kind = UMMU_MOVE;	/* or it grows in place: the end tells */
		c->flags |= UMMU_F_MAYBE;
	} else {
		return;
	}
	c->start = old;
	c->end = old + old_len;
}

static __always_inline void decode_mprotect(struct change *c, const struct args *k)
{
	u64 addr = UNTAG(k->a[0]), prot = k->a[2];

	c->arg[0] = prot;
	if (!k->a[1] || unaligned(addr))
		return;
	if ((prot & PROT_GROWSDOWN) && (prot & PROT_GROWSUP))
		return;
	c->end = page_up(addr + k->a[1]);
	if (addr + k->a[1] < addr)
		return;
	c->kind = UMMU_PROTECT;
	c->start = addr;
	/* reaches to the end of a growing VMA, which only the kernel knows */
	if (prot & PROT_GROWSDOWN) {
		c->start = 0;
		c->flags |= UMMU_F_SUPERSET;
	}
	if (prot & PROT_GROWSUP) {
		c->end = TO_TOP;
		c->flags |= UMMU_F_SUPERSET;
	}
}

static __always_inline void decode_madvise(struct change *c, u64 addr, u64 len, u64 advice)
{
	c->arg[0] = advice;
	addr = UNTAG(addr);
	if (!advice_drops(advice) || !len || unaligned(addr) || addr + len < addr)
		return;
	c->kind = UMMU_ZAP;
	c->start = addr;
	c->end = page_up(addr + len);
}

/* shmdt and shmat know no length: from the address to the top. */
static __always_inline void decode_shmdt(struct change *c, u64 addr)
{
	addr = UNTAG(addr);
	if (unaligned(addr))
		return;
	c->kind = UMMU_UNMAP;
	c->flags |= UMMU_F_SUPERSET;
	c->start = addr;
	c->end = TO_TOP;
}

static __always_inline void decode_shmat(struct change *c, u64 addr, u64 flags)
{
	addr = UNTAG(addr);
	c->arg[0] = (u32)flags;
	if (!(flags & SHM_REMAP) || !addr)
		return;
	if (flags & SHM_RND)
		addr &= ~(SHMLBA_PAGES * page_size - 1);
	if (unaligned(addr))
		return;
	c->kind = UMMU_REPLACE;
	c->flags |= UMMU_F_SUPERSET;
	c->start = addr;
	c->end = TO_TOP;
}

static __always_inline void decode_remap_file_pages(struct change *c, const struct args *k)
{
	u64 addr = k->a[0] & ~(page_size - 1), len = page_up(k->a[1]);

	c->arg[0] = k->a[2];
	c->arg[1] = k->a[4];
	if (len < page_size || addr + len < addr)
		return;
	c->kind = UMMU_REPLACE;
	c->start = addr;
	c->end = addr + len;
}

/*
 * The change that a call makes, judged by its arguments alone. kind stays
 * UMMU_NONE when the call is refused by its first checks or cannot change an
 * existing translation. brk and process_madvise need more than arguments and
 * are handled by the caller.
 */
static __always_inline void decode(struct change *c, u32 call, const struct args *k,
				   struct task_struct *task, u64 mm)
{
	switch (call) {
	case CALL_MUNMAP: {
		u64 addr = UNTAG(k->a[0]), len = k->a[1];

		if (unaligned(addr) || !len || addr + len < addr)
			return;
		c->kind = UMMU_UNMAP;
		c->start = addr;
		c->end = page_up(addr + len);
		return;
	}
	case CALL_MMAP:
	case CALL_OLD_MMAP:
		decode_mmap(c, k, task);
		return;
	case CALL_MREMAP:
		decode_mremap(c, k, mm);
		return;
	case CALL_MPROTECT:
	case CALL_PKEY_MPROTECT:
		decode_mprotect(c, k);
		if (call == CALL_PKEY_MPROTECT)
			c->arg[1] = k->a[3];
		return;
	case CALL_MADVISE:
		decode_madvise(c, k->a[0], k->a[1], (u32)k->a[2]);
		return;
	case CALL_IO_DESTROY:	/* a context is named by the address of its ring */
		if (!ON(GUARD_IO_DESTROY))
			return;
		decode_shmdt(c, k->a[0]);
		return;
	case CALL_SHMDT:
		decode_shmdt(c, k->a[0]);
		return;
	case CALL_SHMAT:
		decode_shmat(c, k->a[1], k->a[2]);
		return;
	case CALL_IPC:	/* call, first, second, third, ptr, fifth */
		if ((k->a[0] & 0xffff) == IPC_SHMDT)
			decode_shmdt(c, k->a[4]);
		else if ((k->a[0] & 0xffff) == IPC_SHMAT)
			decode_shmat(c, k->a[4], k->a[2]);
		return;
	case CALL_REMAP_FILE_PAGES:
		decode_remap_file_pages(c, k);
		return;
	}
}

#endif
