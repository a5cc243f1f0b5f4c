// SPDX-License-Identifier: Apache-2.0

package inject

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// Tree gives a notifier to each address space of a process and of its
// descendants: to every program they execute and to every forked child, before
// the first instruction runs in it.
//
// All tasks of the tree are traced by ptrace. They stop shortly when they
// fork, execute, or get a signal; nobody else can ptrace them meanwhile (strace
// and gdb fail inside). If the tracing process dies they run on, except one into
// which it is just injecting: the kernel kills that.
//
// A Tree belongs to one thread: the goroutine that uses it must be locked to
// its thread.
type Tree struct {
	kvm     *os.File
	known   map[int]bool   // tasks
	spaces  map[int]*space // by process
	gaps    []Gap
	closing sync.WaitGroup // of machines
}

// Gap is an address space that got no notifier.
type Gap struct {
	PID  int
	Comm string
	Err  error
}

// space is an address space, shared by processes after vfork or CLONE_VM.
type space struct {
	machine *Machine // nil: a gap
	users   int
}

// NewTree fails without access to /dev/kvm.
func NewTree() (*Tree, error) {
	if err := supported(); err != nil {
		return nil, err
	}
	kvm, err := openKVM()
	if err != nil {
		return nil, err
	}
	return &Tree{kvm: kvm, known: map[int]bool{}, spaces: map[int]*space{}}, nil
}

const treeOptions = traceOptions | unix.PTRACE_O_TRACEEXEC | unix.PTRACE_O_TRACEFORK |
	unix.PTRACE_O_TRACEVFORK | unix.PTRACE_O_TRACECLONE

// Start takes a child that stands at the SIGTRAP of its first execve, traced
// by PTRACE_TRACEME, and gives it a notifier. It still stands there on return.
func (t *Tree) Start(pid int) error {
	fail := func(err error) error { return fmt.Errorf("make a notifier in process %d: %w", pid, err) }
	if err := refuseSeccomp(pid); err != nil {
		return fail(err)
	}
	// PTRACE_TRACEME does not let job control work; PTRACE_SEIZE does. From
	// one to the other the child is held by SIGSTOP, of which only we, its
	// parent, can know.
	if err := detach(pid, unix.SIGSTOP); err != nil {
		return fail(err)
	}
	var ws unix.WaitStatus
	for {
		_, err := unix.Wait4(pid, &ws, unix.WUNTRACED, nil)
		if err == nil {
			break
		}
		if err != unix.EINTR {
			return fail(err)
		}
	}
	if !ws.Stopped() {
		return fail(&goneError{pid, ws})
	}
	if err := seize(pid, treeOptions); err != nil {
		return fail(err)
	}
	if _, err := wait(pid); err != nil {
		return fail(err)
	}
	if err := swallowCont(pid); err != nil {
		return fail(err)
	}
	m, _, err := inject(pid, pid, stop{}, treeOptions, t.kvm)
	if err != nil {
		return fail(err)
	}
	t.known[pid] = true
	t.spaces[pid] = &space{m, 1}
	return nil
}

// swallowCont ends the job-control stop of a traced process without a SIGCONT
// being left for it, and leaves it at a trap.
func swallowCont(pid int) error {
	mask, err := signalMask(pid)
	if err != nil {
		return err
	}
	if err := setSignalMask(pid, ^(uint64(1) << (unix.SIGCONT - 1))); err != nil {
		return err
	}
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		return err
	}
	for {
		if err := unix.PtraceCont(pid, 0); err != nil {
			return err
		}
		s, err := wait(pid)
		if err != nil {
			return err
		}
		if s.delivers() && s.signal == unix.SIGCONT {
			break
		}
	}
	if _, err := trapAgain(pid); err != nil {
		return err
	}
	return setSignalMask(pid, mask)
}

