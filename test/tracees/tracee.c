//go:build ignore

// SPDX-License-Identifier: Apache-2.0
/*
 * A program to be watched. It obeys one line of standard input at a time and
 * answers each with one line, "ok ..." or "error ...". Its first line is
 * "ready PID AREA SCRATCH": an area of AREA_PAGES private pages and a scratch
 * page, both below 4 GiB where the architecture can have that. Nothing here
 * allocates or uses stdio's buffers, so that the only changes of the address
 * space are those that were asked for.
 *
 *   call COUNT NR ARG...     COUNT times the same system call; "ok LAST NS",
 *                            NS of this thread's processor time
 *   compat NR ARG...         one call by int $0x80; "ok RET"
 *   poke WORD...             stores 32-bit words at the scratch page
 *   peek                     "ok WORD", the first of them
 *   reset                    maps the area again and touches it
 *   sweep COUNT              unmaps COUNT fresh pages one by one; "ok NS"
 *   threads T COUNT          T threads unmap COUNT pages each; "ok TID BASE ..."
 *   churn T COUNT            T threads map and unmap COUNT pages altogether
 *   vfork | clonevm          a child that shares the space unmaps page 0; "ok PID"
 *   fork COUNT               COUNT children at once unmap page 0; "ok PID ..."
 *   spawn                    posix_spawn of /bin/true; "ok PID"
 *   exec                     a second thread executes this program; it says "ready"
 *   mainexit                 the main thread exits, another one goes on obeying
 *   sum T                    T threads fill, check and free memory until "stop"
 *   stop                     ends them; "ok ROUNDS WRONG"
 *   block N                  a thread sleeps in madvise(REMOVE) of the first of N (1, 2)
 *                            memfds, one page each; "ok TID ADDR ..."
 *   release                  lets it go on, to the next or to its end; "ok RET"
 *   uring MODE               two madvise(DONTNEED) of pages 1-2 and 4: "ok T0 T1 RES RES";
 *                            MODE: inline, async, sqpoll, linked
 *   quit
 *
 * An ARG is a number, or A+N: page N of the area, or S: the scratch page.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define AREA_PAGES 1024
#define MAX_THREADS 64
#ifndef MAP_32BIT
#define MAP_32BIT 0
#endif

static size_t page;
static char *area, *scratch;
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

static uint64_t now(clockid_t clock)
{
	struct timespec ts;

	clock_gettime(clock, &ts);
	return ts.tv_sec * 1000000000ull + ts.tv_nsec;
}

static void map_area(int fixed)
{
	area = mmap(area, AREA_PAGES * page, PROT_READ | PROT_WRITE,
		    MAP_PRIVATE | MAP_ANONYMOUS | (fixed ? MAP_FIXED : MAP_32BIT), -1, 0);
	if (area == MAP_FAILED)
		die("map area");
	memset(area, 1, AREA_PAGES * page);
}

static uint64_t arg(const char *s)
{
	if (s[0] == 'A')
		return (uint64_t)area + page * (s[1] ? strtoull(s + 2, NULL, 0) : 0);
	if (s[0] == 'S')
		return (uint64_t)scratch;
	return strtoull(s, NULL, 0);
}

#if defined(__x86_64__)
static long compat_call(const uint64_t *a)
{
	long ret;
	register uint64_t bp asm("r12") = a[6];

	asm volatile("push %%rbp\n\tmov %%r12, %%rbp\n\tint $0x80\n\tpop %%rbp"
		     : "=a"(ret)
		     : "a"(a[0]), "b"(a[1]), "c"(a[2]), "d"(a[3]), "S"(a[4]), "D"(a[5]), "r"(bp)
		     : "memory", "r8", "r9", "r10", "r11");
	return (int)ret;
}
#else
static long compat_call(const uint64_t *a)
{
	(void)a;
	errno = ENOSYS;
	die("compat");
	return 0;
}
#endif

/* ---- threads ---- */

static pthread_t threads[MAX_THREADS];
static struct {
	pid_t tid;
	char *base;
	size_t count;
} part[MAX_THREADS];
static pthread_barrier_t gate;

