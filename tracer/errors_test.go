// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

func TestWithoutPrivileges(t *testing.T) {
	c := perform(t, "unprivileged", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}})
	if !c.Permission || c.NotSupported || c.Hook == nil {
		t.Fatalf("error is not a HookError that answers ErrPermission: %+v", c)
	}
	for _, want := range []string{c.Hook.Hook, kernelRelease(), "CAP_BPF", "CAP_PERFMON", "try: "} {
		if want == "" || !strings.Contains(c.Text, want) {
			t.Errorf("error does not name %q: %s", want, c.Text)
		}
	}
	if c.Tier != "none" || c.Unattached != len(hooksOf(TierSyscall)) {
		t.Errorf("coverage: tier %s, %d hooks with an error, want none and %d", c.Tier, c.Unattached, len(hooksOf(TierSyscall)))
	}
	t.Log(c.Text)
}

func TestWithoutBTF(t *testing.T) {
	c := perform(t, "nobtf", &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS})
	if !c.NotSupported || c.Permission || c.Hook == nil {
		t.Fatalf("error is not a HookError that answers ErrNotSupported: %+v", c)
	}
	for _, want := range []string{"BTF", "/sys/kernel/btf/vmlinux", kernelRelease(), "try: "} {
		if !strings.Contains(c.Text, want) {
			t.Errorf("error does not name %q: %s", want, c.Text)
		}
	}
	if c.Tier != "none" || c.Unattached != len(hooksOf(TierSyscall)) {
		t.Errorf("coverage: tier %s, %d hooks with an error, want none and %d", c.Tier, c.Unattached, len(hooksOf(TierSyscall)))
	}
	t.Log(c.Text)
}

// kernelThread finds one in the process table.
func kernelThread(t *testing.T) int {
	t.Helper()
	dir, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range dir {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue
		}
		stat, err := os.ReadFile("/proc/" + e.Name() + "/stat")
		if err != nil {
			continue
		}
		f := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
		if flags, err := strconv.ParseUint(f[6], 10, 32); err == nil && flags&0x200000 != 0 { // PF_KTHREAD
			return pid
		}
	}
	t.Fatal("no kernel thread is visible: run in the initial pid namespace")
	return 0
}

// zombie starts a process that has ended and was not waited for.
func zombie(t *testing.T) (pid, pidfd int) {
	t.Helper()
	pidfd = -1
	cmd := exec.Command("/bin/true")
	cmd.SysProcAttr = &syscall.SysProcAttr{PidFD: &pidfd}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if pidfd < 0 {
		t.Fatal("no pidfd from clone")
	}
	t.Cleanup(func() { unix.Close(pidfd); cmd.Wait() })
	var info unix.Siginfo
	if err := unix.Waitid(unix.P_PID, cmd.Process.Pid, &info, unix.WEXITED|unix.WNOWAIT, nil); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid, pidfd
}

func TestWatchErrors(t *testing.T) {
	zpid, zfd := zombie(t)
	deadFD := func() int { // a pidfd that outlives its process
		fd := -1
		cmd := exec.Command("/bin/true")
		cmd.SysProcAttr = &syscall.SysProcAttr{PidFD: &fd}
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.Close(fd) })
		return fd
	}()
	null, err := os.Open(os.DevNull)
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	self := os.Getpid()

	for _, c := range []struct {
		name   string
		target Target
		o      WatchOptions
		want   error  // errors.Is
		text   string // the message names it
	}{
		{"no such pid", PID(1 << 22), WatchOptions{}, ErrNoProcess, strconv.Itoa(1 << 22)},
		{"pid 0", PID(0), WatchOptions{}, ErrNoProcess, "0"},
		{"negative pid", PID(-self), WatchOptions{}, ErrNoProcess, strconv.Itoa(-self)},
		{"kernel thread", PID(kernelThread(t)), WatchOptions{}, ErrNoSpace, ""},
		{"zombie", PID(zpid), WatchOptions{}, ErrNoSpace, strconv.Itoa(zpid)},
		{"pidfd of a zombie", PIDFD(zfd), WatchOptions{}, ErrNoSpace, ""},
		{"pidfd of the dead", PIDFD(deadFD), WatchOptions{}, ErrNoProcess, ""},
		{"not a pidfd", PIDFD(int(null.Fd())), WatchOptions{}, unix.EBADF, "pidfd"},
		{"closed descriptor", PIDFD(1 << 20), WatchOptions{}, os.ErrNotExist, ""},
		{"no target", Target{}, WatchOptions{}, nil, "target"},
		{"ring not a power of two", Self(), WatchOptions{RingBytes: 3 * os.Getpagesize()}, nil, "RingBytes"},
		{"ring below a page", Self(), WatchOptions{RingBytes: os.Getpagesize() / 2}, nil, "RingBytes"},
		{"negative ring", Self(), WatchOptions{RingBytes: -1}, nil, "RingBytes"},
		{"huge ring", Self(), WatchOptions{RingBytes: 1 << 31}, nil, "RingBytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := shared.Watch(c.target, c.o)
			if err == nil {
				s.Close()
				t.Fatal("no error")
			}
			if c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.text) {
				t.Errorf("error %q, want %v and the word %q", err, c.want, c.text)
			}
			t.Log(err)
		})
	}
	if shared.streamCount() != 0 {
		t.Errorf("%d streams are left", shared.streamCount())
	}
}

// streamCount is the number of open streams, and of places taken if they differ.
func (t *Tracer) streamCount() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.slots.mu.Lock()
	defer t.slots.mu.Unlock()
	return max(t.slots.open, len(t.streams), t.watches)
}

