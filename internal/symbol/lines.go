// SPDX-License-Identifier: Apache-2.0

package symbol

import (
	"debug/dwarf"
	"io"
	"slices"
)

// lines answers questions about addresses from DWARF. It reads a compilation
// unit when an address in it is first asked for.
type lines struct {
	data   *dwarf.Data
	ranges []unitRange // sorted, without overlaps
	units  map[dwarf.Offset]*unit
}

type unitRange struct {
	low, high uint64
	at        dwarf.Offset
}

type unit struct {
	rows  []row
	funcs []span // by start, outer before inner
}

// row begins a line; the next one ends it.
type row struct {
	address uint64
	file    string
	line    int
	end     bool // of a sequence: nothing is here
}

// span is a part of a function, or of one that is inlined.
type span struct {
	low, high uint64
	depth     int
	name      string
	inlined   bool
	file      string // inlined: where it is called
	line      int
}

// place is one function at an address.
type place struct {
	name    string
	file    string
	line    int
	inlined bool
}

func newLines(d *dwarf.Data) *lines {
	l := &lines{data: d, units: make(map[dwarf.Offset]*unit)}
	r := d.Reader()
	for {
		e, err := r.Next()
		if err != nil || e == nil {
			break
		}
		if e.Tag == dwarf.TagCompileUnit {
			if rs, err := d.Ranges(e); err == nil {
				for _, x := range rs {
					if x[0] < x[1] && x[0] != 0 { // 0: of code that the linker left out
						l.ranges = append(l.ranges, unitRange{x[0], x[1], e.Offset})
					}
				}
			}
		}
		r.SkipChildren()
	}
	slices.SortFunc(l.ranges, func(a, b unitRange) int { return cmpUint(a.low, b.low) })
	return l
}

// find returns the functions at an address, innermost first, nil if DWARF does
// not know it. The last of them may have no name.
func (l *lines) find(a uint64) []place {
	i, ok := slices.BinarySearchFunc(l.ranges, a, func(u unitRange, a uint64) int {
		switch {
		case u.high <= a:
			return -1
		case u.low > a:
			return 1
		}
		return 0
	})
	if !ok {
		return nil
	}
	at := l.ranges[i].at
	u := l.units[at]
	if u == nil {
		u = l.load(at)
		l.units[at] = u
	}
	p := place{}
	if i, ok := slices.BinarySearchFunc(u.rows, a, func(r row, a uint64) int { return cmpUint(r.address, a) }); ok || i > 0 {
		if !ok {
			i--
		}
		for ok && i+1 < len(u.rows) && u.rows[i+1].address == a {
			i++ // the last row of an address counts
		}
		if !u.rows[i].end {
			p.file, p.line = u.rows[i].file, u.rows[i].line
		}
	}
	var around []span // inner first
	for _, s := range u.funcs {
		if s.low <= a && a < s.high {
			around = append(around, s)
		}
	}
	slices.SortStableFunc(around, func(a, b span) int { return b.depth - a.depth })
	var ps []place
	for _, s := range around {
		p.name, p.inlined = s.name, s.inlined
		ps = append(ps, p)
		p = place{file: s.file, line: s.line}
		if !s.inlined {
			return ps
		}
	}
	return append(ps, p)
}

// load reads one unit. What is damaged is left out.
func (l *lines) load(at dwarf.Offset) *unit {
	u := &unit{}
	r := l.data.Reader()
	r.Seek(at)
	cu, err := r.Next()
	if err != nil || cu == nil {
		return u
	}
	var files []*dwarf.LineFile
	if lr, err := l.data.LineReader(cu); err == nil && lr != nil {
		var e dwarf.LineEntry
		for {
			if err := lr.Next(&e); err != nil {
				if err != io.EOF {
					u.rows = nil
				}
				break
			}
			w := row{address: e.Address, line: e.Line, end: e.EndSequence}
			if e.File != nil {
				w.file = e.File.Name
			}
			u.rows = append(u.rows, w)
		}
		slices.SortStableFunc(u.rows, func(a, b row) int {
			if a.address == b.address && a.end != b.end { // another sequence begins where one ends
				if a.end {
					return -1
				}
				return 1
			}
			return cmpUint(a.address, b.address)
		})
		files = lr.Files()
	}
	depth := 0
	for {
		e, err := r.Next()
		if err != nil || e == nil || e.Tag == dwarf.TagCompileUnit {
			break
		}
		if e.Tag == 0 {
			if depth--; depth < 0 {
				break
			}
			continue
		}
		if e.Tag == dwarf.TagSubprogram || e.Tag == dwarf.TagInlinedSubroutine {
			l.function(u, e, depth, files)
		}
		if e.Children {
			depth++
		}
	}
	return u
}

func (l *lines) function(u *unit, e *dwarf.Entry, depth int, files []*dwarf.LineFile) {
	rs, err := l.data.Ranges(e)
	if err != nil || len(rs) == 0 {
		return
	}
	s := span{depth: depth, name: l.nameOf(e, 0), inlined: e.Tag == dwarf.TagInlinedSubroutine}
	if s.inlined {
		if i, ok := e.Val(dwarf.AttrCallFile).(int64); ok && i >= 0 && int(i) < len(files) && files[i] != nil {
			s.file = files[i].Name
		}
		n, _ := e.Val(dwarf.AttrCallLine).(int64)
		s.line = int(n)
	}
	for _, x := range rs {
		s.low, s.high = x[0], x[1]
		u.funcs = append(u.funcs, s)
	}
}

// nameOf follows a concrete function to its declaration. The linkage name has
// namespaces and arguments.
func (l *lines) nameOf(e *dwarf.Entry, depth int) string {
	if n, ok := e.Val(dwarf.AttrLinkageName).(string); ok {
		return n
	}
	for _, a := range []dwarf.Attr{dwarf.AttrAbstractOrigin, dwarf.AttrSpecification} {
		at, ok := e.Val(a).(dwarf.Offset)
		if !ok || depth > 4 {
			continue
		}
		r := l.data.Reader()
		r.Seek(at)
		if o, err := r.Next(); err == nil && o != nil {
			if n := l.nameOf(o, depth+1); n != "" {
				return n
			}
		}
	}
	n, _ := e.Val(dwarf.AttrName).(string)
	return n
}
