// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/daemon"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

// feedClient is a program with a watch by the daemon at $UMMU_SOCKET. It
// answers each line.
func feedClient() error {
	w, err := feed.Dial(context.Background(), feed.Options{Socket: os.Getenv(feed.EnvSocket)})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		switch in.Text() {
		case "changes": // ten that the watch sees
			b, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
			if err != nil {
				return err
			}
			start := mm.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
			ticket := w.Begin(mm.Range{Start: start, End: start + mm.Addr(len(b))})
			for range 10 {
				w.Drain(nil)
				if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
					return err
				}
				if w.Valid() {
					return errors.New("a change was not seen")
				}
			}
			w.Abandon(ticket)
			fmt.Println("ok")
		case "state":
			fmt.Println(w.Drain(nil))
		}
	}
	return w.Close()
}

// served is a daemon under test.
type served struct {
	*started
	socket string
}

// serveIn starts a daemon and waits until it is ready.
func serveIn(t *testing.T, dir string, args ...string) *served {
	t.Helper()
	s := &served{socket: filepath.Join(dir, "feed.sock")}
	s.started = start(t, append([]string{binary, "serve", "--socket", s.socket}, args...)...)
	s.ready()
	return s
}

// ready waits until the daemon takes connections.
func (s *served) ready() {
	s.t.Helper()
	for deadline := time.Now().Add(60 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if r := ummufeed(s.t, "status", "--socket", s.socket); r.code == 0 {
			return
		} else if time.Now().After(deadline) {
			s.t.Fatalf("the daemon does not start: %s", r.errout)
		}
	}
}

// publicDir is a directory that every user may search.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ummufeed")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// client starts a program of a user that has a watch.
func (s *served) client(uid uint32) *started {
	s.t.Helper()
	dir := publicDir(s.t)
	self, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.WriteFile(filepath.Join(dir, "client"), self, 0o755)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	cmd := exec.Command(filepath.Join(dir, "client"), helperArg, "feed")
	cmd.Env = append(os.Environ(), feed.EnvSocket+"="+s.socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	c := startCommand(s.t, cmd)
	c.await("ready")
	return c
}

// statusAs is ummufeed status, asked by a user.
func (s *served) statusAs(t *testing.T, uid uint32, args ...string) result {
	t.Helper()
	c := exec.Command(binary, append([]string{"status", "--socket", s.socket}, args...)...)
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: uid, Gid: uid}}
	return finish(t, c)
}

func (s *served) watchesAs(t *testing.T, uid uint32, args ...string) []daemon.Watch {
	t.Helper()
	r := s.statusAs(t, uid, append([]string{"-o", "json"}, args...)...)
	var report statusReport
	if err := json.Unmarshal([]byte(r.out), &report); err != nil || r.code != 0 {
		t.Fatalf("code %d, %v: %s%s", r.code, err, r.out, r.errout)
	}
	if report.Socket != s.socket || report.UpSec <= 0 {
		t.Errorf("%+v", report)
	}
	return report.Watches
}

// The daemon gives two users a watch each, says of each user's to that user
// only, and ends so that both know.
func TestServe(t *testing.T) {
	const first, second = 65534, 65533
	d := serveIn(t, publicDir(t), "--tier", "syscall", "--mode", "0666")
	a, b := d.client(first), d.client(second)
	a.say("changes")
	a.await("ok")
	for _, c := range []struct {
		asks uint32
		want []uint32
	}{{first, []uint32{first}}, {second, []uint32{second}}, {65532, nil}, {0, []uint32{first, second}}} {
		ws := d.watchesAs(t, c.asks)
		if len(ws) != len(c.want) {
			t.Errorf("user %d is told of %d watches: %+v", c.asks, len(ws), ws)
			continue
		}
		for i, w := range ws {
			if w.UID != c.want[i] || w.Tier != "syscall" || w.State != "live" || w.Comm != "client" || w.PID == 0 || w.Bytes < w.RingBytes || w.Lost != 0 {
				t.Errorf("user %d is told of %+v, want one of %d", c.asks, w, c.want[i])
			}
			if w.UID == first && w.Records < 10 {
				t.Errorf("%d records of ten changes", w.Records)
			}
		}
		table := d.statusAs(t, c.asks)
		if n := strings.Count(table.out, "  client\n"); table.code != 0 || n != len(c.want) || !strings.Contains(table.out, fmt.Sprintf("%d watches", n)) {
			t.Errorf("user %d: code %d\n%s%s", c.asks, table.code, table.out, table.errout)
		}
	}
	if ws := d.watchesAs(t, 0, "--interval", "10ms"); len(ws) != 2 || ws[0].Rate != 0 {
		t.Errorf("nothing happened in 10 ms: %+v", ws)
	}
	if err := b.in.Close(); err != nil {
		t.Fatal(err)
	}
	if r := b.finish(); r.code != 0 {
		t.Errorf("the second client: %+v", r)
	}
	for deadline := time.Now().Add(20 * time.Second); len(d.watchesAs(t, 0)) != 1; {
		if time.Now().After(deadline) {
			t.Fatal("the watch of a client that has gone stays")
		}
	}

	if r := ummufeed(t, "serve", "--socket", d.socket, "--tier", "syscall"); r.code != command.ExitFailure || !strings.Contains(r.errout, "another daemon") {
		t.Errorf("a second daemon: %+v", r)
	}
	d.signal(syscall.SIGTERM)
	r := d.finish()
	if r.code != 0 || r.out != "" || !strings.Contains(r.errout, "msg=serving") {
		t.Errorf("the daemon: %+v", r)
	}
	a.say("state")
	a.await("dead")
	if _, err := os.Stat(d.socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket: %v", err)
	}
	if r := d.statusAs(t, 0); r.code != command.ExitFailure || !strings.Contains(r.errout, "try: ummufeed serve") || r.out != "" {
		t.Errorf("status without a daemon: %+v", r)
	}
}

