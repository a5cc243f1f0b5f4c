// SPDX-License-Identifier: Apache-2.0

// Package truth is the truth table as executable data: what operations on
// memory really do to a registration of it, and which records tell of it.
// The operations are made by the programs of package ops; the pages that a
// device would miss are found with an io_uring registered buffer.
//
// The table was measured on Linux 6.18, x86-64. Its tests need root, io_uring
// and gcc.
package truth

import (
	"errors"
	"fmt"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// Span is the half-open range of pages [First, End), relative to the buffer.
type Span struct{ First, End int }

// Expect is one record that tells of a row's operation.
type Expect struct {
	Kind mm.Kind
	// At are the pages that changed: the record's range holds them all.
	At Span
	// Within are the pages that the call asked for, where that is more than
	// At: a record that is not marked [mm.Superset] lies within. Zero: At.
	Within Span
	// To: the record is a Move, and its end says where to: [Run.Moved].
	To bool
	// Onto: a Move to At says the same.
	Onto bool
	// ABI is the call's.
	ABI mm.ABI
	// ByChild: the record has the pid of [Run.Child], not the program's.
	ByChild bool
	// Flags are set in the record, among others.
	Flags mm.Flags
	// Counted is how many records there are, if not one.
	Counted int
}

// Match reports whether rec is that record in run r, begin or end.
func (e *Expect) Match(r *Run, rec *mm.Record) bool {
	pid := r.P.PID()
	if e.ByChild {
		pid = r.Child
	}
	if rec.PID != uint32(pid) || rec.Call.ABI != e.ABI && e.Kind != mm.Exit || rec.Flags&e.Flags != e.Flags {
		return false
	}
	got := rec.Range
	switch {
	case rec.Kind == e.Kind:
	case e.Onto && rec.Kind == mm.Move:
		got = rec.To
	default:
		return false
	}
	if e.To && rec.Phase == mm.PhaseEnd && rec.To != r.Moved {
		return false
	}
	within := e.Within
	if within == (Span{}) {
		within = e.At
	}
	// The end of a call with a vector has the hull of the begins.
	loose := rec.Flags&mm.Superset != 0 || rec.Flags&mm.Vector != 0 && rec.Phase == mm.PhaseEnd || !e.Kind.IsChange()
	return got.Contains(r.Span(e.At)) && (loose || r.Span(within).Contains(got))
}

// Row is one operation and what it does.
type Row struct {
	Name   string
	Memory Memory
	Oracle Oracle
	// Refused: the registration fails so, and there is nothing to miss.
	Refused unix.Errno
	// Errnos are the outcomes of the operation; empty: success.
	Errnos []unix.Errno
	// Want is what [Run.Oracle] returns when nothing watches.
	Want string
	// Records are what must be reported of it. Where none of them is a
	// change (see [Row.Changes]), no change may be reported that touches the
	// buffer, but for the kinds of May.
	Records []Expect
	// May are kinds that may be reported although they are not necessary.
	May []mm.Kind
	// Gap: hooks on system calls cannot see it; the name of their gap.
	Gap string
	// I386: the call is of the 32-bit ABI, which only x86-64 has.
	I386 bool
	// Needs is what older kernels do not have.
	Needs Feature
	// Prepare is what has to be there before the registration.
	Prepare func(*Run)
	// Act performs the operation and returns its result.
	Act func(*Run) int64
}

// Changes reports whether the operation changes anything about the buffer.
func (row *Row) Changes() bool {
	return slices.ContainsFunc(row.Records, func(e Expect) bool { return e.Kind.IsChange() })
}

// By reports whether programs of impl can perform row on this kernel. Where
// that cannot be found out, performing it tells why.
func (row *Row) By(impl Impl) bool {
	if row.I386 {
		if ok, err := CompatABI.Available(); !ok || err != nil {
			return false
		}
	}
	switch row.Memory {
	case SysV, SysVLow, FilePrivate:
		if ok, err := RegisterFile.Available(); !ok && err == nil {
			return false
		}
	}
	ok, err := row.Needs.Available()
	return ok || err != nil
}

// The gaps of hooks on system calls that rows fall into, as tracer.Coverage
// names them.
const (
	GapTruncate     = "file-truncate"
	GapDirectWrite  = "file-direct-write"
	GapWriteProtect = "uffd-writeprotect"
)

const (
	prot              = unix.PROT_READ | unix.PROT_WRITE
	anon              = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	shmRemap          = 040000
	shmRnd            = 020000
	advCollapse       = 25
	advGuardInstall   = 102
	advGuardRemove    = 103
	advDontneedLocked = 24
	fallocPunch       = unix.FALLOC_FL_PUNCH_HOLE | unix.FALLOC_FL_KEEP_SIZE
	none8             = "........"
	all8              = "SSSSSSSS"
	gone8             = "UUUUUUUU"
)

func one(k mm.Kind, first, end int) []Expect { return []Expect{{Kind: k, At: Span{first, end}}} }

func einval(also ...unix.Errno) []unix.Errno { return append(also, unix.EINVAL) }

// Rows is the table.
var Rows = []Row{
	// Unmapping and replacing.
	{Name: "munmap-mmap", Want: all8, Records: one(mm.Unmap, 0, 8), Act: func(r *Run) int64 {
		r.munmap(0, 8)
		return r.P.Syscall(unix.SYS_MMAP, r.Base, r.bytes(8), prot, anon|unix.MAP_FIXED_NOREPLACE, -1, 0)
	}},
	{Name: "munmap-page", Want: "....U...", Records: one(mm.Unmap, 4, 5), Act: func(r *Run) int64 { return r.munmap(4, 1) }},
	{Name: "munmap-head", Want: "U.......", Records: one(mm.Unmap, 0, 1), Act: func(r *Run) int64 { return r.munmap(0, 1) }},
	{Name: "munmap-tail", Want: ".......U", Records: one(mm.Unmap, 7, 8), Act: func(r *Run) int64 { return r.munmap(7, 1) }},
	{Name: "munmap-overhang", Want: "......UU", Records: one(mm.Unmap, 6, 12), Act: func(r *Run) int64 { return r.munmap(6, 6) }},
	{Name: "munmap-page-and-byte", Want: "..UU....", Records: one(mm.Unmap, 2, 4), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MUNMAP, r.Page(2), r.Unit+1)
	}},
	{Name: "munmap-unaligned", Want: none8, Errnos: einval(), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MUNMAP, r.Page(2)+1, r.Unit)
	}},
	{Name: "munmap-zero", Want: none8, Errnos: einval(), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MUNMAP, r.Page(2), 0)
	}},
	{Name: "munmap-hole", Want: none8, Prepare: func(r *Run) { r.munmap(8, 2) }, Act: func(r *Run) int64 { return r.munmap(8, 2) }},
	{Name: "munmap-vmas-and-holes", Want: gone8, Records: []Expect{{Kind: mm.Unmap, At: Span{0, 8}}, {Kind: mm.Unmap, At: Span{2, 3}}, {Kind: mm.Unmap, At: Span{5, 6}}},
		Prepare: func(r *Run) {
			// Seven mappings, of which the holes take two.
			r.must("advise", r.madvise(1, 1, unix.MADV_DONTDUMP))
			r.must("advise", r.madvise(4, 1, unix.MADV_DONTDUMP))
			r.must("advise", r.madvise(7, 1, unix.MADV_DONTDUMP))
		}, Act: func(r *Run) int64 {
			r.munmap(2, 1)
			r.munmap(5, 1)
			return r.munmap(0, 8)
		}},
	{Name: "mmap-fixed", Want: "...SS...", Records: one(mm.Replace, 3, 5), Act: func(r *Run) int64 {
		return r.mmap(3, 2, prot, anon, -1)
	}},
	{Name: "mmap-fixed-bytes", Want: "...SS...", Records: one(mm.Replace, 3, 5), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MMAP, r.Page(3), r.Unit+1, prot, anon|unix.MAP_FIXED, -1, 0)
	}},
	{Name: "mmap-fixed-noreplace", Want: none8, Errnos: []unix.Errno{unix.EEXIST}, Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MMAP, r.Page(3), r.bytes(2), prot, anon|unix.MAP_FIXED_NOREPLACE, -1, 0)
	}},
	{Name: "mmap-fixed-bad-file", Want: none8, Errnos: []unix.Errno{unix.EBADF}, May: []mm.Kind{mm.Replace}, Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MMAP, r.Page(3), r.bytes(2), prot, unix.MAP_PRIVATE|unix.MAP_FIXED, -1, 0)
	}},
	{Name: "mmap-fixed-refused-by-driver", Want: "..UUUU..", Errnos: einval(), // by the time the driver refuses, the old pages are gone
		Records: one(mm.Replace, 2, 6), Act: func(r *Run) int64 {
			fd := r.event()
			defer r.P.Syscall(unix.SYS_CLOSE, fd)
			return r.P.Syscall(unix.SYS_MMAP, r.Page(2), r.bytes(4), prot, unix.MAP_SHARED|unix.MAP_FIXED, fd, 0) // not one page and a power of two
		}},
	{Name: "mmap-hint", Want: none8, Act: func(r *Run) int64 { // a hint at used addresses: goes elsewhere
		at := r.must("map", r.P.Syscall(unix.SYS_MMAP, r.Base, r.bytes(8), prot, anon, -1, 0))
		return r.P.Syscall(unix.SYS_MUNMAP, at, r.bytes(8))
	}},

	// Advice.
	{Name: "dontneed-byte", Want: "...S....", Records: one(mm.Zap, 3, 4), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MADVISE, r.Page(3), 1, unix.MADV_DONTNEED)
	}},
	{Name: "dontneed-zero", Want: none8, Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MADVISE, r.Page(3), 0, unix.MADV_DONTNEED)
	}},
	{Name: "dontneed-hole", Want: "SSSSUSSS", Errnos: []unix.Errno{unix.ENOMEM}, // done, although it failed
		Records: []Expect{{Kind: mm.Unmap, At: Span{4, 5}}, {Kind: mm.Zap, At: Span{0, 8}}}, Act: func(r *Run) int64 {
			r.munmap(4, 1)
			return r.madvise(0, 8, unix.MADV_DONTNEED)
		}},
	{Name: "dontneed-locked", Want: all8, Records: one(mm.Zap, 0, 8), Prepare: func(r *Run) {
		r.must("lock", r.P.Syscall(unix.SYS_MLOCK, r.Base, r.bytes(8)))
	}, Act: func(r *Run) int64 { return r.madvise(0, 8, advDontneedLocked) }},
	{Name: "dontneed-of-locked", Want: none8, Errnos: einval(), May: []mm.Kind{mm.Zap}, Prepare: func(r *Run) {
		r.must("lock", r.P.Syscall(unix.SYS_MLOCK, r.Base, r.bytes(8)))
	}, Act: func(r *Run) int64 { return r.madvise(0, 8, unix.MADV_DONTNEED) }},
	harmless("free", unix.MADV_FREE),
	harmless("pageout", unix.MADV_PAGEOUT),
	harmless("cold", unix.MADV_COLD),
	harmless("mergeable", unix.MADV_MERGEABLE),
	harmless("unmergeable", unix.MADV_UNMERGEABLE),
	harmless("wipeonfork", unix.MADV_WIPEONFORK),
	harmless("dontfork", unix.MADV_DONTFORK),
	harmless("willneed", unix.MADV_WILLNEED),
	harmless("dontdump", unix.MADV_DONTDUMP),
	harmless("populate-write", unix.MADV_POPULATE_WRITE),
	{Name: "collapse-small", Want: none8, Errnos: einval(), Act: func(r *Run) int64 { return r.madvise(0, 8, advCollapse) }},
	{Name: "collapse-pinned", Memory: NoHuge, Want: none8, Errnos: einval(unix.EAGAIN, 0 /* not pinned */), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MADVISE, r.Base, hugePage, advCollapse)
	}},
	{Name: "guard-install", Needs: Guard, Want: ".U......", Records: one(mm.Zap, 1, 2), Act: func(r *Run) int64 { return r.madvise(1, 1, advGuardInstall) }},
	{Name: "guard-install-remove", Needs: Guard, Want: ".S......", Records: one(mm.Zap, 1, 2), Act: func(r *Run) int64 {
		r.must("install guard", r.madvise(1, 1, advGuardInstall))
		return r.madvise(1, 1, advGuardRemove)
	}},
	{Name: "guard-remove", Needs: Guard, Want: none8, Act: func(r *Run) int64 { return r.madvise(1, 1, advGuardRemove) }},
	{Name: "remove", Memory: MemfdShared, Want: ".....S..", Records: one(mm.Zap, 5, 6), Act: func(r *Run) int64 {
		return r.madvise(5, 1, unix.MADV_REMOVE)
	}},
	{Name: "dontneed-shared", Memory: MemfdShared, Want: none8, May: []mm.Kind{mm.Zap}, Act: func(r *Run) int64 {
		return r.madvise(0, 8, unix.MADV_DONTNEED)
	}},
	{Name: "dontneed-private-file", Memory: MemfdPrivate, Want: "..SSSS..", Records: one(mm.Zap, 2, 6), Act: func(r *Run) int64 {
		return r.madvise(2, 4, unix.MADV_DONTNEED)
	}},
	{Name: "process-madvise", Needs: ProcessDiscard, Want: "S.....S.", Records: []Expect{{Kind: mm.Zap, At: Span{0, 1}}, {Kind: mm.Zap, At: Span{6, 7}}}, Act: func(r *Run) int64 {
		return r.processMadvise(r.Page(0), r.Page(6))
	}},
	{Name: "process-madvise-bad-element", Needs: ProcessDiscard, Want: "S.......", Records: one(mm.Zap, 0, 1), May: []mm.Kind{mm.Zap}, Act: func(r *Run) int64 {
		return r.processMadvise(r.Page(0), r.Page(3)+1, r.Page(6))
	}},
	{Name: "process-madvise-1024", Needs: ProcessDiscard, Want: "..S...S.", Records: []Expect{{Kind: mm.Zap, At: Span{2, 3}}, {Kind: mm.Zap, At: Span{6, 7}}}, Act: func(r *Run) int64 {
		pages := make([]mm.Addr, 1024)
		for i := range pages {
			pages[i] = r.Page(2)
		}
		pages[1023] = r.Page(6)
		return r.processMadvise(pages...)
	}},
	{Name: "uring-madvise", Want: ".SS.....", Records: []Expect{{Kind: mm.Zap, At: Span{1, 3}, ABI: mm.ABIIOUring}}, Act: func(r *Run) int64 {
		return r.uringMadvise(0, 0)
	}},
	{Name: "uring-madvise-async", Want: ".SS.....", Records: []Expect{{Kind: mm.Zap, At: Span{1, 3}, ABI: mm.ABIIOUring}}, Act: func(r *Run) int64 {
		return r.uringMadvise(0, uringSQEAsync)
	}},
	{Name: "uring-madvise-sqpoll", Want: ".SS.....", Records: []Expect{{Kind: mm.Zap, At: Span{1, 3}, ABI: mm.ABIIOUring}}, Act: func(r *Run) int64 {
		return r.uringMadvise(uringSetupSQPoll, 0)
	}},

	// Access rights.
	{Name: "mprotect-none", Want: gone8, Records: one(mm.Protect, 0, 8), Act: func(r *Run) int64 { return r.mprotect(0, 8, unix.PROT_NONE) }},
	{Name: "mprotect-none-rw", Want: none8, Records: []Expect{{Kind: mm.Protect, At: Span{0, 8}, Counted: 2}}, Act: func(r *Run) int64 {
		r.must("protect", r.mprotect(0, 8, unix.PROT_NONE))
		return r.mprotect(0, 8, prot)
	}},
	{Name: "mprotect-read", Want: none8, Records: one(mm.Protect, 0, 8), Act: func(r *Run) int64 { return r.mprotect(0, 8, unix.PROT_READ) }},
	{Name: "mprotect-hole", Want: "UUUUU...", Errnos: []unix.Errno{unix.ENOMEM}, // the part in front of the hole is done
		Records: []Expect{{Kind: mm.Unmap, At: Span{4, 5}}, {Kind: mm.Protect, At: Span{0, 4}, Within: Span{0, 8}}}, Act: func(r *Run) int64 {
			r.munmap(4, 1)
			return r.mprotect(0, 8, unix.PROT_NONE)
		}},
	{Name: "mprotect-growsdown", Want: "UUUUU...", Records: one(mm.Protect, 0, 5), Prepare: func(r *Run) {
		// In the middle of a mapping that grows down: the change begins at
		// the mapping's start, wherever the call's own range does.
		r.munmap(-16, 16)
		r.mmap(0, 8, prot, anon|unix.MAP_GROWSDOWN, -1)
		r.P.Fill(r.Base, r.Unit, 8, 0)
	}, Act: func(r *Run) int64 { return r.mprotect(4, 1, unix.PROT_NONE|unix.PROT_GROWSDOWN) }},
	{Name: "mprotect-none-dontneed-rw", Want: all8, Records: []Expect{{Kind: mm.Protect, At: Span{0, 8}, Counted: 2}, {Kind: mm.Zap, At: Span{0, 8}}}, Act: func(r *Run) int64 {
		r.must("protect", r.mprotect(0, 8, unix.PROT_NONE))
		r.must("drop", r.madvise(0, 8, unix.MADV_DONTNEED))
		return r.mprotect(0, 8, prot)
	}},
	{Name: "pkey-mprotect-none", Want: gone8, Records: one(mm.Protect, 0, 8), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_PKEY_MPROTECT, r.Base, r.bytes(8), unix.PROT_NONE, -1)
	}},

	// Moving.
	{Name: "mremap-grow-move", Want: gone8, Records: []Expect{{Kind: mm.Move, At: Span{0, 8}, To: true}}, Act: func(r *Run) int64 {
		return r.moved(r.mremap(8, 16, unix.MREMAP_MAYMOVE, 0), 16)
	}},
	{Name: "mremap-dontunmap", Want: all8, Records: []Expect{{Kind: mm.Move, At: Span{0, 8}, To: true}}, Act: func(r *Run) int64 {
		return r.moved(r.mremap(8, 8, unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP, 0), 8)
	}},
	{Name: "mremap-away", Want: gone8, Records: []Expect{{Kind: mm.Move, At: Span{0, 8}, To: true}}, Act: func(r *Run) int64 {
		return r.moved(r.mremap(8, 8, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Page(24)), 8)
	}},
	{Name: "mremap-away-mappings", Needs: MoveMappings, Want: gone8, Records: []Expect{{Kind: mm.Move, At: Span{0, 8}, To: true}}, // several at once: from 6.17
		Prepare: func(r *Run) { r.must("advise", r.madvise(3, 2, unix.MADV_DONTDUMP)) }, Act: func(r *Run) int64 {
			return r.moved(r.mremap(8, 8, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Page(24)), 8)
		}},
	{Name: "mremap-away-in-part", Needs: MoveMappings, Want: "UUUU....", Errnos: []unix.Errno{unix.EFAULT}, // the mappings in front of a userfaultfd's have gone by then
		Records: []Expect{{Kind: mm.Move, At: Span{0, 4}, Within: Span{0, 8}}}, Prepare: func(r *Run) {
			r.file = r.userfault(Span{4, 8}, 0, uffdModeMissing)
		}, Act: func(r *Run) int64 {
			return r.mremap(8, 8, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Page(24))
		}},
	{Name: "mremap-grow-in-place", Want: none8, Records: one(mm.Map, 8, 12), Prepare: func(r *Run) { r.munmap(8, 8) }, Act: func(r *Run) int64 {
		return r.mremap(8, 12, 0, 0)
	}},
	{Name: "mremap-may-grow-in-place", Want: none8, Records: one(mm.Map, 8, 12), May: []mm.Kind{mm.Move}, Prepare: func(r *Run) { r.munmap(8, 8) }, Act: func(r *Run) int64 {
		return r.moved(r.mremap(8, 12, unix.MREMAP_MAYMOVE, 0), 12)
	}},
	{Name: "mremap-grow-refused", Want: none8, Errnos: []unix.Errno{unix.ENOMEM}, May: []mm.Kind{mm.Move}, Act: func(r *Run) int64 {
		return r.mremap(8, 12, 0, 0)
	}},
	{Name: "mremap-shrink", Want: ".....UUU", Records: one(mm.Unmap, 5, 8), Act: func(r *Run) int64 { return r.mremap(8, 5, 0, 0) }},
	{Name: "mremap-shrink-away", Want: gone8, Records: one(mm.Move, 0, 8), Act: func(r *Run) int64 {
		return r.mremap(8, 5, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Page(24))
	}},
	{Name: "mremap-onto", Want: all8, Records: []Expect{{Kind: mm.Replace, At: Span{0, 8}, Onto: true}}, Prepare: func(r *Run) {
		r.mmap(24, 8, prot, anon, -1)
		r.P.Fill(r.Page(24), r.Unit, 8, 0)
	}, Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MREMAP, r.Page(24), r.bytes(8), r.bytes(8), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Base)
	}},
	{Name: "mremap-onto-refused", Want: gone8, Errnos: []unix.Errno{unix.ENOMEM}, // the destination is cleared first
		Records: []Expect{{Kind: mm.Replace, At: Span{0, 8}, Within: Span{0, 16}, Onto: true}}, Prepare: func(r *Run) {
			r.munmap(8, 8)
			r.mmap(24, 16, prot, anon, -1)
		}, Act: func(r *Run) int64 {
			defer r.limitSpace()()
			return r.P.Syscall(unix.SYS_MREMAP, r.Page(24), r.bytes(16), r.bytes(16), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED|unix.MREMAP_DONTUNMAP, r.Base)
		}},
	{Name: "mremap-copy", Memory: MemfdShared, Want: none8, Act: func(r *Run) int64 { // of old size 0: a second mapping
		at := r.must("copy", r.mremap(0, 8, unix.MREMAP_MAYMOVE, 0))
		return r.P.Syscall(unix.SYS_MUNMAP, at, r.bytes(8))
	}},
	{Name: "mremap-copy-onto", Memory: MemfdShared, Want: all8, Records: one(mm.Replace, 0, 8), Prepare: func(r *Run) {
		fd := r.memfd(0)
		r.mmap(24, 8, prot, unix.MAP_SHARED, fd)
		r.P.Syscall(unix.SYS_CLOSE, fd)
	}, Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MREMAP, r.Page(24), 0, r.bytes(8), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Base)
	}},
	{Name: "remap-file-pages", Memory: MemfdShared, Want: "..SS....", Records: one(mm.Replace, 2, 4), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_REMAP_FILE_PAGES, r.Page(2), r.bytes(2), 0, 12, 0)
	}},

	// The heap.
	{Name: "brk-shrink-grow", Memory: Heap, Want: "..SSSSSS", Records: one(mm.Unmap, 2, 8), Act: func(r *Run) int64 {
		if got := r.P.Syscall(unix.SYS_BRK, r.Page(2)); mm.Addr(got) != r.Page(2) {
			return -int64(unix.ENOMEM)
		}
		return r.P.Syscall(unix.SYS_BRK, r.Page(8))
	}},
	{Name: "brk-shrink-unaligned", Memory: Heap, Want: "...UUUUU", Records: one(mm.Unmap, 3, 8), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_BRK, r.Page(2)+1)
	}},
	{Name: "brk-query", Memory: Heap, Want: none8, Act: func(r *Run) int64 { return r.P.Syscall(unix.SYS_BRK, 0) }},
	{Name: "brk-grow", Memory: Heap, Want: none8, Records: one(mm.Map, 8, 12), Act: func(r *Run) int64 { return r.P.Syscall(unix.SYS_BRK, r.Page(12)) }},
	{Name: "brk-grow-refused", Memory: Heap, Want: none8, Act: func(r *Run) int64 {
		if got := r.P.Syscall(unix.SYS_BRK, uint64(1)<<46); mm.Addr(got) != r.Page(8) {
			r.fail("grow heap: not refused", unix.EINVAL)
		}
		return 0
	}},
	{Name: "brk-below-start", Memory: Heap, Want: none8, May: []mm.Kind{mm.Unmap}, Act: func(r *Run) int64 {
		if got := r.P.Syscall(unix.SYS_BRK, r.Unit); mm.Addr(got) != r.Page(8) {
			r.fail("shrink heap to nothing: not refused", unix.EINVAL)
		}
		return 0
	}},

	// System V segments.
	{Name: "shmdt", Memory: SysV, Want: gone8, Records: one(mm.Unmap, 0, 8), Act: func(r *Run) int64 { return r.P.Syscall(unix.SYS_SHMDT, r.Base) }},
	{Name: "shmdt-shmat", Memory: SysV, Want: all8, Records: one(mm.Unmap, 0, 8), Act: func(r *Run) int64 {
		r.must("detach", r.P.Syscall(unix.SYS_SHMDT, r.Base))
		return r.P.Syscall(unix.SYS_SHMAT, r.segment(), r.Base, 0)
	}},
	{Name: "shmat-remap", Memory: SysV, Want: all8, Records: one(mm.Replace, 0, 8), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_SHMAT, r.segment(), r.Base, shmRemap)
	}},
	{Name: "shmat-remap-rnd", Want: all8, Records: one(mm.Replace, 0, 8), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_SHMAT, r.segment(), r.Base+1, shmRemap|shmRnd)
	}},
	{Name: "shmat-used", Memory: SysV, Want: none8, Errnos: einval(), May: []mm.Kind{mm.Replace}, Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_SHMAT, r.segment(), r.Base, 0)
	}},
	{Name: "shmdt-pieces", Memory: SysV, Want: "UUUUUSUU", // only what still belongs to the segment goes
		Records: []Expect{{Kind: mm.Unmap, At: Span{3, 4}}, {Kind: mm.Replace, At: Span{5, 6}}, {Kind: mm.Unmap, At: Span{0, 3}, Within: Span{0, 8}}, {Kind: mm.Unmap, At: Span{4, 5}, Within: Span{0, 8}}, {Kind: mm.Unmap, At: Span{6, 8}, Within: Span{0, 8}}},
		Act: func(r *Run) int64 {
			r.munmap(3, 1)
			r.mmap(5, 1, prot, anon, -1)
			return r.P.Syscall(unix.SYS_SHMDT, r.Base)
		}},

	// Through the file, by whoever has it.
	{Name: "punch", Memory: MemfdShared, Want: "..SS....", Records: one(mm.Zap, 2, 4), Gap: GapTruncate, Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_FALLOCATE, r.file, fallocPunch, r.bytes(2), r.bytes(2))
	}},
	{Name: "punch-by-other", Memory: MemfdShared, Want: "..SS....", Records: one(mm.Zap, 2, 4), Gap: GapTruncate, Act: func(r *Run) int64 {
		return r.byOther(func(fd int) error {
			return unix.Fallocate(fd, fallocPunch, int64(r.bytes(2)), int64(r.bytes(2)))
		})
	}},
	{Name: "remove-through-other-mapping", Memory: MemfdShared, Want: ".....S..", Records: one(mm.Zap, 5, 6), Gap: GapTruncate, Prepare: func(r *Run) {
		r.mmap(24, 8, prot, unix.MAP_SHARED, r.file)
	}, Act: func(r *Run) int64 { return r.madvise(29, 1, unix.MADV_REMOVE) }},
	{Name: "remove-by-forked-child", Memory: MemfdShared, Want: ".....S..", Records: one(mm.Zap, 5, 6), Gap: GapTruncate, Act: func(r *Run) int64 {
		return r.join(r.P.Clone(int(unix.SIGCHLD), unix.SYS_MADVISE, r.Page(5), r.bytes(1), unix.MADV_REMOVE))
	}},
	{Name: "uring-punch", Memory: MemfdShared, Want: "..SS....", Records: one(mm.Zap, 2, 4), Gap: GapTruncate, Act: func(r *Run) int64 {
		return r.withRing(func(ring *Ring) int64 { return ring.Punch(r.file, r.bytes(2), r.bytes(2)) })
	}},
	{Name: "uring-truncate", Needs: UringTruncate, Memory: MemfdShared, Want: "....SSSS", Records: one(mm.Zap, 4, 8), Gap: GapTruncate, Act: func(r *Run) int64 {
		return r.withRing(func(ring *Ring) int64 {
			r.must("truncate", ring.Truncate(r.file, r.bytes(4)))
			return ring.Truncate(r.file, r.bytes(8))
		})
	}},
	truncate("truncate-shared", MemfdShared, false),
	truncate("truncate-private", MemfdPrivate, false),
	truncate("truncate-shared-by-other", MemfdShared, true),
	truncate("truncate-private-by-other", MemfdPrivate, true),
	truncate("truncate-disk-private-by-other", FilePrivate, true),
	{Name: "odirect-write-by-other", Memory: FileReadOnly, Oracle: Splice, Want: "..SSS...", Records: one(mm.Zap, 2, 5), Gap: GapDirectWrite, Act: func(r *Run) int64 {
		return r.directWrite(2, 3)
	}},

	// Other tasks.
	{Name: "vfork-dontneed", Want: ".S......", Records: []Expect{{Kind: mm.Zap, At: Span{1, 2}, ByChild: true}}, Act: func(r *Run) int64 {
		return r.join(r.P.Clone(unix.CLONE_VM|unix.CLONE_VFORK|int(unix.SIGCHLD), unix.SYS_MADVISE, r.Page(1), r.bytes(1), unix.MADV_DONTNEED))
	}},
	{Name: "clone-vm-dontneed", Want: ".S......", Records: []Expect{{Kind: mm.Zap, At: Span{1, 2}, ByChild: true}}, Act: func(r *Run) int64 {
		return r.join(r.P.Clone(unix.CLONE_VM|int(unix.SIGCHLD), unix.SYS_MADVISE, r.Page(1), r.bytes(1), unix.MADV_DONTNEED))
	}},
	{Name: "fork-write", Want: none8, Act: func(r *Run) int64 { // pinned pages are copied for the child, from 5.12
		pid := r.must("fork", r.P.Clone(int(unix.SIGCHLD), unix.SYS_PPOLL, 0, 0, 0, 0, 0))
		r.P.Fill(r.Base, r.Unit, 8, 0)
		r.must("kill child", r.P.Syscall(unix.SYS_KILL, pid, int(unix.SIGKILL)))
		return r.join(pid)
	}},
	{Name: "fork-child-write", Want: none8, Act: func(r *Run) int64 { // the child gets copies
		return r.join(r.P.Clone(int(unix.SIGCHLD), unix.SYS_GETRANDOM, r.Base, r.bytes(8), 0))
	}},
	{Name: "munmap-neighbour", Want: none8, Act: func(r *Run) int64 { return r.munmap(8, 4) }}, // what nobody registered
	{Name: "fork-child-munmap", Want: none8, Act: func(r *Run) int64 {
		return r.join(r.P.Clone(int(unix.SIGCHLD), unix.SYS_MUNMAP, r.Base, r.bytes(8)))
	}},

	// Things that move pages, but not pinned ones.
	{Name: "uffd-move-pinned", Needs: UserfaultMove, Want: none8, Errnos: []unix.Errno{unix.EBUSY}, Act: func(r *Run) int64 { return r.uffdMove() }},
	{Name: "uffd-writeprotect", Want: none8, Records: one(mm.Protect, 2, 4), Gap: GapWriteProtect, Act: func(r *Run) int64 {
		return r.uffdWriteProtect(Span{2, 4})
	}},
	{Name: "mbind-move", Want: none8, Act: func(r *Run) int64 {
		at := r.P.scratch + scratchVector
		r.P.Poke(8, at, 1) // node 0
		return r.P.Syscall(unix.SYS_MBIND, r.Base, r.bytes(8), unix.MPOL_BIND, at, 64, 1<<1 /* MPOL_MF_MOVE */)
	}},
	{Name: "move-pages", Want: none8, Act: func(r *Run) int64 {
		at := r.P.scratch + scratchVector
		args := make([]uint64, 16)
		for i := range 8 {
			args[i] = uint64(r.Page(i))
		}
		r.P.Poke(8, at, args...) // then 8 nodes of 4 bytes, all 0, then 8 status words
		return r.P.Syscall(unix.SYS_MOVE_PAGES, 0, 8, at, at+64, at+96, 1<<1 /* MPOL_MF_MOVE */)
	}},
	{Name: "migrate-pages", Want: none8, Act: func(r *Run) int64 {
		at := r.P.scratch + scratchVector
		r.P.Poke(8, at, 1)
		return r.P.Syscall(unix.SYS_MIGRATE_PAGES, 0, 64, at, at)
	}},
	{Name: "compaction", Want: none8, Act: func(r *Run) int64 {
		if err := os.WriteFile("/proc/sys/vm/compact_memory", []byte("1"), 0); err != nil {
			r.err = err
		}
		return 0
	}},
	{Name: "mlock-munlock", Want: none8, Act: func(r *Run) int64 {
		r.must("lock", r.P.Syscall(unix.SYS_MLOCK, r.Base, r.bytes(8)))
		return r.P.Syscall(unix.SYS_MUNLOCK, r.Base, r.bytes(8))
	}},

	// Huge pages.
	{Name: "thp-dontneed-subpage", Memory: Huge, Want: "...S....", Records: one(mm.Zap, 3, 4), Act: func(r *Run) int64 {
		return r.madvise(3, 1, unix.MADV_DONTNEED)
	}},
	{Name: "thp-munmap-subpage", Memory: Huge, Want: "...U....", Records: one(mm.Unmap, 3, 4), Act: func(r *Run) int64 { return r.munmap(3, 1) }},
	{Name: "thp-mremap-away", Memory: Huge, Want: gone8, Records: []Expect{{Kind: mm.Move, At: Span{0, 8}, To: true}}, Act: func(r *Run) int64 {
		return r.moved(r.mremap(8, 8, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Page(520)), 8)
	}},
	{Name: "hugetlb-dontneed", Memory: HugetlbAnon, Want: ".SS.", Records: one(mm.Zap, 1, 3), Act: func(r *Run) int64 {
		return r.madvise(1, 2, unix.MADV_DONTNEED)
	}},
	{Name: "hugetlb-munmap", Memory: HugetlbAnon, Want: "..UU", Records: one(mm.Unmap, 2, 4), Act: func(r *Run) int64 { return r.munmap(2, 2) }},
	{Name: "hugetlb-munmap-part", Memory: HugetlbAnon, Want: "....", Errnos: einval(), May: []mm.Kind{mm.Unmap}, Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MUNMAP, r.Page(2)+mm.Addr(os.Getpagesize()), os.Getpagesize())
	}},
	{Name: "hugetlb-munmap-byte", Memory: HugetlbAnon, Want: "..U.", Records: one(mm.Unmap, 2, 3), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MUNMAP, r.Page(2), hugePage-1)
	}},
	{Name: "hugetlb-mmap-fixed", Memory: HugetlbAnon, Want: ".SS.", Records: one(mm.Replace, 1, 3), Act: func(r *Run) int64 {
		return r.mmap(1, 2, prot, anon|unix.MAP_HUGETLB, -1)
	}},
	{Name: "hugetlb-mmap-fixed-byte", Memory: HugetlbAnon, Want: ".SS.", Records: one(mm.Replace, 1, 3), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MMAP, r.Page(1), r.Unit+1, prot, anon|unix.MAP_FIXED|unix.MAP_HUGETLB, -1, 0)
	}},
	{Name: "hugetlb-file-mmap-fixed-byte", Memory: HugetlbShared, Want: ".SS.", Records: one(mm.Replace, 1, 3), Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_MMAP, r.Page(1), r.Unit+1, prot, unix.MAP_SHARED|unix.MAP_FIXED, r.file, r.bytes(4))
	}},
	{Name: "hugetlb-mremap-away-byte", Memory: HugetlbAnon, Want: "UUUU", Records: []Expect{{Kind: mm.Move, At: Span{0, 4}, To: true}}, Act: func(r *Run) int64 {
		length := r.bytes(3) + 1 // rounded up to huge pages
		return r.moved(r.P.Syscall(unix.SYS_MREMAP, r.Base, length, length, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Page(24)), 4)
	}},
	{Name: "hugetlb-mremap-shrink", Memory: HugetlbAnon, Want: "..UU", Records: one(mm.Unmap, 2, 4), Act: func(r *Run) int64 {
		return r.mremap(4, 2, 0, 0)
	}},
	{Name: "hugetlb-mremap-away", Memory: HugetlbAnon, Want: "UUUU", Records: []Expect{{Kind: mm.Move, At: Span{0, 4}, To: true}}, Act: func(r *Run) int64 {
		return r.moved(r.mremap(4, 4, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Page(24)), 4)
	}},
	{Name: "hugetlb-mprotect-none", Memory: HugetlbAnon, Want: ".U..", Records: one(mm.Protect, 1, 2), Act: func(r *Run) int64 {
		return r.mprotect(1, 1, unix.PROT_NONE)
	}},
	{Name: "hugetlb-remove", Memory: HugetlbShared, Want: ".S..", Records: one(mm.Zap, 1, 2), Act: func(r *Run) int64 {
		return r.madvise(1, 1, unix.MADV_REMOVE)
	}},
	{Name: "hugetlb-punch", Memory: HugetlbShared, Want: ".S..", Records: one(mm.Zap, 1, 2), Gap: GapTruncate, Act: func(r *Run) int64 {
		return r.P.Syscall(unix.SYS_FALLOCATE, r.file, fallocPunch, r.bytes(1), r.bytes(1))
	}},
	{Name: "hugetlb-punch-by-other", Memory: HugetlbShared, Want: ".S..", Records: one(mm.Zap, 1, 2), Gap: GapTruncate, Act: func(r *Run) int64 {
		return r.byOther(func(fd int) error { return unix.Fallocate(fd, fallocPunch, hugePage, hugePage) })
	}},
	truncate("hugetlb-truncate", HugetlbShared, false),
	truncate("hugetlb-truncate-by-other", HugetlbShared, true),

	// The 32-bit ABI, from a 64-bit program.
	{Name: "i386-munmap", Memory: AnonLow, I386: true, Want: "..UU....", Records: i386(mm.Unmap, 2, 4), Act: func(r *Run) int64 {
		return r.P.Syscall32(91, r.Page(2), r.bytes(2))
	}},
	{Name: "i386-mmap2-fixed", Memory: AnonLow, I386: true, Want: "...SS...", Records: i386(mm.Replace, 3, 5), Act: func(r *Run) int64 {
		return r.P.Syscall32(192, r.Page(3), r.bytes(2), prot, anon|unix.MAP_FIXED, -1, 0)
	}},
	{Name: "i386-old-mmap-fixed", Memory: AnonLow, I386: true, Want: "...SS...", Records: i386(mm.Replace, 3, 5), Act: func(r *Run) int64 {
		// Takes its six arguments from memory, in 32-bit words, which have to
		// lie below 4 GiB.
		at := r.Page(-1)
		r.mmap(-1, 1, prot, anon, -1)
		r.P.Poke(4, at, uint64(r.Page(3)), r.bytes(2), prot, anon|unix.MAP_FIXED, 0xffffffff, 0)
		return r.P.Syscall32(90, at)
	}},
	{Name: "i386-mremap-shrink", Memory: AnonLow, I386: true, Want: ".....UUU", Records: i386(mm.Unmap, 5, 8), Act: func(r *Run) int64 {
		return r.P.Syscall32(163, r.Base, r.bytes(8), r.bytes(5), 0, 0)
	}},
	{Name: "i386-mremap-away", Memory: AnonLow, I386: true, Want: gone8, Records: []Expect{{Kind: mm.Move, At: Span{0, 8}, To: true, ABI: mm.ABICompat}}, Act: func(r *Run) int64 {
		return r.moved(r.P.Syscall32(163, r.Base, r.bytes(8), r.bytes(8), unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, r.Page(24)), 8)
	}},
	{Name: "i386-mprotect-none", Memory: AnonLow, I386: true, Want: ".UU.....", Records: i386(mm.Protect, 1, 3), Act: func(r *Run) int64 {
		return r.P.Syscall32(125, r.Page(1), r.bytes(2), unix.PROT_NONE)
	}},
	{Name: "i386-dontneed", Memory: AnonLow, I386: true, Want: ".SS.....", Records: i386(mm.Zap, 1, 3), Act: func(r *Run) int64 {
		return r.P.Syscall32(219, r.Page(1), r.bytes(2), unix.MADV_DONTNEED)
	}},
	{Name: "i386-ipc-shmat-remap", Memory: AnonLow, I386: true, Want: all8, Records: i386(mm.Replace, 0, 8), Act: func(r *Run) int64 {
		// ipc(SHMAT, id, flags, &address, pointer)
		at := r.Page(-1)
		r.mmap(-1, 1, prot, anon, -1)
		return r.P.Syscall32(117, 21, r.segment(), shmRemap, at, r.Base)
	}},
	{Name: "i386-ipc-shmdt", Memory: SysVLow, I386: true, Want: gone8, Records: i386(mm.Unmap, 0, 8), Act: func(r *Run) int64 { return r.P.Syscall32(117, 22, 0, 0, 0, r.Base) }},

	// What ends the registration itself, or does not let it begin.
	{Name: "exec", Oracle: CPUOnly, Want: gone8, Records: []Expect{{Kind: mm.Exit, At: Span{0, 8}, Flags: mm.SpaceDeath}}, Act: func(r *Run) int64 {
		r.P.Exec()
		r.file, r.area = -1, mm.Range{}
		return 0
	}},
	{Name: "register-nothing", Memory: Nothing, Refused: unix.EFAULT},
	{Name: "register-driver-mapping", Memory: Driver, Refused: unix.EFAULT},
	{Name: "register-read-only", Memory: AnonReadOnly, Refused: unix.EFAULT},
	{Name: "register-file", Memory: FileReadOnly, Refused: unix.EFAULT},
	{Name: "register-after-mprotect", Memory: AnonReadOnly, Want: none8, Prepare: func(r *Run) {
		ring, err := r.P.Ring()
		if err != nil {
			r.err = err
			return
		}
		if e := ring.Register(0, r.Buffer()); e != -int64(unix.EFAULT) {
			r.fail("register read-only memory: not refused", unix.EINVAL)
		}
		r.must("protect", r.mprotect(0, 8, prot))
	}, Act: func(*Run) int64 { return 0 }},
}

