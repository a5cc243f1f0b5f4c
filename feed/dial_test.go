// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/internal/wire"
)

// stub listens as a daemon does, and does with each connection what a test
// wants; the daemon itself is tested in internal/daemon.
func stub(t *testing.T, f func(fd int)) (socket string) {
	t.Helper()
	socket = filepath.Join(t.TempDir(), "feed.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: socket}); err != nil {
		t.Fatal(err)
	}
	if err := unix.Listen(fd, 10); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, _, err := unix.Accept4(fd, unix.SOCK_CLOEXEC)
			if err != nil {
				return
			}
			f(c)
			unix.Close(c)
		}
	}()
	t.Cleanup(func() {
		unix.Shutdown(fd, unix.SHUT_RDWR) // wakes Accept up
		<-done
		unix.Close(fd)
	})
	return socket
}

func say(fd int, m wire.Message, fds ...int) {
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	unix.Sendmsg(fd, wire.Append(nil, 1, m), oob, nil, unix.MSG_NOSIGNAL)
}

func hear(fd int) wire.Message {
	b := make([]byte, wire.MaxBytes)
	n, err := unix.Read(fd, b)
	if err != nil {
		return nil
	}
	_, m, err := wire.Decode(b[:n])
	if err != nil {
		return nil
	}
	return m
}

// Each way of not getting a watch is one error, which says what to do.
func TestUnavailable(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	refuse := func(code wire.Code) func(int) {
		return func(fd int) {
			hear(fd)
			say(fd, &wire.Refused{Code: code, Text: "because\x1b[2J"})
		}
	}
	for _, c := range []struct {
		name   string
		socket string
		daemon func(fd int)
		want   string // in what to try
	}{
		{"nothing there", filepath.Join(dir, "none"), nil, "systemctl enable"},
		{"not a socket", file, nil, "start the daemon"},
		{"another program", "", func(fd int) { hear(fd); unix.Write(fd, []byte("HTTP/1.1 400 Bad Request")) }, "UMMU_SOCKET"},
		{"hangs up", "", func(int) {}, "log"},
		{"wrong message", "", func(fd int) { hear(fd); say(fd, &wire.Ready{}) }, "UMMU_SOCKET"},
		{"message without its descriptors", "", func(fd int) { hear(fd); say(fd, &wire.Offer{}) }, "UMMU_SOCKET"},
		{"no common version", "", refuse(wire.CodeVersion), "update"},
		{"identity", "", refuse(wire.CodeIdentity), "pid namespace"},
		{"limit", "", refuse(wire.CodeLimit), "raise the limit"},
		{"no tier", "", refuse(wire.CodeUnavailable), "--allow-syscall-tier"},
		{"stopping", "", refuse(wire.CodeStopping), "again"},
		{"a code of the future", "", refuse(99), "log"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.socket == "" {
				c.socket = stub(t, c.daemon)
			}
			w, err := feed.Dial(t.Context(), feed.Options{Socket: c.socket})
			var u *feed.UnavailableError
			if w != nil || !errors.Is(err, feed.ErrUnavailable) || !errors.As(err, &u) {
				t.Fatalf("%v, %v", w, err)
			}
			if u.Reason == "" || !strings.Contains(u.Try, c.want) || !strings.Contains(err.Error(), u.Try) {
				t.Errorf("%v: want %q in what to try", err, c.want)
			}
			if strings.ContainsRune(err.Error(), '\x1b') {
				t.Errorf("%q controls a terminal", err)
			}
		})
	}
}