// Run lets the process go on and follows it and its descendants until ended
// returns false or no task is left. ended hears of every process that ended,
// and of every other child of the calling process that did.
func (t *Tree) Run(ended func(pid int, ws unix.WaitStatus) bool) error {
	for tid := range t.known {
		if err := unix.PtraceCont(tid, 0); err != nil && err != unix.ESRCH {
			return fmt.Errorf("let process %d run: %w", tid, err)
		}
	}
	for {
		var ws unix.WaitStatus
		tid, err := unix.Wait4(-1, &ws, unix.WALL, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ECHILD:
			return nil
		case err != nil:
			return fmt.Errorf("wait for the tree: %w", err)
		}
		if ws.Stopped() {
			err = t.stopped(tid, stopOf(ws))
			var gone *goneError
			switch {
			case errors.As(err, &gone):
				tid, ws = gone.tid, gone.status
			case err != nil && !errors.Is(err, unix.ESRCH): // killed meanwhile: its end comes
				return err
			default:
				continue
			}
		}
		if t.gone(tid) && !ended(tid, ws) {
			return nil
		}
	}
}

// gone forgets a task that has ended; true unless it is a mere thread.
func (t *Tree) gone(tid int) bool {
	s := t.spaces[tid]
	thread := s == nil && t.known[tid]
	delete(t.known, tid)
	t.release(tid)
	return !thread
}

func (t *Tree) release(pid int) {
	s := t.spaces[pid]
	delete(t.spaces, pid)
	if s == nil {
		return
	}
	if s.users--; s.users == 0 && s.machine != nil {
		t.closing.Go(func() { s.machine.Close() }) // it takes its time
	}
}

// stopped answers a stop and lets the task go on.
func (t *Tree) stopped(tid int, s stop) (err error) {
	switch {
	case !t.known[tid]:
		// Its first stop, before its first instruction. It may come before
		// the parent's event.
		s, err = t.born(tid, s)
	case s.event == unix.PTRACE_EVENT_EXEC:
		s, err = t.executed(tid)
	}
	sig := 0
	switch {
	case err != nil:
		return err
	case s.group():
		// stopped by job control, and remains so until SIGCONT
		return task(tid, ptrace(unix.PTRACE_LISTEN, tid, 0, 0))
	case s.delivers():
		sig = int(s.signal)
	}
	return task(tid, unix.PtraceCont(tid, sig))
}

func task(tid int, err error) error {
	if err != nil {
		return fmt.Errorf("continue task %d: %w", tid, err)
	}
	return nil
}

// born takes a new task, which stands at the trap s, and returns the trap at
// which it stands then.
func (t *Tree) born(tid int, s stop) (stop, error) {
	t.known[tid] = true
	pid, err := processOf(tid)
	if err != nil || pid != tid {
		return s, nil // a thread, or killed: its end comes
	}
	for other, sp := range t.spaces {
		if sameSpace(tid, other) {
			sp.users++
			t.spaces[tid] = sp
			return s, nil
		}
	}
	t.spaces[tid] = &space{users: 1}
	return t.make(tid, s)
}

// executed takes a process that executes a program and stands inside execve.
func (t *Tree) executed(pid int) (stop, error) {
	if former, err := unix.PtraceGetEventMsg(pid); err == nil && int(former) != pid {
		delete(t.known, int(former)) // a thread, that is now the process
	}
	t.release(pid)
	t.spaces[pid] = &space{users: 1}
	s, err := trapAgain(pid)
	if err != nil {
		return s, err
	}
	return t.make(pid, s)
}

// make gives a process its notifier. If that cannot be, it is a gap.
func (t *Tree) make(pid int, at stop) (stop, error) {
	m, at, err := inject(pid, pid, at, treeOptions, t.kvm)
	var gone *goneError
	switch {
	case errors.As(err, &gone), errors.Is(err, unix.ESRCH):
		return at, err
	case err != nil:
		t.gaps = append(t.gaps, Gap{pid, comm(pid), err})
	}
	t.spaces[pid].machine = m
	return at, nil
}

// Gaps are the address spaces that got no notifier so far.
func (t *Tree) Gaps() []Gap { return t.gaps }

// Close lets the notifiers go. It may take a second.
func (t *Tree) Close() error {
	for pid := range t.spaces {
		t.release(pid)
	}
	t.closing.Wait()
	return t.kvm.Close()
}
