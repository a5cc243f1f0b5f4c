// SPDX-License-Identifier: Apache-2.0

// Package coherence tests the contract end to end: the real kernel side, the
// real feed, the cache, and pages that io_uring pins. The oracle is the frame
// number: a hit whose pages are not the ones that the page tables show now is
// a stale hit. Pinned frames are not reused, so equal numbers mean the same
// page.
package coherence

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/uring"
	"github.com/ummu/ummu/test/extras"
	"github.com/ummu/ummu/tracer"
)

// rounds is how often each race is run. `make test` runs a million of each
// without the race detector, and fewer with it.
var rounds = flag.Int("rounds", 10_000, "rounds of each race")

// tier is how the watches of this process see changes, where a test does not
// ask for one.
var tier tracer.Tier

func init() {
	flag.Func("tier", "`tier` to test: syscall (default), mm, notifier/tracepoint, notifier/probe", func(name string) error {
		for _, t := range []tracer.Tier{tracer.TierSyscall, tracer.TierMM, tracer.TierNotifierTracepoint, tracer.TierNotifierProbe} {
			if t.String() == name {
				tier = t
				return nil
			}
		}
		return errors.New("no such tier")
	})
}

// open is local.Open, of the calling process in the tier under test, or by the
// daemon.
func open(o local.Options) (*feed.Watch, error) {
	if o.Tier == tracer.TierNone && o.PID == 0 {
		if socket != "" {
			return feed.Dial(context.Background(), feed.Options{Socket: socket, RingBytes: o.RingBytes, NoWakeup: o.NoWakeup, Timeout: time.Minute})
		}
		o.Tier = tier
	}
	return local.Open(o)
}

var (
	byDaemon = flag.Bool("daemon", false, "watches of this process by ummufeed serve, which the tests start")
	socket   string // of that
)

// startDaemon starts ummufeed serve with the tier under test; stop ends it.
func startDaemon() (stop func() error, err error) {
	dir, err := os.MkdirTemp("", "ummu-coherence-")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			os.RemoveAll(dir)
		}
	}()
	binary, err := extras.Build(context.Background(), dir, "ummufeed")
	if err != nil {
		return nil, err
	}
	name := tracer.TierSyscall.String()
	if tier != tracer.TierNone {
		name = tier.String()
	}
	path := filepath.Join(dir, "feed.sock")
	c := exec.Command(binary, "serve", "--socket", path, "--tier", name, "--allow-kvm", "--max-watches-per-process", "128")
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	log, err := c.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := c.Start(); err != nil {
		return nil, err
	}
	for lines := bufio.NewScanner(log); lines.Scan(); {
		if strings.Contains(lines.Text(), "msg=serving") {
			copied := make(chan struct{})
			go func() {
				defer close(copied)
				io.Copy(os.Stderr, log)
			}()
			socket = path
			return func() error {
				err := c.Process.Signal(syscall.SIGTERM)
				<-copied
				return errors.Join(err, c.Wait(), os.RemoveAll(dir))
			}, nil
		}
		fmt.Fprintln(os.Stderr, lines.Text())
	}
	return nil, fmt.Errorf("the daemon does not start: %w", c.Wait())
}

func TestMain(m *testing.M) {
	flag.Parse()
	if os.Getenv(hammerEnv) != "" {
		fmt.Fprintln(os.Stderr, hammer())
		os.Exit(1)
	}
	goleak.VerifyTestMain(keeping{m})
}

// keep leaves the kernel side loaded from one test to the next: on emulated
// processors to load it takes longer than most tests.
var keep = flag.Bool("keep", false, "load the kernel side once for all tests")

type keeping struct{ *testing.M }

