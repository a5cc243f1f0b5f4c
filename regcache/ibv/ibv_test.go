// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ibv

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What needs a device is tested by test/verbs, in guests that have one.

func TestWithoutCgo(t *testing.T) {
	c := exec.Command("go", "test", "-count=1", "-v", "-run", "^TestNotBuilt$", ".")
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := c.CombinedOutput()
	if err != nil || !strings.Contains(string(out), "--- PASS: TestNotBuilt") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestFlags(t *testing.T) {
	const lr, lw, rr, rw, ra = regcache.Access(0), regcache.LocalWrite, regcache.RemoteRead, regcache.RemoteWrite, regcache.RemoteAtomic
	for _, c := range []struct {
		rights regcache.Access
		o      Options
		names  string
		gives  regcache.Access
	}{
		{lr, Options{}, "none", lr},
		{lw, Options{}, "LOCAL_WRITE", lw},
		{rr, Options{}, "REMOTE_READ", rr},
		{rw, Options{}, "LOCAL_WRITE|REMOTE_WRITE", lw | rw},
		{ra, Options{}, "LOCAL_WRITE|REMOTE_ATOMIC", lw | ra},
		{lw | rr | rw | ra, Options{}, "LOCAL_WRITE|REMOTE_WRITE|REMOTE_READ|REMOTE_ATOMIC", lw | rr | rw | ra},
		{rr, Options{OnDemand: true}, "REMOTE_READ|ON_DEMAND", rr},
		{lw, Options{RelaxedOrdering: true}, "LOCAL_WRITE|RELAXED_ORDERING", lw},
	} {
		f := flagsOf(c.rights, c.o)
		if flagNames(f) != c.names || rightsOf(f) != c.gives {
			t.Errorf("%v, %+v: %s, rights %v; want %s, %v", c.rights, c.o, flagNames(f), rightsOf(f), c.names, c.gives)
		}
		if !rightsOf(f).Has(c.rights) {
			t.Errorf("%v: asked for more than %v", c.rights, rightsOf(f))
		}
	}
}

// No two errnos are explained by the same words, and the figures are there.
func TestExplain(t *testing.T) {
	r := mm.Range{Start: 0x10000, End: 0x30000}
	for _, c := range []struct {
		name  string
		e     RegisterError
		says  string
		limit bool
	}{
		{"memlock", RegisterError{Errno: unix.ENOMEM, Memlock: 65536, Pinned: 4096, Need: 131072}, "limit 65536 bytes (RLIMIT_MEMLOCK, ulimit -l), 4096 pinned now, 131072 needed", true},
		{"no memlock", RegisterError{Errno: unix.ENOMEM, Need: 131072, Live: 3, Max: 4096}, "3 memory regions of this process, the device has 4096", true},
		{"cgroup", RegisterError{Errno: unix.EAGAIN}, "rdma.max", true},
		{"full", RegisterError{Errno: unix.EINVAL, Live: 8, Max: 8}, "no region is free", true},
		{"too long", RegisterError{Errno: unix.EINVAL, Max: 8, MaxSize: 65536}, "131072 bytes, and the device can have 65536", false},
		{"combination", RegisterError{Errno: unix.EINVAL, Max: 8}, "combination of rights", false},
		{"fault", RegisterError{Errno: unix.EFAULT}, "not mapped", false},
		{"on demand", RegisterError{Errno: unix.EOPNOTSUPP, Flags: "LOCAL_WRITE|ON_DEMAND"}, "on-demand paging", false},
		{"unsupported", RegisterError{Errno: unix.EOPNOTSUPP, Flags: "LOCAL_WRITE"}, "cannot be pinned for long", false},
		{"permission", RegisterError{Errno: unix.EACCES}, "not permitted", false},
		{"removed", RegisterError{Errno: unix.EIO, Removed: true}, "device was removed", false},
		{"bound", RegisterError{Op: opDeregister, Errno: unix.EBUSY}, "memory window", false},
		{"other", RegisterError{Errno: unix.EXDEV}, "not known", false},
	} {
		t.Run(c.name, func(t *testing.T) {
			c.e.Range = r
			if c.e.Op == "" {
				c.e.Op = opRegister
			}
			var err error = fmt.Errorf("x: %w", &c.e)
			if !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), r.String()) {
				t.Errorf("%v\nlacks %q", err, c.says)
			}
			if errors.Is(err, regcache.ErrLimit) != c.limit || !errors.Is(err, c.e.Errno) || errors.Is(err, ErrRemoved) != c.e.Removed {
				t.Errorf("%v: is %v, %v, %v", err, errors.Is(err, regcache.ErrLimit), errors.Is(err, c.e.Errno), errors.Is(err, ErrRemoved))
			}
		})
	}
}

