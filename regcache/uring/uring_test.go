// SPDX-License-Identifier: Apache-2.0

package uring

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

const rw = regcache.LocalWrite

func TestMain(m *testing.M) {
	if child := os.Getenv("URING_TEST_CHILD"); child != "" {
		if err := children[child](); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	// The runtime opens its poller on first use and keeps it.
	if r, w, err := os.Pipe(); err == nil {
		r.Close()
		w.Close()
	}
	fds, pin := openFiles(), pinned()
	code := m.Run()
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	if n := openFiles(); n != fds {
		fmt.Fprintf(os.Stderr, "%d open files before the tests, %d after\n", fds, n)
		code = 1
	}
	if p := pinned(); p != pin {
		fmt.Fprintf(os.Stderr, "%d bytes pinned before the tests, %d after\n", pin, p)
		code = 1
	}
	os.Exit(code)
}

func openFiles() int {
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		panic(err)
	}
	return len(fds)
}

func openRing(t testing.TB, o Options) *Ring {
	t.Helper()
	r, err := Open(o)
	if err != nil {
		t.Fatalf("these tests need io_uring: %v", err)
	}
	t.Cleanup(func() {
		if err := r.Close(); err != nil {
			t.Error(err)
		}
	})
	return r
}

// memory maps n pages, touched, and returns them with their range.
func memory(t testing.TB, pages, prot, flags int) ([]byte, mm.Range) {
	t.Helper()
	m, err := unix.Mmap(-1, 0, pages*os.Getpagesize(), prot, flags|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(m) })
	return m, rangeOf(m)
}

