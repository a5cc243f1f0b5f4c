// SPDX-License-Identifier: Apache-2.0

//go:build linux

package verbs

import (
	"bytes"
	"errors"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/ibv"
)

// change is something that happens to part of a registered block, all of which
// is mapped afterwards.
type change struct {
	name   string
	shared bool   // of a memfd
	stale  string // of eight pages, 2 to 5 of which are changed, without a feed
	do     func(b block, fd int) error
}

const (
	four    = "..SSSS.."
	nothing = "........"
)

var changes = []change{
	{"munmap, mmap at the same address", false, four, func(b block, _ int) error {
		if err := unmap(b.span()); err != nil {
			return err
		}
		return mapAt(b.span(), -1, unix.MAP_FIXED_NOREPLACE)
	}},
	{"mmap over it", false, four, func(b block, _ int) error { return mapAt(b.span(), -1, unix.MAP_FIXED) }},
	{"madvise DONTNEED", false, four, func(b block, _ int) error { return unix.Madvise(b, unix.MADV_DONTNEED) }},
	{"mremap away, mmap there", false, four, func(b block, _ int) error {
		// page by page: earlier changes may have made mappings of their own of them
		for i := 0; i < len(b); i += page {
			to, err := unix.MremapPtr(ptr(b[i:].span().Start), uintptr(page), nil, uintptr(page), unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP)
			if err != nil {
				return err
			}
			if err := unix.MunmapPtr(to, uintptr(page)); err != nil {
				return err
			}
		}
		return mapAt(b.span(), -1, unix.MAP_FIXED)
	}},
	{"another mapping mremapped onto it", false, four, func(b block, _ int) error {
		from, err := unix.MmapPtr(-1, 0, nil, uintptr(len(b)), readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
		if err != nil {
			return err
		}
		_, err = unix.MremapPtr(from, uintptr(len(b)), ptr(b.span().Start), uintptr(len(b)), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED)
		return err
	}},
	{"hole in the file", true, four, func(b block, fd int) error {
		return unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(2*page), int64(len(b)))
	}},
	{"mprotect NONE and back", false, nothing, func(b block, _ int) error {
		return errors.Join(unix.Mprotect(b, unix.PROT_NONE), unix.Mprotect(b, readWrite))
	}},
	{"mprotect READ", false, nothing, func(b block, _ int) error { return unix.Mprotect(b, unix.PROT_READ) }},
	{"fork, then the parent writes", false, nothing, func(b block, _ int) error { return forked(b) }},
}

// prepare maps what c changes, eight pages, and the part that it changes.
func (c *change) prepare(t *testing.T) (b, part block, fd int) {
	fd = -1
	if c.shared {
		var err error
		fd, err = unix.MemfdCreate("verbs", unix.MFD_CLOEXEC)
		must(t, err)
		t.Cleanup(func() { unix.Close(fd) })
		must(t, unix.Ftruncate(fd, int64(8*page)))
	}
	b = mapShared(t, 8, fd)
	return b, b.part(2, 4), fd
}

// Without a feed: the device goes on with the old pages. A WRITE by the old key
// succeeds, READ returns all of it, and the processor sees none of it where
// pages were changed.
func TestStaleWithoutFeed(t *testing.T) {
	r := newRig(t)
	for _, c := range changes {
		t.Run(c.name, func(t *testing.T) {
			b, part, fd := c.prepare(t)
			m, err := r.pd.Register(b.span(), all)
			must(t, err)
			defer func() { must(t, r.pd.Deregister(m)) }()
			must(t, c.do(part, fd))
			want, err := r.write(m, b.span())
			must(t, err)
			if got := pages(b, want); got != c.stale {
				t.Errorf("the processor sees %s, want %s", got, c.stale)
			}
			got, err := r.read(m, b.span())
			must(t, err)
			if !bytes.Equal(got, want) {
				t.Error("the device does not read what it has written")
			}
		})
	}
}

// With regcache and a feed: the same changes, and every byte is there. The
// cache was used before the change, and is after it.
func TestFreshWithFeed(t *testing.T) {
	r := newRig(t)
	cache := newCache(t, openFeed(t), r.pd, regcache.Options{})
	for _, c := range changes {
		t.Run(c.name, func(t *testing.T) {
			b, part, fd := c.prepare(t)
			if got := pages(b, r.through(cache, b.span())); got != nothing {
				t.Errorf("before the change the processor sees %s", got)
			}
			must(t, c.do(part, fd))
			if c.name == "mprotect READ" {
				// The old registration could still write; a new one cannot be had.
				if ref, err := cache.Acquire(b.span(), all); !errors.Is(err, unix.EFAULT) {
					ref.Release()
					t.Errorf("a key for writing: %v", err)
				}
				must(t, unix.Mprotect(part, readWrite))
			}
			ref, err := cache.Acquire(b.span(), all)
			must(t, err)
			defer ref.Release()
			want, err := r.write(ref.Handle(), b.span())
			must(t, err)
			if got := pages(b, want); got != nothing {
				t.Errorf("the processor sees %s", got)
			}
		})
	}
}

