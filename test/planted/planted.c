//go:build ignore
/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registers memory and makes one mistake, which is its argument:
 *
 *   planted uring|verbs MISTAKE [COUNT]
 *
 * with io_uring's fixed buffers, or memory regions of libibverbs. Compiled
 * with -DVERBS for the latter. It prints the addresses of what it registered
 * and, at the end, "done"; then it waits until its standard input ends.
 *
 * A comment "at: NAME" marks the line that a test expects in a stack.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <malloc.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#ifdef VERBS
#include <infiniband/verbs.h>
#endif

#define SIZE (1 << 20)
#define PAGE 4096

static void die(const char *what)
{
	fprintf(stderr, "%s: %s\n", what, strerror(errno));
	exit(1);
}

static void *map(void *at, size_t n, int flags)
{
	void *p = mmap(at, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);

	if (p == MAP_FAILED)
		die("mmap");
	memset(p, 1, n);
	return p;
}

/* ---- a device: add() registers, drop() deregisters ---- */

#ifdef VERBS

static struct ibv_pd *pd;
static struct ibv_mr *mrs[20000];

static void device_open(int slots)
{
	int n;
	struct ibv_device **list = ibv_get_device_list(&n);
	struct ibv_context *context;

	(void)slots;
	if (!list || n == 0) {
		errno = ENODEV;
		die("no RDMA device");
	}
	context = ibv_open_device(list[0]);
	if (!context)
		die("ibv_open_device");
	ibv_free_device_list(list);
	pd = ibv_alloc_pd(context);
	if (!pd)
		die("ibv_alloc_pd");
}

__attribute__((noinline)) static void add(int slot, void *p, size_t n)
{
	mrs[slot] = ibv_reg_mr(pd, p, n, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);	/* at: verbs register */
	if (!mrs[slot])
		die("ibv_reg_mr");
}

__attribute__((noinline)) static void drop(int slot)
{
	errno = ibv_dereg_mr(mrs[slot]);
	if (errno)
		die("ibv_dereg_mr");
}

#else

static int ring = -1;

static int reg(unsigned opcode, const void *arg, unsigned n)
{
	return syscall(SYS_io_uring_register, ring, opcode, arg, n);
}

static void device_open(int slots)
{
	struct io_uring_params p = {};
	struct io_uring_rsrc_register r = {.nr = slots, .flags = IORING_RSRC_REGISTER_SPARSE};

	ring = syscall(SYS_io_uring_setup, 4, &p);
	if (ring < 0)
		die("io_uring_setup");
	if (reg(IORING_REGISTER_BUFFERS2, &r, sizeof(r)))
		die("register empty slots");
}

static void update(int slot, struct iovec v)
{
	uint64_t tag = 0;
	struct io_uring_rsrc_update2 u = {.offset = slot, .data = (uintptr_t)&v, .tags = (uintptr_t)&tag, .nr = 1};

	if (reg(IORING_REGISTER_BUFFERS_UPDATE, &u, sizeof(u)) != 1)	/* at: uring register */
		die("update a slot");
}

__attribute__((noinline)) static void add(int slot, void *p, size_t n)
{
	struct iovec v = {p, n};

	update(slot, v);
}

__attribute__((noinline)) static void drop(int slot)
{
	struct iovec v = {};

	update(slot, v);
}

#endif

/* ---- mistakes: each registers in slot 0 and takes the memory away ---- */

static void told(const void *p, size_t n)
{
	printf("%lx %zx\n", (unsigned long)p, n);
	fflush(stdout);
}

static void *registered(void)
{
	void *p = map(NULL, SIZE, 0);

	told(p, SIZE);
	add(0, p, SIZE);		/* at: registered */
	return p;
}

static void *volatile kept;

__attribute__((noinline)) static void unmapped(void)
{
	char *p = registered();

	munmap(p + 4 * PAGE, PAGE);	/* at: unmapped */
}

__attribute__((noinline)) static void reused(void)
{
	char *p = registered();

	munmap(p, SIZE);		/* at: reused */
	if (mmap(p, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0) != p)
		die("the same address again");
	add(1, p, SIZE);
	drop(1);
	drop(0);
}

__attribute__((noinline)) static void replaced(void)
{
	char *p = registered();

	mmap(p, 2 * PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);	/* at: replaced */
}

__attribute__((noinline)) static void dropped(void)
{
	char *p = registered();

	madvise(p, SIZE, MADV_DONTNEED);	/* at: dropped */
}