func private(t testing.TB, pages int) ([]byte, mm.Range) {
	t.Helper()
	return memory(t, pages, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
}

func rangeOf(m []byte) mm.Range {
	start := mm.Addr(uintptr(unsafe.Pointer(&m[0])))
	return mm.Range{Start: start, End: start + mm.Addr(len(m))}
}

func part(r mm.Range, off, n int) mm.Range {
	return mm.Range{Start: r.Start + mm.Addr(off), End: r.Start + mm.Addr(off+n)}
}

// file returns the descriptor of a memfd with the given contents.
func file(t testing.TB, contents []byte) int {
	t.Helper()
	fd, err := unix.MemfdCreate("uring-test", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	if _, err := unix.Pwrite(fd, contents, 0); err != nil {
		t.Fatal(err)
	}
	return fd
}

// diskFile is like file, on a file system with a disk behind it.
func diskFile(t testing.TB, contents []byte) int {
	t.Helper()
	f, err := os.CreateTemp("/var/tmp", "uring-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &fs); err != nil || fs.Type == unix.TMPFS_MAGIC {
		t.Fatalf("/var/tmp is on file system %#x (%v): needs one with a disk behind it", fs.Type, err)
	}
	if _, err := f.WriteAt(contents, 0); err != nil {
		t.Fatal(err)
	}
	return int(f.Fd())
}

func pattern(n int, seed byte) []byte {
	p := make([]byte, n)
	for i := range p {
		p[i] = byte(i*7+i>>8) ^ seed
	}
	return p
}

func mustRegister(t testing.TB, r *Ring, rng mm.Range) Buf {
	t.Helper()
	b, err := r.Register(rng, rw)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func mustDeregister(t testing.TB, r *Ring, b Buf) {
	t.Helper()
	if err := r.Deregister(b); err != nil {
		t.Fatal(err)
	}
}

func wantErr(t testing.TB, what string, err, want error) {
	t.Helper()
	if !errors.Is(err, want) {
		t.Errorf("%s: error %v, want %v", what, err, want)
	}
}

func TestLayout(t *testing.T) {
	for name, size := range map[string][2]uintptr{
		"io_uring_sqe":           {unsafe.Sizeof(sqe{}), 64},
		"io_uring_cqe":           {unsafe.Sizeof(cqe{}), 16},
		"io_uring_params":        {unsafe.Sizeof(setupParams{}), 120},
		"io_uring_rsrc_register": {unsafe.Sizeof(rsrcRegister{}), 32},
		"io_uring_rsrc_update2":  {unsafe.Sizeof(rsrcUpdate{}), 32},
	} {
		if size[0] != size[1] {
			t.Errorf("%s has %d bytes, want %d", name, size[0], size[1])
		}
	}
}

func TestTransfer(t *testing.T) {
	for name, sparse := range map[string]bool{"sparse table (5.19)": true, "table of empty entries (5.13)": false} {
		t.Run(name, func(t *testing.T) {
			r, err := open(Options{Slots: 8, Requests: 2}, sparse)
			if err != nil {
				t.Fatal(err)
			}
			defer r.Close()
			m, whole := private(t, 4)
			rng := part(whole, 100, len(m)-300) // neither end on a page
			b := mustRegister(t, r, rng)
			if b.Range() != rng {
				t.Errorf("range of the buffer %v, want %v", b.Range(), rng)
			}
			in := pattern(10000, 1)
			src, dst := file(t, in), file(t, nil)

			n, err := r.ReadFixed(src, 17, b, part(rng, 5, 9000))
			if n != 9000 || err != nil {
				t.Fatalf("read: %d, %v", n, err)
			}
			if !bytes.Equal(m[105:9105], in[17:9017]) || m[104] != 0 || m[9105] != 0 {
				t.Error("the CPU does not see exactly the bytes that were read")
			}
			n, err = r.WriteFixed(dst, 3, b, part(rng, 1000, 4097))
			if n != 4097 || err != nil {
				t.Fatalf("write: %d, %v", n, err)
			}
			out := make([]byte, 5000)
			k, _ := unix.Pread(dst, out, 0)
			if k != 4100 || !bytes.Equal(out[3:k], m[1100:1100+4097]) {
				t.Error("the file does not have the bytes of the buffer")
			}

			if n, err := r.ReadFixed(src, 9990, b, part(rng, 0, 100)); n != 10 || err != nil {
				t.Errorf("read across the end: %d, %v, want 10", n, err)
			}
			_, err = r.ReadFixed(src, 10000, b, part(rng, 0, 100))
			wantErr(t, "read at the end", err, io.EOF)
			_, err = r.ReadFixed(src, 0, b, part(rng, -1, 10))
			wantErr(t, "read before the buffer", err, ErrOutside)
			_, err = r.ReadFixed(src, 0, b, part(whole, 100, len(m)-299))
			wantErr(t, "read past the buffer", err, ErrOutside)
			_, err = r.ReadFixed(-1, 0, b, rng)
			wantErr(t, "read of no file", err, unix.EBADF)
			mustDeregister(t, r, b)
			if err := r.Close(); err != nil {
				t.Error(err)
			}
		})
	}
}

// A registered buffer goes on meaning the old pages: what this is all about.
func TestStale(t *testing.T) {
	r := openRing(t, Options{})
	m, rng := private(t, 2)
	b := mustRegister(t, r, rng)
	if _, err := unix.MmapPtr(-1, 0, unsafe.Pointer(&m[0]), uintptr(os.Getpagesize()),
		unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	in := pattern(len(m), 3)
	if n, err := r.ReadFixed(file(t, in), 0, b, rng); n != len(m) || err != nil {
		t.Fatal(n, err)
	}
	page := os.Getpagesize()
	if !bytes.Equal(m[:page], make([]byte, page)) {
		t.Error("the replaced page was written through the old registration")
	}
	if !bytes.Equal(m[page:], in[page:]) {
		t.Error("the kept page was not written")
	}
	mustDeregister(t, r, b)
}

func TestTable(t *testing.T) {
	r := openRing(t, Options{Slots: 4})
	_, rng := private(t, 5)
	page := os.Getpagesize()
	var bufs []Buf
	for i := range 4 {
		bufs = append(bufs, mustRegister(t, r, part(rng, i*page, page)))
	}
	_, err := r.Register(part(rng, 4*page, page), rw)
	wantErr(t, "fifth of four", err, regcache.ErrLimit)
	var full *TableError
	if !errors.As(err, &full) || full.Slots != 4 {
		t.Errorf("%v: want a TableError with 4 slots", err)
	}
	awaitRelease(r)
	if got, want := r.Stats(), (Stats{Slots: 4, Registered: 4, RegisteredBytes: uint64(4 * page)}); got != want {
		t.Errorf("stats %+v, want %+v", got, want)
	}

	old := bufs[2]
	mustDeregister(t, r, old)
	b := mustRegister(t, r, part(rng, 4*page, page))
	if b.Slot() != old.Slot() {
		t.Errorf("slot %d, want the free one, %d", b.Slot(), old.Slot())
	}
	wantErr(t, "deregister again", r.Deregister(old), ErrNotRegistered)
	_, err = r.ReadFixed(file(t, pattern(page, 1)), 0, old, old.Range())
	wantErr(t, "transfer with the old buffer", err, ErrNotRegistered)
	wantErr(t, "deregister the zero Buf", r.Deregister(Buf{}), ErrNotRegistered)
	bufs[2] = b
	for _, b := range bufs {
		mustDeregister(t, r, b)
	}
	awaitRelease(r)
	if got, want := r.Stats(), (Stats{Slots: 4}); got != want {
		t.Errorf("stats %+v, want %+v", got, want)
	}
}

// awaitRelease waits for what kernels before 6.4 release late. On others it
// does nothing: there, what is to be released has been.
func awaitRelease(r *Ring) {
	if r.lateSteps == 0 {
		return
	}
	for r.Stats().Releasing > 0 {
		time.Sleep(time.Millisecond)
	}
	time.Sleep(lateSteps * releaseStep)
}

func TestRefused(t *testing.T) {
	r := openRing(t, Options{})
	page := os.Getpagesize()

	t.Run("read-only page, then made writable", func(t *testing.T) { // I4
		m, rng := memory(t, 1, unix.PROT_READ, unix.MAP_PRIVATE)
		_, err := r.Register(rng, 0)
		wantErr(t, "read-only", err, unix.EFAULT)
		if err := unix.Mprotect(m, unix.PROT_READ|unix.PROT_WRITE); err != nil {
			t.Fatal(err)
		}
		mustDeregister(t, r, mustRegister(t, r, rng))
	})
	t.Run("not mapped", func(t *testing.T) {
		m, rng := private(t, 3)
		if err := unix.MunmapPtr(unsafe.Pointer(&m[page]), uintptr(page)); err != nil {
			t.Fatal(err)
		}
		_, err := r.Register(rng, rw)
		wantErr(t, "hole", err, unix.EFAULT)
		mustDeregister(t, r, mustRegister(t, r, part(rng, 0, page)))
	})
	t.Run("shared file", func(t *testing.T) {
		m, err := unix.Mmap(diskFile(t, pattern(page, 1)), 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(m)
		if _, err := r.Register(rangeOf(m), rw); !errors.Is(err, unix.EFAULT) && !errors.Is(err, unix.EOPNOTSUPP) {
			t.Errorf("error %v, want EFAULT (6.5) or EOPNOTSUPP", err)
		}
	})
	t.Run("memfd is not refused", func(t *testing.T) {
		m, err := unix.Mmap(file(t, pattern(page, 1)), 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(m)
		mustDeregister(t, r, mustRegister(t, r, rangeOf(m)))
	})
	t.Run("sizes", func(t *testing.T) {
		_, err := r.Register(mm.Range{}, rw)
		wantErr(t, "empty", err, mm.ErrEmptyRange)
		_, err = r.Register(mm.Range{Start: 4096, End: 4097 + 1<<30}, rw)
		wantErr(t, "more than 1 GiB", err, ErrTooLong)
	})
	if s := r.Stats(); s.Registered != 0 || s.RegisteredBytes != 0 {
		t.Errorf("refused buffers are counted: %+v", s)
	}
}

func TestPinned(t *testing.T) {
	r := openRing(t, Options{})
	awaitRelease(r)
	base := pinned()
	_, rng := private(t, 16)
	b := mustRegister(t, r, part(rng, 1, 4*os.Getpagesize())) // touches 5 pages
	if got, want := pinned()-base, uint64(5*os.Getpagesize()); got != want {
		t.Errorf("%d bytes pinned, want %d", got, want)
	}
	mustDeregister(t, r, b)
	awaitRelease(r)
	if got := pinned(); got != base {
		t.Errorf("%d bytes pinned after deregistering, %d before registering", got, base)
	}
}

// A transfer in flight keeps the pages of a buffer that is deregistered under
// it, and still reaches them.
func TestReleaseLate(t *testing.T) {
	r := openRing(t, Options{})
	awaitRelease(r)
	base := pinned()
	m, rng := private(t, 1)
	b := mustRegister(t, r, rng)
	pr, pw := pipe(t)
	type result struct {
		n   int
		err error
	}
	read := make(chan result)
	go func() {
		n, err := r.ReadFixed(pr, -1, b, rng)
		read <- result{n, err}
	}()
	awaitInFlight(r, 1)
	mustDeregister(t, r, b)
	size := uint64(os.Getpagesize())
	if got := pinned() - base; got != size {
		t.Errorf("%d bytes pinned while the transfer runs, want %d", got, size)
	}
	if s := r.Stats(); s.Registered != 0 || s.Releasing != 1 || s.ReleasingBytes != size {
		t.Errorf("stats while the transfer runs: %+v", s)
	}
	if _, err := unix.Write(pw, []byte("late")); err != nil {
		t.Fatal(err)
	}
	if got := <-read; got.n != 4 || got.err != nil {
		t.Errorf("read: %+v", got)
	}
	if string(m[:4]) != "late" {
		t.Errorf("the CPU reads %q", m[:4])
	}
	awaitRelease(r)
	if got := pinned(); got != base {
		t.Errorf("%d bytes pinned after the transfer, want %d", got, base)
	}
	if s := r.Stats(); s.Releasing != 0 || s.ReleasingBytes != 0 {
		t.Errorf("stats after the transfer: %+v", s)
	}
}

func pipe(t testing.TB) (r, w int) {
	t.Helper()
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(p[0]); unix.Close(p[1]) })
	return p[0], p[1]
}

// awaitInFlight returns when n requests are in the kernel and one goroutine
// waits there.
func awaitInFlight(r *Ring, n int) {
	for {
		r.mu.Lock()
		ok := r.inFlight == n && r.waiting
		r.mu.Unlock()
		if ok {
			return
		}
		syscall.Syscall(unix.SYS_SCHED_YIELD, 0, 0, 0)
	}
}

func TestMadvise(t *testing.T) {
	r := openRing(t, Options{})
	m, rng := private(t, 3)
	copy(m, pattern(len(m), 9))
	page := os.Getpagesize()
	if err := r.Madvise(part(rng, page, page), unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	want := pattern(len(m), 9)
	clear(want[page : 2*page])
	if !bytes.Equal(m, want) {
		t.Error("not exactly the middle page was dropped")
	}
	wantErr(t, "unknown advice", r.Madvise(rng, 12345), unix.EINVAL)
}

func TestClose(t *testing.T) {
	r, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	_, rng := private(t, 1)
	b := mustRegister(t, r, rng)
	wantErr(t, "close with a buffer", r.Close(), ErrBusy)
	src := file(t, pattern(10, 1))
	if n, err := r.ReadFixed(src, 0, b, rng); n != 10 || err != nil {
		t.Errorf("the refused Close did harm: %d, %v", n, err)
	}

	pr, _ := pipe(t)
	blocked := make(chan error)
	for range 3 {
		go func() {
			_, err := r.ReadFixed(pr, -1, b, rng)
			blocked <- err
		}()
	}
	awaitInFlight(r, 3)
	mustDeregister(t, r, b)
	closed := make(chan error)
	for range 2 {
		go func() { closed <- r.Close() }()
	}
	for range 3 {
		wantErr(t, "blocked transfer", <-blocked, os.ErrClosed)
	}
	for range 2 {
		if err := <-closed; err != nil {
			t.Error(err)
		}
	}
	if err := r.Close(); err != nil {
		t.Errorf("close again: %v", err)
	}
	_, err = r.Register(rng, rw)
	wantErr(t, "register after close", err, os.ErrClosed)
	wantErr(t, "deregister after close", r.Deregister(b), os.ErrClosed)
	_, err = r.ReadFixed(src, 0, b, rng)
	wantErr(t, "read after close", err, os.ErrClosed)
	wantErr(t, "madvise after close", r.Madvise(rng, unix.MADV_DONTNEED), os.ErrClosed)
	r.Stats()
}

// Goroutines register, transfer and deregister at once, more than the ring
// has requests, with one blocked in a pipe all the while.
func TestConcurrent(t *testing.T) {
	const workers, rounds = 8, 300
	r := openRing(t, Options{Slots: workers + 1, Requests: 3})
	pr, pw := pipe(t)
	_, prng := private(t, 1)
	pb := mustRegister(t, r, prng)
	blocked := make(chan error)
	go func() {
		_, err := r.ReadFixed(pr, -1, pb, prng)
		blocked <- err
	}()
	awaitInFlight(r, 1)
	var wg sync.WaitGroup
	for w := range workers {
		m, rng := private(t, 2)
		in := pattern(len(m), byte(w))
		src := file(t, in)
		wg.Go(func() {
			for i := range rounds {
				b, err := r.Register(rng, rw)
				if err != nil {
					t.Error(err)
					return
				}
				clear(m)
				if n, err := r.ReadFixed(src, 0, b, rng); n != len(m) || err != nil || !bytes.Equal(m, in) {
					t.Errorf("worker %d, round %d: %d, %v", w, i, n, err)
				}
				if err := r.Deregister(b); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if _, err := unix.Write(pw, []byte{1}); err != nil {
		t.Fatal(err)
	}
	if err := <-blocked; err != nil {
		t.Error(err)
	}
	mustDeregister(t, r, pb)
	awaitRelease(r)
	s := r.Stats()
	if want := uint64(workers*rounds + 1); s.Requests != want || s.Registered != 0 || s.Releasing != 0 {
		t.Errorf("stats %+v, want %d requests and nothing held", s, want)
	}
}

func TestNoAllocations(t *testing.T) {
	r := openRing(t, Options{})
	_, rng := private(t, 1)
	src := file(t, pattern(100, 1))
	b := mustRegister(t, r, rng)
	if n := testing.AllocsPerRun(100, func() { r.ReadFixed(src, 0, b, rng) }); n != 0 {
		t.Errorf("a transfer allocates %v times", n)
	}
	mustDeregister(t, r, b)
	if n := testing.AllocsPerRun(100, func() { b, _ := r.Register(rng, rw); r.Deregister(b) }); n != 0 {
		t.Errorf("registering allocates %v times", n)
	}
}

func TestExplainSetup(t *testing.T) {
	for _, c := range []struct {
		name   string
		err    error
		sysctl string
		rerr   error
		is     error
		says   string
	}{
		{"off", unix.EPERM, "2\n", nil, ErrDisabled, "kernel.io_uring_disabled is 2"},
		{"group only", unix.EPERM, "1\n", nil, ErrDisabled, "kernel.io_uring_disabled is 1"},
		{"seccomp", unix.EPERM, "0\n", nil, ErrDisabled, "seccomp"},
		{"before 6.6", unix.EPERM, "", os.ErrNotExist, ErrDisabled, "seccomp"},
		{"before 5.1", unix.ENOSYS, "", os.ErrNotExist, ErrNotSupported, "5.13"},
		{"other", unix.ENOMEM, "0\n", nil, unix.ENOMEM, "io_uring_setup"},
	} {
		t.Run(c.name, func(t *testing.T) {
			err := explainSetup(c.err, []byte(c.sysctl), c.rerr)
			wantErr(t, "sentinel", err, c.is)
			wantErr(t, "cause", err, c.err)
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("%q does not say %q", err, c.says)
			}
		})
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{Slots: -1}, {Slots: 16385}, {Requests: -1}, {Requests: 4097}} {
		if _, err := Open(o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
	r := openRing(t, Options{Slots: 16384, Requests: 4096})
	if n := r.Stats().Slots; n != 16384 {
		t.Errorf("%d slots", n)
	}
}

// children run in a process of their own, started by child.
var children = map[string]func() error{
	"memlock": memlockChild,
	"seccomp": seccompChild,
}

func child(t *testing.T, name string, attr *syscall.SysProcAttr) {
	t.Helper()
	// A copy that another user can read, wherever the test binary is.
	exe := filepath.Join(os.TempDir(), fmt.Sprintf("uring-test-%d", os.Getpid()))
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(exe, self, 0o755); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(exe)
	cmd := exec.Command(exe)
	cmd.Env = append(os.Environ(), "URING_TEST_CHILD="+name)
	cmd.Dir = "/"
	cmd.SysProcAttr = attr
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// TestMemlock is case I10: the limit of an ordinary user.
func TestMemlock(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root, to become another user")
	}
	// As root, before the child starts: the default can be less (64 KiB
	// before Linux 5.16), and an ordinary user cannot raise it.
	var old unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &old); err != nil {
		t.Fatal(err)
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: memlock, Max: memlock}); err != nil {
		t.Fatal(err)
	}
	defer unix.Setrlimit(unix.RLIMIT_MEMLOCK, &old)
	// A user of its own: all processes of a user share the counter.
	id := uint32(100000 + os.Getpid())
	child(t, "memlock", &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: id, Gid: id}})
}

const memlock = 1 << 20

func memlockChild() error {
	const limit, size = memlock, 512 << 10
	r, err := Open(Options{})
	if err != nil {
		return err
	}
	// Never both, whether the kernel charges the ring as well (6.18) or not.
	var rng [2]mm.Range
	for i, n := range []int{size, size + os.Getpagesize()} {
		m, err := unix.Mmap(-1, 0, n, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return err
		}
		// No huge pages, which are charged as a whole.
		if err := unix.Madvise(m, unix.MADV_NOHUGEPAGE); err != nil {
			return err
		}
		rng[i] = rangeOf(m)
	}
	first, err := r.Register(rng[0], rw)
	if err != nil {
		return fmt.Errorf("first of two: %w", err)
	}
	_, err = r.Register(rng[1], rw)
	var full *MemlockError
	if !errors.As(err, &full) || !errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("over the limit: %w, want a MemlockError", err)
	}
	if full.Limit != limit || full.Need != rng[1].Len() || full.Used < size {
		return fmt.Errorf("limit %d, used %d, need %d", full.Limit, full.Used, full.Need)
	}
	if s := err.Error(); !strings.Contains(s, "RLIMIT_MEMLOCK") || !strings.Contains(s, "1048576") {
		return fmt.Errorf("%q does not name the limit", s)
	}
	if err := r.Deregister(first); err != nil {
		return err
	}
	second, err := r.Register(rng[1], rw)
	if err != nil {
		return fmt.Errorf("after deregistering the first: %w", err)
	}
	if err := r.Deregister(second); err != nil {
		return err
	}
	return errors.Join(memlockThroughCache(r, limit, rng[0], rng[1]), r.Close())
}

func TestDisabled(t *testing.T) { child(t, "seccomp", nil) }

// seccompChild refuses io_uring_setup as containers do.
func seccompChild() error {
	filter := []unix.SockFilter{
		{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: 0}, // seccomp_data.nr
		{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: unix.SYS_IO_URING_SETUP, Jt: 0, Jf: 1},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ERRNO | uint32(unix.EPERM)},
		{Code: unix.BPF_RET | unix.BPF_K, K: unix.SECCOMP_RET_ALLOW},
	}
	prog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	runtime.LockOSThread() // TSYNC takes both to the other threads
	if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("no new privileges: %w", err)
	}
	if _, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog))); errno != 0 {
		return fmt.Errorf("set filter: %w", errno)
	}
	says := "kernel.io_uring_disabled is 0"
	if _, err := os.Stat(disabledSysctl); err != nil { // before 6.6
		says = "seccomp"
	}
	if _, err := Open(Options{}); !errors.Is(err, ErrDisabled) || !strings.Contains(err.Error(), says) {
		return fmt.Errorf("error %v, want ErrDisabled that says %q", err, says)
	}
	return nil
}

