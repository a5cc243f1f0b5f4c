// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/wire"
)

// connect is a client that says what it likes.
func connect(t *testing.T, s *Server) int {
	t.Helper()
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Connect(fd, &unix.SockaddrUnix{Name: s.Addr()}); err != nil {
		t.Fatal(err)
	}
	return fd
}

// sendRaw is sendmsg(2). Libraries add a byte to an empty message.
func sendRaw(t *testing.T, fd int, b, oob []byte) {
	t.Helper()
	m := unix.Msghdr{Control: unsafe.SliceData(oob)}
	m.SetControllen(len(oob))
	if len(b) > 0 {
		iov := unix.Iovec{Base: unsafe.SliceData(b)}
		iov.SetLen(len(b))
		m.Iov = &iov
		m.SetIovlen(1)
	}
	if _, _, e := unix.Syscall(unix.SYS_SENDMSG, uintptr(fd), uintptr(unsafe.Pointer(&m)), unix.MSG_NOSIGNAL); e != 0 {
		t.Fatal(e)
	}
}

// hangsUp waits until the daemon has ended the connection.
func hangsUp(t *testing.T, fd int) {
	t.Helper()
	var b [wire.MaxBytes]byte
	for {
		n, err := unix.Read(fd, b[:])
		if err == unix.EINTR {
			continue
		}
		if err != nil && err != unix.ECONNRESET {
			t.Fatal(err)
		}
		if n <= 0 {
			return
		}
	}
}

// Descriptors that nobody asked for are not kept, whatever they come with:
// the file is closed when the client closes it.
func TestUnwantedDescriptors(t *testing.T) {
	s := start(t, Config{})
	hello := wire.Append(nil, 0, &wire.Hello{Versions: wire.Supported, Purpose: wire.PurposeStatus})
	for _, c := range []struct {
		name  string
		bytes []byte
		n     int
	}{
		{"empty message", nil, 1},
		{"empty message with many", nil, 200},
		{"garbage", []byte("hello"), 1},
		{"HELLO", hello, 1},
		{"HELLO with many", hello, 200},
	} {
		t.Run(c.name, func(t *testing.T) {
			for range 20 {
				r, w, err := os.Pipe()
				if err != nil {
					t.Fatal(err)
				}
				fds := make([]int, c.n)
				for i := range fds {
					fds[i] = int(w.Fd())
				}
				fd := connect(t, s)
				sendRaw(t, fd, c.bytes, unix.UnixRights(fds...))
				hangsUp(t, fd)
				unix.Close(fd)
				w.Close()
				// the end of the pipe comes when nobody has its other end
				if n, err := r.Read(make([]byte, 1)); n != 0 || err == nil {
					t.Errorf("read %d, %v", n, err)
				}
				r.Close()
			}
		})
	}
}
