// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	stdbinary "encoding/binary"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/wire"
	"github.com/ummu/ummu/tracer"
)

// When Close has returned, and before, nothing is valid any more; when it is
// underway nobody gets a watch that lives.
func TestCloseEndsEveryWatch(t *testing.T) {
	s := start(t, Config{})
	var ws []*feed.Watch
	for range 5 {
		w := dial(t, s)
		w.Drain(nil)
		ws = append(ws, w)
	}
	half := dialRaw(t, s) // in the middle of its handshake
	if err := half.send(hello); err != nil {
		t.Fatal(err)
	}
	c := half.challenge(t)
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	for i, w := range ws {
		if w.Valid() {
			t.Errorf("watch %d is valid", i)
		}
		if state := w.Drain(nil); state != feed.DeadState {
			t.Errorf("watch %d: %v", i, state)
		}
	}
	half.send(&wire.Echo{Nonce: c.Nonce})
	if _, _, err := half.finish(); err == nil {
		t.Error("a watch was handed out by a closed daemon")
	}
	if _, err := feed.Dial(t.Context(), feed.Options{Socket: s.Addr()}); !errors.Is(err, feed.ErrUnavailable) {
		t.Errorf("dial a closed daemon: %v", err)
	}
	if _, err := os.Stat(s.Addr()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left behind: %v", err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("second close: %v", err)
	}
}