static void *unmapper(void *p)
{
	size_t i = (size_t)p;

	part[i].tid = gettid();
	pthread_barrier_wait(&gate);
	for (size_t k = 0; k < part[i].count; k++)
		if (munmap(part[i].base + k * page, page))
			die("munmap");
	return NULL;
}

static void run_threads(int n, void *(*f)(void *))
{
	pthread_barrier_init(&gate, NULL, n);
	for (long i = 0; i < n; i++)
		if ((errno = pthread_create(&threads[i], NULL, f, (void *)i)))
			die("create thread");
	for (int i = 0; i < n; i++)
		pthread_join(threads[i], NULL);
}

/* Pages change hands: what one thread mapped another one may unmap. */
static _Atomic(char *) hand[8];
static size_t rounds;

static void *churner(void *p)
{
	unsigned seed = (uintptr_t)p * 2654435761u + 1;

	pthread_barrier_wait(&gate);
	for (size_t k = 0; k < rounds; k++) {
		char *m = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (m == MAP_FAILED)
			die("mmap");
		seed = seed * 1103515245u + 12345;
		m = atomic_exchange(&hand[seed >> 29], m);
		if (m && munmap(m, page))
			die("munmap");
	}
	return NULL;
}

static atomic_int summing;
static atomic_ulong sums, wrong;

static void *summer(void *p)
{
	uint64_t seed = (uintptr_t)p + 1;

	while (atomic_load(&summing)) {
		size_t words = 4 * page / 8;
		uint64_t *m = mmap(NULL, 4 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (m == MAP_FAILED)
			die("mmap");
		seed = seed * 6364136223846793005u + 1442695040888963407u;
		for (size_t i = 0; i < words; i++)
			m[i] = seed ^ i;
		madvise((char *)m + page, page, MADV_DONTNEED);
		mprotect(m, page, PROT_READ);
		for (size_t i = 0; i < words; i++) {
			uint64_t want = i / (page / 8) == 1 ? 0 : seed ^ i;

			if (m[i] != want)
				atomic_fetch_add(&wrong, 1);
		}
		if (munmap(m, 4 * page))
			die("munmap");
		atomic_fetch_add(&sums, 1);
	}
	return NULL;
}

/* ---- calls that stay in flight ---- */

/*
 * write(memfd, page of a userfaultfd) sleeps with the file's inode locked;
 * madvise(REMOVE) of the same file then sleeps until the page comes.
 */
static struct hold {
	pthread_t thread;
	_Atomic pid_t tid;
	int memfd, uffd;
	char *shared, *faulty;
} holds[2];
static int holding, released;
static pthread_t remover_thread;
static _Atomic pid_t remover_tid;
static long removed;

static void *writer(void *p)
{
	struct hold *h = p;

	h->tid = gettid();
	if (pwrite(h->memfd, h->faulty, page, 0) != (ssize_t)page)
		die("write memfd");
	return NULL;
}

static void *remover(void *p)
{
	(void)p;
	remover_tid = gettid();
	for (int i = 0; i < holding; i++)
		if (madvise(holds[i].shared, page, MADV_REMOVE))
			removed = -errno;
	return NULL;
}

/* Waits until the thread sleeps in pwrite64(_, want) or madvise(want). */
static void await_sleep(_Atomic pid_t *tid, int nr, const void *want)
{
	char path[64], line[256];
	unsigned long a[2];
	int fd, in;

	while (!*tid)
		sched_yield();
	snprintf(path, sizeof(path), "/proc/self/task/%d/syscall", *tid);
	for (;;) {
		fd = open(path, O_RDONLY);
		if (fd < 0)
			die(path);
		ssize_t n = read(fd, line, sizeof(line) - 1);

		close(fd);
		line[n > 0 ? n : 0] = 0; /* "running" while it is not asleep */
		if (sscanf(line, "%d %lx %lx", &in, &a[0], &a[1]) == 3 && in == nr &&
		    a[nr == SYS_pwrite64] == (unsigned long)want)
			return;
		sched_yield();
	}
}

static void hold(struct hold *h)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MISSING };

	h->memfd = memfd_create("tracee", 0);
	if (h->memfd < 0 || ftruncate(h->memfd, page))
		die("memfd");
	h->shared = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_SHARED, h->memfd, 0);
	h->faulty = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	h->uffd = syscall(SYS_userfaultfd, O_CLOEXEC);
	if (h->uffd < 0 || ioctl(h->uffd, UFFDIO_API, &api))
		die("userfaultfd");
	reg.range.start = (uintptr_t)h->faulty;
	reg.range.len = page;
	if (ioctl(h->uffd, UFFDIO_REGISTER, &reg))
		die("register userfaultfd");
	h->tid = 0;
	if ((errno = pthread_create(&h->thread, NULL, writer, h)))
		die("create thread");
	await_sleep(&h->tid, SYS_pwrite64, h->faulty);
}