// With an on-demand region: the same, without anything of ours.
func TestFreshOnDemand(t *testing.T) {
	r := newRig(t)
	if !r.onDemand() {
		return
	}
	for _, c := range changes {
		t.Run(c.name, func(t *testing.T) {
			b, part, fd := c.prepare(t)
			m, err := r.pd.RegisterAt(b.span(), odpRights, uint64(b.span().Start), ibv.Options{OnDemand: true})
			must(t, err)
			defer func() { must(t, r.pd.Deregister(m)) }()
			must(t, c.do(part, fd))
			if c.name == "mprotect READ" {
				if _, err := r.write(m, part.part(0, 1).span()); err == nil {
					t.Error("writes what is not writable")
				}
				r.connect()
				return
			}
			if got := r.pageStarts(m, b); got != nothing {
				t.Errorf("the processor sees %s", got)
			}
		})
	}
}

// chunk is what a transfer to an on-demand region has, at the start of a page:
// soft-RoCE puts each packet at the start of its page, wherever in the page it
// belongs (6.16 to 6.18 at least, __rxe_odp_mr_copy), and a packet has 1024
// bytes where the network interface has an MTU of 1500.
const chunk = 1024

// pageStarts writes to the start of each page of b by m, and says of each
// whether the processor sees the bytes.
func (r *rig) pageStarts(m *ibv.MR, b block) string {
	r.t.Helper()
	var s strings.Builder
	for i := 0; i < len(b); i += page {
		to := b[i : i+chunk]
		want, err := r.write(m, to.span())
		must(r.t, err)
		s.WriteString(pages(to, want))
	}
	return s.String()
}

const odpRights = all &^ regcache.RemoteAtomic

// onDemand reports whether the device has regions that follow the page tables.
// Where it has none, that is proved.
func (r *rig) onDemand() bool {
	r.t.Helper()
	if l := r.dev.Limits(); l.OnDemandWrite && l.OnDemandRead {
		return true
	}
	b := mapPages(r.t, 1)
	if _, err := r.pd.RegisterAt(b.span(), odpRights, uint64(b.span().Start), ibv.Options{OnDemand: true}); !errors.Is(err, unix.EOPNOTSUPP) {
		r.t.Errorf("the device says that it has no on-demand regions, and then: %v", err)
	}
	return false
}

// through writes by a registration from the cache, and returns the bytes.
func (r *rig) through(c *regcache.Cache[*ibv.MR], at mm.Range) []byte {
	r.t.Helper()
	ref, err := c.Acquire(at, all)
	must(r.t, err)
	defer ref.Release()
	want, err := r.write(ref.Handle(), at)
	must(r.t, err)
	return want
}

// forked writes to each page of b while there is a child that has it as well.
func forked(b block) error {
	var p [2]int
	if err := unix.Pipe2(p[:], unix.O_CLOEXEC); err != nil {
		return err
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	pid, e := cloneAndWait(p[0], p[1])
	if e != 0 {
		return e
	}
	for i := 0; i < len(b); i += page {
		b[i]++
	}
	err := errors.Join(unix.Close(p[0]), unix.Close(p[1])) // the child ends
	for {
		_, werr := unix.Wait4(pid, nil, 0, nil)
		if werr != unix.EINTR {
			return errors.Join(err, werr)
		}
	}
}

// cloneAndWait makes a child, by fork, that waits until nobody else has the
// pipe's end for writing. The child must not enter the scheduler.
//
//go:noinline
//go:norace
//go:nosplit
func cloneAndWait(r, w int) (int, syscall.Errno) {
	pid, _, e := unix.RawSyscall6(unix.SYS_CLONE, uintptr(unix.SIGCHLD), 0, 0, 0, 0, 0)
	if e != 0 || pid != 0 {
		return int(pid), e
	}
	var b [1]byte
	unix.RawSyscall(unix.SYS_CLOSE, uintptr(w), 0, 0)
	unix.RawSyscall(unix.SYS_READ, uintptr(r), uintptr(unsafe.Pointer(&b)), 1)
	unix.RawSyscall(unix.SYS_EXIT_GROUP, 0, 0, 0)
	return 0, 0
}
