// SPDX-License-Identifier: Apache-2.0

package truth

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// Memory is what a row's buffer is made of.
type Memory uint8

// The kinds of memory.
const (
	Anon          Memory = iota // private anonymous
	AnonLow                     // the same below 4 GiB, where the i386 ABI reaches
	MemfdShared                 // MAP_SHARED of a memfd
	MemfdPrivate                // MAP_PRIVATE of a memfd
	Heap                        // grown with brk
	SysV                        // an attached System V segment
	SysVLow                     // the same below 4 GiB
	Huge                        // 4 KiB pages of a transparent huge page
	NoHuge                      // as Huge, but of small pages
	HugetlbAnon                 // private anonymous, of 2 MiB pages
	HugetlbShared               // MAP_SHARED of a memfd of 2 MiB pages
	FileReadOnly                // PROT_READ, MAP_SHARED of a file on a disk
	FilePrivate                 // MAP_PRIVATE of a file on a disk
	AnonReadOnly                // PROT_READ, private anonymous
	Driver                      // a driver's pages (VM_PFNMAP), here perf_event's
	Nothing                     // no mapping at all
)

var memoryNames = [...]string{
	"private anonymous", "private anonymous below 4 GiB", "memfd, shared", "memfd, private", "brk heap",
	"System V segment", "System V segment below 4 GiB", "transparent huge page", "small pages where a huge page fits", "hugetlb, anonymous", "hugetlb, shared",
	"file, read-only", "file, private", "private anonymous, read-only", "driver mapping", "no mapping",
}

// String describes m.
func (m Memory) String() string { return memoryNames[m] }

// File reports whether the pages belong to a file or shared object, through
// which anybody who has it can drop them.
func (m Memory) File() bool {
	switch m {
	case MemfdShared, MemfdPrivate, SysV, SysVLow, HugetlbShared, FileReadOnly, FilePrivate:
		return true
	}
	return false
}

// Oracle is how a row finds out which pages a device would miss.
type Oracle uint8

// The oracles.
const (
	// FixedBuffer: an io_uring registered buffer; the device writes through
	// it and the CPU looks for what was written.
	FixedBuffer Oracle = iota
	// Splice: vmsplice(2) takes references of the pages for reading, as a
	// send buffer does, and what the pipe gives is compared with what the
	// CPU sees. For memory that io_uring refuses to register for writing.
	Splice
	// CPUOnly: the registration itself ends with the operation; only what
	// the CPU sees is compared, with the pattern from before.
	CPUOnly
)

const hugePage = 2 << 20

// Run is one performance of a row by a program: [Row.Setup], then Register,
// Act, Oracle, Teardown, in this order.
type Run struct {
	Row   *Row
	P     *Proc
	Base  mm.Addr // of page 0
	Unit  uint64  // bytes in a page
	Pages int
	// Result is what the operation itself returned: a negative errno or the
	// call's result. Valid after Act.
	Result int64
	// Moved is where a Move went. Valid after Act; the zero Range: nowhere.
	Moved mm.Range
	// Child is the process that made the calls if it was not the program
	// itself. Valid after Act.
	Child int

	area     mm.Range // reserved, the buffer within it
	seed     uint64
	file     int64  // of the mapping, -1 if none
	path     string // of a file on a disk
	segments []int64
	pipe     [2]int64
	restore  []func() error
	err      error
}

var seeds uint64 // a fresh pattern per run; rows are not run concurrently