func i386(k mm.Kind, first, end int) []Expect {
	return []Expect{{Kind: k, At: Span{first, end}, ABI: mm.ABICompat}}
}

// harmless is a row of an advice that does nothing to pinned pages.
func harmless(name string, advice int) Row {
	return Row{Name: name, Want: none8, Act: func(r *Run) int64 { return r.madvise(0, 8, advice) }}
}

// truncate is a row in which the file is cut to its first half and grows back.
func truncate(name string, m Memory, byOther bool) Row {
	row := Row{Name: name, Memory: m, Want: "....SSSS", Records: one(mm.Zap, 4, 8), Gap: GapTruncate}
	if m == HugetlbShared {
		row.Want, row.Records = "..SS", one(mm.Zap, 2, 4)
	}
	row.Act = func(r *Run) int64 {
		half, whole := r.bytes(r.Pages/2), r.bytes(r.Pages)
		if byOther {
			return r.byOther(func(fd int) error {
				if err := unix.Ftruncate(fd, int64(half)); err != nil {
					return err
				}
				return unix.Ftruncate(fd, int64(whole))
			})
		}
		r.must("truncate", r.P.Syscall(unix.SYS_FTRUNCATE, r.file, half))
		return r.P.Syscall(unix.SYS_FTRUNCATE, r.file, whole)
	}
	return row
}

