// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"io"
	"os"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/wire"
)

// exactly is sendmsg(2). Libraries add a byte to an empty message.
func (r *raw) exactly(b, oob []byte) error {
	m := unix.Msghdr{Control: unsafe.SliceData(oob)}
	m.SetControllen(len(oob))
	if len(b) > 0 {
		iov := unix.Iovec{Base: unsafe.SliceData(b)}
		iov.SetLen(len(b))
		m.Iov = &iov
		m.SetIovlen(1)
	}
	if _, _, e := unix.Syscall(unix.SYS_SENDMSG, uintptr(r.fd), uintptr(unsafe.Pointer(&m)), unix.MSG_NOSIGNAL); e != 0 {
		return e
	}
	return nil
}

// hangsUp waits until the daemon has ended the connection.
func (r *raw) hangsUp(t *testing.T) {
	t.Helper()
	for {
		_, _, err := r.receive()
		if errors.Is(err, io.EOF) {
			return
		}
		if err != nil {
			t.Fatal(err)
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
				client := dialRaw(t, s)
				if err := client.exactly(c.bytes, unix.UnixRights(fds...)); err != nil {
					t.Fatal(err)
				}
				client.hangsUp(t)
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
