// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache/uring"
)

const (
	// The areas are far from where the kernel and Go put mappings by
	// themselves, so that a hole in one stays until a step fills it, and each
	// process has others: a notifier tier that does not know whose a change
	// is goes by the address.
	base     mm.Addr = 0x2000_0000_0000
	ofPID    mm.Addr = 8 << 30
	mostPIDs         = 4096

	hugePage  = 2 << 20
	fileUnits = 64 // pages of a file
	segment   = 8  // pages of a System V segment
	heapUnits = 16
)

// Advice and flags that x/sys/unix does not have.
const (
	advCollapse      = 25
	advGuardInstall  = 102
	advGuardRemove   = 103
	shmRemap         = 0o40000
	mlockOnFault     = 1
	fallocPunchQuiet = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
)

var advices = []struct {
	name     string
	advice   uintptr
	harmless bool // takes no pinned page away, though the notifiers may be told
}{
	{"DONTNEED", unix.MADV_DONTNEED, false},
	{"DONTNEED", unix.MADV_DONTNEED, false},
	{"DONTNEED", unix.MADV_DONTNEED, false},
	{"DONTNEED_LOCKED", unix.MADV_DONTNEED_LOCKED, false},
	{"FREE", unix.MADV_FREE, true},
	{"COLD", unix.MADV_COLD, true},
	{"PAGEOUT", unix.MADV_PAGEOUT, true},
	{"GUARD_INSTALL", advGuardInstall, false},
	{"GUARD_INSTALL", advGuardInstall, false},
	{"GUARD_REMOVE", advGuardRemove, true},
	{"GUARD_REMOVE", advGuardRemove, true},
	{"COLLAPSE", advCollapse, true},
	{"POPULATE_READ", unix.MADV_POPULATE_READ, true},
	{"POPULATE_WRITE", unix.MADV_POPULATE_WRITE, true},
	{"REMOVE", unix.MADV_REMOVE, false},
	{"WILLNEED", unix.MADV_WILLNEED, true},
	{"DONTFORK", unix.MADV_DONTFORK, true},
	{"DOFORK", unix.MADV_DOFORK, true},
	{"DONTDUMP", unix.MADV_DONTDUMP, true},
	{"HUGEPAGE", unix.MADV_HUGEPAGE, true},
	{"NOHUGEPAGE", unix.MADV_NOHUGEPAGE, true},
	{"WIPEONFORK", unix.MADV_WIPEONFORK, true},
	{"KEEPONFORK", unix.MADV_KEEPONFORK, true},
}

// vectorAdvices are indices into advices.
var vectorAdvices = []int{0, 0, 0, 3, 4, 5, 6, 7, 11}

var prots = []struct {
	name string
	prot uintptr
}{
	{"NONE", unix.PROT_NONE}, {"READ", unix.PROT_READ},
	{"READ|WRITE", unix.PROT_READ | unix.PROT_WRITE}, {"READ|WRITE", unix.PROT_READ | unix.PROT_WRITE},
}

var remaps = []string{
	"shrink", "grow", "grow in place", "move onto", "move onto", "move onto and grow", "move onto and shrink",
	"DONTUNMAP", "DONTUNMAP onto", "second mapping onto",
}

// comment says in words what the variant of a step is.
func (s Step) comment() string {
	switch s.Op {
	case OpMap:
		return [...]string{"FIXED", "FIXED", "FIXED", "FIXED", "NOREPLACE", "hint", "FIXED shared", "FIXED"}[s.Arg&7]
	case OpMapFile:
		if s.Arg&2 != 0 {
			return fmt.Sprintf("file %d shared", s.Arg&1)
		}
		return fmt.Sprintf("file %d private", s.Arg&1)
	case OpProtect:
		return prots[s.Arg&3].name
	case OpAdvise:
		return advices[int(s.Arg)%len(advices)].name
	case OpVector:
		return advices[vectorAdvices[int(s.Arg)%len(vectorAdvices)]].name
	case OpRemap:
		return remaps[int(s.Arg)%len(remaps)]
	case OpTruncate:
		if s.Arg&2 != 0 {
			return fmt.Sprintf("file %d, and back", s.Arg&1)
		}
		return fmt.Sprintf("file %d", s.Arg&1)
	case OpPunch:
		return fmt.Sprintf("file %d", s.Arg&1)
	}
	return ""
}