/* n holds, and a thread that madvises one file after the other. */
static void block(int n)
{
	holding = n;
	released = 0;
	removed = 0;
	remover_tid = 0;
	for (int i = 0; i < n; i++)
		hold(&holds[i]);
	if ((errno = pthread_create(&remover_thread, NULL, remover, NULL)))
		die("create thread");
	await_sleep(&remover_tid, SYS_madvise, holds[0].shared);
	say("ok %d", remover_tid);
	for (int i = 0; i < n; i++)
		say(" %#lx", (unsigned long)holds[i].shared);
}

static void release(void)
{
	struct hold *h = &holds[released++];
	struct uffdio_zeropage z = { .range = { (uintptr_t)h->faulty, page } };

	if (ioctl(h->uffd, UFFDIO_ZEROPAGE, &z))
		die("resolve userfault");
	pthread_join(h->thread, NULL);
	close(h->uffd);
	close(h->memfd);
	if (released < holding)
		await_sleep(&remover_tid, SYS_madvise, holds[released].shared);
	else
		pthread_join(remover_thread, NULL);
	say("ok %ld", removed);
}

/* ---- io_uring, without a library ---- */

static void uring(const char *mode)
{
	struct io_uring_params p = {};
	struct io_uring_sqe *sqes;
	struct io_uring_cqe *cqes;
	_Atomic unsigned *sq_tail, *cq_head, *cq_tail;
	unsigned *array, mask, cq_mask, enter = IORING_ENTER_GETEVENTS, tail, n = 0;
	int res[2] = {}, held = !strcmp(mode, "held"), linked = held || !strcmp(mode, "linked"), fd;
	size_t sq_len, cq_len;
	char *sq, *cq;
	uint64_t t0, t1;

	if (!strcmp(mode, "sqpoll")) {
		p.flags = IORING_SETUP_SQPOLL;
		p.sq_thread_idle = 1000;
		enter |= IORING_ENTER_SQ_WAKEUP;
	}
	if (!strcmp(mode, "spin")) { /* a thread that polls for submissions for ever */
		p.flags = IORING_SETUP_SQPOLL;
		p.sq_thread_idle = 1000000;
	}
	fd = syscall(SYS_io_uring_setup, 8, &p);
	if (fd < 0)
		die("io_uring_setup");
	if (!strcmp(mode, "spin")) {
		say("ok");
		return;
	}
	sq_len = p.sq_off.array + p.sq_entries * sizeof(unsigned);
	cq_len = p.cq_off.cqes + p.cq_entries * sizeof(struct io_uring_cqe);
	sq = mmap(NULL, sq_len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_SQ_RING);
	cq = mmap(NULL, cq_len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, IORING_OFF_CQ_RING);
	sqes = mmap(NULL, p.sq_entries * sizeof(*sqes), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
		    IORING_OFF_SQES);
	if (sq == MAP_FAILED || cq == MAP_FAILED || sqes == MAP_FAILED)
		die("map io_uring");
	sq_tail = (void *)(sq + p.sq_off.tail);
	array = (void *)(sq + p.sq_off.array);
	mask = *(unsigned *)(sq + p.sq_off.ring_mask);
	cq_head = (void *)(cq + p.cq_off.head);
	cq_tail = (void *)(cq + p.cq_off.tail);
	cq_mask = *(unsigned *)(cq + p.cq_off.ring_mask);
	cqes = (void *)(cq + p.cq_off.cqes);

	memset(sqes, 0, p.sq_entries * sizeof(*sqes));
	if (linked) { /* the two madvise wait behind it */
		sqes[n].opcode = IORING_OP_NOP;
		if (held) { /* ... until somebody writes to us */
			sqes[n].opcode = IORING_OP_READ;
			sqes[n].fd = 0;
			sqes[n].addr = (uintptr_t)scratch;
			sqes[n].len = 1;
		}
		sqes[n++].flags = IOSQE_IO_LINK;
	}
	for (int i = 0; i < 2; i++, n++) {
		sqes[n].opcode = IORING_OP_MADVISE;
		sqes[n].addr = (uintptr_t)area + page * (i ? 4 : 1);
		sqes[n].len = page * (i ? 1 : 2);
		sqes[n].fadvise_advice = MADV_DONTNEED;
		sqes[n].user_data = i + 1;
		if (linked && !i)
			sqes[n].flags = IOSQE_IO_LINK;
		if (!strcmp(mode, "async"))
			sqes[n].flags = IOSQE_ASYNC;
	}
	t0 = now(CLOCK_MONOTONIC);
	tail = atomic_load(sq_tail);
	for (unsigned i = 0; i < n; i++)
		array[(tail + i) & mask] = i;
	atomic_store(sq_tail, tail + n);
	for (unsigned seen = 0; seen < n;) {
		unsigned head = atomic_load(cq_head);

		if (head == atomic_load(cq_tail)) {
			if (syscall(SYS_io_uring_enter, fd, seen ? 0 : n, 1, enter, NULL, 0) < 0 && errno != EINTR)
				die("io_uring_enter");
			continue;
		}
		if (cqes[head & cq_mask].user_data)
			res[cqes[head & cq_mask].user_data - 1] = cqes[head & cq_mask].res;
		atomic_store(cq_head, head + 1);
		seen++;
	}
	t1 = now(CLOCK_MONOTONIC);
	munmap(sqes, p.sq_entries * sizeof(*sqes));
	munmap(cq, cq_len);
	munmap(sq, sq_len);
	close(fd);
	say("ok %lu %lu %d %d", (unsigned long)t0, (unsigned long)t1, res[0], res[1]);
}

