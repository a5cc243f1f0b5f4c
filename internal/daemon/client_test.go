// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/demo"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/uring"
	"github.com/ummu/ummu/test/child"
)

// Clients are processes: this test binary again, in a role that this
// environment variable names. The first argument is the socket. They answer on
// standard output, a line for each line of standard input.
const roleEnv = "UMMU_TEST_ROLE"

var roles = map[string]func(socket string, args []string) error{
	"demo":    roleDemo,
	"silent":  roleSilent,
	"noisy":   roleNoisy,
	"forbids": roleForbids,
}

func runRole(name string) int {
	if err := roles[name](os.Args[1], os.Args[2:]); err != nil {
		fmt.Fprintln(os.Stderr, name+":", err)
		return 1
	}
	return 0
}

// nobody is a user without any rights.
const nobody = 65534

// binary is this test binary where every user can execute it.
var binary string

func copyBinary() (cleanup func(), err error) {
	dir, err := os.MkdirTemp("", "ummu-daemon-test")
	if err != nil {
		return nil, err
	}
	cleanup = func() { os.RemoveAll(dir) }
	b, err := os.ReadFile("/proc/self/exe")
	if err == nil {
		err = os.Chmod(dir, 0o755)
	}
	if err == nil {
		binary = filepath.Join(dir, "client")
		err = os.WriteFile(binary, b, 0o755)
	}
	return cleanup, err
}

// client is a process in a role.
type client struct {
	*exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

type clientOptions struct {
	uid     int
	flags   uintptr // of clone: namespaces
	mapUser bool    // with CLONE_NEWUSER: root there is uid here
	files   []*os.File
}

func startClient(t testing.TB, o clientOptions, role string, args ...string) *client {
	t.Helper()
	c := &client{Cmd: exec.Command(binary, args...)}
	// A signal of Go's scheduler makes the kernel start a fork again, and one
	// of a large process takes longer than the next signal.
	c.Env = append(os.Environ(), roleEnv+"="+role, "GODEBUG=asyncpreemptoff=1")
	c.Stderr = os.Stderr // a file: Wait must not wait for children of the client
	c.ExtraFiles = o.files
	c.SysProcAttr = &syscall.SysProcAttr{
		Pdeathsig:  syscall.SIGKILL,
		Cloneflags: o.flags,
	}
	if o.uid != 0 {
		c.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(o.uid), Gid: uint32(o.uid)}
	}
	if o.mapUser {
		c.SysProcAttr.Credential = &syscall.Credential{Uid: 0, Gid: 0, NoSetGroups: true}
		c.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: o.uid, Size: 1}}
		c.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: o.uid, Size: 1}}
	}
	c.in, c.out = child.Start(t, c.Cmd)
	return c
}

// ask sends a line and returns the answer.
func (c *client) ask(t testing.TB, line string) string {
	t.Helper()
	if _, err := fmt.Fprintln(c.in, line); err != nil {
		t.Fatal(err)
	}
	answer, err := c.out.ReadString('\n')
	if err != nil {
		t.Fatalf("%s: %v", line, err)
	}
	return strings.TrimSuffix(answer, "\n")
}

// expect is ask for what has one right answer.
func (c *client) expect(t testing.TB, line, want string) {
	t.Helper()
	if got := c.ask(t, line); got != want {
		t.Fatalf("%s: %s, want %s", line, got, want)
	}
}

// killed reports whether the process ended by a signal.
func (c *client) killed(s syscall.Signal) bool {
	c.in.Close()
	c.Wait()
	ws, ok := c.ProcessState.Sys().(syscall.WaitStatus)
	return ok && ws.Signaled() && ws.Signal() == s
}

// restrict takes what a hardened job scheduler takes.
func restrict() error {
	return forbid(unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD)
}

// roleForbids shows that the filter is one: it does not survive.
func roleForbids(string, []string) error {
	if err := restrict(); err != nil {
		return err
	}
	unix.Syscall(unix.SYS_BPF, 0, 0, 0)
	return errors.New("bpf(2) was not forbidden")
}

// roleDemo runs the demonstration over the daemon's feed.
func roleDemo(socket string, _ []string) error {
	if err := restrict(); err != nil {
		return err
	}
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return err
	}
	for field, want := range map[string]string{"CapEff:": "0000000000000000", "CapPrm:": "0000000000000000", "Seccomp:": "2", "NoNewPrivs:": "1"} {
		if got := fieldOf(string(status), field); got != want {
			return fmt.Errorf("%s is %s, want %s", field, got, want)
		}
	}
	if uid := os.Getuid(); uid != nobody {
		return fmt.Errorf("uid %d", uid)
	}
	r, err := demo.Run(context.Background(), demo.Options{
		Open:   func() (*feed.Watch, error) { return feed.Dial(context.Background(), feed.Options{Socket: socket}) },
		Rounds: 50,
	})
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(r)
}

