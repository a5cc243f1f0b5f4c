// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bufio"
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/wire"
	"github.com/ummu/ummu/tracer"
)

func init() {
	roles["obey"] = roleObey
	roles["echo"] = roleEcho
	roles["exec"] = roleExec
	roles["connect"] = roleConnect
	roles["inherit"] = roleInherit
	roles["headless"] = roleHeadless
	roles["serve"] = roleServe
}

// roleObey does what it is told, and answers "ok" or why not.
func roleObey(socket string, _ []string) error {
	var w *feed.Watch
	do := func(line string) (string, error) {
		switch line {
		case "dial":
			var err error
			w, err = feed.Dial(context.Background(), feed.Options{Socket: socket})
			return "ok", err
		case "watched":
			return "ok", watched(w)
		case "valid":
			w.Drain(nil)
			return fmt.Sprint(w.Valid()), nil
		case "close":
			return "ok", w.Close()
		case "pid":
			return fmt.Sprint(os.Getpid()), nil
		case "fork": // a child that has the connection, too
			pid, e := forkIdle()
			if e != 0 {
				return "", e
			}
			return fmt.Sprint(pid), nil
		case "storm":
			for range 40 {
				pid, e := forkExit()
				if e != 0 {
					return "", e
				}
				if _, err := waitFor(int(pid)); err != nil {
					return "", err
				}
			}
			return "ok", nil
		case "sleep": // another program
			return "", syscall.Exec("/bin/sleep", []string{"sleep", "1000"}, nil)
		case "status":
			r, err := Status(context.Background(), socket)
			if err != nil {
				return "", err
			}
			return fmt.Sprint(len(r.Entries)), nil
		}
		return "", errors.New("unknown order")
	}
	return serveLines(do)
}

func serveLines(do func(string) (string, error)) error {
	for in := bufio.NewScanner(os.Stdin); in.Scan(); {
		answer, err := do(in.Text())
		if err != nil {
			answer = "error: " + err.Error()
		}
		fmt.Println(answer)
	}
	return nil
}

// Who sends another's pid with the echo is told so, even root.
func TestForgedSender(t *testing.T) {
	s := shared(t)
	victim := startClient(t, clientOptions{}, "obey", s.Addr())
	r := dialRaw(t, s)
	if err := r.send(hello); err != nil {
		t.Fatal(err)
	}
	c := r.challenge(t)
	if err := r.sendAs(&wire.Echo{Nonce: c.Nonce}, unix.Ucred{Pid: int32(victim.Process.Pid)}); err != nil {
		t.Fatal(err)
	}
	r.refusedWith(t, wire.CodeIdentity)
}

func TestWrongEcho(t *testing.T) {
	s := shared(t)
	r := dialRaw(t, s)
	if err := r.send(hello); err != nil {
		t.Fatal(err)
	}
	c := r.challenge(t)
	c.Nonce[7] ^= 1
	if err := r.send(&wire.Echo{Nonce: c.Nonce}); err != nil {
		t.Fatal(err)
	}
	r.refusedWith(t, wire.CodeIdentity)
}

// roleEcho answers a challenge on descriptor 3: the one that is told as an
// argument, or the one that it reads.
func roleEcho(_ string, args []string) error {
	r := &raw{3}
	var e wire.Echo
	if len(args) > 0 {
		b, err := hex.DecodeString(args[0])
		if err != nil {
			return err
		}
		e.Nonce = wire.Nonce(b)
	} else {
		m, _, err := r.receive()
		if err != nil {
			return err
		}
		e.Nonce = m.(*wire.Challenge).Nonce
	}
	if err := r.send(&e); err != nil {
		return err
	}
	_, _, err := r.finish()
	var no *refusal
	if !errors.As(err, &no) {
		return fmt.Errorf("not refused: %v", err)
	}
	fmt.Println(no.code)
	return nil
}

// A child with its parent's connection is not its parent: it gets nothing of
// the parent's, and what it needs when it asks itself.
func TestChildWithTheConnection(t *testing.T) {
	s := shared(t)
	r := dialRaw(t, s)
	if err := r.send(hello); err != nil {
		t.Fatal(err)
	}
	fd, err := unix.Dup(r.fd)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "connection")
	defer file.Close()
	c := startClient(t, clientOptions{files: []*os.File{file}}, "echo", s.Addr())
	answer, err := c.out.ReadString('\n')
	if want := fmt.Sprintln(wire.CodeIdentity); answer != want {
		t.Fatalf("refused with code %q (%v), want %q", answer, err, want)
	}
	self := startClient(t, clientOptions{}, "obey", s.Addr())
	self.expect(t, "dial", "ok")
	self.expect(t, "watched", "ok")
}