// Run runs the tests.
func (k keeping) Run() int {
	if *byDaemon {
		stop, err := startDaemon()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		code := k.M.Run()
		if err := stop(); err != nil {
			fmt.Fprintln(os.Stderr, "daemon:", err)
			return 1
		}
		return code
	}
	if !*keep {
		return k.M.Run()
	}
	w, err := open(local.Options{})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code := k.M.Run()
	if err := w.Close(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

var page = int(mm.PageSize())

// pinned is what the tests register: a buffer and the frame of its first page.
type pinned struct {
	buf   uring.Buf
	frame uint64
}

// rig is a process with a feed, a cache, and a device.
type rig struct {
	t       testing.TB
	w       *feed.Watch
	c       *regcache.Cache[pinned]
	ring    *uring.Ring
	pagemap *os.File
}

func newRig(t testing.TB, o local.Options) *rig {
	t.Helper()
	w, err := open(o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return rigOver(t, w)
}

// rigOver makes a rig over a watch that stays the caller's.
func rigOver(t testing.TB, w *feed.Watch) *rig {
	t.Helper()
	r := &rig{t: t, w: w}
	var err error
	if r.pagemap, err = os.Open("/proc/self/pagemap"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.pagemap.Close() })
	if r.ring, err = uring.Open(uring.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.ring.Close(); err != nil {
			t.Error(err)
		}
	})
	if r.c, err = regcache.New(w, r, regcache.Options{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := r.c.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// Register implements regcache.Registrar.
func (r *rig) Register(rng mm.Range, a regcache.Access) (pinned, error) {
	b, err := r.ring.Register(rng, a)
	if err != nil {
		return pinned{}, err
	}
	return pinned{b, r.frame(rng.Start)}, nil
}

// Deregister implements regcache.Registrar.
func (r *rig) Deregister(p pinned) error { return r.ring.Deregister(p.buf) }

// frame is the number of the page frame behind a, 0 if none is present
// (Documentation/admin-guide/mm/pagemap.rst).
func (r *rig) frame(a mm.Addr) uint64 {
	var b [8]byte
	if _, err := r.pagemap.ReadAt(b[:], int64(uint64(a)/uint64(page))*8); err != nil {
		panic(err)
	}
	e := binary.NativeEndian.Uint64(b[:])
	if e>>63 == 0 {
		return 0
	}
	return e & (1<<55 - 1)
}

// block is a mapping at an address of its own.
type block []byte

func ptr(b block) unsafe.Pointer { return unsafe.Pointer(unsafe.SliceData(b)) }

func (b block) start() mm.Addr { return mm.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b)))) }
func (b block) span() mm.Range { return mm.Range{Start: b.start(), End: b.start() + mm.Addr(len(b))} }

// touch makes the pages present.
func (b block) touch() {
	for i := 0; i < len(b); i += page {
		b[i] = byte(i) | 1
	}
}

func mapBlock(t testing.TB, pages int) block {
	t.Helper()
	b, err := unix.MmapPtr(-1, 0, nil, uintptr(pages*page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	return unsafe.Slice((*byte)(b), pages*page)
}

// remap maps fresh memory over b, which may be mapped or not.
func (b block) remap(t testing.TB) {
	_, err := unix.MmapPtr(-1, 0, ptr(b), uintptr(len(b)),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED)
	if err != nil {
		t.Fatal(err)
	}
}

func (b block) unmap(t testing.TB) {
	if err := unix.MunmapPtr(ptr(b), uintptr(len(b))); err != nil {
		t.Fatal(err)
	}
}

func (b block) zap(t testing.TB) {
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
}

// acquire looks b up, and fails the test on a hit whose page is not the one
// that the CPU sees. Nobody may change b meanwhile. It reports whether it was
// a hit.
func (r *rig) acquire(b block) bool {
	before := r.c.Stats().Registrations
	ref, err := r.c.Acquire(b.span(), regcache.LocalWrite)
	if err != nil {
		r.t.Error(err)
		return false
	}
	hit := r.c.Stats().Registrations == before
	b.touch()
	if now, then := r.frame(b.start()), ref.Handle().frame; now != then {
		r.t.Errorf("stale: %v is frame %#x, registered as %#x (hit: %v)", b.span(), now, then, hit)
	}
	ref.Release()
	return hit
}
