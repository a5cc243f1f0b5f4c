// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/internal/wire"
)

// A client is who the kernel says it is, in this order:
//
//  1. SO_PEERCRED names the process that connected. It cannot be forged, but
//     the number may belong to another process by now.
//  2. A pidfd is opened for that number: it stands for one process for ever.
//  3. The watch is opened on the address space which that process has now.
//  4. A random challenge is sent, and echoed: the kernel says who sent the
//     echo, at the time of sending, and it must be the same number.
//  5. The pidfd's process is alive. So the number was its own all the time
//     from 2 on, and it has sent the echo.
//  6. It still has the address space of 3: it has not executed another program.
//
// A process with CAP_SYS_ADMIN in a user namespace of its own may send
// messages under the number of any process of its pid namespace; by 1 that
// leads nowhere. A forked child with its parent's connection is neither its
// parent (4) nor the one that connected (1): it must connect itself.
type identity struct {
	pid   int
	uid   uint32
	pidfd int
}

// peerOf is the process that connected.
func peerOf(c *net.UnixConn) (pid int, uid uint32, err error) {
	err = control(c, func(fd int) error {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
			return err
		}
		u, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		if err == nil {
			pid, uid = int(u.Pid), u.Uid
		}
		return err
	})
	return pid, uid, err
}

// openIdentity is step 2.
func openIdentity(pid int, uid uint32) (*identity, error) {
	if pid <= 0 {
		return nil, refuse(wire.CodeIdentity, "it cannot see the process that connected: its pid namespace does not contain it")
	}
	fd, err := unix.PidfdOpen(pid, pidfdNonblock)
	if err != nil {
		return nil, refuse(wire.CodeIdentity, "process %d, which connected, is gone", pid)
	}
	return &identity{pid, uid, fd}, nil
}

const pidfdNonblock = unix.O_NONBLOCK // PIDFD_NONBLOCK, Linux 5.10

// sent checks the sender of a message.
func (id *identity) sent(c *unix.Ucred) error {
	if c == nil || c.Pid == 0 {
		return refuse(wire.CodeIdentity, "it cannot see who sent a message")
	}
	if int(c.Pid) != id.pid && !guard.Off(guard.PeerSame) {
		return refuse(wire.CodeIdentity, "process %d uses the connection of process %d: each must connect itself", c.Pid, id.pid)
	}
	return nil
}

// alive is step 5.
func (id *identity) alive() error {
	p := []unix.PollFd{{Fd: int32(id.pidfd), Events: unix.POLLIN}}
	for {
		n, err := unix.Poll(p, 0)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("poll pidfd: %w", err)
		}
		if n != 0 {
			return refuse(wire.CodeIdentity, "process %d is gone", id.pid)
		}
		return nil
	}
}

// onExit calls f when the process ends; stop ends that, and waits for a
// running f.
func (id *identity) onExit(f func()) (stop func(), err error) {
	fd, err := unix.FcntlInt(uintptr(id.pidfd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate pidfd: %w", err)
	}
	file := os.NewFile(uintptr(fd), "pidfd")
	rc, err := file.SyscallConn()
	if err != nil {
		file.Close()
		return nil, fmt.Errorf("wait for process: %w", err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		ended := false
		err := rc.Read(func(fd uintptr) bool {
			p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			n, err := unix.Poll(p, 0)
			ended = err == nil && n > 0
			return ended
		})
		if err == nil && ended {
			f()
		}
	}()
	return func() {
		file.Close()
		<-done
	}, nil
}

func (id *identity) close() { unix.Close(id.pidfd) }

// seesAll reports whether the process may see what concerns others: it has
// CAP_SYS_PTRACE, in this process's user namespace. (In a namespace of its
// own every user has it.) The caller has checked who it is; what is read here
// is its own as long as it is alive afterwards.
func (id *identity) seesAll() bool {
	const capSysPtrace = 19
	caps, err := strconv.ParseUint(procStatus(id.pid, "CapEff:"), 16, 64)
	if err != nil || caps>>capSysPtrace&1 == 0 || id.alive() != nil {
		return false
	}
	ours, err1 := os.Readlink("/proc/self/ns/user")
	theirs, err2 := os.Readlink(fmt.Sprintf("/proc/%d/ns/user", id.pid))
	return err1 == nil && err2 == nil && ours == theirs && id.alive() == nil
}

// comm is the process's name; empty if it cannot be read.
func (id *identity) comm() (name [16]byte) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", id.pid))
	if err == nil {
		copy(name[:15], strings.TrimSuffix(string(b), "\n"))
	}
	return name
}

// procStatus is a field of /proc/PID/status.
func procStatus(pid int, field string) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		return ""
	}
	return fieldOf(string(b), field)
}

func fieldOf(text, field string) string {
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, field); ok {
			return strings.TrimSpace(rest)
		}
	}
	return ""
}
