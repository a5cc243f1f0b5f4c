//go:build ignore

// SPDX-License-Identifier: Apache-2.0
/*
 * A program to be watched, for the cases of docs/cases.md. It obeys one line
 * of standard input at a time and answers each with one line, "ok ..." or
 * "error ...". Its first line is "ready PID AREA": an area of AREA_PAGES
 * private touched pages. With -DRAW its memory comes from system calls made
 * without libc, so that no hook in libc can see it.
 *
 *   alloc COUNT SIZE      allocates, touches and frees COUNT blocks in turn;
 *                         "ok START LEN ..." of the mappings behind them
 *   purge COUNT SIZE      the same without an answer about where
 *   brk                   the heap's end up and down: "ok NEW OLD" of the shrink
 *   ops                   a fixed list of changes of the area; "ok"
 *   random COUNT SEED     unmaps COUNT random ranges of the area, maps it again
 *   unmap COUNT           unmaps COUNT pages of the area one by one
 *   hop COUNT             maps and unmaps one page, on another CPU each time
 *   big T MIB             T threads unmap MIB touched MiB each at once
 *   reuse PID             a child with this pid unmaps page 0 of the area
 *   toggle                "ok", then maps and unmaps pages of the area for ever
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/sched.h>
#include <malloc.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define AREA_PAGES 64
#define MAX_THREADS 512

static size_t page;
static char *area;
static char out[64 << 10];
static size_t used;

static void say(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
static void say(const char *fmt, ...)
{
	va_list ap;

	va_start(ap, fmt);
	used += vsnprintf(out + used, sizeof(out) - used, fmt, ap);
	va_end(ap);
}

static void flush(void)
{
	say("\n");
	for (size_t n = 0; n < used;) {
		ssize_t w = write(1, out + n, used - n);

		if (w <= 0)
			_exit(3);
		n += w;
	}
	used = 0;
}

static void die(const char *what)
{
	used = 0;
	say("error %s: %s", what, strerror(errno));
	flush();
	_exit(2);
}

/* ---- calls: libc's functions, or the instruction itself ---- */

#if defined(RAW) && defined(__x86_64__)
static long raw(long nr, long a, long b, long c, long d, long e, long f)
{
	register long r10 asm("r10") = d;
	register long r8 asm("r8") = e;
	register long r9 asm("r9") = f;
	long ret;

	asm volatile("syscall"
		     : "=a"(ret)
		     : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
		     : "rcx", "r11", "memory");
	if (ret < 0 && ret > -4096) {
		errno = -ret;
		return -1;
	}
	return ret;
}
#else
#define raw(nr, a, b, c, d, e, f) syscall(nr, a, b, c, d, e, f)
#endif

#ifdef RAW
#define do_mmap(a, n, p, f) ((char *)raw(SYS_mmap, (long)(a), n, p, f, -1, 0))
#define do_munmap(a, n) raw(SYS_munmap, (long)(a), n, 0, 0, 0, 0)
#define do_madvise(a, n, v) raw(SYS_madvise, (long)(a), n, v, 0, 0, 0)
#define do_mprotect(a, n, p) raw(SYS_mprotect, (long)(a), n, p, 0, 0, 0)
#define do_mremap(a, o, n, f, to) raw(SYS_mremap, (long)(a), o, n, f, (long)(to), 0)
#else
#define do_mmap(a, n, p, f) ((char *)mmap(a, n, p, f, -1, 0))
#define do_munmap(a, n) munmap(a, n)
#define do_madvise(a, n, v) madvise(a, n, v)
#define do_mprotect(a, n, p) mprotect(a, n, p)
#define do_mremap(a, o, n, f, to) ((long)mremap(a, o, n, f, to))
#endif

#define RW (PROT_READ | PROT_WRITE)
#define ANON (MAP_PRIVATE | MAP_ANONYMOUS)

static char *map(char *at, size_t n, int flags)
{
	char *m = do_mmap(at, n, RW, ANON | flags);

	if (m == MAP_FAILED)
		die("mmap");
	return m;
}

static void unmap(char *at, size_t n)
{
	if (do_munmap(at, n))
		die("munmap");
}