__attribute__((noinline)) static void moved(void)
{
	char *p = registered(), *to = map(NULL, SIZE, 0);

	mremap(p, SIZE, SIZE, MREMAP_MAYMOVE | MREMAP_FIXED, to);	/* at: moved */
}

/* free of a block that malloc had mapped. */
__attribute__((noinline)) static void freed(void)
{
	char *p = malloc(SIZE);

	memset(p, 1, SIZE);
	told(p, SIZE);
	add(0, p, SIZE);
	free(p);			/* at: freed */
}

/* free of the last blocks of the heap: the break goes down. */
__attribute__((noinline)) static void trimmed(void)
{
	char *blocks[64], *low = malloc(64 << 10);

	if (!malloc(64))		/* keeps low apart */
		die("malloc");
	mallopt(M_TRIM_THRESHOLD, 64 << 10);
	for (int i = 0; i < 64; i++) {
		blocks[i] = malloc(64 << 10);
		memset(blocks[i], 1, 64 << 10);
	}
	free(low);			/* room for what others allocate */
	told(blocks[60], 64 << 10);
	add(0, blocks[60], 64 << 10);
	for (int i = 63; i >= 0; i--)
		free(blocks[i]);	/* at: trimmed */
}

/* A ring whose blocks are replaced under its registration. */
__attribute__((noinline)) static void remapped(void)
{
	char *p = registered();

	for (int i = 0; i < 8; i++)
		mmap(p + 4 * PAGE, 4 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);	/* at: remapped */
	drop(0);
}

static void *unmapping(void *p)
{
	munmap(p, SIZE);		/* at: threaded */
	return NULL;
}

/* By another thread. */
__attribute__((noinline)) static void threaded(void)
{
	pthread_t t;

	if (pthread_create(&t, NULL, unmapping, registered()) || pthread_join(t, NULL))
		die("thread");
}

/* By a system call that no function of the C library makes. */
__attribute__((noinline)) static void direct(void)
{
	char *p = registered();

	syscall(SYS_munmap, p, SIZE);	/* at: direct */
}

#ifndef VERBS
/* One of two descriptors of the ring is closed: it lives on. */
__attribute__((noinline)) static void dupped(void)
{
	char *p = registered();

	close(dup(ring));
	dup2(ring, ring);
	munmap(p, SIZE);		/* at: dupped */
}
#endif

/* Many at once, in one mapping. */
__attribute__((noinline)) static void arena(void)
{
	char *p = map(NULL, 16 * PAGE, 0);

	told(p, 16 * PAGE);
	for (int i = 0; i < 16; i++)
		add(i, p + i * PAGE, PAGE);
	munmap(p, 16 * PAGE);		/* at: arena */
}

/* After a line on standard input: who looks has time to come. */
__attribute__((noinline)) static void later(void)
{
	char *p = registered();

	while (getchar() != '\n')
		;
	munmap(p, SIZE);		/* at: later */
}

/* ---- no mistakes ---- */

