// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// ownAndEnd is what a daemon does, in a process of its own: it opens a feed of
// its parent, hands out the descriptors, and when it is told ends in this way.
func ownAndEnd(way string) error {
	conn := os.NewFile(3, "socket")
	t, err := Open(Options{poll: way == "polled"})
	if err != nil {
		return err
	}
	f, err := t.OpenFeed(PID(os.Getppid()), FeedOptions{NoWakeup: true})
	if err != nil {
		return err
	}
	rights := unix.UnixRights(f.StatusFD(), f.EpochFD(), f.InterestFD())
	if err := unix.Sendmsg(int(conn.Fd()), []byte{0}, rights, nil, 0); err != nil {
		return err
	}
	term := make(chan os.Signal, 1)
	signal.Notify(term, unix.SIGTERM)
	if way == "leader" {
		// The goroutine that runs main.main is on the main thread (TestMain
		// is told so by init), which ends now; the process lives on.
		go func() {
			io.ReadFull(conn, make([]byte, 1))
			os.Exit(0)
		}()
		// Not RawSyscall: the runtime would wait for this thread when it next
		// stops the world.
		unix.Syscall(unix.SYS_EXIT, 0, 0, 0)
	}
	if way == "term" {
		<-term
		return t.Close()
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		return err
	}
	switch way {
	case "crash":
		signal.Reset()
		unix.Kill(os.Getpid(), unix.SIGSEGV)
		select {}
	case "exec":
		return unix.Exec("/bin/sleep", []string{"sleep", "60"}, nil)
	case "exit":
		os.Exit(0)
	}
	select {} // to be killed
}

func init() {
	if os.Getenv("UMMU_TEST_ROLE") == "owner-leader" {
		runtime.LockOSThread() // main.main stays on the main thread
	}
}

// owner is such a process, seen from its parent.
type owner struct {
	cmd      *exec.Cmd
	conn     *os.File
	status   *layout.Status
	epoch    *layout.Epoch
	interest *layout.Interest
}

func startOwner(t *testing.T, way string) *owner {
	t.Helper()
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	theirs := os.NewFile(uintptr(pair[1]), "socket")
	o := &owner{cmd: exec.Command("/proc/self/exe"), conn: os.NewFile(uintptr(pair[0]), "socket")}
	o.cmd.Env = append(os.Environ(), "UMMU_TEST_ROLE=owner-"+way)
	o.cmd.ExtraFiles = []*os.File{theirs}
	if way != "crash" { // whose last words are long
		o.cmd.Stderr = os.Stderr
	}
	if err := o.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	t.Cleanup(func() {
		o.cmd.Process.Kill()
		o.cmd.Wait()
		o.conn.Close()
	})
	buf, oob := make([]byte, 1), make([]byte, unix.CmsgSpace(3*4))
	n, oobn, _, _, err := unix.Recvmsg(pair[0], buf, oob, unix.MSG_CMSG_CLOEXEC)
	if err != nil || n != 1 {
		t.Fatalf("no descriptors: %d, %v", n, err)
	}
	msgs, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(msgs) != 1 {
		t.Fatalf("%d control messages, %v", len(msgs), err)
	}
	fds, err := unix.ParseUnixRights(&msgs[0])
	if err != nil || len(fds) != 3 {
		t.Fatalf("%d descriptors, %v", len(fds), err)
	}
	o.status = (*layout.Status)(shown(t, fds[0]))
	o.epoch = (*layout.Epoch)(shown(t, fds[1]))
	size := (unsafe.Sizeof(layout.Interest{}) + uintptr(mm.PageSize()) - 1) &^ (uintptr(mm.PageSize()) - 1)
	p, err := unix.MmapPtr(fds[2], 0, nil, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.MunmapPtr(p, size) })
	o.interest = (*layout.Interest)(p)
	o.interest.All = 1
	for _, fd := range fds {
		unix.Close(fd)
	}
	return o
}

func (o *owner) dead() bool {
	return atomic.LoadUint64(&o.epoch.Deaths) != 0
}

// expectDeathFirst changes memory until the epoch says that the owner died:
// each change up to then is seen, none is missed before the mark.
func (o *owner) expectDeathFirst(t *testing.T, end func()) {
	t.Helper()
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(page)
	if o.dead() {
		t.Fatal("dead before its end")
	}
	ended := make(chan struct{})
	n, after := 0, 0
	for start := time.Now(); ; {
		before := generation(o.status)
		if err := unix.Madvise(page, unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
		seen := generation(o.status) != before
		if o.dead() {
			break
		}
		if !seen {
			t.Fatalf("change %d was not seen, and the watch is alive (%d after the end)", n, after)
		}
		if n == 1000 {
			go func() { end(); close(ended) }()
		}
		if n++; n > 1000 {
			after++
		}
		if time.Since(start) > 20*time.Second {
			t.Fatalf("alive after %d changes", n)
		}
	}
	<-ended
	t.Logf("%d changes seen, %d of them after the end was asked for", n, after)
	// What comes later changes nothing: no hook is left.
	o.cmd.Process.Kill()
	o.cmd.Wait()
	if !o.dead() {
		t.Error("came back to life")
	}
}

// However the process that loaded the hooks ends, every watch is dead before
// the first hook goes.
func TestOwnerEnds(t *testing.T) {
	for _, way := range []string{"kill", "term", "crash", "exec", "exit", "leader"} {
		t.Run(way, func(t *testing.T) {
			for range max(times(2), 1) {
				o := startOwner(t, way)
				o.expectDeathFirst(t, func() {
					switch way {
					case "kill":
						o.cmd.Process.Kill()
					case "term":
						o.cmd.Process.Signal(unix.SIGTERM)
					default:
						o.conn.Write([]byte{0})
					}
				})
			}
		})
	}
}

// Its first thread is not it.
func TestOwnerLeaderEnds(t *testing.T) {
	o := startOwner(t, "leader")
	eventually(t, "the leader has ended", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", o.cmd.Process.Pid))
		return err == nil && strings.Contains(string(stat), ") Z ")
	})
	if o.dead() {
		t.Error("its watches died with its first thread")
	}
	before := generation(o.status)
	page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Munmap(page); err != nil {
		t.Fatal(err)
	}
	if generation(o.status) == before {
		t.Error("a change was not seen")
	}
}

// Children of the owner, which have copies of its descriptors, may come and go.
func TestOwnerForks(t *testing.T) {
	p := startTracee(t)
	tr := own(t)
	ep := epochOf(t, openFeed(t, tr, PID(p.pid)))
	before := atomic.LoadUint64(&ep.Word)
	for range 20 {
		if out, err := exec.Command("/bin/true").CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	if w := atomic.LoadUint64(&ep.Word); w != before {
		t.Errorf("epoch %#x, was %#x", w, before)
	}
}