/* ---- blocks ---- */

#ifdef RAW
static char *get(size_t size, char **start, size_t *len)
{
	*len = (size + page - 1) & ~(page - 1);
	return *start = map(NULL, *len, 0);
}

static void put(char *p, size_t len)
{
	unmap(p, len);
}
#else
static char *get(size_t size, char **start, size_t *len)
{
	char *p = malloc(size);

	if (!p)
		die("malloc");
	/* glibc keeps the length of a chunk in the word before it, here a mapping */
	*start = (char *)((uintptr_t)p & ~(page - 1));
	*len = malloc_usable_size(p) + (p - *start);
	return p;
}

static void put(char *p, size_t len)
{
	(void)len;
	free(p);
}
#endif

static void blocks(long count, size_t size, int tell)
{
	say("ok");
	for (long i = 0; i < count; i++) {
		char *start;
		size_t len;
		char *p = get(size, &start, &len);

		for (size_t k = 0; k < size; k += page)
			p[k] = 1;
		p[size - 1] = 1;
		if (tell)
			say(" %#lx %#lx", (unsigned long)start, (unsigned long)len);
		put(p, len);
	}
}

static void heap(void)
{
	char *old = sbrk(0);
	char *top = (char *)(((uintptr_t)old + page - 1) & ~(page - 1)) + 16 * page;

	if (brk(top)) /* up */
		die("brk");
	memset(top - 16 * page, 1, 16 * page);
	if (syscall(SYS_brk, 0) != (long)top) /* a question */
		die("brk query");
	if (syscall(SYS_brk, (long)top + (1L << 46)) != (long)top) /* refused */
		die("brk refused");
	if (brk(top - 6 * page - 8)) /* down, to the middle of a page */
		die("brk");
	say("ok %#lx %#lx", (unsigned long)(top - 6 * page), (unsigned long)top);
}

/* ---- changes of the area ---- */

static void fresh(void)
{
	area = map(area, AREA_PAGES * page, area ? MAP_FIXED : 0);
	memset(area, 1, AREA_PAGES * page);
}

static void ops(void)
{
	unmap(area + 4 * page, page);
	if (do_madvise(area, 3 * page, MADV_DONTNEED) || do_mprotect(area + 8 * page, 2 * page, PROT_READ) ||
	    do_mprotect(area + 8 * page, 2 * page, RW))
		die("advise or protect");
	map(area + 12 * page, 2 * page, MAP_FIXED);
	if (do_mremap(area + 16 * page, 4 * page, 2 * page, 0, NULL) != (long)(area + 16 * page))
		die("mremap");
	if (do_mremap(area + 20 * page, 2 * page, 2 * page, MREMAP_MAYMOVE | MREMAP_FIXED, area + 30 * page) !=
	    (long)(area + 30 * page))
		die("mremap");
	if (!do_munmap(area + 1, page) || errno != EINVAL)
		die("munmap of an odd address");
	unmap(area + 40 * page, page + 1);
	say("ok");
}

static void random_unmaps(long count, unsigned seed)
{
	for (long i = 0; i < count; i++) {
		size_t from, n;

		seed = seed * 1103515245u + 12345;
		from = seed >> 26; /* 0..63 */
		n = 1 + (seed >> 20) % 8;
		if (from + n > AREA_PAGES)
			n = AREA_PAGES - from;
		unmap(area + from * page, n * page);
		map(area + from * page, n * page, MAP_FIXED_NOREPLACE);
	}
	say("ok");
}

static void hop(long count)
{
	cpu_set_t all, one;
	int cpu = -1;

	if (sched_getaffinity(0, sizeof(all), &all))
		die("sched_getaffinity");
	for (long i = 0; i < 2 * count; i++) {
		do
			cpu = (cpu + 1) % CPU_SETSIZE;
		while (!CPU_ISSET(cpu, &all));
		CPU_ZERO(&one);
		CPU_SET(cpu, &one);
		if (sched_setaffinity(0, sizeof(one), &one))
			die("sched_setaffinity");
		if (i % 2)
			map(area, page, MAP_FIXED_NOREPLACE);
		else
			unmap(area, page);
	}
	say("ok %d", CPU_COUNT(&all));
}

