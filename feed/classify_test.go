// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

// mapping maps n pages with a neighbour on each side that is not mapped, and
// returns its range.
func mapping(t *testing.T, fd, n, prot, flags int) mm.Range {
	t.Helper()
	size := uintptr(n) * uintptr(mm.PageSize())
	p, err := unix.MmapPtr(fd, 0, nil, size, prot, flags)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.MunmapPtr(p, size) })
	return mm.Range{Start: mm.Addr(uintptr(p)), End: mm.Addr(uintptr(p) + size)}
}

// named finds a mapping of this process by the end of its line.
func named(t *testing.T, name string) mm.Range {
	t.Helper()
	text, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if !strings.HasSuffix(line, name+"\n") {
			continue
		}
		from, to, _ := strings.Cut(strings.Fields(line)[0], "-")
		start, err1 := strconv.ParseUint(from, 16, 64)
		end, err2 := strconv.ParseUint(to, 16, 64)
		if err1 != nil || err2 != nil {
			t.Fatal(line)
		}
		return mm.Range{Start: mm.Addr(start), End: mm.Addr(end)}
	}
	t.Fatalf("no %s in maps", name)
	return mm.Range{}
}

func TestClassify(t *testing.T) {
	const rw = unix.PROT_READ | unix.PROT_WRITE
	file, err := os.Create(filepath.Join(t.TempDir(), "with space\nand newline"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	long := filepath.Join(t.TempDir(), strings.Repeat("x", 200), strings.Repeat("y", 200))
	if err := os.MkdirAll(filepath.Dir(long), 0o700); err != nil {
		t.Fatal(err)
	}
	longFile, err := os.Create(long)
	if err != nil {
		t.Fatal(err)
	}
	defer longFile.Close()
	if err := longFile.Truncate(1 << 20); err != nil {
		t.Fatal(err)
	}
	memfd, err := unix.MemfdCreate("x", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(memfd)
	if err := unix.Ftruncate(memfd, 1<<20); err != nil {
		t.Fatal(err)
	}
	zero, err := os.OpenFile("/dev/zero", os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer zero.Close()
	id, err := unix.SysvShmGet(0, 1<<16, unix.IPC_CREAT|0o600)
	if err != nil {
		t.Fatal(err)
	}
	shm, err := unix.SysvShmAttach(id, 0, 0)
	unix.SysvShmCtl(id, unix.IPC_RMID, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.SysvShmDetach(shm)
	shmRange := mm.Range{Start: mm.Addr(uintptr(unsafe.Pointer(&shm[0])))}
	shmRange.End = shmRange.Start + mm.Addr(len(shm))

	anon := mapping(t, -1, 16, rw, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	n := mm.Addr(mm.PageSize())
	split := mapping(t, -1, 16, rw, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err := unix.Mprotect(unsafe.Slice((*byte)(addr(split.Start+4*n)), 4*n), unix.PROT_READ); err != nil {
		t.Fatal(err)
	}
	// A hole far below everything, where no other mapping will be put meanwhile.
	hole := mm.Range{Start: 0x200000000000, End: 0x200000000000 + 16*n}
	for _, part := range []mm.Range{{Start: hole.Start, End: hole.Start + 8*n}, {Start: hole.Start + 9*n, End: hole.End}} {
		if _, err := unix.MmapPtr(-1, 0, addr(part.Start), uintptr(part.Len()), rw,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { unix.MunmapPtr(addr(part.Start), uintptr(part.Len())) })
	}
	mixed := mapping(t, -1, 16, rw, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if _, err := unix.MmapPtr(memfd, 0, addr(mixed.Start+8*n), uintptr(n), rw, unix.MAP_PRIVATE|unix.MAP_FIXED); err != nil {
		t.Fatal(err)
	}
	heap := make([]byte, 1<<20)

	cases := []struct {
		name string
		r    mm.Range
		want feed.Verdict
	}{
		{"private anonymous", anon, feed.Cacheable},
		{"part of it", mm.Range{Start: anon.Start + n, End: anon.Start + 2*n}, feed.Cacheable},
		{"several of them", split, feed.Cacheable},
		{"go heap", mm.Range{Start: mm.Addr(uintptr(unsafe.Pointer(&heap[0]))), End: mm.Addr(uintptr(unsafe.Pointer(&heap[0]))) + mm.Addr(len(heap))}.Pages(), feed.Cacheable},
		{"stack", named(t, "[stack]"), feed.Cacheable},
		{"hole", hole, feed.NoMapping},
		{"before the hole", mm.Range{Start: hole.Start, End: hole.Start + 8*n}, feed.Cacheable},
		{"nothing", mm.Range{Start: n, End: 2 * n}, feed.NoMapping},
		{"above everything", mm.Range{Start: 0x7ffffffff000 - n, End: 0x7ffffffff000}, feed.NoMapping},
		{"private file", mapping(t, int(file.Fd()), 4, rw, unix.MAP_PRIVATE), feed.FileBacked},
		{"shared file", mapping(t, int(file.Fd()), 4, rw, unix.MAP_SHARED), feed.FileBacked},
		{"file with a long path", mapping(t, int(longFile.Fd()), 4, rw, unix.MAP_PRIVATE), feed.FileBacked},
		{"memfd", mapping(t, memfd, 4, rw, unix.MAP_SHARED), feed.FileBacked},
		{"private memfd", mapping(t, memfd, 4, rw, unix.MAP_PRIVATE), feed.FileBacked},
		{"anonymous, then memfd", mixed, feed.FileBacked},
		{"shared anonymous", mapping(t, -1, 4, rw, unix.MAP_SHARED|unix.MAP_ANONYMOUS), feed.FileBacked},
		{"shared /dev/zero", mapping(t, int(zero.Fd()), 4, rw, unix.MAP_SHARED), feed.FileBacked},
		{"SysV shared memory", shmRange, feed.FileBacked},
		{"vdso", named(t, "[vdso]"), feed.DriverMapping},
		{"vvar", named(t, "[vvar]"), feed.DriverMapping},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			for _, text := range []bool{false, true} {
				if v := feed.Classify("/proc/self/maps", c.r, text); v != c.want {
					t.Errorf("text %v: %v, want %v", text, v, c.want)
				}
			}
		})
	}
	runtime.KeepAlive(heap)

	t.Run("driver", func(t *testing.T) {
		// An io_uring's rings: pages of the kernel behind an anonymous inode.
		var params [120]byte
		fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 4, uintptr(unsafe.Pointer(&params)), 0)
		if errno != 0 {
			t.Fatalf("io_uring_setup: %v (is kernel.io_uring_disabled set?)", errno)
		}
		defer unix.Close(int(fd))
		r := mapping(t, int(fd), 1, rw, unix.MAP_SHARED)
		for _, text := range []bool{false, true} {
			if v := feed.Classify("/proc/self/maps", r, text); v != feed.DriverMapping {
				t.Errorf("text %v: %v", text, v)
			}
		}
	})
	t.Run("commit", func(t *testing.T) {
		memfdRange := mapping(t, memfd, 4, rw, unix.MAP_SHARED)
		_, w := pair(t, feedtest.Options{Gaps: layout.GapFile})
		if a, f := commit(w, anon), commit(w, memfdRange); a != feed.Cacheable || f != feed.FileBacked {
			t.Errorf("with the gap: anonymous %v, memfd %v", a, f)
		}
		_, w = pair(t, feedtest.Options{})
		if f := commit(w, memfdRange); f != feed.Cacheable {
			t.Errorf("without the gap: memfd %v", f)
		}
	})
	t.Run("no maps file", func(t *testing.T) {
		if v := feed.Classify("/nonexistent", anon, false); v != feed.Unclassified {
			t.Error(v)
		}
	})
	t.Run("another process", func(t *testing.T) {
		cmd := exec.Command("sleep", "60")
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		defer cmd.Wait()
		defer cmd.Process.Kill()
		path := "/proc/" + strconv.Itoa(cmd.Process.Pid) + "/maps"
		for _, text := range []bool{false, true} {
			if v := feed.Classify(path, anon, text); v != feed.NoMapping {
				t.Errorf("our mapping there, text %v: %v", text, v)
			}
		}
	})
}

func TestClassifyText(t *testing.T) {
	r := mm.Range{Start: 0x2000, End: 0x4000}
	const before = "00001000-00002000 r--p 00000000 00:00 0 \n"
	cases := []struct {
		name, maps string
		want       feed.Verdict
	}{
		{"empty", "", feed.NoMapping},
		{"anonymous", before + "00002000-00004000 rw-p 00000000 00:00 0 \n", feed.Cacheable},
		{"heap, then named", before + "00002000-00003000 rw-p 00000000 00:00 0                          [heap]\n00003000-00009000 rw-p 00000000 00:00 0      [anon:x y]\n", feed.Cacheable},
		{"gap at the start", before + "00003000-00004000 rw-p 00000000 00:00 0 \n", feed.NoMapping},
		{"gap at the end", before + "00002000-00003000 rw-p 00000000 00:00 0 \n00004000-00005000 rw-p 00000000 00:00 0 \n", feed.NoMapping},
		{"shared without inode", "00002000-00004000 rw-s 00000000 00:00 0 \n", feed.FileBacked},
		{"hugetlb", "00002000-00004000 rw-p 00000000 00:10 1234   /anon_hugepage (deleted)\n", feed.FileBacked},
		{"infiniband", "00002000-00004000 rw-s 00000000 00:05 77   /dev/infiniband/uverbs0\n", feed.DriverMapping},
		{"dev shm", "00002000-00004000 rw-s 00000000 00:05 77   /dev/shm/a\n", feed.FileBacked},
		{"unknown name", "00002000-00004000 rw-p 00000000 00:00 0   [new]\n", feed.DriverMapping},
		{"malformed", "00002000-00004000\n", feed.Unclassified},
		{"malformed address", "0000200g-00004000 rw-p 00000000 00:00 0 \n", feed.Unclassified},
		{"too long", strings.Repeat("x", 1<<20) + "\n", feed.Unclassified},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			if v := feed.ClassifyText(c.maps, r); v != c.want {
				t.Errorf("%v, want %v", v, c.want)
			}
		})
	}
}

func FuzzClassifyText(f *testing.F) {
	f.Add([]byte("00001000-00004000 r--p 00000000 00:00 0 \n"), uint64(0x2000), uint64(0x4000))
	f.Add([]byte("00001000-00004000 r--p 00000000 00:00 0   [heap]\n-"), uint64(0x2000), uint64(0x4000))
	f.Fuzz(func(t *testing.T, maps []byte, start, end uint64) {
		v := feed.ClassifyText(string(maps), mm.Range{Start: mm.Addr(start), End: mm.Addr(end)})
		if v == feed.Cacheable && start < end && !bytes.Contains(maps, []byte("-")) {
			t.Error("cacheable without a mapping")
		}
	})
}

// addr is a mapped address of this process as a pointer.
func addr(a mm.Addr) unsafe.Pointer { return unsafe.Add(unsafe.Pointer(nil), uintptr(a)) }