// Setup makes the row's memory in the program and fills it with a pattern.
func (row *Row) Setup(p *Proc) (*Run, error) {
	seeds++
	r := &Run{Row: row, P: p, Unit: uint64(os.Getpagesize()), Pages: 8, file: -1, seed: seeds * 64, pipe: [2]int64{-1, -1}}
	if _, err := p.Ring(); err != nil { // its own mappings must not get into holes that a row makes
		return nil, fmt.Errorf("set up %s: %w", row.Name, err)
	}
	if row.Memory == HugetlbAnon || row.Memory == HugetlbShared {
		r.Unit, r.Pages = hugePage, 4
		r.reserveHugePages(4 * r.Pages)
	}
	const rw = unix.PROT_READ | unix.PROT_WRITE
	r.reserve()
	switch row.Memory {
	case Anon, AnonLow:
		r.mmap(0, r.Pages, rw, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
	case AnonReadOnly:
		r.mmap(0, r.Pages, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
	case MemfdShared:
		r.file = r.memfd(0)
		r.mmap(0, r.Pages, rw, unix.MAP_SHARED, r.file)
	case MemfdPrivate:
		r.file = r.memfd(0)
		r.mmap(0, r.Pages, rw, unix.MAP_PRIVATE, r.file)
	case Heap:
		top := r.must("ask for the break", p.Syscall(unix.SYS_BRK, 0))
		r.Base = mm.Range{Start: mm.Addr(top) - 1, End: mm.Addr(top)}.Pages().End
		if got := p.Syscall(unix.SYS_BRK, r.Page(r.Pages)); mm.Addr(got) != r.Page(r.Pages) {
			r.fail("grow heap", unix.ENOMEM)
		}
		r.restore = append(r.restore, func() error {
			r.P.Syscall(unix.SYS_BRK, top)
			return nil
		})
	case SysV, SysVLow:
		r.must("attach segment", p.Syscall(unix.SYS_SHMAT, r.segment(), r.Base, shmRemap))
	case Huge, NoHuge:
		r.must("map", p.Syscall(unix.SYS_MMAP, r.Base, hugePage, rw, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, -1, 0))
		advice := unix.MADV_HUGEPAGE
		if row.Memory == NoHuge { // whatever the system's default is
			advice = unix.MADV_NOHUGEPAGE
		}
		r.must("advise for or against huge pages", p.Syscall(unix.SYS_MADVISE, r.Base, hugePage, advice))
		r.fill(hugePage / int(r.Unit))
		if row.Memory == NoHuge {
			r.must("allow huge pages again", p.Syscall(unix.SYS_MADVISE, r.Base, hugePage, unix.MADV_HUGEPAGE))
		}
		if row.Memory == Huge && !r.hasHugePage() {
			r.fail("get a transparent huge page (/sys/kernel/mm/transparent_hugepage/enabled must not be never)", unix.ENOMEM)
		}
	case HugetlbAnon:
		r.mmap(0, r.Pages, rw, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_HUGETLB, -1)
	case HugetlbShared:
		r.file = r.memfd(unix.MFD_HUGETLB)
		r.mmap(0, r.Pages, rw, unix.MAP_SHARED, r.file)
	case FileReadOnly:
		r.file = r.diskFile()
		r.mmap(0, r.Pages, unix.PROT_READ, unix.MAP_SHARED, r.file)
	case FilePrivate:
		r.file = r.diskFile()
		r.mmap(0, r.Pages, rw, unix.MAP_PRIVATE, r.file)
	case Driver:
		r.file = r.event()
		r.Pages = 2 // the event's own page and one of data
		r.mmap(0, r.Pages, rw, unix.MAP_SHARED, r.file)
	case Nothing:
		r.munmap(0, r.Pages)
	}
	switch row.Memory {
	case AnonReadOnly, FileReadOnly, Driver, Nothing:
	default:
		r.fill(r.Pages)
	}
	if row.Prepare != nil && r.err == nil {
		row.Prepare(r)
	}
	if err := r.failed(); err != nil {
		return nil, errors.Join(fmt.Errorf("set up %s: %w", row.Name, err), r.Teardown())
	}
	return r, nil
}

// Page is the address of page i of the buffer; i may lie outside of it.
func (r *Run) Page(i int) mm.Addr { return r.Base + mm.Addr(int64(i)*int64(r.Unit)) }

// Span is the range of pages s.
func (r *Run) Span(s Span) mm.Range { return mm.Range{Start: r.Page(s.First), End: r.Page(s.End)} }

// Buffer is the range that is registered.
func (r *Run) Buffer() mm.Range { return r.Span(Span{0, r.Pages}) }

// Register registers the buffer: 0 or a negative errno, as [Row.Refused]
// says. A run of another oracle than the fixed buffer prepares that instead.
func (r *Run) Register() (int64, error) {
	var ret int64
	switch r.Row.Oracle {
	case FixedBuffer:
		ring, err := r.P.Ring()
		if err != nil {
			return 0, err
		}
		ret = ring.Register(0, r.Buffer())
	case Splice:
		at := r.P.scratch + scratchVector
		r.must("make pipe", r.P.Syscall(unix.SYS_PIPE2, at, unix.O_CLOEXEC))
		fds := r.P.Peek(at, 1)[0]
		r.pipe = [2]int64{int64(uint32(fds)), int64(fds >> 32)}
		r.P.Poke(8, at, uint64(r.Base), r.Buffer().Len())
		if n := r.must("splice buffer", r.P.Syscall(unix.SYS_VMSPLICE, r.pipe[1], at, 1, 0)); n != int64(r.Buffer().Len()) {
			r.fail("splice buffer: short", unix.EIO)
		}
	}
	return ret, r.failed()
}

// Act performs the operation and returns an error if it did not end as
// [Row.Errnos] says.
func (r *Run) Act() error {
	r.Result = r.Row.Act(r)
	if err := r.failed(); err != nil {
		return fmt.Errorf("perform %s: %w", r.Row.Name, err)
	}
	var errno unix.Errno
	if r.Result < 0 && r.Result >= -4095 {
		errno = unix.Errno(-r.Result)
	}
	want := r.Row.Errnos
	if len(want) == 0 {
		want = []unix.Errno{0}
	}
	if !slices.Contains(want, errno) {
		return fmt.Errorf("perform %s: returned %d (%w), want one of %v", r.Row.Name, r.Result, errno, want)
	}
	return nil
}

// Oracle lets the device write a fresh pattern to the old addresses and
// returns what the CPU sees, a character a page as [Proc.Look]. Where the
// pages were moved, the pattern must have arrived at their new address.
func (r *Run) Oracle() (string, error) {
	seen, err := r.OracleThrough(0)
	if err != nil || r.Moved.Empty() {
		return seen, err
	}
	if at := r.P.Look(r.Moved.Start, r.Unit, r.Pages, r.seed); strings.Trim(at, ".") != "" {
		return "", fmt.Errorf("oracle of %s: %s at the new address", r.Row.Name, at)
	}
	return seen, r.failed()
}

// OracleThrough is Oracle through the buffer of another slot of the program's
// ring, which holds the run's whole buffer.
func (r *Run) OracleThrough(slot int) (string, error) {
	p := r.P
	var seen string
	switch r.Row.Oracle {
	case FixedBuffer:
		ring, err := p.Ring()
		if err != nil {
			return "", err
		}
		r.seed++
		if n := ring.Write(slot, r.Base, r.Unit, r.Pages, r.seed); n != int64(r.Buffer().Len()) {
			return "", fmt.Errorf("oracle of %s: transfer returned %d", r.Row.Name, n)
		}
		seen = p.Look(r.Base, r.Unit, r.Pages, r.seed)
	case Splice:
		copied := r.Page(16)
		r.mmap(16, r.Pages, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1)
		if n := p.Syscall(unix.SYS_READ, r.pipe[0], copied, r.Buffer().Len()); n != int64(r.Buffer().Len()) {
			return "", fmt.Errorf("oracle of %s: pipe gave %d bytes", r.Row.Name, n)
		}
		seen = p.Same(r.Base, copied, r.Unit, r.Pages)
	case CPUOnly:
		seen = p.Look(r.Base, r.Unit, r.Pages, r.seed)
	}
	return seen, r.failed()
}

// Unregister takes the registration back.
func (r *Run) Unregister() error {
	if r.Row.Oracle == FixedBuffer && r.P.ring != nil {
		r.must("unregister", r.P.ring.Unregister(0))
	}
	return r.failed()
}

// Teardown unregisters and takes back everything that the run made.
func (r *Run) Teardown() error {
	p := r.P
	err := r.Unregister()
	if !r.area.Contains(r.Moved) {
		p.Syscall(unix.SYS_MUNMAP, r.Moved.Start, r.Moved.Len())
	}
	if !r.area.Empty() {
		p.Syscall(unix.SYS_MUNMAP, r.area.Start, r.area.Len())
	}
	for _, fd := range []int64{r.file, r.pipe[0], r.pipe[1]} {
		if fd >= 0 {
			p.Syscall(unix.SYS_CLOSE, fd)
		}
	}
	for _, id := range r.segments {
		p.Syscall(unix.SYS_SHMCTL, id, unix.IPC_RMID, 0)
	}
	if r.path != "" {
		err = errors.Join(err, os.Remove(r.path))
	}
	for _, f := range slices.Backward(r.restore) {
		err = errors.Join(err, f())
	}
	return errors.Join(err, p.err)
}

// fill writes the pattern to n pages, if they could be made at all.
func (r *Run) fill(n int) {
	if r.failed() == nil {
		r.P.Fill(r.Base, r.Unit, n, r.seed)
	}
}

func (r *Run) failed() error { return errors.Join(r.err, r.P.err) }

func (r *Run) fail(doing string, errno unix.Errno) {
	if r.err == nil {
		r.err = fmt.Errorf("%s: %w", doing, errno)
	}
}

// must passes the result of a call on that has to succeed.
func (r *Run) must(doing string, ret int64) int64 {
	if ret < 0 && ret >= -4095 {
		r.fail(doing, unix.Errno(-ret))
	}
	return ret
}

// reserve takes addresses around the buffer, so that nothing else of the
// program gets in: at least 16 pages in front and 40 behind.
func (r *Run) reserve() {
	if r.Row.Memory == Heap {
		return
	}
	const align = hugePage
	length := 64*r.Unit + 2*align
	flags := unix.MAP_PRIVATE | unix.MAP_ANONYMOUS | unix.MAP_NORESERVE
	if r.Row.Memory == AnonLow || r.Row.Memory == SysVLow {
		flags |= map32Bit
	}
	a := mm.Addr(r.must("reserve addresses", r.P.Syscall(unix.SYS_MMAP, 0, length, unix.PROT_NONE, flags, -1, 0)))
	r.area = mm.Range{Start: a, End: a + mm.Addr(length)}
	r.Base = (a + mm.Addr(16*r.Unit) + align - 1) &^ (align - 1)
}

// mmap maps n pages from page i on.
func (r *Run) mmap(i, n, prot, flags int, fd int64) int64 {
	return r.must("map", r.P.Syscall(unix.SYS_MMAP, r.Page(i), r.bytes(n), prot, flags|unix.MAP_FIXED, fd, 0))
}

func (r *Run) munmap(i, n int) int64 {
	return r.must("unmap", r.P.Syscall(unix.SYS_MUNMAP, r.Page(i), r.bytes(n)))
}

func (r *Run) mprotect(i, n, prot int) int64 {
	return r.P.Syscall(unix.SYS_MPROTECT, r.Page(i), r.bytes(n), prot)
}

func (r *Run) madvise(i, n, advice int) int64 {
	return r.P.Syscall(unix.SYS_MADVISE, r.Page(i), r.bytes(n), advice)
}

func (r *Run) mremap(oldPages, newPages, flags int, to mm.Addr) int64 {
	return r.P.Syscall(unix.SYS_MREMAP, r.Base, r.bytes(oldPages), r.bytes(newPages), flags, to)
}

// moved notes that the result of mremap is where the buffer went.
func (r *Run) moved(ret int64, pages int) int64 {
	if ret > 0 && mm.Addr(ret) != r.Base {
		r.Moved = mm.Range{Start: mm.Addr(ret), End: mm.Addr(ret) + mm.Addr(r.bytes(pages))}
	}
	return ret
}

func (r *Run) bytes(pages int) uint64 { return uint64(pages) * r.Unit }

// memfd makes a file in memory, twice as long as the buffer.
func (r *Run) memfd(flags int) int64 {
	fd := r.must("create memfd", r.P.Syscall(unix.SYS_MEMFD_CREATE, "truth", unix.MFD_CLOEXEC|flags))
	r.must("size memfd", r.P.Syscall(unix.SYS_FTRUNCATE, fd, r.bytes(2*r.Pages)))
	return fd
}

// event opens a perf event that counts nothing, for its driver mapping.
func (r *Run) event() int64 {
	attr := r.P.scratch + scratchVector
	words := make([]uint64, 16)
	words[0] = unix.PERF_TYPE_SOFTWARE | uint64(len(words))*8<<32
	words[1] = unix.PERF_COUNT_SW_DUMMY
	r.P.Poke(8, attr, words...)
	return r.must("open event", r.P.Syscall(unix.SYS_PERF_EVENT_OPEN, attr, 0, -1, -1, unix.PERF_FLAG_FD_CLOEXEC))
}

// segment makes a System V segment of the buffer's size.
func (r *Run) segment() int64 {
	id := r.must("make segment", r.P.Syscall(unix.SYS_SHMGET, unix.IPC_PRIVATE, r.bytes(r.Pages), 0o600|unix.IPC_CREAT))
	r.segments = append(r.segments, id)
	return id
}

// diskFile makes a file of the buffer's size, every byte 1, on a file system
// that writes O_DIRECT past the page cache.
func (r *Run) diskFile() int64 {
	for _, dir := range []string{os.TempDir(), "/var/tmp", "."} {
		var fs unix.Statfs_t
		if unix.Statfs(dir, &fs) != nil || fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.OVERLAYFS_SUPER_MAGIC {
			continue
		}
		abs, err := filepath.Abs(dir)
		if err != nil {
			continue
		}
		f, err := os.CreateTemp(abs, "ummu-truth-")
		if err != nil {
			continue
		}
		r.path = f.Name()
		_, err = f.Write([]byte(strings.Repeat("\x01", int(r.bytes(r.Pages)))))
		err = errors.Join(err, f.Chmod(0o666)) // the program may be another user's
		if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
			r.err = errors.Join(r.err, err)
		}
		return r.must("open file", r.P.Syscall(unix.SYS_OPENAT, unix.AT_FDCWD, r.path, unix.O_RDWR|unix.O_CLOEXEC, 0))
	}
	r.fail("find a directory on a disk", unix.ENOENT)
	return -1
}

// byOther lets another process, this one, do something with the mapped file.
func (r *Run) byOther(do func(fd int) error) int64 {
	fd, err := unix.Open(fmt.Sprintf("/proc/%d/fd/%d", r.P.PID(), r.file), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		r.err = errors.Join(r.err, fmt.Errorf("open the program's file: %w", err))
		return 0
	}
	defer unix.Close(fd)
	if err := do(fd); err != nil {
		r.err = errors.Join(r.err, fmt.Errorf("change the program's file: %w", err))
	}
	return 0
}

// join waits for a child of the program.
func (r *Run) join(pid int64) int64 {
	r.Child = int(r.must("make child", pid))
	r.must("wait for child", r.P.Syscall(unix.SYS_WAIT4, pid, 0, 0, 0))
	return 0
}

func (r *Run) hasHugePage() bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps", r.P.PID()))
	if err != nil {
		return false
	}
	_, b2, ok := strings.Cut(string(b), r.Base.String()[2:]+"-")
	if !ok {
		return false
	}
	_, b2, _ = strings.Cut(b2, "AnonHugePages:")
	var kb int
	fmt.Sscan(b2, &kb)
	return kb > 0
}

