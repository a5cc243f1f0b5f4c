// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/wire"
)

// account is a registry with one user connected.
func account(t *testing.T, c Config, uid uint32) *registry {
	t.Helper()
	c.Socket = "unused"
	if err := c.complete(); err != nil {
		t.Fatal(err)
	}
	r := new(registry)
	r.init(&c)
	conn := new(net.UnixConn)
	if err := r.connected(conn, uid); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.forgetAll()
		r.disconnected(conn, uid)
	})
	return r
}

func identityOf(t *testing.T, pid int, uid uint32) *identity {
	t.Helper()
	id, err := openIdentity(pid, uid)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(id.close)
	return id
}

func isLimit(err error) bool {
	var r *refusal
	return errors.As(err, &r) && r.code == wire.CodeLimit
}

// opens opens and closes watches until it is refused, n at most.
func opens(t *testing.T, r *registry, id *identity, n int) (did int) {
	t.Helper()
	for range n {
		_, err := r.reserve(id)
		if isLimit(err) {
			return did
		}
		if err != nil {
			t.Fatal(err)
		}
		r.unreserve(id.pid, id.uid)
		did++
	}
	return did
}

// A client keeps the ring of a watch that is closed, so a user may open as
// many as it may have, then one a second.
func TestOpensAreBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const most = 5
		r := account(t, Config{MaxWatchesPerUID: most}, 1)
		id := identityOf(t, os.Getpid(), 1)
		if n := opens(t, r, id, 100); n != most {
			t.Errorf("%d watches at once, want %d", n, most)
		}
		time.Sleep(openInterval - 1)
		if n := opens(t, r, id, 100); n != 0 {
			t.Errorf("%d more too early", n)
		}
		time.Sleep(time.Nanosecond)
		if n := opens(t, r, id, 100); n != 1 {
			t.Errorf("%d more after %v, want 1", n, openInterval)
		}
		time.Sleep(1000 * openInterval)
		if n := opens(t, r, id, 100); n != most {
			t.Errorf("%d after a long time, want %d", n, most)
		}
		r.refund(1)
		if n := opens(t, r, id, 100); n != 1 {
			t.Errorf("%d after a refund, want 1", n)
		}
		// Who disconnects is not forgotten before it has paid.
		other := new(net.UnixConn)
		r.users[1].conns--
		if err := r.connected(other, 2); err != nil {
			t.Fatal(err)
		}
		if r.users[1] == nil {
			t.Error("a user that leaves is forgotten")
		}
		r.users[1].conns++
		r.disconnected(other, 2)
		if r.users[2] != nil {
			t.Error("a user without anything is not forgotten")
		}
	})
}

// The kernel side keeps a place for each process that ever had a watch, so
// those that live are counted.
func TestProcessesAreBounded(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
		most int
	}{
		{"of a user", Config{MaxWatchesPerUID: 2}, 2 * knownPerWatch},
		{"of all", Config{MaxClients: 1}, knownPerClient},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := account(t, c.cfg, 1)
			try := func(id *identity) bool {
				r.users[1].paid = time.Time{} // as after a while
				return opens(t, r, id, 1) == 1
			}
			child := func() (*identity, func()) {
				cmd := exec.Command("sleep", "infinity")
				if err := cmd.Start(); err != nil {
					t.Fatal(err)
				}
				end := func() {
					cmd.Process.Kill()
					cmd.Wait()
				}
				t.Cleanup(end)
				return identityOf(t, cmd.Process.Pid, 1), end
			}
			first, end := child()
			for i := range c.most {
				id := first
				if i > 0 {
					id, _ = child()
				}
				for range 2 { // the second costs no more: it is the same process
					if !try(id) {
						t.Fatalf("process %d of %d is refused", i+1, c.most)
					}
				}
			}
			last, _ := child()
			if try(last) {
				t.Errorf("one more than %d processes", c.most)
			}
			if !try(first) {
				t.Error("a process that is counted is refused")
			}
			end()
			if !try(last) {
				t.Error("refused, though a process has ended")
			}
			r.forgetAll()
			if r.known != 0 || len(r.users[1].known) != 0 {
				t.Errorf("%d, %d processes after all are forgotten", r.known, len(r.users[1].known))
			}
		})
	}
}

