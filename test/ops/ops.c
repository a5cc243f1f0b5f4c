//go:build ignore

// SPDX-License-Identifier: Apache-2.0
/*
 * Makes the memory-management calls it is told to make, one line of standard
 * input each, and looks at its own memory. Package internal/truth drives it.
 *
 *   syscall NR ARG...             the call's result, or a negative errno
 *   clone FLAGS NR ARG...         the pid of a child that makes the call and exits
 *   i386 NR ARG...                as syscall, through int $0x80
 *   poke SIZE ADDR VALUE...       stores values of SIZE bytes, one behind the other
 *   peek ADDR COUNT               COUNT 64-bit words
 *   fill ADDR UNIT COUNT SEED     writes COUNT pages of UNIT bytes, each with its pattern
 *   look ADDR UNIT COUNT SEED     a character a page: . pattern, S something else, U no access
 *   same ADDR COPY UNIT COUNT     as look, but compares with the bytes at COPY
 *
 * An argument 'TEXT is a pointer to TEXT. With -DDIRECT the calls are made by
 * the instruction, without libc; else by libc's functions, where it has one.
 * Nothing here allocates: the only changes of the address space are those
 * that were asked for.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define MAXARG 4200

static char line[128 << 10];
static char reply[16 << 10];
static uint64_t scratch[8192] __attribute__((aligned(4096)));
static char stack[64 << 10] __attribute__((aligned(4096)));
static uint64_t arg[MAXARG];
static int narg;

#ifdef DIRECT
static long direct(long nr, const uint64_t *a)
{
#if defined(__x86_64__)
	long ret;
	register uint64_t r10 __asm__("r10") = a[3];
	register uint64_t r8 __asm__("r8") = a[4];
	register uint64_t r9 __asm__("r9") = a[5];

	__asm__ volatile("syscall"
			 : "=a"(ret)
			 : "a"(nr), "D"(a[0]), "S"(a[1]), "d"(a[2]), "r"(r10), "r"(r8), "r"(r9)
			 : "rcx", "r11", "memory");
	return ret;
#elif defined(__aarch64__)
	register uint64_t x8 __asm__("x8") = nr;
	register uint64_t x0 __asm__("x0") = a[0];
	register uint64_t x1 __asm__("x1") = a[1];
	register uint64_t x2 __asm__("x2") = a[2];
	register uint64_t x3 __asm__("x3") = a[3];
	register uint64_t x4 __asm__("x4") = a[4];
	register uint64_t x5 __asm__("x5") = a[5];

	__asm__ volatile("svc #0"
			 : "+r"(x0)
			 : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4), "r"(x5)
			 : "memory");
	return x0;
#endif
}
#endif

static long i386(long nr, const uint64_t *a)
{
#if defined(__x86_64__)
	int ret;

	/* The sixth argument goes in ebp, which is no operand of inline assembly. */
	__asm__ volatile("push %%rbp\n\t"
			 "mov %[a5], %%rbp\n\t"
			 "int $0x80\n\t"
			 "pop %%rbp"
			 : "=a"(ret)
			 : "a"(nr), "b"(a[0]), "c"(a[1]), "d"(a[2]), "S"(a[3]), "D"(a[4]), [a5] "r"(a[5])
			 : "r8", "r9", "r10", "r11", "memory");
	return ret < 0 && ret >= -4095 ? ret : (long)(uint32_t)ret;
#else
	return -ENOSYS;
#endif
}

#ifndef DIRECT
static long kernel_style(long ret)
{
	return ret == -1 ? -errno : ret;
}
#endif

static long call(long nr, const uint64_t *a)
{
#ifdef DIRECT
	return direct(nr, a);
#else
	switch (nr) {
	case SYS_munmap:
		return kernel_style(munmap((void *)a[0], a[1]));
	case SYS_mmap:
		return kernel_style((long)mmap((void *)a[0], a[1], a[2], a[3], a[4], a[5]));
	case SYS_mremap:
		return kernel_style((long)mremap((void *)a[0], a[1], a[2], a[3], (void *)a[4]));
	case SYS_mprotect:
		return kernel_style(mprotect((void *)a[0], a[1], a[2]));
	case SYS_pkey_mprotect:
		return kernel_style(pkey_mprotect((void *)a[0], a[1], a[2], a[3]));
	case SYS_madvise:
		return kernel_style(madvise((void *)a[0], a[1], a[2]));
	case SYS_process_madvise:
		return kernel_style(process_madvise(a[0], (struct iovec *)a[1], a[2], a[3], a[4]));
	case SYS_remap_file_pages:
		return kernel_style(remap_file_pages((void *)a[0], a[1], a[2], a[3], a[4]));
	case SYS_shmat:
		return kernel_style((long)shmat(a[0], (void *)a[1], a[2]));
	case SYS_shmdt:
		return kernel_style(shmdt((void *)a[0]));
	case SYS_brk: /* the kernel returns the break in force, libc 0 or an error */
		if (a[0])
			brk((void *)a[0]);
		return (long)sbrk(0);
	}
	return kernel_style(syscall(nr, a[0], a[1], a[2], a[3], a[4], a[5]));
#endif
}