// reserveHugePages makes the system set n more huge pages aside until the
// run's end. Another process that does the same waits meanwhile.
func (r *Run) reserveHugePages(n int) {
	const name = "/proc/sys/vm/nr_hugepages"
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		r.err = errors.Join(r.err, fmt.Errorf("reserve huge pages: %w", err))
		return
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		r.err = errors.Join(r.err, fmt.Errorf("reserve huge pages: %w", err), f.Close())
		return
	}
	before := hugePages("HugePages_Total:")
	r.restore = append(r.restore, func() error {
		// Pages whose unpinning is still under way are given back when it is
		// through: the kernel counts them as surplus until then.
		_, err := f.WriteAt(fmt.Appendln(nil, before), 0)
		return errors.Join(err, f.Close())
	})
	for range 50 {
		// what counts is what can be mapped: there are pages still pinned,
		// and kernels (6.1) that forget to give reservations back
		lack := n - (hugePages("HugePages_Free:") - hugePages("HugePages_Rsvd:"))
		if lack <= 0 {
			return
		}
		if _, err := f.WriteAt(fmt.Appendln(nil, hugePages("HugePages_Total:")+lack), 0); err != nil {
			r.err = errors.Join(r.err, fmt.Errorf("reserve huge pages: %w", err))
			return
		}
		time.Sleep(10 * time.Millisecond) // memory that is being compacted
	}
	r.fail(fmt.Sprintf("reserve %d huge pages by %s", n, name), unix.ENOMEM)
}

// hugePages is a number of /proc/meminfo; 0 if it is not there.
func hugePages(name string) (n int) {
	b, _ := os.ReadFile("/proc/meminfo")
	if _, rest, ok := strings.Cut(string(b), name); ok {
		fmt.Sscan(rest, &n)
	}
	return n
}