func BenchmarkRegister(b *testing.B) {
	for _, size := range []int{4 << 10, 64 << 10, 1 << 20, 16 << 20} {
		b.Run(fmt.Sprintf("%dKiB", size>>10), func(b *testing.B) {
			r := openRing(b, Options{})
			_, rng := private(b, size/os.Getpagesize())
			b.ReportAllocs()
			for b.Loop() {
				buf, err := r.Register(rng, rw)
				if err != nil {
					b.Fatal(err)
				}
				if err := r.Deregister(buf); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A read that finds its pages in the page cache completes inline where the
// file system can (ext4, XFS); shmem hands it to a worker.
func BenchmarkReadFixed(b *testing.B) {
	for _, size := range []int{64, 4 << 10, 64 << 10} {
		src := map[string]int{"file": diskFile(b, pattern(size, 1)), "memfd": file(b, pattern(size, 1))}
		for kind, fd := range src {
			b.Run(fmt.Sprintf("%s/%dB", kind, size), func(b *testing.B) {
				r := openRing(b, Options{})
				_, rng := private(b, 16)
				buf := mustRegister(b, r, rng)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					if n, err := r.ReadFixed(fd, 0, buf, part(rng, 0, size)); n != size || err != nil {
						b.Fatal(n, err)
					}
				}
				mustDeregister(b, r, buf)
			})
		}
	}
}