// cause is the word for a step in statistics.
func (s Step) cause() string {
	switch s.Op {
	case OpProtect, OpAdvise, OpVector, OpRemap:
		return opNames[s.Op] + " " + s.comment()
	}
	return opNames[s.Op]
}

// harmless: no pinned page can go by the step, yet the notifiers may be told of
// dropped pages.
func (s Step) harmless() bool {
	switch s.Op {
	case OpAdvise:
		return advices[int(s.Arg)%len(advices)].harmless
	case OpVector:
		return advices[vectorAdvices[int(s.Arg)%len(vectorAdvices)]].harmless
	case OpTouch, OpLock, OpRegister:
		return true
	}
	return false
}

// zone is where an area lies.
type zone struct {
	start mm.Addr
	unit  uint64
	units uint64
}

func (z zone) span() mm.Range {
	return mm.Range{Start: z.start, End: z.start + mm.Addr(z.unit*z.units)}
}

// performer makes the operations. Each thread has its own vector.
type performer struct {
	zones   [numAreas]zone
	hugetlb bool // the program at hand is to have the area, and got it
	files   [3]int
	shm     [2]int
	keep    [2][]byte // attachments that keep the segments
	pidfd   int
	ring    *uring.Ring
	vectors [Threads]*[32][2]uint64
}

var page = mm.PageSize()

func newPerformer(ring *uring.Ring) (*performer, error) {
	p := &performer{ring: ring, files: [3]int{-1, -1, -1}}
	start := base + mm.Addr(unix.Getpid()%mostPIDs)*ofPID
	p.zones = [numAreas]zone{
		Small: {start, page, 64},
		Huge:  {start + 1<<30, 256 << 10, 16},
		TLB:   {start + 2<<30, hugePage, 2},
	}
	brk, _, _ := unix.RawSyscall(unix.SYS_BRK, 0, 0, 0)
	p.zones[Heap] = zone{mm.Addr(uint64(brk)+page-1) &^ mm.Addr(page-1), page, heapUnits}
	var err error
	if p.pidfd, err = unix.PidfdOpen(unix.Getpid(), 0); err != nil {
		return nil, fmt.Errorf("open pidfd: %w", err)
	}
	for i := range p.shm {
		if p.shm[i], err = unix.SysvShmGet(unix.IPC_PRIVATE, int(segment*page), unix.IPC_CREAT|0o600); err != nil {
			return nil, fmt.Errorf("make segment: %w", err)
		}
		p.keep[i], err = unix.SysvShmAttach(p.shm[i], 0, 0)
		// it ends with its last attachment
		if _, e := unix.SysvShmCtl(p.shm[i], unix.IPC_RMID, nil); e != nil && err == nil {
			err = e
		}
		if err != nil {
			return nil, fmt.Errorf("attach segment: %w", err)
		}
	}
	for i := range p.vectors {
		p.vectors[i] = new([32][2]uint64) // on the heap, where it stays
	}
	return p, nil
}

func syscall6(nr uintptr, args ...uintptr) error {
	var a [6]uintptr
	copy(a[:], args)
	if _, _, e := unix.Syscall6(nr, a[0], a[1], a[2], a[3], a[4], a[5]); e != 0 {
		return e
	}
	return nil
}

const (
	rw    = unix.PROT_READ | unix.PROT_WRITE
	fixed = unix.MAP_FIXED
	anon  = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
)