// processMadvise drops one page each at the addresses.
func (r *Run) processMadvise(pages ...mm.Addr) int64 {
	p := r.P
	self := r.must("open pidfd", p.Syscall(unix.SYS_PIDFD_OPEN, p.PID(), 0))
	vector := make([]uint64, 0, 2*len(pages))
	for _, a := range pages {
		vector = append(vector, uint64(a), r.Unit)
	}
	p.Poke(8, p.scratch+scratchVector, vector...)
	ret := p.Syscall(unix.SYS_PROCESS_MADVISE, self, p.scratch+scratchVector, len(pages), unix.MADV_DONTNEED, 0)
	p.Syscall(unix.SYS_CLOSE, self)
	return ret
}

// uringMadvise drops pages 1 and 2.
func (r *Run) uringMadvise(setup, flags uint64) int64 {
	ring, err := r.P.Ring()
	if setup != 0 {
		if ring, err = r.P.newRing(setup); err == nil {
			defer ring.close()
		}
	}
	if err != nil {
		r.err = err
		return 0
	}
	return ring.Madvise(r.Span(Span{1, 3}), unix.MADV_DONTNEED, flags)
}

// withRing does something with the program's ring.
func (r *Run) withRing(do func(*Ring) int64) int64 {
	ring, err := r.P.Ring()
	if err != nil {
		r.err = err
		return 0
	}
	return do(ring)
}

