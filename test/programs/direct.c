// SPDX-License-Identifier: Apache-2.0

// direct changes its page tables by system calls that no library function
// makes for it: build it statically (cc -static -pthread). Each call's result
// is checked; a kernel that refuses one that is not in every kernel is
// accepted. It prints nothing when all is well.

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef MAP_FIXED_NOREPLACE
#define MAP_FIXED_NOREPLACE 0x100000
#endif
#ifndef MREMAP_DONTUNMAP
#define MREMAP_DONTUNMAP 4
#endif
enum { DONTNEED_LOCKED = 24, GUARD_INSTALL = 102, GUARD_REMOVE = 103, UNKNOWN_ADVICE = 9999 };

static long page;

static long call(long nr, long a, long b, long c, long d, long e, long f)
{
#if defined(__x86_64__)
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;
	long ret;
	__asm__ volatile("syscall" : "=a"(ret) : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return ret;
#elif defined(__aarch64__)
	register long x8 __asm__("x8") = nr;
	register long x0 __asm__("x0") = a;
	register long x1 __asm__("x1") = b;
	register long x2 __asm__("x2") = c;
	register long x3 __asm__("x3") = d;
	register long x4 __asm__("x4") = e;
	register long x5 __asm__("x5") = f;
	__asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5) : "memory");
	return x0;
#else
#error "no system call instruction known for this architecture"
#endif
}

static void want(int line, long got, long wanted)
{
	if (got == wanted)
		return;
	fprintf(stderr, "direct: line %d: returned %ld (%#lx), not %ld (%#lx)\n", line, got, got, wanted, wanted);
	exit(1);
}

// WANT checks the result; MAY accepts a kernel that does not have it.
#define WANT(got, wanted) want(__LINE__, (got), (wanted))
#define MAY(got, wanted)                                            \
	do {                                                        \
		long r_ = (got);                                    \
		if (r_ != -EINVAL && r_ != -ENOSYS && r_ != -EPERM) \
			want(__LINE__, r_, (wanted));               \
	} while (0)

static long map_at(long addr, long len, long prot, long flags, long fd)
{
	return call(SYS_mmap, addr, len, prot, flags, fd, 0);
}

