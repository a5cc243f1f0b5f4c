// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"syscall"

	"github.com/ummu/ummu/mm"
)

// need says whether a call must, may or must not have a record.
type need uint8

const (
	never need = iota // it changes nothing: a record of it is invented
	may               // it failed or was cut off, or nobody can tell from outside
	must              // it changed page tables, or is an event of the life cycle
)

// group is the records of one call of one thread: begins (several for a
// vector), and the end. Single events are an end alone.
type group struct {
	begins []*Record
	end    *Record
}

// first is any record of the group, for messages and for what all share.
func (g *group) first() *Record {
	if len(g.begins) > 0 {
		return g.begins[0]
	}
	return g.end
}

// expectation is what the records of a call must be.
type expectation struct {
	need  need
	match func(*group) bool
}

// Numbers of the system-call interface, the same on every architecture that
// this program runs on (include/uapi/asm-generic).
const (
	mapFixed          = 0x10
	mapHugeTLB        = 0x40000
	mapFixedNoReplace = 0x100000
	mremapMayMove     = 1
	mremapFixed       = 2
	mremapDontUnmap   = 4
	shmRemap          = 0o40000
	growsDown         = 0x01000000
	growsUp           = 0x02000000
	vectorMax         = 16 // elements of process_madvise that have a record each
)

// advice by what it does to page tables. What is in neither list is taken for
// destructive by the tracer and unknown to most kernels.
var (
	dropping = map[uint64]bool{4: true, 9: true, 24: true, 100: true, 101: true, 102: true}
	harmless = map[uint64]bool{
		0: true, 1: true, 2: true, 3: true, 8: true, 10: true, 11: true, 12: true, 13: true, 14: true, 15: true,
		16: true, 17: true, 18: true, 19: true, 20: true, 21: true, 22: true, 23: true, 25: true, 103: true,
	}
)

// span returns the pages of [addr, addr+n), and whether that is a range which
// the kernel's argument checks let pass.
func span(addr, n uint64) (mm.Range, bool) {
	r, err := mm.MakeRange(mm.Addr(addr), n)
	return r.Pages(), err == nil && addr%mm.PageSize() == 0
}

func pageUp(n uint64) uint64 {
	return (n + mm.PageSize() - 1) &^ (mm.PageSize() - 1)
}

// is reports whether rec has the kind and exactly the range; a larger one
// must be marked as superset.
func is(rec *Record, kind mm.Kind, r mm.Range) bool {
	return rec.Kind == kind && (rec.Range == r || rec.Has("superset") && rec.Range.Contains(r))
}

// pair wants a begin and an end, both of the kind and range.
func pair(kind mm.Kind, r mm.Range) func(*group) bool {
	return func(g *group) bool {
		return len(g.begins) == 1 && g.end != nil && is(g.begins[0], kind, r) && is(g.end, kind, r)
	}
}

// single wants one record of an end.
func single(kind mm.Kind, r mm.Range) func(*group) bool {
	return func(g *group) bool { return len(g.begins) == 0 && is(g.end, kind, r) }
}

// lifecycle wants one record of an event that has no range.
func lifecycle(kind mm.Kind) func(*group) bool {
	return func(g *group) bool { return len(g.begins) == 0 && g.end.Kind == kind }
}

func anything(*group) bool { return true }

// failed is for a call that failed where its arguments do not say which range
// its records have.
var failed = expectation{may, func(g *group) bool { return len(g.begins) > 0 && g.end != nil }}

// outcome turns a result into a need: must for success and for the failures
// after which part of the range has changed, may for the others.
func outcome(c *Call, partial ...syscall.Errno) need {
	if c.Ret >= 0 {
		return must
	}
	for _, e := range partial {
		if c.Ret == -int64(e) {
			return must
		}
	}
	return may
}

