// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
)

// What the forked child of TestFork saw, as its exit code.
const (
	childValid = 1 << iota
	childNotDead
	childTicket
)

// A forked child inherits the Watch and all its memory. It must miss, and must
// not touch what it shares with the parent.
func TestFork(t *testing.T) {
	p, w := pair(t, everything)
	if v := commit(w, pages(1, 2)); v != feed.Cacheable || !w.Valid() {
		t.Fatal(v)
	}
	p.Change(mm.Zap, pages(1, 2))
	consumer, interest := atomic.LoadUint64(p.Consumer), *p.Interest
	other := pages(1000, 1001)

	status := forkChild(t, func() (code uintptr) {
		if w.Valid() {
			code |= childValid
		}
		if w.Drain(nil) != feed.DeadState {
			code |= childNotDead
		}
		if (w.Begin(other) != feed.Ticket{}) {
			code |= childTicket
		}
		w.Forget(other)
		return code
	})
	if !status.Exited() || status.ExitStatus() != 0 {
		t.Errorf("child: %#x (valid %v, not dead %v, ticket %v)", int(status), status.ExitStatus()&childValid != 0,
			status.ExitStatus()&childNotDead != 0, status.ExitStatus()&childTicket != 0)
	}
	if atomic.LoadUint64(p.Consumer) != consumer || *p.Interest != interest {
		t.Error("the child wrote to the parent's memory")
	}
	// The parent is not disturbed.
	if s, got := drain(w); s != feed.Fresh || len(got) != 1 || !w.Valid() {
		t.Errorf("parent after the fork: %v %v", s, got)
	}
}

// forkChild runs f in a child made by fork, without the other threads of the
// Go runtime: f must not allocate or block. If the runtime asks the goroutine
// to yield just then, the child is stuck in a scheduler without threads; that
// says nothing about f, so it is killed and another one made.
func forkChild(t *testing.T, f func() uintptr) unix.WaitStatus {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	for range 10 {
		runtime.GC()
		pid := fork(f)
		if pid == 0 {
			t.Fatal("clone failed")
		}
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			t.Fatal(err)
		}
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 2000)
		for err == unix.EINTR {
			n, err = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 2000)
		}
		unix.Close(fd)
		if n == 0 {
			unix.Kill(pid, unix.SIGKILL)
		}
		var status unix.WaitStatus
		if _, err := unix.Wait4(pid, &status, 0, nil); err != nil {
			t.Fatal(err)
		}
		if n > 0 {
			return status
		}
	}
	t.Fatal("ten children got stuck")
	return 0
}

//go:norace
func fork(f func() uintptr) (pid int) {
	r, _, errno := syscall.RawSyscall6(syscall.SYS_CLONE, uintptr(syscall.SIGCHLD), 0, 0, 0, 0, 0)
	if errno != 0 {
		return 0
	}
	if r == 0 {
		syscall.RawSyscall(syscall.SYS_EXIT_GROUP, f(), 0, 0)
	}
	return int(r)
}

// MADV_WIPEONFORK, on which the above rests: a child by fork finds the words
// wiped, children that share the address space find them.
func TestForkKinds(t *testing.T) {
	const src = `
#define _GNU_SOURCE
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
static volatile unsigned long *seen;
static int look(void *arg) { (void)arg; _exit(seen[0] == 42 ? 7 : 9); }
static int status_of(pid_t pid) { int st = 0; waitpid(pid, &st, __WALL); return WIFEXITED(st) ? WEXITSTATUS(st) : 99; }
int main(void) {
	seen = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (seen == MAP_FAILED || madvise((void *)seen, 4096, 18 /* MADV_WIPEONFORK */)) return 1;
	seen[0] = 42;
	pid_t pid = fork();
	if (pid == 0) look(0);
	if (status_of(pid) != 9) return 2;
	pid = vfork();
	if (pid == 0) _exit(seen[0] == 42 ? 7 : 9);
	if (status_of(pid) != 7) return 3;
	char *stack = malloc(65536);
	pid = clone(look, stack + 65536, CLONE_VM | SIGCHLD, 0);
	if (status_of(pid) != 7) return 4;
	return seen[0] == 42 ? 0 : 5;
}
`
	dir := t.TempDir()
	file, prog := filepath.Join(dir, "fork.c"), filepath.Join(dir, "fork")
	if err := os.WriteFile(file, []byte(src), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-Wall", "-O1", "-o", prog, file).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	if err := exec.Command(prog).Run(); err != nil {
		t.Errorf("2 fork, 3 vfork, 4 CLONE_VM: %v", err)
	}
}