/* ---- children ---- */

static int vm_child(void *p)
{
	(void)p;
	return munmap(area, page) != 0;
}

static void reap(pid_t pid)
{
	int st;

	if (waitpid(pid, &st, __WALL) != pid || st)
		die("child");
}

static void clone_child(int flags)
{
	static char stack[64 << 10] __attribute__((aligned(16)));
	pid_t pid = clone(vm_child, stack + sizeof(stack), flags | SIGCHLD, NULL);

	if (pid < 0)
		die("clone");
	reap(pid);
	say("ok %d", pid);
}

static void forks(int n)
{
	pid_t *pids = (pid_t *)scratch;
	int hold[2];

	if (n > (int)(page / sizeof(*pids)) || pipe(hold))
		die("pipe");
	for (int i = 0; i < n; i++) {
		pids[i] = fork();
		if (pids[i] < 0)
			die("fork");
		if (!pids[i]) {
			char c;

			close(hold[1]);
			if (read(hold[0], &c, 1) != 0) /* until all are there */
				_exit(1);
			_exit(munmap(area, page) != 0);
		}
	}
	close(hold[1]);
	close(hold[0]);
	say("ok");
	for (int i = 0; i < n; i++) {
		say(" %d", pids[i]);
		reap(pids[i]);
	}
}

static void *executor(void *p)
{
	(void)p;
	execl("/proc/self/exe", "tracee", NULL);
	die("exec");
	return NULL;
}

static void *obey(void *p);

static void *take_over(void *main_thread)
{
	pthread_join(*(pthread_t *)main_thread, NULL);
	say("ok %d", gettid());
	flush();
	return obey(NULL);
}

/* ---- commands ---- */