// directWrite lets this process write n pages of the file from page i on with
// O_DIRECT.
func (r *Run) directWrite(i, n int) int64 {
	f, err := os.OpenFile(r.path, os.O_WRONLY|unix.O_DIRECT, 0)
	if err != nil {
		r.err = err
		return 0
	}
	defer f.Close()
	b, err := unix.Mmap(-1, 0, int(r.bytes(n)), prot, anon) // aligned
	if err != nil {
		r.err = err
		return 0
	}
	defer unix.Munmap(b)
	for i := range b {
		b[i] = 2
	}
	if _, err := f.WriteAt(b, int64(r.bytes(i))); err != nil {
		r.err = err
	}
	return 0
}

// limitSpace keeps the program's address space from growing by more than a
// page until the function it returns is called.
func (r *Run) limitSpace() (lift func()) {
	var pages uint64
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", r.P.PID()))
	if err == nil {
		_, err = fmt.Sscan(string(b), &pages)
	}
	if err != nil {
		r.err = errors.Join(r.err, fmt.Errorf("limit address space: %w", err))
		return func() {}
	}
	// by the program itself: another one may not without CAP_SYS_RESOURCE
	p, limit, old := r.P, r.P.scratch+scratchVector, r.P.scratch+scratchVector+16
	r.must("ask for limit of address space", p.Syscall(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_AS, 0, old))
	was := p.Peek(old, 2)
	p.Poke(8, limit, (pages+1)*r.Unit, was[1])
	r.must("limit address space", p.Syscall(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_AS, limit, 0))
	return func() {
		p.Poke(8, limit, was...)
		r.must("lift limit of address space", p.Syscall(unix.SYS_PRLIMIT64, 0, unix.RLIMIT_AS, limit, 0))
	}
}