static void toggle(void)
{
	unsigned seed = 1;
	unsigned char gone[AREA_PAGES] = { 0 };

	for (;;) {
		unsigned i;

		seed = seed * 1103515245u + 12345;
		i = seed >> 26;
		if (gone[i])
			map(area + i * page, page, MAP_FIXED_NOREPLACE);
		else
			unmap(area + i * page, page);
		gone[i] = !gone[i];
	}
}

/* ---- threads ---- */

static pthread_barrier_t gate;
static char *base[MAX_THREADS];
static size_t length;

static void *unmapper(void *p)
{
	long i = (long)p;

	base[i] = map(NULL, length, MAP_POPULATE);
	pthread_barrier_wait(&gate);
	unmap(base[i], length);
	return NULL;
}

static void big(long n, size_t mib)
{
	static pthread_t threads[MAX_THREADS];
	pthread_attr_t attr;

	length = mib << 20;
	pthread_barrier_init(&gate, NULL, n);
	pthread_attr_init(&attr);
	pthread_attr_setstacksize(&attr, 64 << 10);
	for (long i = 0; i < n; i++)
		if ((errno = pthread_create(&threads[i], &attr, unmapper, (void *)i)))
			die("create thread");
	for (long i = 0; i < n; i++)
		pthread_join(threads[i], NULL);
	say("ok");
	for (long i = 0; i < n; i++)
		say(" %#lx", (unsigned long)base[i]);
}

/* ---- a pid that is used again ---- */

static void reuse(pid_t pid)
{
	struct clone_args a = { .exit_signal = SIGCHLD, .set_tid = (uintptr_t)&pid, .set_tid_size = 1 };
	int status;
	pid_t got = syscall(SYS_clone3, &a, sizeof(a));

	if (got < 0)
		die("clone3");
	if (!got)
		_exit(do_munmap(area, page) != 0);
	if (waitpid(got, &status, 0) != got || status)
		die("child");
	say("ok %d", got);
}

static void command(char *line)
{
	char *save, *word[4];
	long a = 0, b = 0;
	int n = 0;

	for (char *s = strtok_r(line, " ", &save); s && n < 4; s = strtok_r(NULL, " ", &save))
		word[n++] = s;
	if (!n)
		return;
	if (n > 1)
		a = strtol(word[1], NULL, 0);
	if (n > 2)
		b = strtol(word[2], NULL, 0);
	if (!strcmp(word[0], "alloc"))
		blocks(a, b, 1);
	else if (!strcmp(word[0], "purge"))
		blocks(a, b, 0);
	else if (!strcmp(word[0], "brk"))
		heap();
	else if (!strcmp(word[0], "ops"))
		ops();
	else if (!strcmp(word[0], "random"))
		random_unmaps(a, b);
	else if (!strcmp(word[0], "unmap")) {
		for (long i = 0; i < a; i++)
			unmap(area + i * page, page);
		say("ok");
	} else if (!strcmp(word[0], "hop"))
		hop(a);
	else if (!strcmp(word[0], "big") && a <= MAX_THREADS)
		big(a, b);
	else if (!strcmp(word[0], "reuse"))
		reuse(a);
	else if (!strcmp(word[0], "toggle")) {
		say("ok");
		flush();
		toggle();
	} else {
		errno = EINVAL;
		die(word[0]);
	}
	flush();
}

int main(void)
{
	static char in[256];
	size_t have = 0;

	page = sysconf(_SC_PAGESIZE);
#ifndef RAW
	mallopt(M_MMAP_THRESHOLD, 1 << 20); /* and it stays there */
#endif
	fresh();
	say("ready %d %#lx", getpid(), (unsigned long)area);
	flush();
	for (;;) {
		char *end = memchr(in, '\n', have);
		ssize_t n;

		if (end) {
			char line[sizeof(in)];
			size_t len = end - in;

			memcpy(line, in, len);
			line[len] = 0;
			have -= len + 1;
			memmove(in, end + 1, have);
			command(line);
			continue;
		}
		n = read(0, in + have, sizeof(in) - have);
		if (n <= 0)
			_exit(0);
		have += n;
	}
}