// Who may not connect is told whom to ask.
func TestServeGroup(t *testing.T) {
	d := serveIn(t, publicDir(t), "--tier", "syscall", "--mode", "660", "--group", "65533")
	if r := d.statusAs(t, 65533); r.code != 0 {
		t.Errorf("of the group: %+v", r)
	}
	if r := d.statusAs(t, 65534); r.code != command.ExitPrivileges || !strings.Contains(r.errout, "group") {
		t.Errorf("not of the group: %+v", r)
	}
}

func TestServeRefuses(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "feed.sock")
	type refusal struct {
		args string
		code int
		says string
	}
	all := []refusal{
		{"--tier nonsense", command.ExitUsage, "one of"},
		{"--mode 9", command.ExitUsage, "octal"},
		{"--group no-such-group", command.ExitUsage, "no-such-group"},
		{"--max-clients 100000", command.ExitFailure, "MaxClients"},
		{"extra", command.ExitUsage, "unknown command"},
	}
	if !machine.HasProbes() {
		// by no option is a weaker tier taken silently
		all = append(all, refusal{"", command.ExitUnsupported, "--allow-syscall-tier"}, refusal{"--tier notifier/probe", command.ExitUnsupported, "notifier/probe"})
	}
	for _, c := range all {
		r := ummufeed(t, append([]string{"serve", "--socket", socket}, strings.Fields(c.args)...)...)
		if r.code != c.code || !strings.Contains(r.errout, c.says) || r.out != "" {
			t.Errorf("%s: %+v, want code %d and %q", c.args, r, c.code, c.says)
		}
		if _, err := os.Stat(socket); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: the socket is left: %v", c.args, err)
		}
	}
	dir := publicDir(t)
	if err := os.Chmod(dir, 0o777); err != nil {
		t.Fatal(err)
	}
	c := exec.Command(binary, "serve", "--socket", filepath.Join(dir, "feed.sock"), "--tier", "syscall")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	if r := finish(t, c); r.code != command.ExitPrivileges || !strings.Contains(r.errout, "CAP_BPF") {
		t.Errorf("without privileges: %+v", r)
	}
}

// A service manager passes the socket, and is told when the daemon is ready
// and when it ends.
func TestServeActivated(t *testing.T) {
	dir := publicDir(t)
	socket := filepath.Join(dir, "feed.sock")
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	listener := os.NewFile(uintptr(fd), socket)
	defer listener.Close()
	if err := errors.Join(unix.Bind(fd, &unix.SockaddrUnix{Name: socket}), os.Chmod(socket, 0o666), unix.Listen(fd, 10)); err != nil {
		t.Fatal(err)
	}
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(dir, "notify"), Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	defer notify.Close()
	told := func(want string) {
		t.Helper()
		notify.SetReadDeadline(time.Now().Add(60 * time.Second))
		b := make([]byte, 200)
		n, err := notify.Read(b)
		if !strings.HasPrefix(string(b[:n]), want) {
			t.Fatalf("told %q, %v; want %q", b[:n], err, want)
		}
	}
	// The pid is that of the program that the shell becomes.
	c := exec.Command("sh", "-c", `LISTEN_PID=$$ exec "$0" serve --tier syscall`, binary)
	c.Env = append(os.Environ(), "LISTEN_FDS=1", "NOTIFY_SOCKET="+notify.LocalAddr().String())
	c.ExtraFiles = []*os.File{listener}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	defer c.Wait()
	defer c.Process.Kill()
	told("READY=1")
	s := &served{started: &started{t: t}, socket: socket}
	s.client(65534)
	if len(s.watchesAs(t, 0)) != 1 {
		t.Error("the client has no watch")
	}
	c.Process.Signal(syscall.SIGTERM)
	told("STOPPING=1")
	if err := c.Wait(); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(socket); err != nil {
		t.Errorf("the socket is the service manager's: %v", err)
	}
}

// switches is how often the threads of a process have gone to sleep, or were
// made to.
func switches(t *testing.T, pid int) (n int) {
	t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/status", pid))
	if err != nil || len(files) == 0 {
		t.Fatalf("%d threads, %v", len(files), err)
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(b)) {
			if name, value, _ := strings.Cut(line, ":"); strings.HasSuffix(name, "voluntary_ctxt_switches") {
				k, err := strconv.Atoi(strings.TrimSpace(value))
				if err != nil {
					t.Fatal(err)
				}
				n += k
			}
		}
	}
	return n
}

// A daemon of which nobody wants anything sleeps: before its first client,
// while a client changes what it likes, and after it.
func TestServeIdle(t *testing.T) {
	d := serveIn(t, publicDir(t), "--tier", "syscall")
	pid := d.cmd.Process.Pid
	idle := func(when string) {
		t.Helper()
		// What it has begun it may end. Go's runtime looks after itself once a minute.
		for deadline := time.Now().Add(30 * time.Second); ; {
			before := switches(t, pid)
			time.Sleep(2 * time.Second)
			n := switches(t, pid) - before
			if n == 0 {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: %d context switches in 2 s", when, n)
			}
		}
	}
	idle("before the first client")
	c := d.client(65534)
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		t.Fatal(err)
	}
	if !tracer.Preemptible() && u.Release[0] < '7' { // else it reads the counters of skipped programs
		idle("with a client")
		before := switches(t, pid)
		for range 20 {
			c.say("changes")
			c.await("ok")
		}
		if n := switches(t, pid) - before; n > 2 {
			t.Errorf("%d context switches in 200 changes", n)
		}
	}
	c.in.Close()
	c.finish()
	idle("after the client")
}