// The requests of userfaultfd (linux/userfaultfd.h).
const (
	uffdUserModeOnly = 1
	uffdAPI          = 0xc018aa3f
	uffdRegister     = 0xc020aa00
	uffdMove         = 0xc028aa05
	uffdWriteProtect = 0xc018aa06
	uffdVersion      = 0xaa
	uffdFeatureMove  = 1 << 16
	uffdModeMissing  = 1 << 0
	uffdModeWP       = 1 << 1
)

// userfault opens a userfaultfd and registers pages s with it.
func (r *Run) userfault(s Span, features, mode uint64) int64 {
	p, at := r.P, r.P.scratch+scratchVector
	fd := r.must("open userfaultfd", p.Syscall(unix.SYS_USERFAULTFD, unix.O_CLOEXEC|uffdUserModeOnly))
	p.Poke(8, at, uffdVersion, features, 0)
	r.must("agree on userfaultfd version", p.Syscall(unix.SYS_IOCTL, fd, uffdAPI, at))
	p.Poke(8, at, uint64(r.Page(s.First)), r.Span(s).Len(), mode, 0)
	r.must("register with userfaultfd", p.Syscall(unix.SYS_IOCTL, fd, uffdRegister, at))
	return fd
}

// uffdMove asks userfaultfd to move page 3, which is pinned, elsewhere.
func (r *Run) uffdMove() int64 {
	r.mmap(24, 1, prot, anon, -1)
	fd := r.userfault(Span{24, 25}, uffdFeatureMove, uffdModeMissing)
	defer r.P.Syscall(unix.SYS_CLOSE, fd)
	at := r.P.scratch + scratchVector
	r.P.Poke(8, at, uint64(r.Page(24)), uint64(r.Page(3)), r.Unit, 0, 0)
	return r.P.Syscall(unix.SYS_IOCTL, fd, uffdMove, at)
}

// uffdWriteProtect takes the right to write to pages s away.
func (r *Run) uffdWriteProtect(s Span) int64 {
	fd := r.userfault(s, 0, uffdModeWP)
	defer r.P.Syscall(unix.SYS_CLOSE, fd)
	at := r.P.scratch + scratchVector
	r.P.Poke(8, at, uint64(r.Page(s.First)), r.Span(s).Len(), 1 /* UFFDIO_WRITEPROTECT_MODE_WP */)
	return r.P.Syscall(unix.SYS_IOCTL, fd, uffdWriteProtect, at)
}
