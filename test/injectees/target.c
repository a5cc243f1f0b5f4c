//go:build ignore

// SPDX-License-Identifier: Apache-2.0
//
// A program into which a notifier is injected, and which looks for traces of
// it: threads that wait in system calls of every kind, one that spins with a
// known value in every register, signals blocked and pending, a timer.
// "check" on standard input ends the waiting; whoever was disturbed says so.

#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <poll.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static atomic_int go, bad, ready;
static volatile sig_atomic_t ticks;

#define CHECK(what, ok)                                                        \
	do {                                                                   \
		if (!(ok)) {                                                   \
			printf("disturbed: %s (errno %d)\n", what, errno);     \
			bad = 1;                                               \
		}                                                              \
	} while (0)

static int wake[2];	/* closed in the end: every reader sees it */

static void *in_epoll(void *p)
{
	struct epoll_event e = { .events = EPOLLIN };
	int ep = epoll_create1(0);

	epoll_ctl(ep, EPOLL_CTL_ADD, wake[0], &e);
	ready++;
	CHECK("epoll_wait", epoll_wait(ep, &e, 1, -1) == 1);
	return p;
}

static void *in_poll(void *p)
{
	struct pollfd fd = { .fd = wake[0], .events = POLLIN };

	ready++;
	CHECK("poll", poll(&fd, 1, 1000000) == 1);
	return p;
}

static void *in_read(void *p)
{
	char c;

	ready++;
	CHECK("read", read(wake[0], &c, 1) == 0);
	return p;
}

static void *in_recv(void *p)	/* with a timeout: not restarted by the kernel */
{
	int *s = p;
	struct timeval t = { .tv_sec = 1000 };
	char c;

	setsockopt(*s, SOL_SOCKET, SO_RCVTIMEO, &t, sizeof(t));
	ready++;
	CHECK("recv", recv(*s, &c, 1, 0) == 1);
	return p;
}

static void *in_sigtimedwait(void *p)
{
	struct timespec t = { .tv_sec = 1000 };
	sigset_t set;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR2);
	ready++;
	CHECK("sigtimedwait", sigtimedwait(&set, NULL, &t) == SIGUSR2);
	return p;
}

static void *in_nanosleep(void *p)	/* a restart block */
{
	struct timespec t = { .tv_nsec = 1000000 };

	ready++;
	while (!go)
		CHECK("nanosleep", nanosleep(&t, NULL) == 0);
	return p;
}

static void *in_registers(void *p)
{
#if defined(__x86_64__)
	unsigned long wrong = 0;

	ready++;
	asm volatile("push %%rbx\n\tpush %%rbp\n\t"
		     "mov $0x1b1, %%rbx\n\tmov $0x1c1, %%rcx\n\tmov $0x1d1, %%rdx\n\t"
		     "mov $0x151, %%rsi\n\tmov $0x1b9, %%rbp\n\tmov $0x108, %%r8\n\t"
		     "mov $0x109, %%r9\n\tmov $0x10a, %%r10\n\tmov $0x10b, %%r11\n\t"
		     "mov $0x10c, %%r12\n\tmov $0x10d, %%r13\n\tmov $0x10e, %%r14\n\t"
		     "mov $0x10f, %%r15\n\tmovq %%r15, %%xmm7\n\t"
		     "1: pause\n\tcmpl $0, (%%rdi)\n\tje 1b\n\t"
		     "xor %%eax, %%eax\n\t"
		     "cmp $0x1b1, %%rbx\n\tjne 2f\n\tcmp $0x1c1, %%rcx\n\tjne 2f\n\t"
		     "cmp $0x1d1, %%rdx\n\tjne 2f\n\tcmp $0x151, %%rsi\n\tjne 2f\n\t"
		     "cmp $0x1b9, %%rbp\n\tjne 2f\n\tcmp $0x108, %%r8\n\tjne 2f\n\t"
		     "cmp $0x109, %%r9\n\tjne 2f\n\tcmp $0x10a, %%r10\n\tjne 2f\n\t"
		     "cmp $0x10b, %%r11\n\tjne 2f\n\tcmp $0x10c, %%r12\n\tjne 2f\n\t"
		     "cmp $0x10d, %%r13\n\tjne 2f\n\tcmp $0x10e, %%r14\n\tjne 2f\n\t"
		     "movq %%xmm7, %%rbx\n\tcmp $0x10f, %%rbx\n\tjne 2f\n\t"
		     "cmp $0x10f, %%r15\n\tje 3f\n\t"
		     "2: mov $1, %%eax\n\t"
		     "3: pop %%rbp\n\tpop %%rbx"
		     : "=a"(wrong)
		     : "D"(&go)
		     : "rcx", "rdx", "rsi", "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "xmm7",
		       "memory", "cc");
	CHECK("registers", !wrong);
#else
	ready++;
#endif
	return p;
}