static long map(long pages)
{
	long p = map_at(0, pages * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	if (p < 0 && p > -4096)
		want(__LINE__, p, 0);
	for (long i = 0; i < pages; i++)
		*(volatile char *)(p + i * page) = 1;
	return p;
}

static long unmap(long addr, long len) { return call(SYS_munmap, addr, len, 0, 0, 0, 0); }
static long protect(long addr, long len, long prot) { return call(SYS_mprotect, addr, len, prot, 0, 0, 0); }
static long advise(long addr, long len, long advice) { return call(SYS_madvise, addr, len, advice, 0, 0, 0); }
static long remap(long addr, long old, long new, long flags, long to)
{
	return call(SYS_mremap, addr, old, new, flags, to, 0);
}

static void mappings(void)
{
	long p = map(8), anon = MAP_PRIVATE | MAP_ANONYMOUS;

	WANT(unmap(p + 4 * page, page), 0);
	WANT(unmap(p + 6 * page, page + 1), 0); // two pages
	WANT(unmap(p + 1, page), -EINVAL);
	WANT(unmap(p, 0), -EINVAL);
	WANT(unmap(p + 4 * page, page), 0); // a hole
	WANT(unmap(p, -1), -EINVAL);
	WANT(map_at(p, 2 * page, PROT_READ, anon | MAP_FIXED, -1), p);
	WANT(map_at(p + 2 * page, page + 1, PROT_NONE, anon | MAP_FIXED, -1), p + 2 * page);
	WANT(map_at(p, page, PROT_READ, anon | MAP_FIXED_NOREPLACE, -1), -EEXIST);
	WANT(map_at(p + 4 * page, page, PROT_READ, anon | MAP_FIXED_NOREPLACE, -1), p + 4 * page);
	WANT(map_at(p + 1, page, PROT_READ, anon | MAP_FIXED, -1), -EINVAL);
	WANT(map_at(p, page, PROT_READ, MAP_PRIVATE | MAP_FIXED, -1), -EBADF);
	WANT(map_at(p, 0, PROT_READ, anon, -1), -EINVAL);
	WANT(unmap(p, 8 * page), 0);
}

static void protections(void)
{
	long p = map(8);

	WANT(protect(p, 3 * page, PROT_READ), 0);
	WANT(protect(p + page, 1, PROT_NONE), 0);
	WANT(protect(p, 0, PROT_NONE), 0);
	WANT(protect(p + 1, page, PROT_NONE), -EINVAL);
	WANT(unmap(p + 4 * page, page), 0);
	WANT(protect(p, 8 * page, PROT_NONE), -ENOMEM); // the first half changed
	WANT(call(SYS_pkey_mprotect, p, page, PROT_READ, -1, 0, 0), 0);
	WANT(unmap(p, 8 * page), 0);
}

static void advices(void)
{
	long p = map(8);

	WANT(advise(p, page, MADV_DONTNEED), 0);
	WANT(advise(p + page, 1, MADV_DONTNEED), 0);
	WANT(advise(p, 0, MADV_DONTNEED), 0);
	WANT(advise(p + 1, page, MADV_DONTNEED), -EINVAL);
	WANT(advise(p, page, UNKNOWN_ADVICE), -EINVAL);
	WANT(advise(p, 8 * page, MADV_FREE), 0);
	WANT(advise(p, 8 * page, MADV_WILLNEED), 0);
	MAY(advise(p, 8 * page, MADV_HUGEPAGE), 0);
	MAY(advise(p, 8 * page, MADV_COLD), 0);
	MAY(advise(p, 8 * page, MADV_PAGEOUT), 0);
	MAY(advise(p, 8 * page, DONTNEED_LOCKED), 0);
	MAY(advise(p + page, page, GUARD_INSTALL), 0);
	MAY(advise(p + page, page, GUARD_REMOVE), 0);
	WANT(unmap(p + 4 * page, page), 0);
	WANT(advise(p, 8 * page, MADV_DONTNEED), -ENOMEM); // all but the hole
	WANT(unmap(p, 8 * page), 0);

	long fd = call(SYS_memfd_create, (long)"direct", 0, 0, 0, 0, 0);
	WANT(call(SYS_ftruncate, fd, 4 * page, 0, 0, 0, 0), 0);
	p = map_at(0, 4 * page, PROT_READ | PROT_WRITE, MAP_SHARED, fd);
	WANT(advise(p + page, page, MADV_REMOVE), 0);
	WANT(call(SYS_remap_file_pages, p, page, 0, 2, 0, 0), 0);
	WANT(unmap(p, 4 * page), 0);
	WANT(call(SYS_close, fd, 0, 0, 0, 0, 0), 0);
}

static void moves(void)
{
	long p = map(16), q;

	// Room behind it that nothing else borders on.
	WANT(unmap(p + 8 * page, 8 * page), 0);
	WANT(remap(p, 8 * page, 5 * page, 0, 0), p); // the tail goes
	WANT(remap(p, 5 * page, 5 * page, 0, 0), p);
	WANT(remap(p, 5 * page, 6 * page, 0, 0), p); // into the room it left
	WANT(remap(p, 6 * page, 8 * page, MREMAP_MAYMOVE, 0), p);
	WANT(map_at(p + 8 * page, page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1), p + 8 * page);
	WANT(remap(p, 8 * page, 9 * page, 0, 0), -ENOMEM);
	q = remap(p, 8 * page, 300 * page, MREMAP_MAYMOVE, 0); // no room here
	if (q == p || (q < 0 && q > -4096))
		want(__LINE__, q, 0);
	long r = map(8);
	WANT(remap(q, 4 * page, 4 * page, MREMAP_MAYMOVE | MREMAP_FIXED, r + page), r + page);
	WANT(remap(q + 4 * page, 4 * page, 2 * page, MREMAP_MAYMOVE | MREMAP_FIXED, r), r);
	WANT(remap(q + 8 * page, page, page, MREMAP_FIXED, r), -EINVAL);
	WANT(remap(q + 8 * page, page, page, MREMAP_MAYMOVE | MREMAP_FIXED, r + 1), -EINVAL);
	WANT(remap(q + 8 * page + 1, page, page, MREMAP_MAYMOVE, 0), -EINVAL);
	long s = remap(q + 8 * page, 2 * page, 2 * page, MREMAP_MAYMOVE | MREMAP_DONTUNMAP, 0);
	if (s < 0 && s > -4096 && s != -EINVAL)
		want(__LINE__, s, 0);
	if (s > 0)
		WANT(unmap(s, 2 * page), 0);
	WANT(unmap(q, 300 * page), 0);
	WANT(unmap(r, 8 * page), 0);
	WANT(unmap(p + 8 * page, page), 0);
}

static void segments(void)
{
	long id = call(SYS_shmget, IPC_PRIVATE, 4 * page, 0600, 0, 0, 0);
	if (id < 0)
		want(__LINE__, id, 0);
	long a = call(SYS_shmat, id, 0, 0, 0, 0, 0);
	long b = call(SYS_shmat, id, 0, SHM_RDONLY, 0, 0, 0);

	WANT(call(SYS_shmat, id, a, 0, 0, 0, 0), -EINVAL); // taken
	WANT(call(SYS_shmat, id, a, SHM_REMAP, 0, 0, 0), a);
	WANT(call(SYS_shmdt, a, 0, 0, 0, 0, 0), 0);
	WANT(call(SYS_shmdt, a, 0, 0, 0, 0, 0), -EINVAL);
	WANT(call(SYS_shmdt, b, 0, 0, 0, 0, 0), 0);
	WANT(call(SYS_shmctl, id, IPC_RMID, 0, 0, 0, 0), 0);
}

static void vectors(void)
{
	long p = map(24);
	struct iovec v[20];

	for (long i = 0; i < 20; i++)
		v[i] = (struct iovec){ (void *)(p + i * page), page };
	v[1].iov_base = (void *)(p + 21 * page);
	long fd = call(SYS_pidfd_open, call(SYS_getpid, 0, 0, 0, 0, 0, 0), 0, 0, 0, 0, 0);
	// On itself from 6.13.
	MAY(call(SYS_process_madvise, fd, (long)v, 2, MADV_DONTNEED, 0, 0), 2 * page);
	MAY(call(SYS_process_madvise, fd, (long)v, 20, MADV_DONTNEED, 0, 0), 20 * page);
	MAY(call(SYS_process_madvise, fd, (long)v, 2, MADV_COLD, 0, 0), 2 * page);
	MAY(call(SYS_process_madvise, -1, (long)v, 2, MADV_DONTNEED, 0, 0), -EBADF);
	WANT(call(SYS_close, fd, 0, 0, 0, 0, 0), 0);
	WANT(unmap(p, 24 * page), 0);
}

static void heap(void)
{
	long top = call(SYS_brk, 0, 0, 0, 0, 0, 0);

	WANT(call(SYS_brk, top + 9 * page + 5, 0, 0, 0, 0, 0), top + 9 * page + 5);
	WANT(call(SYS_brk, top + 9 * page + 6, 0, 0, 0, 0, 0), top + 9 * page + 6); // same page
	WANT(call(SYS_brk, top + 2 * page, 0, 0, 0, 0, 0), top + 2 * page);
	WANT(call(SYS_brk, -page, 0, 0, 0, 0, 0), top + 2 * page); // refused
	WANT(call(SYS_brk, top, 0, 0, 0, 0, 0), top);
}

#if defined(__x86_64__)
static long compat(long nr, long a, long b, long c, long d, long e)
{
	long ret;
	// The sixth argument would be in the frame pointer; nothing here needs it.
	__asm__ volatile("int $0x80" : "=a"(ret) : "a"(nr), "b"(a), "c"(b), "d"(c), "S"(d), "D"(e) : "r8", "r9", "r10", "r11", "memory");
	return (int)ret;
}

// The 32-bit way into the kernel, from a 64-bit program.
static void legacy(void)
{
	enum {
		OLD_MUNMAP = 91, OLD_MPROTECT = 125, OLD_MREMAP = 163, OLD_MMAP2 = 192, OLD_MADVISE = 219,
		OLD_SHMAT = 397, OLD_SHMDT = 398,
	};
	long anon = MAP_PRIVATE | MAP_ANONYMOUS;
	long p = map_at(0, 8 * page, PROT_READ | PROT_WRITE, anon | MAP_32BIT, -1);

	if (p < 0 && p > -4096)
		want(__LINE__, p, 0);
	WANT(compat(OLD_MPROTECT, p, page, PROT_READ, 0, 0), 0);
	WANT(compat(OLD_MADVISE, p, page, MADV_DONTNEED, 0, 0), 0);
	WANT(compat(OLD_MADVISE, p, page, MADV_FREE, 0, 0), 0);
	WANT(compat(OLD_MREMAP, p, 4 * page, 3 * page, 0, 0), p);
	WANT(compat(OLD_MMAP2, p, page, PROT_READ, anon | MAP_FIXED, -1), p);
	long q = compat(OLD_MMAP2, 0, page, PROT_READ, anon, -1) & 0xffffffff;
	WANT(compat(OLD_MUNMAP, q, page, 0, 0, 0), 0);
	WANT(compat(OLD_MREMAP, p + 4 * page, page, page, MREMAP_MAYMOVE | MREMAP_FIXED, p), p);
	WANT(compat(OLD_MUNMAP, p, 3 * page, 0, 0, 0), 0);
	WANT(compat(OLD_MUNMAP, p + 1, page, 0, 0, 0), -EINVAL);
	WANT(unmap(p, 8 * page), 0);

	long id = call(SYS_shmget, IPC_PRIVATE, 2 * page, 0600, 0, 0, 0);
	long s = compat(OLD_SHMAT, id, 0, 0, 0, 0);
	if (s != -ENOSYS) // there from 5.1
		WANT(compat(OLD_SHMDT, s & 0xffffffff, 0, 0, 0, 0), 0);
	WANT(call(SYS_shmctl, id, IPC_RMID, 0, 0, 0, 0), 0);
}

// int 0x80 is a fault where the kernel has no 32-bit system calls.
static void legacy_if_there(void)
{
	pid_t child = fork();
	int status;

	if (child == 0) {
		enum { OLD_GETPID = 20 };
		_exit(compat(OLD_GETPID, 0, 0, 0, 0, 0) == getpid() ? 0 : 1);
	}
	WANT(waitpid(child, &status, 0), child);
	if (status == 0)
		legacy();
}
#else
static void legacy_if_there(void) {}
#endif

// Only functions that leave no hole for another thread's mapping to fall into.
static void *some(void *arg)
{
	for (int i = 0; i < 50; i++) {
		long p = map(4);
		WANT(protect(p, page, PROT_READ), 0);
		WANT(advise(p + page, page, MADV_DONTNEED), 0);
		WANT(map_at(p, 2 * page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1), p);
		WANT(unmap(p, 4 * page), 0);
		vectors();
	}
	return arg;
}

static int shared_child(void *arg)
{
	long p = *(long *)arg;

	WANT(advise(p, page, MADV_DONTNEED), 0);
	WANT(unmap(p + page, page), 0);
	call(SYS_exit, 0, 0, 0, 0, 0, 0);
	return 0;
}

// Children with and without an address space of their own.
static void children(void)
{
	static char stack[64 << 10] __attribute__((aligned(16)));
	long p = map(4);
	int status;

	pid_t child = clone(shared_child, stack + sizeof(stack), CLONE_VM | SIGCHLD, &p);
	WANT(waitpid(child, &status, 0), child);
	WANT(status, 0);
	WANT(*(volatile char *)p, 0); // dropped by the child

	child = fork();
	if (child == 0) {
		WANT(unmap(p + 2 * page, page), 0);
		heap();
		_exit(0);
	}
	WANT(waitpid(child, &status, 0), child);
	WANT(status, 0);

	child = vfork();
	if (child == 0) {
		execl("/proc/self/exe", "direct", "child", (char *)NULL);
		_exit(1);
	}
	WANT(waitpid(child, &status, 0), child);
	WANT(status, 0);
	WANT(unmap(p, 4 * page), 0);
}

static void *exec_from_thread(void *arg)
{
	execl("/proc/self/exe", "direct", "last", (char *)NULL);
	return arg;
}

static void *busy(void *arg)
{
	for (;;) {
		long p = map_at(0, 64 * page, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1);
		unmap(p, 64 * page);
	}
	return arg;
}

// outlive goes on after the main thread.
static void *outlive(void *arg)
{
	for (int i = 0; i < 50; i++)
		unmap(map(2), 2 * page);
	_exit(0);
	return arg;
}

// die ends a process from one thread while others are in calls,
// and another one by its main thread only.
static void die(void)
{
	pid_t child = fork();
	int status;

	if (child == 0) {
		pthread_t id[3];
		for (int i = 0; i < 3; i++)
			pthread_create(&id[i], NULL, busy, NULL);
		for (int i = 0; i < 50; i++)
			unmap(map(2), 2 * page);
		_exit(0);
	}
	WANT(waitpid(child, &status, 0), child);
	WANT(status, 0);

	child = fork();
	if (child == 0) {
		pthread_t id;
		pthread_create(&id, NULL, outlive, NULL);
		call(SYS_exit, 0, 0, 0, 0, 0, 0);
	}
	WANT(waitpid(child, &status, 0), child);
	WANT(status, 0);
}

// A child whose munmap is refused by seccomp.
static void sandbox(void)
{
	struct sock_filter refuse[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_munmap, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog filter = { sizeof(refuse) / sizeof(refuse[0]), refuse };
	int status;

	pid_t child = fork();
	if (child == 0) {
		long p = map(2);
		WANT(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
		WANT(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), 0);
		WANT(unmap(p, page), -EPERM);
		WANT(*(volatile char *)p, 1); // still there
		WANT(advise(p, page, MADV_DONTNEED), 0);
		_exit(0);
	}
	WANT(waitpid(child, &status, 0), child);
	WANT(status, 0);
}

int main(int argc, char **)
{
	page = sysconf(_SC_PAGESIZE);
	mappings();
	protections();
	advices();
	moves();
	segments();
	vectors();
	heap();
	if (argc > 1) // executed by one of the children or threads below
		return 0;
	legacy_if_there();

	pthread_t id[4];
	for (int i = 0; i < 4; i++)
		WANT(pthread_create(&id[i], NULL, some, NULL), 0);
	for (int i = 0; i < 4; i++)
		WANT(pthread_join(id[i], NULL), 0);
	children();
	sandbox();
	die();

	WANT(pthread_create(&id[0], NULL, busy, NULL), 0);
	WANT(pthread_create(&id[1], NULL, exec_from_thread, NULL), 0);
	for (;;)
		pause();
}
