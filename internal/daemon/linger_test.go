// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/wire"
)

// lingering is a descriptor whose last close does not return until release is
// called: a TCP socket (in a network of its own) that waits for its peer to
// read.
func lingering(t *testing.T) (fd int, release func()) {
	t.Helper()
	type result struct {
		fd, peer int
		err      error
	}
	made := make(chan result)
	go func() {
		runtime.LockOSThread() // for ever: the thread ends with the goroutine
		var r result
		r.fd, r.peer, r.err = lingeringHere()
		made <- r
	}()
	r := <-made
	if r.err != nil {
		t.Fatal(r.err)
	}
	once := false
	release = func() {
		if !once {
			once = true
			unix.Close(r.peer) // with unread data: reset
		}
	}
	t.Cleanup(release)
	return r.fd, release
}

func lingeringHere() (fd, peer int, err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return -1, -1, os.NewSyscallError("unshare", err)
	}
	l, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, err
	}
	defer unix.Close(l)
	lo, err := unix.NewIfreq("lo")
	if err != nil {
		return -1, -1, err
	}
	lo.SetUint16(unix.IFF_UP)
	at := &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: 7}
	fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, -1, err
	}
	if err = errors.Join(unix.IoctlIfreq(l, unix.SIOCSIFFLAGS, lo), unix.Bind(l, at), unix.Listen(l, 1), unix.Connect(fd, at)); err != nil {
		return -1, -1, err
	}
	if peer, _, err = unix.Accept4(l, unix.SOCK_CLOEXEC); err != nil {
		return -1, -1, err
	}
	if err = errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1, Linger: 3600}),
		unix.SetNonblock(fd, true)); err != nil {
		return -1, -1, err
	}
	for b := make([]byte, 1<<16); err == nil; {
		_, err = unix.Write(fd, b)
	}
	if err != unix.EAGAIN {
		return -1, -1, err
	}
	return fd, peer, nil
}

// within fails the test if f hangs.
func within(t *testing.T, what string, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		f()
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatalf("%s hangs", what)
	}
}

// A client's descriptor may take for ever to close. No session waits for it.
func TestLingeringInASession(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	client := &raw{pair[1]}
	defer unix.Close(client.fd)
	if err := unix.SetsockoptInt(pair[0], unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		t.Fatal(err)
	}
	ss := &session{s: new(Server), c: connOf(t, pair[0]), version: 1}
	defer ss.c.Close()
	var releases []func()
	for _, c := range []struct {
		name  string
		bytes []byte
		n     int
	}{
		{"garbage", []byte("hello"), 1},
		{"too many", wire.Append(nil, 1, &wire.Machine{}), 2},
		{"empty", nil, 1},
	} {
		theirs, release := lingering(t)
		releases = append(releases, release)
		fds := []int{theirs, 0}[:c.n]
		if err := client.exactly(c.bytes, unix.UnixRights(fds...)); err != nil {
			t.Fatal(err)
		}
		unix.Close(theirs)
		within(t, c.name, func() {
			if _, _, err := ss.receive(1); err == nil {
				t.Errorf("%s is accepted", c.name)
			}
		})
	}
	if len(ss.theirs) != 3 {
		t.Errorf("%d descriptors are left to close, want 3", len(ss.theirs))
	}
	for _, release := range releases {
		release()
	}
	for _, fd := range ss.theirs {
		unix.Close(fd)
	}
}

// A connection counts until everything of it is closed, so that nobody has
// more of the daemon's threads than connections; and Close does not wait.
func TestLingeringInAConnection(t *testing.T) {
	s := start(t, Config{})
	theirs, release := lingering(t)
	client := dialRaw(t, s)
	// It lies behind what the session reads, so it is dropped when the
	// connection is closed.
	hello := wire.Append(nil, 0, &wire.Hello{Versions: wire.Supported, Purpose: wire.PurposeStatus})
	s.clients.mu.Lock() // not before both are sent
	err := errors.Join(client.bytes(hello), client.bytes([]byte("no echo")), client.exactly(nil, unix.UnixRights(theirs)))
	s.clients.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	unix.Close(theirs)
	within(t, "the end of the session", func() { client.hangsUp(t) })
	if n := s.connCount(); n != 1 {
		t.Errorf("%d connections while one is being closed", n)
	}
	within(t, "Close", func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	if n := s.connCount(); n != 1 {
		t.Errorf("%d connections after Close while one is being closed", n)
	}
	release()
	within(t, "closing", func() {
		for s.connCount() != 0 {
			runtime.Gosched()
		}
	})
}

// What the kernel drops for a lack of room keeps a session in recvmsg(2). Close
// returns, and says so.
func TestLingeringInTheKernel(t *testing.T) {
	dir := socketDir(t)
	l, own, err := listen(dir+"/feed.sock", 0o600, 0)
	if err != nil {
		t.Fatal(err)
	}
	s := &Server{cfg: Config{Listener: l, Patience: time.Second}, listener: l, path: own}
	if err := s.cfg.complete(); err != nil {
		t.Fatal(err)
	}
	s.log = s.cfg.Log
	s.clients.init(&s.cfg)
	theirs, release := lingering(t)
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	client := &raw{pair[1]}
	defer unix.Close(client.fd)
	if err := client.bytes([]byte("hello"), theirs); err != nil {
		t.Fatal(err)
	}
	unix.Close(theirs)
	s.accepted(connOf(t, pair[0]))
	within(t, "the session", func() { // until it has read
		for n := -1; n != 0; runtime.Gosched() {
			if n, err = unix.IoctlGetInt(client.fd, unix.TIOCOUTQ); err != nil {
				t.Error(err)
				return
			}
		}
	})
	within(t, "Close", func() {
		if err := s.Close(); !errors.Is(err, errBusy) {
			t.Errorf("%v, want errBusy", err)
		}
	})
	release()
	client.hangsUp(t)
	s.sessions.Wait()
	within(t, "closing", func() {
		for s.connCount() != 0 {
			runtime.Gosched()
		}
	})
}
