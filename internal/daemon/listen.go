// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// ownPath is a socket in the file system that this process made.
type ownPath struct {
	path string
	lock *os.File // path.lock, locked as long as the socket is ours
}

// Close removes the socket. The lock's file stays: another daemon may be
// waiting for it.
func (p *ownPath) Close() error {
	err := os.Remove(p.path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return errors.Join(err, p.lock.Close())
}

// listen makes a socket at path. One that a daemon which was killed has left
// there is replaced; one that is in use is an error.
func listen(path string, mode fs.FileMode, gid int) (_ *net.UnixListener, _ *ownPath, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, nil, fmt.Errorf("make directory of socket: %w", err)
	}
	lock, err := os.OpenFile(path+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("lock socket: %w", err)
	}
	own := &ownPath{path, lock}
	defer func() {
		if err != nil {
			lock.Close()
		}
	}()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, nil, fmt.Errorf("lock %s: another daemon serves it: %w", path, err)
	}
	switch info, err := os.Lstat(path); {
	case errors.Is(err, fs.ErrNotExist):
	case err != nil:
		return nil, nil, err
	case info.Mode().Type() != fs.ModeSocket:
		return nil, nil, fmt.Errorf("listen at %s: it is there, and no socket", path)
	default:
		if err := os.Remove(path); err != nil { // nobody has the lock, so nobody serves it
			return nil, nil, fmt.Errorf("remove old socket: %w", err)
		}
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, nil, fmt.Errorf("make socket: %w", err)
	}
	file := os.NewFile(uintptr(fd), path)
	defer file.Close()
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
		return nil, nil, fmt.Errorf("bind %s: %w", path, err)
	}
	defer func() {
		if err != nil {
			os.Remove(path)
		}
	}()
	// Nobody can connect before listen.
	if gid > 0 {
		if err := os.Lchown(path, -1, gid); err != nil {
			return nil, nil, fmt.Errorf("set group of socket: %w", err)
		}
	}
	if err := os.Chmod(path, mode.Perm()); err != nil {
		return nil, nil, fmt.Errorf("set mode of socket: %w", err)
	}
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return nil, nil, fmt.Errorf("listen at %s: %w", path, err)
	}
	l, err := listenerOf(file)
	if err != nil {
		return nil, nil, err
	}
	return l, own, nil
}

// listenerOf duplicates the descriptor of a listening socket.
func listenerOf(file *os.File) (*net.UnixListener, error) {
	l, err := net.FileListener(file)
	if err != nil {
		return nil, fmt.Errorf("use socket %s: %w", file.Name(), err)
	}
	u, ok := l.(*net.UnixListener)
	if !ok || u.Addr().Network() != "unixpacket" {
		l.Close()
		return nil, fmt.Errorf("socket %s is %s, not a Unix socket of type SEQPACKET (ListenSequentialPacket= of systemd)", file.Name(), l.Addr().Network())
	}
	u.SetUnlinkOnClose(false)
	return u, nil
}

// firstActivated is where inherited sockets begin (sd_listen_fds(3)).
const firstActivated = 3

// Activated returns the listening socket that a service manager passes by the
// environment variables LISTEN_PID and LISTEN_FDS, which it removes; nil: it
// passes none.
func Activated() (*net.UnixListener, error) {
	pid, n := os.Getenv("LISTEN_PID"), os.Getenv("LISTEN_FDS")
	if pid != strconv.Itoa(os.Getpid()) || n == "" {
		return nil, nil
	}
	os.Unsetenv("LISTEN_PID")
	os.Unsetenv("LISTEN_FDS")
	os.Unsetenv("LISTEN_FDNAMES")
	if n != "1" {
		return nil, fmt.Errorf("LISTEN_FDS is %s: one socket is served", n)
	}
	unix.CloseOnExec(firstActivated)
	file := os.NewFile(firstActivated, "LISTEN_FDS")
	defer file.Close()
	return listenerOf(file)
}

// passCredentials makes the kernel attach the sender to every message, from
// the first one on.
func passCredentials(l *net.UnixListener) error {
	return control(l, func(fd int) error {
		return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_PASSCRED, 1)
	})
}

// control runs f with the descriptor of a socket.
func control(c syscall.Conn, f func(fd int) error) error {
	rc, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var inner error
	if err := rc.Control(func(fd uintptr) { inner = f(int(fd)) }); err != nil {
		return err
	}
	return inner
}

// Notify tells the service manager something (sd_notify(3)), if there is one.
func Notify(state string) error {
	name := os.Getenv("NOTIFY_SOCKET")
	if name == "" {
		return nil
	}
	c, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: name, Net: "unixgram"})
	if err != nil {
		return fmt.Errorf("notify service manager: %w", err)
	}
	defer c.Close()
	if _, err := c.Write([]byte(state)); err != nil {
		return fmt.Errorf("notify service manager: %w", err)
	}
	return nil
}
