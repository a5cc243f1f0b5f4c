// SPDX-License-Identifier: Apache-2.0

//go:build linux && amd64

package local

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/inject"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/child"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

// otherRole makes this test binary the process that is watched.
const (
	otherRole = "UMMU_LOCAL_OTHER"
	otherHeld = "UMMU_LOCAL_HELD"
)

func init() {
	if os.Getenv(otherRole) == "" {
		return
	}
	size := os.Getpagesize()
	b, err := unix.Mmap(-1, 0, 4*size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err == nil {
		copy(b, "touched")
		b[size] = 1
		fmt.Printf("%x\n", uintptr(unsafe.Pointer(unsafe.SliceData(b))))
		vm := os.NewFile(3, "socket")
		if os.Getenv(otherRole) == "vm" {
			err = sendMachine(int(vm.Fd()))
		}
	}
	in := bufio.NewScanner(os.Stdin)
	for err == nil && in.Scan() {
		switch in.Text() {
		case "drop":
			err = unix.Madvise(b[size:2*size], unix.MADV_DONTNEED)
		case "close":
			unix.CloseRange(3, ^uint(0)>>32, 0)
		case "exec":
			err = unix.Exec("/bin/echo", []string{"echo", "exec"}, nil)
		case "fork": // a child that only waits, whatever becomes of its parent
			child, _, e := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
			for e == 0 && child == 0 {
				unix.RawSyscall(unix.SYS_PAUSE, 0, 0, 0)
			}
			if e != 0 {
				err = e
			}
			fmt.Println("child", child)
		case "hold": // a feed of process otherHeld, for as long as this one lives
			var pid int
			if pid, err = strconv.Atoi(os.Getenv(otherHeld)); err == nil {
				_, err = Open(Options{PID: pid, Tier: tracer.TierNotifierTracepoint, Inject: true})
			}
		}
		fmt.Println(in.Text())
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

// sendMachine makes a machine and passes it on.
func sendMachine(socket int) error {
	kvm, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return err
	}
	for {
		vm, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(kvm), 0xae01, 0)
		switch e {
		case 0:
			return unix.Sendmsg(socket, []byte{0}, unix.UnixRights(int(vm)), nil, 0)
		case unix.EINTR:
		default:
			return e
		}
	}
}

type other struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	r   mm.Range // four pages, two of them touched
	vm  *os.File
}

