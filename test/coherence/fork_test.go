// SPDX-License-Identifier: Apache-2.0

//go:build amd64 && !race

// The race detector has a part in every atomic load, and locks of its own that
// a forked child may find taken.

package coherence

import (
	"runtime"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/test/coherence/vfork"
)

// child runs f in a new process, forked or (shared) as by vfork in the same
// address space, and returns its exit status. f is nosplit: a function that
// looks at its stack may enter the scheduler, which a child does not have.
func child(t testing.TB, shared bool, f func() uintptr) int {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid := clone(shared, f)
	if pid < 0 {
		t.Fatalf("clone: %v", syscall.Errno(-pid))
	}
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &ws, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		break
	}
	if !ws.Exited() {
		t.Fatalf("child: %v", ws)
	}
	return ws.ExitStatus()
}

//go:noinline
//go:norace
//go:nosplit
func clone(shared bool, f func() uintptr) int {
	var pid int
	if shared {
		pid = vfork.Clone(uintptr(unix.SIGCHLD))
	} else {
		n, _, e := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
		if pid = int(n); e != 0 {
			pid = -int(e)
		}
	}
	if pid == 0 {
		unix.RawSyscall(unix.SYS_EXIT_GROUP, f(), 0, 0)
	}
	return pid
}

// What the children work on.
var family struct {
	w        *feed.Watch
	addr, ln uintptr
}

//go:norace
//go:nosplit
func askValid() uintptr {
	if family.w.Valid() {
		return 1
	}
	return 2
}

//go:norace
//go:nosplit
func unmapAll() uintptr {
	_, _, e := unix.RawSyscall(unix.SYS_MUNMAP, family.addr, family.ln, 0)
	return uintptr(e)
}

//go:norace
//go:nosplit
func dropAll() uintptr {
	_, _, e := unix.RawSyscall(unix.SYS_MADVISE, family.addr, family.ln, unix.MADV_DONTNEED)
	return uintptr(e)
}

// A forked child's watch is dead; the parent's lives, and fork alone does not
// invalidate anything.
func TestForkedChild(t *testing.T) {
	r := newRig(t, local.Options{})
	b := mapBlock(t, 2)
	defer b.unmap(t)
	family.w, family.addr, family.ln = r.w, uintptr(b.start()), uintptr(len(b))
	r.acquire(b)
	if r.w.Drain(nil); !r.w.Valid() {
		t.Fatal("not valid")
	}
	for range *rounds {
		r.hit(b)
		losses := r.w.Stats().Losses
		if got := child(t, false, askValid); got != 2 {
			t.Fatalf("valid in a forked child (%d)", got)
		}
		// the child drops everything; the parent keeps its entry
		got := child(t, false, unmapAll)
		if got != 0 {
			t.Fatal(got)
		}
		// a loss is another matter: the kernel skipped a program
		if !r.acquire(b) && r.w.Stats().Losses == losses {
			t.Fatalf("a fork invalidated the parent's entry: %+v", r.w.Stats())
		}
	}
}

// A vfork or CLONE_VM child shares the address space and the watch; what it
// changes is the parent's change.
func TestSharedSpaceChild(t *testing.T) {
	r := newRig(t, local.Options{})
	b := mapBlock(t, 2)
	defer b.unmap(t)
	family.w, family.addr, family.ln = r.w, uintptr(b.start()), uintptr(len(b))
	disturbed := 0
	for range *rounds {
		// Another thread of this process may change something meanwhile that the
		// filter takes for interesting; then the child must not hit either.
		before := r.w.Stats()
		hit := r.acquire(b)
		for range 100 {
			if hit && r.w.Valid() {
				break
			}
			hit = r.acquire(b)
		}
		if !hit {
			t.Fatalf("not cached: %+v", r.w.Stats())
		}
		if got := child(t, true, askValid); got != 1 {
			disturbed++
			if r.w.Drain(nil); r.w.Stats().Records == before.Records && r.w.Stats().Losses == before.Losses {
				t.Fatalf("validity in a vfork child: %d, and nothing happened", got)
			}
		}
		got := child(t, true, dropAll)
		if got != 0 {
			t.Fatal(got)
		}
		if r.w.Valid() {
			t.Fatal("a change by a vfork child was not seen")
		}
		if r.acquire(b) {
			t.Fatal("hit after a vfork child dropped the pages")
		}
	}
	if disturbed > *rounds/10 {
		t.Errorf("%d of %d children found the watch invalid", disturbed, *rounds)
	}
}