// reset makes every area that the program uses mapped and empty, and gives
// every file its size. Without free huge pages there is no area of them.
func (p *performer) reset(program Program) error {
	uses := [numAreas]bool{Small: true}
	for _, s := range program {
		uses[s.Area] = true
	}
	for i, f := range p.files {
		if f >= 0 {
			unix.Close(f)
			p.files[i] = -1
		}
	}
	for i := range p.files {
		flags, size := unix.MFD_CLOEXEC, int64(fileUnits*page)
		if i == 2 {
			if !uses[TLB] {
				break
			}
			flags, size = flags|unix.MFD_HUGETLB, int64(p.zones[TLB].units*hugePage)
		}
		fd, err := unix.MemfdCreate("oracle", flags)
		if err == nil {
			p.files[i], err = fd, unix.Ftruncate(fd, size)
		}
		if err != nil {
			return fmt.Errorf("make file: %w", err)
		}
	}
	p.hugetlb = false
	for a, z := range p.zones {
		// and what growth may have left behind the area
		r := z.span()
		r.End += mm.Addr(r.Len())
		if err := syscall6(unix.SYS_MUNMAP, uintptr(r.Start), uintptr(r.Len())); err != nil {
			return fmt.Errorf("unmap area %s: %w", areaNames[a], err)
		}
		if !uses[a] {
			continue
		}
		r = z.span()
		flags := uintptr(anon | unix.MAP_FIXED_NOREPLACE)
		switch Area(a) {
		case Heap:
			if !ownsBrk {
				continue
			}
			// The break does not come down through a hole.
			if now, _, _ := unix.RawSyscall(unix.SYS_BRK, 0, 0, 0); mm.Addr(now) > r.Start {
				if err := syscall6(unix.SYS_MMAP, uintptr(r.Start), now-uintptr(r.Start), rw, anon|fixed, ^uintptr(0), 0); err != nil {
					return fmt.Errorf("map heap: %w", err)
				}
			}
			for _, to := range []mm.Addr{r.Start, r.End} {
				if got, _, _ := unix.RawSyscall(unix.SYS_BRK, uintptr(to), 0, 0); got != uintptr(to) {
					return fmt.Errorf("set break to %v: it is %#x", to, got)
				}
			}
			continue
		case TLB:
			flags |= unix.MAP_HUGETLB
		}
		err := syscall6(unix.SYS_MMAP, uintptr(r.Start), uintptr(r.Len()), rw, flags, ^uintptr(0), 0)
		if Area(a) == TLB {
			p.hugetlb = err == nil
		} else if err != nil {
			return fmt.Errorf("map area %s: %w", areaNames[a], err)
		}
		if Area(a) == Huge {
			if err := syscall6(unix.SYS_MADVISE, uintptr(r.Start), uintptr(r.Len()), unix.MADV_HUGEPAGE); err != nil {
				return fmt.Errorf("advise huge pages: %w", err)
			}
		}
	}
	return nil
}

// keptPage is a page that no step touches.
func (p *performer) keptPage() mm.Range {
	a := mm.Addr(uintptr(unsafe.Pointer(&p.keep[0][0])))
	return mm.Range{Start: a, End: a + mm.Addr(page)}
}

// span is the range that a step is about.
func (p *performer) span(s Step) mm.Range {
	z := p.zones[s.Area]
	r := mm.Range{Start: z.start + mm.Addr(uint64(s.Page)%z.units*z.unit)}
	n := uint64(s.Pages) * z.unit
	if n == 0 {
		n = page
		if s.Area == TLB {
			n = z.unit
		}
	}
	r.End = min(r.Start+mm.Addr(n), z.span().End)
	return r
}

