// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"runtime"
	"syscall"

	"golang.org/x/sys/unix"
)

// call is one system call as the children of clone make it; clone_*.s knows
// its layout.
type call struct {
	nr   uintptr
	args [6]uintptr
	ret  int64 // what it returned, or a negative errno
}

// clone makes a child that makes the n calls of script and exits: clone(2)
// with flags. It returns the child's pid or a negative errno. A child that
// shares the caller's memory stores the results.
//
//go:noescape
func clone(flags uintptr, script *call, n int) (pid int)

// direct makes the calls in this thread.
func (p *performer) direct(script []call) {
	for i := range script {
		c := &script[i]
		n, _, e := unix.Syscall6(c.nr, c.args[0], c.args[1], c.args[2], c.args[3], c.args[4], c.args[5])
		if c.ret = int64(n); e != 0 {
			c.ret = -int64(e)
		}
	}
}

// child lets a new process make the calls, in the same address space
// (vfork) or in a copy of it, and waits for its end.
func (p *performer) child(shared bool, script []call) error {
	var flags uintptr // no signal at the exit
	if shared {
		flags = unix.CLONE_VM | unix.CLONE_VFORK
	}
	var pin runtime.Pinner
	pin.Pin(&script[0])
	defer pin.Unpin()
	pid := clone(flags, &script[0], len(script))
	switch e := syscall.Errno(-pid); {
	case pid > 0:
	case e == unix.ENOMEM, e == unix.EAGAIN: // no memory, or no huge page, for the copy
		return nil
	default:
		return fmt.Errorf("clone: %w", e)
	}
	for {
		_, err := unix.Wait4(pid, nil, unix.WALL, nil)
		if err != unix.EINTR {
			return err
		}
	}
}