func TestNoSuchDevice(t *testing.T) {
	_, err := Open("no-such-device")
	if !errors.Is(err, ErrNoDevice) || !strings.Contains(err.Error(), `"no-such-device"`) {
		t.Error(err)
	}
	names, err := Devices()
	if err != nil {
		t.Error(err)
	}
	for _, n := range names {
		if !strings.Contains((&OpenError{Name: "x", Have: names, Errno: syscall.ENODEV}).Error(), n) {
			t.Errorf("%s is not named", n)
		}
	}
	if _, err := os.Stat("/dev/infiniband/rdma_cm"); err == nil {
		return
	}
	if _, err := Listen(netip.MustParseAddrPort("127.0.0.1:0")); err == nil {
		t.Error("listens without rdma_cm")
	}
	if _, err := Resolve(netip.MustParseAddrPort("127.0.0.1:1")); err == nil {
		t.Error("resolves without rdma_cm")
	}
}

var static [64]byte

// The runtime tells memory that may be registered from memory that may not.
func TestWhoseMemory(t *testing.T) {
	at := func(p *byte) mm.Addr { return mm.Addr(uintptr(unsafe.Pointer(p))) }
	mapped, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(mapped)
	heap := make([]byte, 1<<20)
	for _, c := range []struct {
		name string
		p    *byte
		want bool
	}{{"mmap", &mapped[0], false}, {"static", &static[0], false}, {"heap", &heap[0], true}, {"inside of it", &heap[70001], true}} {
		if got := heapUnpinned(at(c.p)); got != c.want {
			t.Errorf("%s: unpinned heap: %v, want %v", c.name, got, c.want)
		}
	}
	var pin runtime.Pinner
	pin.Pin(&heap[0])
	if heapUnpinned(at(&heap[0])) || heapUnpinned(at(&heap[70001])) {
		t.Error("refused although it is pinned")
	}
	pin.Unpin()
	if !heapUnpinned(at(&heap[0])) {
		t.Error("not refused after it was unpinned")
	}
	_, err = new(PD).Register(mm.Range{Start: at(&heap[0]), End: at(&heap[0]) + 4096}, 0)
	if !errors.Is(err, ErrGoMemory) {
		t.Errorf("Register: %v, want ErrGoMemory", err)
	}
	runtime.KeepAlive(heap)
}

func TestClosedAndEmpty(t *testing.T) {
	p := new(PD)
	if _, err := p.Register(mm.Range{Start: 0x10000, End: 0x11000}, 0); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
	if _, err := p.Register(mm.Range{}, 0); !errors.Is(err, mm.ErrEmptyRange) {
		t.Error(err)
	}
	if _, err := p.RegisterBytes(nil, 0); !errors.Is(err, mm.ErrEmptyRange) {
		t.Error(err)
	}
	if err := p.Deregister(nil); !errors.Is(err, ErrNotRegistered) {
		t.Error(err)
	}
	if err := p.Deregister(&MR{pd: new(PD)}); !errors.Is(err, ErrNotRegistered) {
		t.Errorf("of another protection domain: %v", err)
	}
	if err := p.Close(); err != nil {
		t.Error(err)
	}
	d := new(Device)
	if _, err := d.NewPD(Options{}); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
	if err := d.Close(); err != nil {
		t.Error(err)
	}
}