// script is what a step does, as system calls; none: it does nothing here.
func (p *performer) script(s Step) []call {
	r := p.span(s)
	z := p.zones[s.Area]
	at, n, arg := uintptr(r.Start), uintptr(r.Len()), int(s.Arg)
	one := func(nr uintptr, args ...uintptr) []call {
		c := call{nr: nr}
		copy(c.args[:], args)
		return []call{c}
	}
	file, unit, units := p.files[arg&1], uintptr(page), uintptr(fileUnits)
	if s.Area == TLB {
		if !p.hugetlb {
			return nil
		}
		file, unit, units = p.files[2], hugePage, uintptr(z.units)
	}
	if s.Area == Heap && !ownsBrk {
		return nil
	}
	offset := uintptr(s.To) % units * unit
	switch s.Op {
	case OpMap:
		prot, flags := uintptr(rw), uintptr(anon|fixed)
		switch arg & 7 {
		case 4:
			flags = anon | unix.MAP_FIXED_NOREPLACE
		case 5:
			flags = anon
		case 6:
			flags = unix.MAP_SHARED | unix.MAP_ANONYMOUS | fixed
		case 7:
			if arg&16 != 0 {
				prot = unix.PROT_NONE
			}
		}
		if s.Area == TLB {
			flags |= unix.MAP_HUGETLB
		}
		if arg&8 != 0 {
			flags |= unix.MAP_POPULATE
		}
		c := one(unix.SYS_MMAP, at, n, prot, flags, ^uintptr(0), 0)
		if s.Area == Huge && arg&16 != 0 {
			c = append(c, one(unix.SYS_MADVISE, at, n, unix.MADV_HUGEPAGE)...)
		}
		return c
	case OpMapFile:
		flags := uintptr(unix.MAP_PRIVATE | fixed)
		if arg&2 != 0 {
			flags = unix.MAP_SHARED | fixed
		}
		return one(unix.SYS_MMAP, at, n, rw, flags, uintptr(file), offset)
	case OpUnmap:
		if arg&7 == 7 && s.Area != TLB {
			n -= uintptr(page) - 1
		}
		return one(unix.SYS_MUNMAP, at, n)
	case OpProtect:
		if arg&8 != 0 && s.Area != TLB {
			n -= uintptr(page) - 1
		}
		if arg&4 != 0 {
			return one(unix.SYS_PKEY_MPROTECT, at, n, prots[arg&3].prot, ^uintptr(0))
		}
		return one(unix.SYS_MPROTECT, at, n, prots[arg&3].prot)
	case OpAdvise:
		return one(unix.SYS_MADVISE, at, uintptr(p.advised(s).Len()), advices[arg%len(advices)].advice)
	case OpVector:
		v := p.vectors[s.Thread]
		k := 1 + (int(s.Pages)+int(s.To))%24
		for i := range k {
			place := (uint64(s.Page) + uint64(i)*uint64(1+s.To%7)) % z.units
			v[i] = [2]uint64{uint64(z.start) + place*z.unit, z.unit}
		}
		return one(unix.SYS_PROCESS_MADVISE, uintptr(p.pidfd), uintptr(unsafe.Pointer(v)), uintptr(k),
			advices[vectorAdvices[arg%len(vectorAdvices)]].advice, 0)
	case OpRemap:
		return p.remap(s, one)
	case OpBreak:
		return one(unix.SYS_BRK, uintptr(p.zones[Heap].start)+uintptr(s.To)%(heapUnits+1)*uintptr(page))
	case OpAttach:
		if s.Area == TLB {
			return nil
		}
		flags := uintptr(shmRemap)
		if arg&6 == 6 {
			flags = 0
		}
		at = min(at, uintptr(z.span().End)-uintptr(segment*page))
		return one(unix.SYS_SHMAT, uintptr(p.shm[arg&1]), at, flags)
	case OpDetach:
		return one(unix.SYS_SHMDT, at)
	case OpTruncate:
		c := one(unix.SYS_FTRUNCATE, uintptr(file), uintptr(s.To)%(units+1)*unit)
		if arg&2 != 0 {
			c = append(c, one(unix.SYS_FTRUNCATE, uintptr(file), units*unit)...)
		}
		return c
	case OpPunch:
		return one(unix.SYS_FALLOCATE, uintptr(file), fallocPunchQuiet, offset, max(n, unit))
	case OpTouch:
		var c []call
		for i := range min(uint64(n)/page, 4) {
			if arg&1 != 0 { // a write by the kernel never kills
				c = append(c, one(unix.SYS_GETRANDOM, at+uintptr(i*page), 1, 0)...)
			} else {
				c = append(c, one(unix.SYS_MADVISE, at+uintptr(i*page), uintptr(page), unix.MADV_POPULATE_READ)...)
			}
		}
		return c
	case OpLock:
		switch arg & 3 {
		case 0:
			return one(unix.SYS_MLOCK, at, n)
		case 1:
			return one(unix.SYS_MLOCK2, at, n, mlockOnFault)
		}
		return one(unix.SYS_MUNLOCK, at, n)
	case OpFilePages:
		return one(unix.SYS_REMAP_FILE_PAGES, at, n, 0, offset/uintptr(page), 0)
	}
	return nil
}