static uint64_t child_arg[8]; /* its own: arg is overwritten while it runs */

static int child(void *unused)
{
	(void)unused;
	call(child_arg[1], child_arg + 2);
	syscall(SYS_exit, 0);
	return 0;
}

static sigjmp_buf fault;

static void on_fault(int sig)
{
	siglongjmp(fault, sig);
}

static uint64_t pattern(uint64_t seed, uint64_t page, uint64_t word)
{
	return (seed * 4096 + page + 1) * 0x9E3779B97F4A7C15 + word;
}

static char look(const uint64_t *p, uint64_t words, uint64_t seed, uint64_t page, const uint64_t *copy)
{
	if (sigsetjmp(fault, 1))
		return 'U';
	for (uint64_t w = 0; w < words; w++) {
		uint64_t got = ((volatile const uint64_t *)p)[w];

		if (got != (copy ? copy[w] : pattern(seed, page, w)))
			return 'S';
	}
	return '.';
}

static void execute(const char *verb)
{
	char *out = reply;

	if (!strcmp(verb, "syscall")) {
		out += sprintf(out, "%ld", call(arg[0], arg + 1));
	} else if (!strcmp(verb, "i386")) {
		out += sprintf(out, "%ld", i386(arg[0], arg + 1));
	} else if (!strcmp(verb, "clone")) {
		memcpy(child_arg, arg, sizeof(child_arg));
		int pid = clone(child, stack + sizeof(stack), arg[0], NULL);

		out += sprintf(out, "%d", pid < 0 ? -errno : pid);
	} else if (!strcmp(verb, "poke")) {
		char *p = (char *)arg[1];

		for (int i = 2; i < narg; i++, p += arg[0])
			memcpy(p, &arg[i], arg[0]);
		out += sprintf(out, "0");
	} else if (!strcmp(verb, "peek")) {
		for (uint64_t i = 0; i < arg[1]; i++)
			out += sprintf(out, "%s%lu", i ? " " : "", ((volatile uint64_t *)arg[0])[i]);
	} else if (!strcmp(verb, "fill")) {
		volatile uint64_t *p = (uint64_t *)arg[0];
		uint64_t words = arg[1] / 8;

		for (uint64_t i = 0; i < arg[2]; i++)
			for (uint64_t w = 0; w < words; w++)
				p[i * words + w] = pattern(arg[3], i, w);
		out += sprintf(out, "0");
	} else if (!strcmp(verb, "look")) {
		for (uint64_t i = 0; i < arg[2]; i++)
			*out++ = look((uint64_t *)(arg[0] + i * arg[1]), arg[1] / 8, arg[3], i, NULL);
	} else if (!strcmp(verb, "same")) {
		for (uint64_t i = 0; i < arg[3]; i++)
			*out++ = look((uint64_t *)(arg[0] + i * arg[2]), arg[2] / 8, 0, i,
				      (uint64_t *)(arg[1] + i * arg[2]));
	} else {
		out += sprintf(out, "unknown verb %.64s", verb);
	}
	*out++ = '\n';
	for (char *p = reply; p < out;) {
		ssize_t n = write(1, p, out - p);

		if (n <= 0)
			_exit(1);
		p += n;
	}
}

/* Reads up to the newline; a line is one request, and there is never a second one waiting. */
static int read_line(void)
{
	size_t n = 0;

	while (n < sizeof(line) - 1) {
		ssize_t got = read(0, line + n, sizeof(line) - 1 - n);

		if (got <= 0)
			return 0;
		n += got;
		if (line[n - 1] == '\n') {
			line[n - 1] = 0;
			return 1;
		}
	}
	return 0;
}

int main(void)
{
	struct sigaction sa = {.sa_handler = on_fault};
	int n = sprintf(reply, "ready %d %lu %zu\n", getpid(), (unsigned long)scratch, sizeof(scratch));

	sigaction(SIGSEGV, &sa, NULL);
	sigaction(SIGBUS, &sa, NULL);
	if (write(1, reply, n) != n)
		return 1;
	while (read_line()) {
		char *save, *verb = strtok_r(line, " ", &save), *word;

		if (!verb)
			return 1;
		memset(arg, 0, 16 * sizeof(arg[0]));
		for (narg = 0; narg < MAXARG && (word = strtok_r(NULL, " ", &save)); narg++)
			arg[narg] = *word == '\'' ? (uint64_t)(word + 1) : strtoull(word, NULL, 0);
		execute(verb);
	}
	return 0;
}
