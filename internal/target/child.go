// SPDX-License-Identifier: Apache-2.0

// Package target is how a person names what to watch, and with which tier: a
// program to start, running processes by number, name or control group.
package target

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/command"
)

// Child is a program that this one started. It and all its descendants are
// this program's to wait for: orphans come to us, not to init.
type Child struct {
	PID int

	mu     sync.Mutex
	status unix.WaitStatus // guarded by mu
	ended  bool            // guarded by mu: the program itself was waited for
}

// LookPath finds the program as a shell does, and fails with a shell's codes.
func LookPath(name string) (string, error) {
	path, err := exec.LookPath(name)
	if errors.Is(err, exec.ErrDot) {
		err = nil
	}
	return path, startError(name, err)
}

func startError(name string, err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, exec.ErrNotFound):
		return command.Exit(command.ExitNotFound, fmt.Errorf("start %s: command not found", name))
	}
	return command.Exit(command.ExitNotExecutable, fmt.Errorf("start %s: %w", name, err))
}

// StartStopped starts argv and returns when it stands behind its execve,
// before its first instruction in user space, held by ptrace. The caller must
// have locked its goroutine to its thread, and call Release from it.
func StartStopped(path string, argv []string, s command.Streams) (*Child, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become subreaper: %w", err)
	}
	p, err := os.StartProcess(path, argv, &os.ProcAttr{
		Files: []*os.File{s.In, s.Out, s.Err},
		Sys:   &syscall.SysProcAttr{Ptrace: true},
	})
	if err != nil {
		var pe *fs.PathError
		if errors.As(err, &pe) {
			err = pe.Err
		}
		return nil, startError(argv[0], err)
	}
	c := &Child{PID: p.Pid}
	p.Release() // waiting is ours
	var ws unix.WaitStatus
	for {
		_, err = unix.Wait4(c.PID, &ws, 0, nil)
		if err != unix.EINTR {
			break
		}
	}
	switch {
	case err != nil:
		return nil, fmt.Errorf("wait for %s: %w", argv[0], err)
	case !ws.Stopped():
		return nil, fmt.Errorf("start %s: it ended before its first instruction", argv[0])
	}
	return c, nil
}

// Release lets the program run.
func (c *Child) Release() error {
	if err := unix.PtraceDetach(c.PID); err != nil {
		return fmt.Errorf("let process %d run: %w", c.PID, err)
	}
	return nil
}

// Abandon kills a program that cannot be watched.
func (c *Child) Abandon() {
	unix.Kill(c.PID, unix.SIGKILL)
	c.Wait(false)
}

// Wait waits for the program, and with tree for all its descendants.
func (c *Child) Wait(tree bool) error {
	for {
		var ws unix.WaitStatus
		target := -1
		if !tree {
			target = c.PID
		}
		pid, err := unix.Wait4(target, &ws, 0, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err == unix.ECHILD:
			return nil
		case err != nil:
			return fmt.Errorf("wait for process %d: %w", c.PID, err)
		}
		if c.Reaped(pid, ws) && !tree {
			return nil
		}
	}
}

// Reaped takes what a wait returned; true if the program itself has ended.
func (c *Child) Reaped(pid int, ws unix.WaitStatus) bool {
	if pid != c.PID || !ws.Exited() && !ws.Signaled() {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.status, c.ended = ws, true
	return true
}

// Code is the exit code that a shell would show.
func (c *Child) Code() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case !c.ended:
		return command.ExitFailure
	case c.status.Signaled():
		return 128 + int(c.status.Signal())
	}
	return c.status.ExitStatus()
}

// PassOn passes a signal on to everything this program started, as a terminal
// does. What a terminal has delivered already is not delivered twice.
func PassOn(sig syscall.Signal) {
	if (sig == unix.SIGINT || sig == unix.SIGQUIT) && inForeground() {
		return
	}
	// A child born during the scan is not in it, and its parent has forked
	// before the signal came. So again, until nobody is new.
	told := map[int]bool{}
	for again := true; again; {
		again = false
		for _, pid := range descendants(os.Getpid()) {
			if !told[pid] {
				told[pid], again = true, true
				unix.Kill(pid, sig)
			}
		}
	}
}

// KillDescendants ends everything this program started, what is born meanwhile
// too.
func KillDescendants() {
	for range 100 {
		pids := descendants(os.Getpid())
		if len(pids) == 0 {
			return
		}
		for _, pid := range pids {
			unix.Kill(pid, unix.SIGKILL)
		}
		runtime.Gosched()
	}
}

// inForeground reports whether this process is in the foreground process
// group of its terminal, whose keys then reach the started program as well.
func inForeground() bool {
	tty, err := os.Open("/dev/tty")
	if err != nil {
		return false
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// descendants finds the live children of a process and theirs.
func descendants(of int) []int {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil
	}
	children := map[int][]int{}
	for _, name := range stats {
		b, err := os.ReadFile(name)
		if err != nil {
			continue // ended meanwhile
		}
		// "pid (comm) state ppid ...": comm may hold anything, the last ")" ends it.
		text := string(b)
		i := strings.LastIndexByte(text, ')')
		fields := strings.Fields(text[i+1:])
		if i < 0 || len(fields) < 2 || fields[0] == "Z" {
			continue
		}
		pid, err1 := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		parent, err2 := strconv.Atoi(fields[1])
		if err1 == nil && err2 == nil {
			children[parent] = append(children[parent], pid)
		}
	}
	var all []int
	for next := children[of]; len(next) > 0; {
		all = append(all, next...)
		var deeper []int
		for _, pid := range next {
			deeper = append(deeper, children[pid]...)
		}
		next = deeper
	}
	return all
}