// What is sent is open: no tracer is closed under a session.
func TestCloseWaitsForSessions(t *testing.T) {
	reached, result := make(chan struct{}), make(chan error, 1)
	s := start(t, Config{welcoming: func(w *watch) {
		close(reached)
		// until Close has come to the connections
		if _, err := w.conn.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
			result <- err
			return
		}
		st, err := w.feed.Stats()
		if err == nil && st.Deaths != 0 {
			err = errors.New("the watch was closed")
		}
		if err != nil {
			result <- err
			return
		}
		b, err := unix.Mmap(w.feed.EpochFD(), 0, page, unix.PROT_READ, unix.MAP_SHARED)
		if err == nil {
			if (*layout.Epoch)(unsafe.Pointer(unsafe.SliceData(b))).Word < layout.GenDeath {
				err = errors.New("the watch is alive")
			}
			err = errors.Join(err, unix.Munmap(b))
		}
		result <- err
	}})
	client := dialRaw(t, s)
	err := client.send(hello)
	if err == nil {
		err = client.send(&wire.Echo{Nonce: client.challenge(t).Nonce})
	}
	if err != nil {
		t.Fatal(err)
	}
	<-reached
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := <-result; err != nil {
		t.Error(err)
	}
}

// Nobody is handed /dev/kvm before it has shown that it is who connected.
func TestChallengeBeforeOffer(t *testing.T) {
	s := start(t, Config{})
	s.clients.mu.Lock() // which each session takes before it looks at tiers
	for i := range s.tiers {
		s.tiers[i].machine = true
	}
	s.clients.mu.Unlock()
	client := dialRaw(t, s)
	h := *hello
	h.Flags = wire.FlagMachine
	if err := client.send(&h); err != nil {
		t.Fatal(err)
	}
	client.challenge(t)
	if err := client.send(&wire.Echo{}); err != nil {
		t.Fatal(err)
	}
	client.refusedWith(t, wire.CodeIdentity)
}

// A connection that is accepted while the server is closed is no session: who
// waited for all would not know of it.
func TestNoSessionAfterClose(t *testing.T) {
	s := start(t, Config{})
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[1])
	s.accepted(connOf(t, pair[0]))
	var b [wire.MaxBytes]byte
	if n, err := unix.Read(pair[1], b[:]); n != 0 || err != nil {
		t.Errorf("%d bytes, %v; want the end", n, err)
	}
}

// connOf takes a descriptor over.
func connOf(t *testing.T, fd int) *net.UnixConn {
	t.Helper()
	file := os.NewFile(uintptr(fd), "socket")
	defer file.Close()
	c, err := net.FileConn(file)
	if err != nil {
		t.Fatal(err)
	}
	return c.(*net.UnixConn)
}

// What a daemon says does nothing to a terminal.
func TestStatusTextIsPrintable(t *testing.T) {
	l, own, err := listen(t.TempDir()+"/feed.sock", 0o600, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	defer l.Close()
	done := make(chan struct{})
	go func() {
		defer close(done)
		c, err := l.AcceptUnix()
		if err != nil {
			t.Error(err)
			return
		}
		defer c.Close()
		c.Read(make([]byte, wire.MaxBytes))
		c.Write(wire.Append(nil, 0, &wire.Refused{Code: wire.CodeInternal, Text: "\x1b]0;no\a"}))
	}()
	_, err = Status(t.Context(), l.Addr().String())
	<-done
	const want = "refused: ?]0;no?"
	if err == nil || len(err.Error()) < len(want) || err.Error()[len(err.Error())-len(want):] != want {
		t.Errorf("%q, want %q at its end", err, want)
	}
}
