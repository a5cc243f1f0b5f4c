// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"io"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/wire"
)

// raw is a connection of a client that does as it pleases.
type raw struct{ fd int }

func connectRaw(socket string) (*raw, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	r := &raw{fd}
	if err := r.connect(socket); err != nil {
		unix.Close(fd)
		return nil, err
	}
	return r, nil
}

func (r *raw) connect(socket string) error {
	// No test waits for ever for an answer.
	if err := unix.SetsockoptTimeval(r.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 20}); err != nil {
		return err
	}
	return unix.Connect(r.fd, &unix.SockaddrUnix{Name: socket})
}

func dialRaw(t testing.TB, s *Server) *raw {
	t.Helper()
	r, err := connectRaw(s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(r.fd) })
	return r
}

func (r *raw) bytes(b []byte, fds ...int) error {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	return unix.Sendmsg(r.fd, b, oob, nil, unix.MSG_NOSIGNAL)
}

func (r *raw) send(m wire.Message, fds ...int) error { return r.bytes(wire.Append(nil, 1, m), fds...) }

// sendAs sends in the name of another, as far as the kernel allows it.
func (r *raw) sendAs(m wire.Message, c unix.Ucred) error {
	return unix.Sendmsg(r.fd, wire.Append(nil, 1, m), unix.UnixCredentials(&c), nil, unix.MSG_NOSIGNAL)
}

// receive returns io.EOF at the end of the connection.
func (r *raw) receive() (wire.Message, []int, error) {
	buf, oob := make([]byte, wire.MaxBytes), make([]byte, 1024)
	n, oobn, flags, _, err := unix.Recvmsg(r.fd, buf, oob, unix.MSG_CMSG_CLOEXEC)
	switch {
	case err == unix.ECONNRESET, err == nil && n == 0:
		return nil, nil, io.EOF
	case err != nil:
		return nil, nil, err
	}
	a, err := wire.Attached(oob[:oobn], flags)
	if err != nil {
		return nil, nil, err
	}
	_, m, err := wire.Decode(buf[:n])
	if err != nil {
		a.Close()
		return nil, nil, err
	}
	return m, a.FDs, nil
}

var hello = &wire.Hello{Versions: wire.Supported, Layouts: layouts, Purpose: wire.PurposeWatch}

// handshake goes on until the daemon hands out a watch.
func (r *raw) handshake(h *wire.Hello) (*wire.Welcome, []int, error) {
	if err := r.send(h); err != nil {
		return nil, nil, err
	}
	return r.finish()
}

// finish is handshake after the HELLO.
func (r *raw) finish() (*wire.Welcome, []int, error) {
	for {
		m, fds, err := r.receive()
		if err != nil {
			return nil, nil, err
		}
		switch m := m.(type) {
		case *wire.Challenge:
			if err := r.send(&wire.Echo{Nonce: m.Nonce}); err != nil {
				return nil, nil, err
			}
		case *wire.Welcome:
			return m, fds, nil
		case *wire.Refused:
			return nil, nil, &refusal{m.Code, m.Text}
		default:
			return nil, nil, fmt.Errorf("got %v", wire.TypeOf(m))
		}
	}
}

// refusedWith checks that the daemon says no, for the right reason, and
// closes the connection.
func (r *raw) refusedWith(t testing.TB, want wire.Code) {
	t.Helper()
	m, fds, err := r.receive()
	if err != nil {
		t.Fatalf("no answer: %v", err)
	}
	no, ok := m.(*wire.Refused)
	if !ok || len(fds) != 0 {
		t.Fatalf("%v with %d descriptors, want REFUSED", wire.TypeOf(m), len(fds))
	}
	if no.Code != want {
		t.Fatalf("refused with code %d (%s), want %d", no.Code, no.Text, want)
	}
	if _, _, err := r.receive(); !errors.Is(err, io.EOF) {
		t.Fatalf("the connection is open after a refusal: %v", err)
	}
}

func (r *raw) challenge(t testing.TB) *wire.Challenge {
	t.Helper()
	m, _, err := r.receive()
	if err != nil {
		t.Fatal(err)
	}
	c, ok := m.(*wire.Challenge)
	if !ok {
		t.Fatalf("%v, want CHALLENGE", wire.TypeOf(m))
	}
	return c
}

// eventually waits for what another process or goroutine is about to do.
func eventually(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited 20 s: %s", what)
		}
	}
}

// watches is how many there are.
func (s *Server) watchCount() int {
	s.clients.mu.Lock()
	defer s.clients.mu.Unlock()
	return len(s.clients.watches)
}

func (s *Server) connCount() int {
	s.clients.mu.Lock()
	defer s.clients.mu.Unlock()
	return len(s.clients.conns)
}