// A process that may do nothing gets what one that may do everything has: no
// transfer goes to pages that are not there any more, by any kind of change,
// and what does not change is a hit.
func TestClientWithoutPrivileges(t *testing.T) {
	if c := startClient(t, clientOptions{uid: nobody}, "forbids", ""); !c.killed(syscall.SIGSYS) {
		t.Fatalf("the filter lets bpf(2) pass: %v", c.ProcessState)
	}
	s := shared(t)
	c := startClient(t, clientOptions{uid: nobody}, "demo", s.Addr())
	var r demo.Report
	if err := json.NewDecoder(c.out).Decode(&r); err != nil {
		t.Fatal(err)
	}
	for _, row := range r.Rows {
		t.Logf("%-30s %d threads: without %+v, with %+v", row.Change, row.Threads, row.WithoutFeed, row.WithFeed)
		if row.WithFeed.Stale != 0 {
			t.Errorf("%s: %d stale transfers", row.Change, row.WithFeed.Stale)
		}
	}
	if r.WithoutFeed.Stale == 0 {
		t.Error("nothing is stale without a feed: what is tested?")
	}
	if r.WithFeed.Hits == 0 {
		t.Error("nothing was ever cached")
	}
	if err := c.Wait(); err != nil {
		t.Error(err)
	}
}

const silentLookups = 200

// hitsInSilence looks a registration up in a thread that may make no system
// call, with a step in between. It does not return in time if the scheduler
// interrupts it; so the window is short and is tried again by the test.
func hitsInSilence(socket string, step func(*feed.Watch)) error {
	debug.SetGCPercent(-1)
	w, err := feed.Dial(context.Background(), feed.Options{Socket: socket})
	if err != nil {
		return err
	}
	defer w.Close()
	ring, err := uring.Open(uring.Options{})
	if err != nil {
		return err
	}
	defer ring.Close()
	c, err := regcache.New(w, ring, regcache.Options{})
	if err != nil {
		return err
	}
	defer c.Close()
	b, r, unmap, err := mapPages(1)
	if err != nil {
		return err
	}
	defer unmap()
	b[0] = 1
	hit := func() bool {
		before := c.Stats().Misses
		ref, err := c.Acquire(r, regcache.LocalWrite)
		if err != nil {
			return false
		}
		ref.Release()
		return c.Stats().Misses == before
	}
	for i := 0; !hit(); i++ {
		if i == 1000 {
			return errors.New("never cached")
		}
	}
	var result atomic.Int32
	go func() {
		runtime.LockOSThread()
		look := func(times int) (n int32) {
			for range times {
				step(w)
				if !w.Valid() {
					continue
				}
				if ref, err := c.Acquire(r, regcache.LocalWrite); err == nil {
					ref.Release()
					n++
				}
			}
			return n
		}
		look(2)           // the stack grows to what it needs
		runtime.Gosched() // a fresh time slice
		if err := forbidAll(); err != nil {
			result.Store(-1)
			return
		}
		n := look(silentLookups)
		result.Store(n + 1)
		for result.Load() != 0 { // it could not even end
		}
	}()
	for result.Load() == 0 {
		time.Sleep(time.Millisecond)
	}
	fmt.Println(result.Load() - 1)
	os.Exit(0) // by this thread, which may
	return nil
}

func roleSilent(socket string, _ []string) error {
	return hitsInSilence(socket, func(*feed.Watch) {})
}

func roleNoisy(socket string, _ []string) error {
	return hitsInSilence(socket, func(*feed.Watch) { unix.Getppid() })
}

// After the handshake there is no system call in a hit, nor in the question
// whether the watch is valid.
func TestNoSystemCalls(t *testing.T) {
	s := shared(t)
	if c := startClient(t, clientOptions{uid: nobody}, "noisy", s.Addr()); !c.killed(syscall.SIGSYS) {
		t.Fatalf("a system call is not noticed: %v", c.ProcessState)
	}
	for try := range 20 {
		c := startClient(t, clientOptions{uid: nobody}, "silent", s.Addr())
		answer, err := c.out.ReadString('\n')
		if err == nil {
			if answer != fmt.Sprintln(silentLookups) {
				t.Errorf("%s hits, want %d", answer, silentLookups)
			}
			t.Logf("attempt %d", try+1)
			return
		}
		if !c.killed(syscall.SIGSYS) {
			t.Fatalf("%v", c.ProcessState)
		}
		// Killed: by a hit, and then always, or by Go's scheduler.
	}
	t.Error("no attempt made its hits without a system call")
}