// advised is the range of OpAdvise, sometimes of one byte.
func (p *performer) advised(s Step) mm.Range {
	r := p.span(s)
	if s.Arg >= 192 && s.Area != TLB {
		r.End = r.Start + 1
	}
	return r
}

func (p *performer) remap(s Step, one func(uintptr, ...uintptr) []call) []call {
	const may, fix, dont = unix.MREMAP_MAYMOVE, unix.MREMAP_FIXED, unix.MREMAP_DONTUNMAP
	r, z := p.span(s), p.zones[s.Area]
	at, n := uintptr(r.Start), uintptr(r.Len())
	grown, half := n+2*uintptr(z.unit), max(uintptr(z.unit), n/2&^uintptr(z.unit-1))
	if s.Pages == 0 {
		half = n
	}
	to := z
	if s.Arg >= 128 && s.Area != TLB { // to another area
		to = p.zones[Small]
	}
	// dest is a place in the area for m bytes; 0: none
	dest := func(m uintptr) uintptr {
		room := uintptr(to.unit * to.units)
		if m > room {
			return 0
		}
		off := uintptr(s.To) % uintptr(to.units) * uintptr(to.unit)
		return uintptr(to.start) + min(off, (room-m)/uintptr(to.unit)*uintptr(to.unit))
	}
	var old, length, flags uintptr = n, n, 0
	switch int(s.Arg) % len(remaps) {
	case 0:
		length = half
	case 1:
		length, flags = grown, may
	case 2:
		length = grown
	case 3, 4:
		flags = may | fix
	case 5:
		length, flags = grown, may|fix
	case 6:
		length, flags = half, may|fix
	case 7:
		flags = may | dont
	case 8:
		flags = may | dont | fix
	case 9:
		old, flags = 0, may|fix
	}
	var where uintptr
	if flags&fix != 0 {
		if where = dest(length); where == 0 {
			return nil
		}
	}
	return one(unix.SYS_MREMAP, at, old, length, flags, where)
}

// strayed is the mapping that a call made outside of all areas, if any: the
// kernel chose the place.
func (p *performer) strayed(c *call) mm.Range {
	var n uintptr
	switch c.nr {
	case unix.SYS_MMAP:
		n = c.args[1]
	case unix.SYS_MREMAP:
		n = c.args[2]
	}
	if n == 0 || c.ret <= 0 {
		return mm.Range{}
	}
	at := mm.Addr(c.ret)
	for _, z := range p.zones {
		if r := z.span(); at >= r.Start && at < r.End+mm.Addr(r.Len()) {
			return mm.Range{}
		}
	}
	return mm.Range{Start: at, End: at + mm.Addr(n)}
}

// do performs a step in the calling thread. Failures of its calls are part of
// the game; an error is one of the harness.
func (p *performer) do(s Step) error {
	script := p.script(s)
	if len(script) == 0 {
		return nil
	}
	switch s.How {
	case Vfork, Fork:
		if err := p.child(s.How == Vfork, script); err != nil {
			return err
		}
		if s.How == Fork {
			return nil // strays went with the child
		}
	case Uring:
		// what it answers is part of the game as well
		_ = p.ring.Madvise(p.advised(s), int(script[0].args[2]))
	default:
		p.direct(script)
	}
	for i := range script {
		if r := p.strayed(&script[i]); !r.Empty() {
			if err := syscall6(unix.SYS_MUNMAP, uintptr(r.Start), uintptr(r.Len())); err != nil {
				return fmt.Errorf("unmap stray %v: %w", r, err)
			}
		}
	}
	return nil
}