// expect says which records a call must have. It knows the kernel's
// interface, not the tracer.
func expect(c *Call) expectation {
	switch {
	case c.Done && !c.Doubtful:
	case isExec(c.Name):
		return expectation{may, lifecycle(mm.Exec)}
	case isFork(c.Name):
		return expectation{may, lifecycle(mm.Fork)}
	default:
		return expectation{may, anything}
	}
	a := c.Args
	for len(a) < 6 {
		a = append(a, 0)
	}
	switch c.Name {
	case exitCall:
		return expectation{must, lifecycle(mm.Exit)}
	case "execve", "execveat":
		if c.Ret < 0 {
			return expectation{need: never}
		}
		return expectation{must, lifecycle(mm.Exec)}
	case "clone", "clone3", "fork", "vfork":
		if c.Ret < 0 {
			return expectation{need: never}
		}
		return expectation{must, func(g *group) bool {
			return lifecycle(mm.Fork)(g) && g.end.Child == int(c.Ret)
		}}

	case "munmap":
		r, ok := span(a[0], a[1])
		if !ok {
			return failed
		}
		return expectation{outcome(c), pair(mm.Unmap, r)}

	case "mmap":
		n := a[1]
		if a[3]&mapHugeTLB != 0 {
			n = (n + 2<<20 - 1) &^ (2<<20 - 1)
		}
		if a[3]&mapFixed != 0 && a[3]&mapFixedNoReplace == 0 {
			r, ok := span(a[0], n)
			if !ok {
				return failed
			}
			return expectation{outcome(c), pair(mm.Replace, r)}
		}
		if c.Ret < 0 {
			return expectation{need: never}
		}
		r, _ := span(uint64(c.Ret), n)
		return expectation{must, single(mm.Map, r)}

	case "mremap":
		return expectMremap(c, a)

	case "mprotect", "pkey_mprotect":
		r, ok := span(a[0], a[1])
		switch {
		case a[1] == 0:
			return expectation{need: never}
		case !ok:
			return failed
		}
		if a[2]&growsDown != 0 { // reaches to where the VMA begins
			r.Start = 0
		}
		if a[2]&growsUp != 0 {
			r.End = mm.MaxAddr
		}
		return expectation{outcome(c, syscall.ENOMEM, syscall.EACCES), pair(mm.Protect, r)}

	case "madvise":
		r, ok := span(a[0], a[1])
		advice := uint64(uint32(a[2]))
		switch {
		case harmless[advice] || a[1] == 0:
			return expectation{need: never}
		case !ok || !dropping[advice]:
			return failed
		}
		// The walk over the mappings stops at the first that refuses.
		n := outcome(c, syscall.ENOMEM, syscall.EACCES)
		return expectation{n, pair(mm.Zap, r)}

	case "process_madvise":
		advice := uint64(uint32(a[3]))
		switch {
		case harmless[advice] || a[2] == 0:
			return expectation{need: never}
		case !dropping[advice] || uint64(len(c.Iov)) != a[2]:
			return failed
		}
		return expectation{outcome(c, syscall.ENOMEM, syscall.EACCES), vector(c.Iov)}

	case "brk":
		from, to := mm.Addr(pageUp(c.Old)), mm.Addr(pageUp(uint64(c.Ret)))
		switch {
		case !c.Known:
			return expectation{may, anything}
		case to < from:
			return expectation{must, pair(mm.Unmap, mm.Range{Start: to, End: from})}
		case to > from:
			return expectation{must, single(mm.Map, mm.Range{Start: from, End: to})}
		}
		return expectation{need: never}

	case "shmat":
		if c.Ret < 0 {
			if a[2]&shmRemap != 0 {
				return failed
			}
			return expectation{need: never}
		}
		r := segment(uint64(c.Ret), c)
		if a[2]&shmRemap != 0 {
			return expectation{must, pair(mm.Replace, r)}
		}
		return expectation{must, func(g *group) bool {
			return len(g.begins) == 0 && g.end.Kind == mm.Map && g.end.Range.Start == r.Start &&
				(g.end.Has("unknown_length") || is(g.end, mm.Map, r))
		}}

	case "shmdt":
		return expectation{outcome(c), pair(mm.Unmap, segment(a[0], c))}

	case "remap_file_pages":
		r, err := mm.MakeRange(mm.Addr(a[0]), a[1])
		if err != nil {
			return failed
		}
		return expectation{outcome(c), pair(mm.Replace, r.Pages())}
	}
	return expectation{need: never}
}

func expectMremap(c *Call, a []uint64) expectation {
	old, oldLen, newLen := mm.Addr(a[0]), mm.Addr(pageUp(a[1])), mm.Addr(pageUp(a[2]))
	flags, ret := a[3], mm.Addr(c.Ret)
	from, to := mm.Range{Start: old, End: old + oldLen}, mm.Range{Start: ret, End: ret + newLen}
	switch {
	case c.Ret < 0:
		return failed
	case oldLen == 0 && flags&mremapFixed != 0: // a second mapping of shared memory
		return expectation{must, pair(mm.Replace, to)}
	case oldLen == 0:
		return expectation{may, anything}
	case flags&(mremapFixed|mremapDontUnmap) != 0 || ret != old:
		return expectation{must, func(g *group) bool {
			if !pair(mm.Move, from)(g) || g.end.To != to {
				return false
			}
			// Where it goes is known before only if the caller chose it.
			return g.begins[0].To == to || flags&mremapFixed == 0 && g.begins[0].To.Empty()
		}}
	case newLen < oldLen:
		return expectation{must, pair(mm.Unmap, mm.Range{Start: old + newLen, End: from.End})}
	case newLen > oldLen:
		return expectation{must, func(g *group) bool {
			for _, b := range g.begins {
				if flags&mremapMayMove == 0 || !b.Has("maybe") || !is(b, mm.Move, from) {
					return false
				}
			}
			return len(g.begins) <= 1 && g.end != nil && is(g.end, mm.Map, mm.Range{Start: from.End, End: to.End})
		}}
	}
	return expectation{need: never}
}

// segment is the range of an attached segment; one page of it at least.
func segment(addr uint64, c *Call) mm.Range {
	n := mm.PageSize()
	if c.Known {
		n = pageUp(c.Old)
	}
	return mm.Range{Start: mm.Addr(addr), End: mm.Addr(addr + n)}
}

// vector wants one begin for each element and one end for all; a long vector
// may have one begin for the whole space.
func vector(iov []mm.Range) func(*group) bool {
	var want []mm.Range
	var hull mm.Range
	for _, r := range iov {
		if !r.Empty() {
			want = append(want, r.Pages())
			hull = hull.Hull(r.Pages())
		}
	}
	return func(g *group) bool {
		if g.end == nil || g.end.Kind != mm.Zap || !g.end.Range.Contains(hull) {
			return false
		}
		if len(iov) > vectorMax && len(g.begins) == 1 {
			return is(g.begins[0], mm.Zap, hull)
		}
		if len(g.begins) != len(want) {
			return false
		}
		for i, b := range g.begins {
			if !is(b, mm.Zap, want[i]) {
				return false
			}
		}
		return true
	}
}
