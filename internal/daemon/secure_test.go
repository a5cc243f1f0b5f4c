// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
)

const (
	nobodyUID = 65534
	secureEnv = "UMMU_TEST_SECURE"
)

// A program that has more rights than who started it does not ask the
// environment where the daemon is, or whether there is one.
func TestEnvironmentOfSetUserID(t *testing.T) {
	if os.Getenv(secureEnv) != "" { // the program
		w, err := feed.Open(t.Context(), feed.Options{Unavailable: func(err error) { fmt.Println("unavailable:", err) }})
		fmt.Println("opened:", err)
		if err == nil {
			w.Close()
		}
		return
	}
	path := filepath.Join(socketDir(t), "program")
	b, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, b, 0o755); err != nil {
		t.Fatal(err)
	}
	run := func(env ...string) string {
		cmd := exec.Command(path, "-test.run=^TestEnvironmentOfSetUserID$")
		cmd.Dir = "/"
		cmd.Env = append([]string{secureEnv + "=1"}, env...)
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobodyUID, Gid: nobodyUID}}
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "opened:") {
			t.Fatalf("%v: %s", err, out)
		}
		return string(out)
	}
	for _, c := range []struct {
		env, obeyed string
	}{
		{"UMMU_SOCKET=/nowhere/at.all", "/nowhere/at.all"},
		{"UMMU=nonsense", "nonsense"},
	} {
		for mode, obeys := range map[os.FileMode]bool{0o755: true, 0o755 | os.ModeSetuid: false} {
			if err := os.Chmod(path, mode); err != nil {
				t.Fatal(err)
			}
			if out := run(c.env); strings.Contains(out, c.obeyed) != obeys {
				t.Errorf("mode %v, %s: want obeyed %v: %s", mode, c.env, obeys, out)
			}
		}
	}
}

// A daemon that another user runs is not believed.
func TestDaemonOfAnotherUser(t *testing.T) {
	pathOf := func(uid int) string {
		path := filepath.Join(socketDir(t), "feed.sock")
		fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
			t.Fatal(err)
		}
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		as := func(uid int) { // this thread; the kernel notes who listens
			if _, _, e := unix.RawSyscall(unix.SYS_SETRESUID, ^uintptr(0), uintptr(uid), ^uintptr(0)); e != 0 {
				t.Fatal(e)
			}
		}
		as(uid)
		err = unix.Listen(fd, 5)
		as(0)
		if err != nil {
			t.Fatal(err)
		}
		return path
	}
	for uid, refused := range map[int]bool{0: false, 1: true, nobodyUID: true} {
		// nobody answers: who is believed is waited for
		_, err := feed.Dial(t.Context(), feed.Options{Socket: pathOf(uid), Timeout: 1})
		if !errors.Is(err, feed.ErrUnavailable) {
			t.Fatalf("user %d: %v", uid, err)
		}
		if got := strings.Contains(err.Error(), "neither root nor this user"); got != refused {
			t.Errorf("user %d: %v", uid, err)
		}
	}
}