// roleExec becomes another program between the challenge and the echo.
func roleExec(socket string, _ []string) error {
	r, err := connectRaw(socket)
	if err != nil {
		return err
	}
	if err := r.send(hello); err != nil {
		return err
	}
	m, _, err := r.receive()
	if err != nil {
		return err
	}
	nonce := m.(*wire.Challenge).Nonce
	if err := unix.Dup3(r.fd, 3, 0); err != nil && r.fd != 3 {
		return err
	}
	if err := inheritable(3); err != nil {
		return err
	}
	return syscall.Exec("/proc/self/exe", []string{"echo", socket, hex.EncodeToString(nonce[:])}, []string{roleEnv + "=echo"})
}

// The process is the same, the address space is not.
func TestExecDuringTheHandshake(t *testing.T) {
	s := shared(t)
	c := startClient(t, clientOptions{}, "exec", s.Addr())
	answer, err := c.out.ReadString('\n')
	if want := fmt.Sprintln(wire.CodeIdentity); answer != want {
		t.Fatalf("refused with code %q (%v), want %q", answer, err, want)
	}
	eventually(t, "its watch is closed", func() bool { return s.watchCount() == 0 })
}

// roleConnect connects descriptor 3 and perhaps says hello, and ends.
func roleConnect(socket string, args []string) error {
	r := &raw{3}
	if err := r.connect(socket); err != nil {
		return err
	}
	if len(args) > 0 {
		return r.send(hello)
	}
	return nil
}

// roleInherit makes a watch over the connection of descriptor 3, and reports
// what came of it.
func roleInherit(_ string, args []string) error {
	answer := func() (string, error) {
		r := &raw{3}
		if args[0] == "hello" {
			if err := r.send(hello); err != nil {
				return "", err
			}
		}
		m, fds, err := r.finish()
		var no *refusal
		if errors.As(err, &no) {
			return fmt.Sprint("refused ", no.code), nil
		}
		if err != nil {
			return "", err
		}
		mem, err := feed.Descriptors{Status: fds[0], Epoch: fds[1], Interest: fds[2], Ring: fds[3], RingBytes: int(m.RingBytes)}.Map()
		if err != nil {
			return "", err
		}
		w, err := feed.New(mem)
		if err != nil {
			return "", err
		}
		return "right", watched(w)
	}
	a, err := answer()
	if err != nil {
		a = "error: " + err.Error()
	}
	return os.WriteFile(args[1], []byte(a), 0o600)
}

// A process ends, and another one gets its pid, and its connection.
func TestPIDUsedAgain(t *testing.T) {
	for _, c := range []struct {
		name       string
		connect    []string // arguments of the first process
		inherit    string   // what the second does
		want, what string
	}{
		{"before its hello", nil, "hello", "right", "it is who says hello"},
		{"before its echo", []string{"hello"}, "", fmt.Sprint("refused ", wire.CodeIdentity), "it is not who said hello"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := shared(t)
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				t.Fatal(err)
			}
			file := os.NewFile(uintptr(fd), "connection")
			defer file.Close()
			first := startClient(t, clientOptions{files: []*os.File{file}}, "connect", append([]string{s.Addr()}, c.connect...)...)
			pid := first.Process.Pid
			if len(c.connect) > 0 {
				// The daemon has taken up its identity when the watch is open.
				eventually(t, "its watch is open", func() bool { return s.watchCount() == 1 })
			}
			if err := first.Wait(); err != nil {
				t.Fatal(err)
			}
			result := filepath.Join(t.TempDir(), "result")
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			// As descriptor 3 of the second: a shell moves it there.
			dup, err := unix.Dup(int(file.Fd()))
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(dup)
			script := fmt.Sprintf("exec 3<&%d; exec %s %s '%s' %s", dup, binary, s.Addr(), c.inherit, result)
			if err := spawnAs(pid, "/bin/bash", []string{"bash", "-c", script}, []string{roleEnv + "=inherit"}); err != nil {
				t.Fatal(err)
			}
			if ws, err := waitFor(pid); err != nil || ws.ExitStatus() != 0 {
				t.Fatalf("%v, %v", ws, err)
			}
			got, err := os.ReadFile(result)
			if string(got) != c.want {
				t.Errorf("%s, %v; want %s: %s", got, err, c.want, c.what)
			}
		})
	}
}

// Processes in pid namespaces of their own, both with pid 1: each has its own
// changes, and only those.
func TestPIDNamespaces(t *testing.T) {
	s := shared(t)
	var cs [2]*client
	for i := range cs {
		cs[i] = startClient(t, clientOptions{uid: nobody, flags: unix.CLONE_NEWPID}, "obey", s.Addr())
		cs[i].expect(t, "pid", "1")
		cs[i].expect(t, "dial", "ok")
	}
	for range 20 {
		for i := range cs {
			cs[1-i].expect(t, "valid", "true")
			cs[i].expect(t, "watched", "ok")
			cs[1-i].expect(t, "valid", "true")
		}
	}
}