// A daemon that is stopped does not stop its clients.
func TestDialTimeout(t *testing.T) {
	release := make(chan struct{})
	socket := stub(t, func(int) { <-release })
	defer close(release)
	if _, err := feed.Dial(t.Context(), feed.Options{Socket: socket, Timeout: 50 * time.Millisecond}); !errors.Is(err, feed.ErrUnavailable) {
		t.Errorf("time is over: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(20*time.Millisecond, cancel)
	if _, err := feed.Dial(ctx, feed.Options{Socket: socket}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled: %v", err)
	}
	if _, err := feed.Dial(ctx, feed.Options{Socket: socket}); !errors.Is(err, context.Canceled) {
		t.Errorf("cancelled before: %v", err)
	}
}

func TestDialOptions(t *testing.T) {
	for _, o := range []feed.Options{
		{RingBytes: -1}, {RingBytes: 1}, {RingBytes: 3 * os.Getpagesize()}, {RingBytes: 2 << 30},
		{Timeout: -1}, {Socket: strings.Repeat("x", 108)},
	} {
		if _, err := feed.Dial(t.Context(), o); err == nil || errors.Is(err, feed.ErrUnavailable) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

// A watch that does not see this process is not used: the client asks for
// another, and gives back what it had. Nothing else is asked before, though
// some other process's change is in flight all the time.
func TestBlindWatch(t *testing.T) {
	for _, tier := range []uint32{layout.TierSyscall, layout.TierNotifierTracepoint} {
		p, err := feedtest.New(feedtest.Options{}) // of a kernel side that sees nothing
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		atomic.StoreUint64(&p.Epoch.Begun[0], 1)
		status, epoch, interest, ring := p.Descriptors()
		said := make(chan wire.Message, 2)
		socket := stub(t, func(fd int) {
			said <- hear(fd)
			say(fd, &wire.Welcome{Layout: layout.Version, Tier: tier, RingBytes: 64 << 10}, status, epoch, interest, ring)
			said <- hear(fd)
			say(fd, &wire.Refused{Code: wire.CodeUnavailable, Text: "that was all"})
		})
		before := countDescriptors(t)
		if _, err := feed.Dial(t.Context(), feed.Options{Socket: socket}); !errors.Is(err, feed.ErrUnavailable) {
			t.Fatalf("%v", err)
		}
		<-said
		m := <-said
		if n, ok := m.(*wire.Next); !ok || n.Reason != wire.ReasonSilent {
			t.Errorf("tier %d: the client said %+v, want NEXT", tier, m)
		}
		for begin := time.Now(); countDescriptors(t) > before; time.Sleep(time.Millisecond) { // the stub's end closes a little later
			if time.Since(begin) > 20*time.Second {
				t.Fatalf("%d descriptors are open, %d before", countDescriptors(t), before)
			}
		}
	}
}

func countDescriptors(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// UMMU decides.
func TestOpen(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none")
	var connected atomic.Int32
	socket := stub(t, func(fd int) {
		connected.Add(1)
		hear(fd)
		say(fd, &wire.Refused{Code: wire.CodeUnavailable, Text: "no"})
	})
	for _, c := range []struct {
		mode, socket, env string
		dead, told, asked bool
		err               string
	}{
		{mode: "off", socket: socket, dead: true},
		{mode: "", socket: none, dead: true, told: true},
		{mode: "try", socket: none, dead: true, told: true},
		{mode: "try", socket: socket, dead: true, told: true, asked: true},
		{mode: "try", env: socket, dead: true, told: true, asked: true},
		{mode: "try", socket: none, env: socket, dead: true, told: true}, // the option goes first
		{mode: "require", socket: none, err: "feed is unavailable"},
		{mode: "require", env: socket, asked: true, err: "feed is unavailable"},
		{mode: "yes", socket: none, err: "off, try or require"},
	} {
		t.Run(c.mode+" "+c.err, func(t *testing.T) {
			t.Setenv(feed.EnvMode, c.mode)
			t.Setenv(feed.EnvSocket, c.env)
			connected.Store(0)
			var why error
			w, err := feed.Open(t.Context(), feed.Options{Socket: c.socket, Unavailable: func(err error) { why = err }})
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) || w != nil {
					t.Errorf("%v, %v; want an error with %q", w, err, c.err)
				}
			} else if err != nil || (w == feed.Dead()) != c.dead {
				t.Errorf("%v, %v", w, err)
			}
			if (why != nil) != c.told {
				t.Errorf("told %v", why)
			}
			if n := connected.Load(); (n != 0) != c.asked {
				t.Errorf("%d connections", n)
			}
		})
	}
	t.Setenv(feed.EnvMode, "try")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := feed.Open(ctx, feed.Options{Socket: none}); !errors.Is(err, context.Canceled) {
		t.Errorf("a context that is over: %v", err)
	}
}

// A program without a daemon loses no time.
func BenchmarkNoDaemon(b *testing.B) {
	o := feed.Options{Socket: filepath.Join(b.TempDir(), "none")}
	for b.Loop() {
		if _, err := feed.Dial(context.Background(), o); !errors.Is(err, feed.ErrUnavailable) {
			b.Fatal(err)
		}
	}
}