// Each limit refuses one too many, says which option it is, and lets in
// another when one has left.
func TestLimits(t *testing.T) {
	s := start(t, Config{MaxWatchesPerProcess: 2, MaxWatchesPerUID: 3, MaxClients: 8, Patience: 20 * time.Second})
	refusedFor := func(err error, option string) {
		t.Helper()
		if !errors.Is(err, feed.ErrUnavailable) || !strings.Contains(fmt.Sprint(err), option) {
			t.Errorf("%v, want a refusal for %s", err, option)
		}
	}
	first := dial(t, s)
	dial(t, s)
	_, err := feed.Dial(t.Context(), feed.Options{Socket: s.Addr()})
	refusedFor(err, "--max-watches-per-process")
	if err := first.Close(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a place is free", func() bool { return s.watchCount() == 1 })
	again := dial(t, s)
	if err := watched(again); err != nil {
		t.Error(err)
	}

	var cs [4]*client
	for i := range cs {
		cs[i] = startClient(t, clientOptions{uid: nobody}, "obey", s.Addr())
	}
	for _, c := range cs[:3] {
		c.expect(t, "dial", "ok")
	}
	refusedFor(fmt.Errorf("%w%s", feed.ErrUnavailable, cs[3].ask(t, "dial")), "--max-watches-per-uid")
	// another user is not concerned
	if err := watched(again); err != nil {
		t.Error(err)
	}

	// 2 of this process, 3 of nobody; the rest are idle.
	for range 3 {
		dialRaw(t, s)
	}
	eventually(t, "all places are taken", func() bool { return s.connCount() == 8 })
	_, err = feed.Dial(t.Context(), feed.Options{Socket: s.Addr()})
	refusedFor(err, "--max-clients")
	if _, err = feed.Dial(t.Context(), feed.Options{Socket: s.Addr(), RingBytes: 1 << 30}); err == nil {
		t.Error("a ring of 1 GiB")
	}
}

func TestRingBytes(t *testing.T) {
	s := shared(t)
	w, err := feed.Dial(t.Context(), feed.Options{Socket: s.Addr(), RingBytes: page, NoWakeup: true})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := watched(w); err != nil {
		t.Error(err)
	}
	if _, err := feed.Dial(t.Context(), feed.Options{Socket: s.Addr(), RingBytes: 2 * DefaultMaxRingBytes}); !errors.Is(err, feed.ErrUnavailable) {
		t.Errorf("too large a ring: %v", err)
	}
	for _, n := range []uint32{1, uint32(page) + 1, 3 * uint32(page), 1 << 31} {
		r := dialRaw(t, s)
		h := *hello
		h.RingBytes = n
		if err := r.send(&h); err != nil {
			t.Fatal(err)
		}
		r.refusedWith(t, wire.CodeLimit)
	}
}

// Peers of other versions: what both speak is spoken, or else both can say so.
func TestVersions(t *testing.T) {
	for _, c := range []struct {
		name          string
		daemon        wire.Versions
		client        wire.Versions
		layouts       wire.Versions
		code          wire.Code // 0: a watch
		messageOfNext uint16
	}{
		{"the same", wire.Versions{Min: 1, Max: 1}, wire.Versions{Min: 1, Max: 1}, layouts, 0, 1},
		{"newer daemon, which speaks the previous one", wire.Versions{Min: 1, Max: 2}, wire.Versions{Min: 1, Max: 1}, layouts, 0, 1},
		{"newer client, which speaks the previous one", wire.Versions{Min: 1, Max: 1}, wire.Versions{Min: 1, Max: 2}, layouts, 0, 1},
		{"client that speaks a version of the past too", wire.Versions{Min: 1, Max: 1}, wire.Versions{Min: 0, Max: 1}, layouts, 0, 1},
		{"both speak two", wire.Versions{Min: 1, Max: 2}, wire.Versions{Min: 1, Max: 2}, layouts, 0, 2},
		{"client that speaks everything", wire.Versions{Min: 1, Max: 1}, wire.Versions{Min: 0, Max: 0xffff}, layouts, 0, 1},
		{"client of the past", wire.Versions{Min: 1, Max: 1}, wire.Versions{Min: 0, Max: 0}, layouts, wire.CodeVersion, 0},
		{"client of the next version only", wire.Versions{Min: 1, Max: 1}, wire.Versions{Min: 2, Max: 2}, layouts, wire.CodeVersion, 0},
		{"client of the future", wire.Versions{Min: 1, Max: 1}, wire.Versions{Min: 2, Max: 3}, layouts, wire.CodeVersion, 0},
		{"daemon of the future", wire.Versions{Min: 2, Max: 3}, wire.Versions{Min: 1, Max: 1}, layouts, wire.CodeVersion, 0},
		{"layout of the future", wire.Versions{Min: 1, Max: 1}, wire.Versions{Min: 1, Max: 1}, wire.Versions{Min: 2, Max: 9}, wire.CodeVersion, 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := start(t, Config{versions: c.daemon})
			r := dialRaw(t, s)
			if err := r.send(&wire.Hello{Versions: c.client, Layouts: c.layouts, Purpose: wire.PurposeWatch}); err != nil {
				t.Fatal(err)
			}
			if c.code != 0 {
				r.refusedWith(t, c.code)
				return
			}
			b := make([]byte, wire.MaxBytes)
			n, err := unix.Read(r.fd, b)
			if err != nil || n < wire.HeaderBytes {
				t.Fatalf("%d bytes, %v", n, err)
			}
			if v := stdbinary.LittleEndian.Uint16(b[4:]); v != c.messageOfNext {
				t.Fatalf("the daemon goes on in version %d, want %d", v, c.messageOfNext)
			}
			if c.messageOfNext > wire.Supported.Max {
				return // programs of that version are in test/kill
			}
			_, m, err := wire.Decode(b[:n])
			if err != nil {
				t.Fatal(err)
			}
			if err := r.send(&wire.Echo{Nonce: m.(*wire.Challenge).Nonce}); err != nil {
				t.Fatal(err)
			}
			if _, _, err := r.finish(); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// The library against daemons that are not of its version.
func TestDialOtherVersions(t *testing.T) {
	s := start(t, Config{versions: wire.Versions{Min: 2, Max: 3}})
	if _, err := feed.Dial(t.Context(), feed.Options{Socket: s.Addr()}); !errors.Is(err, feed.ErrUnavailable) || !strings.Contains(err.Error(), "update") {
		t.Errorf("a daemon of the future: %v", err)
	}
	previous := start(t, Config{versions: wire.Versions{Min: 1, Max: 2}})
	if err := watched(dial(t, previous)); err != nil {
		t.Error(err)
	}
}

func TestSocketIsGuarded(t *testing.T) {
	s := start(t, Config{Mode: 0o640, GID: 7})
	var st unix.Stat_t
	if err := unix.Stat(s.Addr(), &st); err != nil {
		t.Fatal(err)
	}
	if st.Mode&0o777 != 0o640 || st.Gid != 7 {
		t.Errorf("mode %o, group %d", st.Mode&0o777, st.Gid)
	}
	c := startClient(t, clientOptions{uid: nobody}, "obey", s.Addr())
	if answer := c.ask(t, "dial"); !strings.Contains(answer, "permission denied") || !strings.Contains(answer, "--group") {
		t.Errorf("dial: %s", answer)
	}
	// A second daemon does not take the socket away.
	if _, _, err := listen(s.Addr(), DefaultMode, 0); err == nil || !strings.Contains(err.Error(), "another daemon") {
		t.Errorf("second daemon: %v", err)
	}
	if err := watched(dial(t, s)); err != nil {
		t.Error(err)
	}
}

func TestListen(t *testing.T) {
	dir := socketDir(t)
	path := filepath.Join(dir, "a", "feed.sock")
	l, own, err := listen(path, 0o600, 0)
	if err != nil {
		t.Fatal(err)
	}
	// as if it had been killed: neither the socket nor the lock's file is removed
	l.Close()
	own.lock.Close()
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("nothing is left: what is tested? %v", err)
	}
	if l, own, err = listen(path, 0o600, 0); err != nil {
		t.Fatalf("after a daemon that was killed: %v", err)
	}
	l.Close()
	if err := own.Close(); err != nil {
		t.Error(err)
	}
	file := filepath.Join(dir, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := listen(file, 0o600, 0); err == nil {
		t.Error("a file was replaced")
	}
	if b, err := os.ReadFile(file); string(b) != "precious" {
		t.Errorf("%s, %v", b, err)
	}
	if _, _, err := listen(filepath.Join(dir, strings.Repeat("x", 200)), 0o600, 0); err == nil {
		t.Error("a path that no socket can have")
	}
}

func TestNotify(t *testing.T) {
	path := filepath.Join(socketDir(t), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	if err := Notify("READY=1"); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 100)
	n, err := l.Read(buf)
	if string(buf[:n]) != "READY=1" {
		t.Errorf("%s, %v", buf[:n], err)
	}
	t.Setenv("NOTIFY_SOCKET", "")
	if err := Notify("READY=1"); err != nil {
		t.Errorf("without a service manager: %v", err)
	}
	t.Setenv("NOTIFY_SOCKET", path+"x")
	if err := Notify("READY=1"); err == nil {
		t.Error("a service manager that does not listen")
	}
}

func TestConfig(t *testing.T) {
	for _, c := range []struct {
		name string
		cfg  Config
	}{
		{"no socket", Config{}},
		{"two sockets", Config{Socket: "x", Listener: new(net.UnixListener)}},
		{"negative", Config{Socket: "x", MaxClients: -1}},
		{"more than there are places", Config{Socket: "x", MaxClients: mostClients + 1}},
		{"more than an address space can have", Config{Socket: "x", MaxWatchesPerProcess: mostPerProcess + 1}},
		{"impatient", Config{Socket: "x", Patience: -1}},
	} {
		t.Run(c.name, func(t *testing.T) {
			if s, err := New(c.cfg); err == nil {
				s.Close()
				t.Error("accepted")
			}
		})
	}
}

// Nothing may be used: the daemon says so, and why, and leaves nothing behind.
func TestNoTier(t *testing.T) {
	path := filepath.Join(socketDir(t), "feed.sock")
	l, own, err := listen(path, 0o600, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close()
	// A tier of which this machine has none: a name that is no tier.
	_, err = New(Config{Listener: l, Tiers: []tracer.Tier{99}})
	if err == nil || !strings.Contains(err.Error(), "no tier") {
		t.Errorf("%v", err)
	}
}

// What the daemon writes and reads does not block for ever: a status that
// nobody reads.
func TestStatus(t *testing.T) {
	s := shared(t)
	w := dial(t, s)
	if err := watched(w); err != nil {
		t.Fatal(err)
	}
	r, err := Status(context.Background(), s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if len(r.Entries) != 1 || r.End.Entries != 1 {
		t.Fatalf("%+v", r)
	}
	e := r.Entries[0]
	if int(e.PID) != os.Getpid() || e.UID != 0 || e.Records == 0 || e.Lost != 0 || e.Deaths != 0 || e.RingBytes != defaultRingBytes {
		t.Errorf("%+v", e)
	}
	if e.MemoryBytes < defaultRingBytes || e.MemoryBytes > 1<<20 {
		t.Errorf("%d bytes, want at least the ring's and at most 1 MiB", e.MemoryBytes)
	}
	if r.End.NowNanos < e.OpenedNanos || e.OpenedNanos < r.End.StartedNanos {
		t.Errorf("opened at %d, started at %d, now %d", e.OpenedNanos, r.End.StartedNanos, r.End.NowNanos)
	}
	if _, err := Status(context.Background(), s.Addr()+"x"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("no daemon: %v", err)
	}
}