func startOther(t *testing.T, role string) *other {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	theirs := os.NewFile(uintptr(pair[1]), "socket")
	o := &other{t: t, cmd: exec.Command("/proc/self/exe")}
	o.cmd.Env = append(os.Environ(), otherRole+"="+role)
	o.cmd.Stderr = os.Stderr
	o.cmd.ExtraFiles = []*os.File{theirs}
	o.in, o.out = child.Start(t, o.cmd)
	theirs.Close()
	var start uint64
	if _, err := fmt.Fscanf(o.out, "%x\n", &start); err != nil {
		t.Fatal(err)
	}
	o.r = mm.Range{Start: mm.Addr(start), End: mm.Addr(start + 4*uint64(os.Getpagesize()))}
	if role == "vm" {
		oob := make([]byte, 64)
		_, n, _, _, err := unix.Recvmsg(pair[0], make([]byte, 1), oob, unix.MSG_CMSG_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		ms, err := unix.ParseSocketControlMessage(oob[:n])
		if err != nil || len(ms) != 1 {
			t.Fatal(err, len(ms))
		}
		fds, err := unix.ParseUnixRights(&ms[0])
		if err != nil {
			t.Fatal(err)
		}
		o.vm = os.NewFile(uintptr(fds[0]), "vm")
		t.Cleanup(func() { o.vm.Close() })
	}
	return o
}

func (o *other) do(word string) {
	o.t.Helper()
	if _, err := io.WriteString(o.in, word+"\n"); err != nil {
		o.t.Fatal(err)
	}
	if line, err := o.out.ReadString('\n'); err != nil || strings.TrimSpace(line) != word {
		o.t.Fatalf("%q, %v", line, err)
	}
}

// cached registers the process's memory.
func (o *other) cached(w *feed.Watch) {
	o.t.Helper()
	cache(o.t, w, o.r)
}

// dropped makes the process drop its second page; the watch must say so.
func (o *other) dropped(w *feed.Watch) {
	o.t.Helper()
	o.do("drop")
	if w.Valid() {
		o.t.Fatal("valid after the change")
	}
	size := mm.Addr(os.Getpagesize())
	want := mm.Range{Start: o.r.Start + size, End: o.r.Start + 2*size}
	seen := 0
	if s := w.Drain(func(r *mm.Record) {
		if r.Touches(want) {
			seen++
		}
	}); s != feed.Fresh || seen == 0 {
		o.t.Fatalf("drain: %v, %d records", s, seen)
	}
}

func openOn(t *testing.T, o Options) *feed.Watch {
	t.Helper()
	w, err := Open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// A watch of another process, whose notifier it is given or makes. Whatever
// the process closes, changes are seen; when it executes another program the
// watch is dead.
func TestOtherProcess(t *testing.T) {
	machine.NeedKVM(t)
	for _, tier := range notifierTiers() {
		for _, role := range []string{"inject", "vm"} {
			t.Run(tier.String()+"/"+role, func(t *testing.T) { otherProcess(t, tier, role) })
		}
	}
}

func otherProcess(t *testing.T, tier tracer.Tier, role string) {
	o := startOther(t, role)
	options := Options{PID: o.cmd.Process.Pid, Tier: tier, VM: o.vm, Inject: role == "inject"}
	w := openOn(t, options)
	if o.vm != nil {
		o.vm.Close() // the watch has its own
	}
	o.cached(w)
	o.dropped(w)
	o.do("close")
	o.dropped(w)
	o.do("exec")
	if w.Valid() {
		t.Error("valid after execve")
	}
	if s := w.Drain(func(*mm.Record) {}); s != feed.DeadState {
		t.Errorf("drain: %v, want %v", s, feed.DeadState)
	}
}

// The watch dies with its process, though a forked child lives on and has
// inherited the descriptor of the machine.
func TestOtherForksAndEnds(t *testing.T) {
	machine.NeedKVM(t)
	for _, tier := range notifierTiers() {
		for _, role := range []string{"inject", "vm"} {
			t.Run(tier.String()+"/"+role, func(t *testing.T) {
				o := startOther(t, role)
				w := openOn(t, Options{PID: o.cmd.Process.Pid, Tier: tier, VM: o.vm, Inject: role == "inject"})
				if o.vm != nil {
					o.vm.Close()
				}
				o.cached(w)
				var child int
				if _, err := io.WriteString(o.in, "fork\n"); err != nil {
					t.Fatal(err)
				}
				if _, err := fmt.Fscanf(o.out, "child %d\nfork\n", &child); err != nil || child <= 0 {
					t.Fatal(child, err)
				}
				defer unix.Kill(child, unix.SIGKILL)
				o.dropped(w) // the machine is not the child's
				o.cached(w)
				o.cmd.Process.Kill()
				o.cmd.Process.Wait() // its output goes on: the child has it
				for start := time.Now(); w.Valid() || w.Drain(func(*mm.Record) {}) != feed.DeadState; runtime.Gosched() {
					if time.Since(start) > 20*time.Second {
						t.Fatal("the watch of a process that has ended lives on")
					}
				}
				if err := unix.Kill(child, 0); err != nil {
					t.Errorf("the child: %v", err)
				}
			})
		}
	}
}

// A process that held the machine and the watch of another one is killed: that
// one is unharmed, and the next holder sees its changes.
func TestHolderKilled(t *testing.T) {
	machine.NeedKVM(t)
	o := startOther(t, "inject")
	t.Setenv(otherHeld, strconv.Itoa(o.cmd.Process.Pid))
	holder := startOther(t, "inject")
	holder.do("hold")
	o.do("drop")
	holder.cmd.Process.Kill()
	holder.cmd.Process.Wait()
	o.do("drop")
	w := openOn(t, Options{PID: o.cmd.Process.Pid, Tier: tracer.TierNotifierTracepoint, Inject: true})
	o.cached(w)
	o.dropped(w)
}

func TestOtherRefused(t *testing.T) {
	machine.NeedKVM(t)
	o := startOther(t, "inject")
	pid, tier := o.cmd.Process.Pid, tracer.TierNotifierTracepoint
	// a tier that does not exist is refused before anything is done to the process
	if _, err := Open(Options{PID: pid, Tier: tracer.Tier(99), Inject: true}); err == nil || !strings.Contains(err.Error(), "cannot be opened") {
		t.Errorf("no such tier: %v", err)
	}
	if _, err := Open(Options{PID: pid, Tier: tier}); err == nil {
		t.Error("a process without a notifier is watched")
	}
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	if _, err := Open(Options{PID: pid, Tier: tier, VM: null}); err == nil {
		t.Error("/dev/null is taken for a machine")
	}
	kvm, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(kvm)
	var vm uintptr
	for e := unix.EINTR; e == unix.EINTR; {
		vm, _, e = unix.Syscall(unix.SYS_IOCTL, uintptr(kvm), 0xae01, 0)
	}
	own := os.NewFile(vm, "vm")
	defer own.Close()
	if _, err := Open(Options{PID: pid, Tier: tier, VM: own}); err == nil {
		t.Error("a machine of this process is taken for the other's")
	}
	o.cmd.Process.Kill()
	o.cmd.Wait()
	if _, err := Open(Options{PID: pid, Tier: tier, Inject: true}); err == nil || errors.Is(err, inject.ErrSeccomp) {
		t.Errorf("a process that has ended: %v", err)
	}
}
