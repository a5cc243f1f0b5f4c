// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"encoding/binary"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/machine"
)

// ringRecords are the records of a feed that nobody has drained.
func ringRecords(t *testing.T, f *Feed) (out []layout.Record) {
	t.Helper()
	page := int(mm.PageSize())
	b, err := unix.Mmap(f.RingFD(), int64(page), page+2*f.RingBytes(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	end := atomic.LoadUint64((*uint64)(unsafe.Pointer(unsafe.SliceData(b))))
	for at := uint64(0); at < end; {
		n := uint64(binary.NativeEndian.Uint32(b[page+int(at):])) // neither busy nor discarded
		if n != uint64(unsafe.Sizeof(layout.Record{})) {
			t.Fatalf("a record of %d bytes", n)
		}
		out = append(out, *(*layout.Record)(unsafe.Pointer(&b[page+int(at)+8])))
		at += 8 + n
	}
	return out
}

// Who has no privileges is told by which task its own process changed its
// address space, but not which other process did.
func TestFeedHidesOutsiders(t *testing.T) {
	tiers := []Tier{TierSyscall} // sees only what a process does itself
	if machine.Full() {
		tiers = append(tiers, TierNotifierProbe, TierMM)
	}
	for _, tier := range tiers {
		t.Run(tier.String(), func(t *testing.T) {
			if tier == TierNotifierProbe {
				vm, err := MakeNotifier()
				if err != nil {
					t.Fatal(err)
				}
				defer vm.Close()
			}
			tr, err := Open(Options{Tier: tier})
			if err != nil {
				t.Fatal(err)
			}
			defer tr.Close()
			f, err := tr.OpenFeed(Self(), FeedOptions{Unprivileged: true, Witness: true})
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			interestOf(t, f).All = 1
			fd, err := unix.MemfdCreate("shared", unix.MFD_CLOEXEC)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Close(fd)
			if err := unix.Ftruncate(fd, int64(2*mm.PageSize())); err != nil {
				t.Fatal(err)
			}
			b, err := unix.Mmap(fd, 0, int(2*mm.PageSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Munmap(b)
			b[0], b[mm.PageSize()] = 1, 1
			touched := func(page int) (pids []uint32) {
				at := uint64(uintptr(unsafe.Pointer(&b[page*int(mm.PageSize())])))
				for _, r := range ringRecords(t, f) {
					if r.Start <= at && at < r.End && mm.Kind(r.Kind) == mm.Zap {
						if (r.Pid == 0) != (r.Tid == 0) {
							t.Errorf("process %d, thread %d", r.Pid, r.Tid)
						}
						pids = append(pids, r.Pid)
					}
				}
				return pids
			}
			if err := unix.Madvise(b[:mm.PageSize()], unix.MADV_DONTNEED); err != nil {
				t.Fatal(err)
			}
			own := touched(0)
			if len(own) == 0 {
				t.Error("a change of its own is not seen")
			}
			for _, pid := range own {
				if int(pid) != os.Getpid() {
					t.Errorf("a change of its own is told of process %d", pid)
				}
			}
			if tier == TierSyscall {
				return
			}
			p := startTracee(t)
			path := fmt.Appendf(nil, "/proc/%d/fd/%d\x00\x00\x00\x00", os.Getpid(), fd)
			var words []string
			for ; len(path) >= 4; path = path[4:] {
				words = append(words, fmt.Sprint(binary.NativeEndian.Uint32(path)))
			}
			p.do(t, "poke %s", strings.Join(words, " "))
			theirs := p.call(t, unix.SYS_OPENAT, unix.AT_FDCWD, "S", unix.O_RDWR, 0)
			p.call(t, unix.SYS_FALLOCATE, theirs, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int(mm.PageSize()), int(mm.PageSize()))
			outside := touched(1)
			if len(outside) == 0 {
				t.Error("a change by another process is not seen")
			}
			for _, pid := range outside {
				if pid != 0 {
					t.Errorf("a change from outside is told of process %d; the other one is %d", pid, p.pid)
				}
			}
		})
	}
}