static void command(char *line)
{
	char *save, *word[16];
	uint64_t a[16] = {}, t;
	int n = 0, T, count;
	long ret = 0;

	for (char *s = strtok_r(line, " ", &save); s && n < 16; s = strtok_r(NULL, " ", &save))
		word[n++] = s;
	if (!n)
		return;
	for (int i = 1; i < n; i++)
		a[i] = arg(word[i]);
	T = a[1];
	count = a[2];
	if (!strcmp(word[0], "call")) {
		t = now(CLOCK_THREAD_CPUTIME_ID);
		for (uint64_t i = 0; i < a[1]; i++)
			ret = syscall(a[2], a[3], a[4], a[5], a[6], a[7], a[8]);
		t = now(CLOCK_THREAD_CPUTIME_ID) - t;
		say("ok %ld %lu", ret < 0 && ret > -4096 ? -(long)errno : ret, (unsigned long)t);
	} else if (!strcmp(word[0], "compat")) {
		say("ok %ld", compat_call(a + 1));
	} else if (!strcmp(word[0], "poke")) {
		for (int i = 1; i < n; i++)
			((uint32_t *)scratch)[i - 1] = a[i];
		say("ok");
	} else if (!strcmp(word[0], "peek")) {
		say("ok %u", *(uint32_t *)scratch);
	} else if (!strcmp(word[0], "reset")) {
		map_area(1);
		say("ok");
	} else if (!strcmp(word[0], "sweep")) {
		char *m = mmap(NULL, a[1] * page, PROT_READ | PROT_WRITE,
			       MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

		if (m == MAP_FAILED)
			die("mmap");
		t = now(CLOCK_THREAD_CPUTIME_ID);
		for (uint64_t i = a[1]; i--;)
			if (munmap(m + i * page, page))
				die("munmap");
		say("ok %lu", (unsigned long)(now(CLOCK_THREAD_CPUTIME_ID) - t));
	} else if (!strcmp(word[0], "threads") && T <= MAX_THREADS && T * count <= AREA_PAGES) {
		for (int i = 0; i < T; i++) {
			part[i].base = area + (size_t)i * count * page;
			part[i].count = count;
		}
		run_threads(T, unmapper);
		say("ok");
		for (int i = 0; i < T; i++)
			say(" %d %#lx", part[i].tid, (unsigned long)part[i].base);
	} else if (!strcmp(word[0], "churn") && T <= MAX_THREADS) {
		rounds = count / T;
		run_threads(T, churner);
		say("ok");
	} else if (!strcmp(word[0], "vfork")) {
		clone_child(CLONE_VM | CLONE_VFORK);
	} else if (!strcmp(word[0], "clonevm")) {
		clone_child(CLONE_VM);
	} else if (!strcmp(word[0], "fork")) {
		forks(T);
	} else if (!strcmp(word[0], "spawn")) {
		char *argv[] = { "true", NULL };
		pid_t pid;

		if ((errno = posix_spawn(&pid, "/bin/true", NULL, NULL, argv, environ)))
			die("spawn");
		reap(pid);
		say("ok %d", pid);
	} else if (!strcmp(word[0], "exec")) {
		pthread_create(&threads[0], NULL, executor, NULL);
		pthread_join(threads[0], NULL);
	} else if (!strcmp(word[0], "mainexit")) {
		static pthread_t self;

		self = pthread_self();
		if ((errno = pthread_create(&threads[0], NULL, take_over, &self)))
			die("create thread");
		syscall(SYS_exit, 0);
	} else if (!strcmp(word[0], "sum") && T <= MAX_THREADS) {
		summing = T;
		for (long i = 0; i < T; i++)
			if ((errno = pthread_create(&threads[i], NULL, summer, (void *)i)))
				die("create thread");
		say("ok");
	} else if (!strcmp(word[0], "stop")) {
		T = atomic_exchange(&summing, 0);
		for (int i = 0; i < T; i++)
			pthread_join(threads[i], NULL);
		say("ok %lu %lu", sums, wrong);
	} else if (!strcmp(word[0], "block")) {
		block(T == 2 ? 2 : 1);
	} else if (!strcmp(word[0], "release")) {
		release();
	} else if (!strcmp(word[0], "uring") && n == 2) {
		uring(word[1]);
	} else if (!strcmp(word[0], "quit")) {
		_exit(0);
	} else {
		errno = EINVAL;
		die(word[0]);
	}
	flush();
}

static void *obey(void *p)
{
	static char in[4096];
	static size_t have;

	(void)p;
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

int main(void)
{
	page = sysconf(_SC_PAGESIZE);
	scratch = mmap(NULL, page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	if (scratch == MAP_FAILED)
		die("map scratch page");
	map_area(0);
	say("ready %d %#lx %#lx", getpid(), (unsigned long)area, (unsigned long)scratch);
	flush();
	obey(NULL);
}