static void tick(int sig) { (void)sig; ticks++; }

static void *closer(void *p)	/* whoever leaves a descriptor loses it */
{
	ready++;
	while (!go)
		syscall(SYS_close_range, 100, ~0u, 0);
	return p;
}

static void change(void)
{
	char *a = mmap(NULL, 3 * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	memset(a, 1, 3 * 4096);
	munmap(a + 4096, 4096);
	printf("unmapped %lx\n", (long)a + 4096);
}

/* Kills the process at ioctl: whoever tries loses it. */
static void filter(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 1),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
	};
	struct sock_fprog prog = { .len = 4, .filter = code };

	prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
	if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &prog))
		perror("seccomp");
}

static void commands(void)
{
	char line[64];

	while (fgets(line, sizeof(line), stdin)) {
		if (!strncmp(line, "change", 6))
			change();
		else
			return;
	}
}

static int threads(void)
{
	void *(*const all[])(void *) = { in_epoll, in_poll, in_read, in_recv, in_sigtimedwait,
					 in_nanosleep, in_registers, closer };
	enum { N = sizeof(all) / sizeof(all[0]) };
	struct itimerval every = { { 0, 2000 }, { 0, 2000 } };
	struct sigaction sa = { .sa_handler = tick, .sa_flags = SA_RESTART | SA_NODEFER };
	pthread_t t[N];
	sigset_t set, now;
	int pair[2], i;

	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	sigaddset(&set, SIGUSR2);
	sigaddset(&set, SIGALRM);	/* for the threads; only main gets it */
	sigprocmask(SIG_BLOCK, &set, NULL);
	if (pipe(wake) || socketpair(AF_UNIX, SOCK_STREAM, 0, pair))
		return 2;
	for (i = 0; i < N; i++)
		pthread_create(&t[i], NULL, all[i], &pair[0]);
	while (ready < N)
		usleep(1000);
	sigaction(SIGALRM, &sa, NULL);
	sigemptyset(&set);
	sigaddset(&set, SIGALRM);
	sigprocmask(SIG_UNBLOCK, &set, NULL);
	setitimer(ITIMER_REAL, &every, NULL);
	raise(SIGUSR1);		/* stays pending */
	printf("ready\n");
	commands();
	while (!ticks)
		usleep(1000);
	go = 1;
	close(wake[1]);
	CHECK("send", write(pair[1], "x", 1) == 1);
	kill(getpid(), SIGUSR2);
	for (i = 0; i < N; i++)
		pthread_join(t[i], NULL);
	sigpending(&set);
	CHECK("pending signal", sigismember(&set, SIGUSR1));
	sigprocmask(SIG_BLOCK, NULL, &now);
	CHECK("signal mask", sigismember(&now, SIGUSR1) && !sigismember(&now, SIGALRM) && !sigismember(&now, SIGTERM));
	printf(bad ? "bad\n" : "ok\n");
	return bad;
}

static void *exec_thread(void *p)
{
	char *const argv[] = { "target", "plain", NULL };

	execv("/proc/self/exe", argv);
	return p;
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";
	pthread_t t;
	struct rlimit cpu = { 60, 60 };
	volatile int *flag;
	pid_t parent;

	setrlimit(RLIMIT_CPU, &cpu);	/* whatever becomes of the test */
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!strcmp(mode, "threads"))
		return threads();
	if (!strcmp(mode, "filter"))
		filter();
	if (!strcmp(mode, "filterexec")) {
		filter();
		exec_thread(NULL);
	}
	if (!strcmp(mode, "many"))	/* mappings that do not merge */
		for (long i = 0; i < 60000; i++)
			mmap(NULL, 4096, i & 1 ? PROT_READ : PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (!strcmp(mode, "execthread")) {
		pthread_create(&t, NULL, exec_thread, NULL);
		pthread_join(t, NULL);
	}
	if (!strcmp(mode, "fork")) {
		if (fork() == 0) {
			change();
			return 0;
		}
		wait(NULL);
	}
	if (!strcmp(mode, "orphan")) {
		parent = getpid();
		if (fork() != 0)
			return 7;
		while (getppid() == parent)
			usleep(1000);
		change();
		return 0;
	}
	if (!strcmp(mode, "stopped")) {
		flag = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
		parent = getpid();
		if (fork() == 0) {
			usleep(20000);
			*flag = 1;
			while (getppid() == parent) {
				kill(parent, SIGCONT);
				usleep(1000);
			}
			return 0;
		}
		raise(SIGSTOP);
		CHECK("stop", *flag);
		if (bad)
			return bad;
	}
	if (!strcmp(mode, "plain") || !strcmp(mode, "stopped")) {
		change();
		return 0;
	}
	printf("ready\n");
	commands();
	printf("ok\n");
	return 0;
}