static void correct(void)
{
	char *p = registered();
	int status;

	mprotect(p, SIZE, PROT_NONE);	/* pinned pages stay where they are */
	mprotect(p, SIZE, PROT_READ | PROT_WRITE);
	madvise(p, SIZE, MADV_WILLNEED);
	if (fork() == 0)		/* the child changes its own */
		_exit(munmap(p, SIZE) != 0);
	wait(&status);
	if (status)
		die("child");
	munmap(map(NULL, SIZE, 0), SIZE);
	drop(0);
	munmap(p, SIZE);
	for (int i = 0; i < 100; i++) {	/* the same address again and again */
		p = map(NULL, SIZE, 0);
		add(0, p, SIZE);
		drop(0);
		munmap(p, SIZE);
	}
	/* shared memory keeps its pages */
	int fd = memfd_create("shared", 0);
	if (fd < 0 || ftruncate(fd, SIZE))
		die("memfd");
	p = mmap(NULL, SIZE, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (p == MAP_FAILED)
		die("mmap memfd");
	memset(p, 1, SIZE);
	told(p, SIZE);
	add(0, p, SIZE);
	madvise(p, SIZE, MADV_DONTNEED);
	drop(0);
	munmap(p, SIZE);
#ifndef VERBS
	/* whole tables, and rings that are closed */
	for (int i = 0; i < 4; i++) {
		struct iovec v[4];

		if (reg(IORING_UNREGISTER_BUFFERS, NULL, 0))
			die("unregister");
		p = map(NULL, SIZE, 0);
		for (int j = 0; j < 4; j++)
			v[j] = (struct iovec){p + j * (SIZE / 4), SIZE / 4};
		if (reg(IORING_REGISTER_BUFFERS, v, 4))
			die("register four");
		if (i == 0) {
			if (reg(IORING_UNREGISTER_BUFFERS, NULL, 0))
				die("unregister four");
		} else if (i == 1) {
			close(ring);
		} else if (i == 2) {
			if (syscall(SYS_close_range, ring, ring, 0))
				die("close_range");
		} else {
			int other = dup(ring);

			close(other);	/* the ring is still open */
			dup2(1, ring);	/* now it is not */
		}
		munmap(p, SIZE);
		close(ring);
		device_open(16);
	}
#endif
	/* refused: nothing is registered */
	p = map(NULL, SIZE, 0);
	munmap(p, SIZE);
#ifdef VERBS
	if (ibv_reg_mr(pd, p, SIZE, IBV_ACCESS_LOCAL_WRITE)) {
#else
	struct iovec v = {p, SIZE};
	struct io_uring_rsrc_update2 u = {.data = (uintptr_t)&v, .nr = 1};
	if (reg(IORING_REGISTER_BUFFERS_UPDATE, &u, sizeof(u)) == 1) {
#endif
		errno = EINVAL;
		die("registered what is not there");
	}
	if (mmap(p, SIZE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != p)
		die("mmap again");
	munmap(p, SIZE);
}

/* COUNT registrations; one of them is a mistake. */
static void many(int count)
{
	char *p = map(NULL, (size_t)count * 2 * PAGE, 0);

	for (int i = 0; i < count; i++)
		add(i, p + (size_t)i * 2 * PAGE, PAGE);
	told(p + (size_t)(count / 2) * 2 * PAGE, PAGE);
	munmap(p + (size_t)(count / 2) * 2 * PAGE, PAGE);	/* at: many */
	for (int i = 0; i < count; i++)
		drop(i);
	munmap(p, (size_t)count * 2 * PAGE);
}

#ifndef VERBS
/* All by one call, whose array is in memory that nobody has touched yet. */
static void table(int count)
{
	char *p = map(NULL, (size_t)count * 2 * PAGE, 0);
	int fd = memfd_create("table", 0);
	struct iovec *v;

	if (fd < 0 || ftruncate(fd, count * sizeof(*v)))
		die("memfd");
	for (int i = 0; i < count; i++) {
		struct iovec x = {p + (size_t)i * 2 * PAGE, PAGE};

		if (write(fd, &x, sizeof(x)) != sizeof(x))
			die("write");
	}
	v = mmap(NULL, count * sizeof(*v), PROT_READ, MAP_SHARED, fd, 0);
	if (v == MAP_FAILED)
		die("mmap");
	if (reg(IORING_UNREGISTER_BUFFERS, NULL, 0))
		die("unregister");
	if (reg(IORING_REGISTER_BUFFERS, v, count))	/* at: table register */
		die("register");
	told(p + (size_t)(count / 2) * 2 * PAGE, PAGE);
	munmap(p + (size_t)(count / 2) * 2 * PAGE, PAGE);	/* at: table */
}
#endif

int main(int argc, char **argv)
{
	static const struct {
		const char *name;
		void (*make)(void);
	} mistakes[] = {
		{"unmapped", unmapped}, {"reused", reused}, {"replaced", replaced}, {"dropped", dropped}, {"moved", moved},
		{"freed", freed}, {"trimmed", trimmed}, {"remapped", remapped}, {"threaded", threaded}, {"direct", direct},
#ifndef VERBS
		{"dupped", dupped},
#endif
		{"later", later}, {"arena", arena}, {"correct", correct},
	};
	static char buffer[BUFSIZ];	/* not on the heap, which trimmed looks after */
	const char *mistake = argc > 1 ? argv[1] : "";
	int count = argc > 2 ? atoi(argv[2]) : 0;

	setvbuf(stdout, buffer, _IOFBF, sizeof(buffer));
	device_open(count ? count : 16);
	if (!strcmp(mistake, "many"))
		many(count);
#ifndef VERBS
	else if (!strcmp(mistake, "table"))
		table(count);
#endif
	else {
		unsigned i = 0;

		while (i < sizeof(mistakes) / sizeof(mistakes[0]) && strcmp(mistakes[i].name, mistake))
			i++;
		if (i == sizeof(mistakes) / sizeof(mistakes[0])) {
			fprintf(stderr, "no such mistake: %s\n", mistake);
			return 2;
		}
		mistakes[i].make();
	}
	printf("done\n");
	fflush(stdout);
	while (getchar() != EOF)
		;
	return 0;
}