// roleServe is a daemon in a process of its own; the arguments are options.
func roleServe(socket string, _ []string) error {
	s, err := New(Config{Socket: socket, Tiers: []tracer.Tier{tracer.TierSyscall}})
	if err != nil {
		return err
	}
	fmt.Println("ready")
	return s.Serve(context.Background())
}

// A daemon that does not see who connects refuses.
func TestInvisibleClient(t *testing.T) {
	socket := filepath.Join(socketDir(t), "feed.sock")
	c := startClient(t, clientOptions{flags: unix.CLONE_NEWPID}, "serve", socket)
	if line, err := c.out.ReadString('\n'); err != nil {
		t.Fatal(line, err)
	}
	_, err := feed.Dial(t.Context(), feed.Options{Socket: socket})
	if !errors.Is(err, feed.ErrUnavailable) || !strings.Contains(err.Error(), "pid namespace") {
		t.Errorf("%v", err)
	}
}

// Root of a user namespace of its own is nobody: it has its watch, and sees
// nobody else's.
func TestUserNamespace(t *testing.T) {
	s := shared(t)
	w := dial(t, s) // root's
	c := startClient(t, clientOptions{uid: nobody, flags: unix.CLONE_NEWUSER, mapUser: true}, "obey", s.Addr())
	c.expect(t, "dial", "ok")
	c.expect(t, "watched", "ok")
	if err := watched(w); err != nil {
		t.Error(err)
	}
	c.expect(t, "status", "1")
	other := startClient(t, clientOptions{uid: nobody - 1}, "obey", s.Addr())
	other.expect(t, "status", "0")
	root := startClient(t, clientOptions{}, "obey", s.Addr())
	root.expect(t, "status", "2")
}

// roleHeadless ends its first thread and goes on.
func roleHeadless(socket string, _ []string) error {
	dialed := make(chan error)
	var w *feed.Watch
	go func() {
		var err error
		w, err = feed.Dial(context.Background(), feed.Options{Socket: socket})
		dialed <- err
	}()
	if err := <-dialed; err != nil {
		return err
	}
	go func() {
		for leader := ""; !strings.HasPrefix(leader, "Z"); {
			leader = procStatus(os.Getpid(), "State:")
			runtime.Gosched()
		}
		again, err := feed.Dial(context.Background(), feed.Options{Socket: socket})
		if err == nil {
			err = errors.Join(watched(w), watched(again), again.Close())
		}
		fmt.Println(err)
		os.Exit(0)
	}()
	// TestMain's goroutine is locked to the first thread by init.
	unix.Syscall(unix.SYS_EXIT, 0, 0, 0) // not RawSyscall: stopping the world would wait for this thread
	return nil
}

func init() {
	if os.Getenv(roleEnv) == "headless" {
		runtime.LockOSThread()
	}
}

func TestLeaderExitsFirst(t *testing.T) {
	s := shared(t)
	c := startClient(t, clientOptions{uid: nobody}, "headless", s.Addr())
	answer, err := c.out.ReadString('\n')
	if answer != "<nil>\n" {
		t.Errorf("%s, %v", answer, err)
	}
	eventually(t, "its watches are closed", func() bool { return s.watchCount() == 0 })
}

// Children that come and go with the connection open change nothing, and one
// that stays does not keep the watch of a dead parent.
func TestChildrenKeepTheConnection(t *testing.T) {
	s := shared(t)
	c := startClient(t, clientOptions{uid: nobody}, "obey", s.Addr())
	c.expect(t, "dial", "ok")
	c.expect(t, "storm", "ok")
	c.expect(t, "watched", "ok")
	child, err := strconv.Atoi(c.ask(t, "fork"))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Kill(child, unix.SIGKILL)
	c.expect(t, "watched", "ok")
	c.Process.Kill()
	c.Wait()
	eventually(t, "the watch of the dead is closed", func() bool { return s.watchCount() == 0 && s.connCount() == 0 })
	if err := unix.Kill(child, 0); err != nil {
		t.Fatalf("the child is gone: what was tested? %v", err)
	}
}

// Close ends the watch although a child has the connection.
func TestCloseWithChildren(t *testing.T) {
	s := shared(t)
	c := startClient(t, clientOptions{uid: nobody}, "obey", s.Addr())
	c.expect(t, "dial", "ok")
	child, err := strconv.Atoi(c.ask(t, "fork"))
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Kill(child, unix.SIGKILL)
	c.expect(t, "close", "ok")
	eventually(t, "the watch is closed", func() bool { return s.watchCount() == 0 })
}

// Another program does not have the watch, nor the connection.
func TestExecEndsTheWatch(t *testing.T) {
	s := shared(t)
	c := startClient(t, clientOptions{uid: nobody}, "obey", s.Addr())
	c.expect(t, "dial", "ok")
	if _, err := fmt.Fprintln(c.in, "sleep"); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the watch is closed", func() bool { return s.watchCount() == 0 })
	if err := unix.Kill(c.Process.Pid, 0); err != nil {
		t.Fatal(err)
	}
}