func TestOpenErrors(t *testing.T) {
	for _, n := range []int{-1, 1<<20 + 1} {
		if tr, err := Open(Options{MaxSpaces: n}); err == nil {
			tr.Close()
			t.Errorf("MaxSpaces %d is accepted", n)
		} else if !strings.Contains(err.Error(), "MaxSpaces") {
			t.Errorf("MaxSpaces %d: %v", n, err)
		}
	}
}

// More watches than one address space can have, and than MaxSpaces.
func TestTooMany(t *testing.T) {
	tr, err := Open(Options{MaxSpaces: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	p, q := startTracee(t), startTracee(t)
	n := 0
	for ; ; n++ {
		if _, err = tr.Watch(PID(p.pid), WatchOptions{RingBytes: os.Getpagesize()}); err != nil {
			break
		}
		if n > 100 {
			t.Fatal("no limit")
		}
	}
	if n == 0 || !errors.Is(err, ErrTooMany) {
		t.Errorf("after %d watches: %v, want ErrTooMany", n, err)
	}
	// a failed watch leaves no place taken
	if got := tr.streamCount(); got != n {
		t.Errorf("%d streams, want %d", got, n)
	}
	if _, err := tr.Watch(PID(q.pid), WatchOptions{}); !errors.Is(err, ErrTooMany) || !strings.Contains(err.Error(), "MaxSpaces") {
		t.Errorf("second space: %v, want ErrTooMany and MaxSpaces", err)
	}
}

func TestCloseAndDeadline(t *testing.T) {
	tr, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	p := startTracee(t)
	var r mm.Record

	s, err := tr.Watch(PID(p.pid), WatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	s.SetDeadline(time.Now().Add(-time.Second))
	for range 2 {
		if err := s.Read(&r); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("read after the deadline: %v", err)
		}
	}
	s.SetDeadline(time.Now().Add(time.Millisecond))
	if err := s.Read(&r); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Fatalf("read until the deadline: %v", err)
	}
	// a record that is there is read although the deadline is over
	p.call(t, unix.SYS_MUNMAP, "A", mm.PageSize())
	if err := s.Read(&r); err != nil || r.Kind != mm.Unmap || r.Seq != 1 {
		t.Errorf("read of what is there: %v, %+v", err, r)
	}
	s.SetDeadline(time.Time{})
	if records := drain(t, s); len(records) != 1 {
		t.Errorf("after the deadline: %d records, want the other one:%s", len(records), show(records))
	}
	// two flushes, nothing between
	for range 2 {
		if records := drain(t, s); len(records) != 0 {
			t.Errorf("flushed again:%s", show(records))
		}
	}

	ended := make(chan error, 1)
	block := func() {
		go func() {
			var r mm.Record
			ended <- s.Read(&r)
		}()
		p.call(t, unix.SYS_MUNMAP, "A+1", mm.PageSize()) // the reader is at work
		if err := <-ended; err != nil {
			t.Fatal(err)
		}
		go func() {
			var r mm.Record
			for {
				if err := s.Read(&r); err != nil {
					ended <- err
					return
				}
			}
		}()
	}
	block()
	for range 2 {
		if err := s.Close(); err != nil {
			t.Errorf("close stream: %v", err)
		}
	}
	if err := <-ended; !errors.Is(err, os.ErrClosed) {
		t.Errorf("a waiting Read returned %v", err)
	}
	if err := s.Read(&r); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Read after Close: %v", err)
	}
	if st := s.Stats(); st.Records < 4 {
		t.Errorf("the totals are gone with Close: %+v", st)
	}

	s, err = tr.Watch(PID(p.pid), WatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	block()
	for range 2 {
		if err := tr.Close(); err != nil {
			t.Errorf("close tracer: %v", err)
		}
	}
	if err := <-ended; !errors.Is(err, os.ErrClosed) {
		t.Errorf("a waiting Read returned %v when the tracer was closed", err)
	}
	if err := s.Close(); err != nil {
		t.Errorf("close stream of a closed tracer: %v", err)
	}
	if _, err := tr.Watch(Self(), WatchOptions{}); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Watch on a closed tracer: %v", err)
	}
	if err := s.Flush(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("Flush of a closed stream: %v", err)
	}
}

// A refusal is for want of a capability only where one is wanting.
func TestHookError(t *testing.T) {
	for _, c := range []struct {
		cause           error
		capable, wanted error // with the capabilities, without them
	}{
		{unix.EPERM, ErrNotSupported, ErrPermission},
		{unix.EACCES, ErrNotSupported, ErrPermission},
		{os.ErrPermission, ErrNotSupported, ErrPermission},
		{unix.EINVAL, ErrNotSupported, ErrNotSupported},
		{os.ErrNotExist, ErrNotSupported, ErrNotSupported},
	} {
		check := func(want error) {
			t.Helper()
			err := error(hookError("tp_btf/x", c.cause))
			if !errors.Is(err, want) || !errors.Is(err, c.cause) {
				t.Errorf("%v does not answer %v", err, want)
			}
			if errors.Is(err, ErrNotSupported) == errors.Is(err, ErrPermission) {
				t.Errorf("%v answers both or none", err)
			}
		}
		check(c.capable)
		withoutCapabilities(t, func() { check(c.wanted) })
	}
}

// withoutCapabilities runs f in a thread that has none.
func withoutCapabilities(t *testing.T, f func()) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var d, none [2]unix.CapUserData
	if err := unix.Capget(&h, &d[0]); err != nil {
		t.Fatal(err)
	}
	none = d
	none[0].Effective, none[1].Effective = 0, 0
	if err := unix.Capset(&h, &none[0]); err != nil {
		t.Fatal(err)
	}
	f()
	if err := unix.Capset(&h, &d[0]); err != nil {
		t.Fatal(err)
	}
}
