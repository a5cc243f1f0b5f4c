// SPDX-License-Identifier: Apache-2.0

package symbol

import (
	"bytes"
	"debug/dwarf"
	"debug/elf"
	"debug/gosym"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"

	"github.com/ianlancetaylor/demangle"
)

// maxSection bounds one section that is read into memory.
const maxSection = 1 << 30

// image is one executable file. What it holds is read when it is first needed;
// the file stays open. It is safe for concurrent use.
type image struct {
	name    string // as the process sees it
	file    *os.File
	elf     *elf.File
	buildID string

	symbolsOnce sync.Once
	symbols     []function
	goTable     *gosym.Table // of Go programs, stripped ones too

	framesOnce sync.Once
	frames     frameTable

	resolved map[uint64][]Frame // what is known already; of the resolver, which locks

	linesOnce sync.Once
	debug     *elf.File // where DWARF is: elf, or a file of its own
	debugFile *os.File  // that file, nil if it is elf's
	lines     *lines    // nil: none
}

// function is one symbol.
type function struct {
	start, end uint64
	name       string
}

func openImage(f *os.File, name string) (*image, error) {
	e, err := elf.NewFile(f)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", name, err)
	}
	return &image{name: name, file: f, elf: e, buildID: buildID(e), resolved: make(map[uint64][]Frame)}, nil
}

func (m *image) close() error {
	err := m.file.Close()
	// Whoever still resolves holds the resolver's lock; there is nobody.
	if m.debugFile != nil {
		err = errors.Join(err, m.debugFile.Close())
	}
	return err
}

// address is the address in the file's own numbers of an offset in the file.
func (m *image) address(offset uint64) (uint64, bool) {
	for _, p := range m.elf.Progs {
		if p.Type == elf.PT_LOAD && p.Flags&elf.PF_X != 0 && offset >= p.Off && offset-p.Off < p.Filesz {
			return offset - p.Off + p.Vaddr, true
		}
	}
	return 0, false
}

// section reads a section, decompressed; nil if it is not there.
func section(e *elf.File, name string) []byte {
	s := e.Section(name)
	if s == nil || s.Type == elf.SHT_NOBITS || s.Size > maxSection {
		return nil
	}
	b, err := s.Data()
	if err != nil {
		return nil
	}
	return b
}

const ntGNUBuildID = 3

// buildID finds the note in hexadecimal; empty if there is none.
func buildID(e *elf.File) string {
	var notes [][]byte
	for _, s := range e.Sections {
		if s.Type == elf.SHT_NOTE && s.Size < 1<<20 {
			if b, err := s.Data(); err == nil {
				notes = append(notes, b)
			}
		}
	}
	if notes == nil { // section headers can be stripped
		for _, p := range e.Progs {
			if p.Type == elf.PT_NOTE && p.Filesz < 1<<20 {
				if b, err := io.ReadAll(p.Open()); err == nil {
					notes = append(notes, b)
				}
			}
		}
	}
	for _, b := range notes {
		for len(b) >= 12 {
			n, d, t := e.ByteOrder.Uint32(b), e.ByteOrder.Uint32(b[4:]), e.ByteOrder.Uint32(b[8:])
			b = b[12:]
			an, ad := (uint64(n)+3)&^3, (uint64(d)+3)&^3
			if an+ad > uint64(len(b)) {
				break
			}
			if t == ntGNUBuildID && bytes.Equal(b[:n], []byte("GNU\x00")) {
				return hex.EncodeToString(b[an:][:d])
			}
			b = b[an+ad:]
		}
	}
	return ""
}

// function finds the symbol that holds a.
func (m *image) function(a uint64) string {
	m.symbolsOnce.Do(func() {
		m.linesOnce.Do(m.loadLines)
		m.symbols = functions(m.elf)
		if m.debug != nil && m.debug != m.elf {
			m.symbols = sortFunctions(append(m.symbols, functions(m.debug)...))
		}
		if len(m.symbols) == 0 || m.lines == nil {
			m.goTable = goTable(m.elf)
		}
	})
	i, ok := slices.BinarySearchFunc(m.symbols, a, func(f function, a uint64) int {
		switch {
		case f.end <= a:
			return -1
		case f.start > a:
			return 1
		}
		return 0
	})
	if !ok {
		return ""
	}
	return m.symbols[i].name
}

// goTable reads what Go's runtime itself looks functions up in; nil: not Go.
func goTable(e *elf.File) (t *gosym.Table) {
	defer func() {
		if recover() != nil { // damaged
			t = nil
		}
	}()
	text := e.Section(".text")
	if text == nil {
		return nil
	}
	for _, n := range []string{".gopclntab", ".data.rel.ro.gopclntab"} {
		if b := section(e, n); b != nil {
			if t, err := gosym.NewTable(nil, gosym.NewLineTable(b, text.Addr)); err == nil {
				return t
			}
		}
	}
	return nil
}

// goPlace is where an address is by Go's own table.
func (m *image) goPlace(a uint64) (p place, ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	if m.goTable == nil {
		return p, false
	}
	file, line, fn := m.goTable.PCToLine(a)
	if fn == nil {
		return p, false
	}
	return place{name: fn.Name, file: file, line: line}, true
}

// functions are the functions of both symbol tables, sorted, without overlaps.
func functions(e *elf.File) []function {
	var fs []function
	for _, table := range []func() ([]elf.Symbol, error){e.Symbols, e.DynamicSymbols} {
		syms, err := table() // ErrNoSymbols, or damage: what there is
		if err != nil {
			continue
		}
		for i := range syms {
			s := &syms[i]
			t := elf.ST_TYPE(s.Info)
			if t != elf.STT_FUNC && t != elf.STT_GNU_IFUNC || s.Section == elf.SHN_UNDEF || s.Name == "" {
				continue
			}
			fs = append(fs, function{s.Value, s.Value + s.Size, s.Name})
		}
	}
	return sortFunctions(fs)
}

func sortFunctions(fs []function) []function {
	slices.SortFunc(fs, func(a, b function) int {
		switch {
		case a.start != b.start:
			return cmpUint(a.start, b.start)
		case a.end != b.end:
			return -cmpUint(a.end, b.end) // a size is better than none
		}
		return plainer(a.name, b.name)
	})
	out := fs[:0]
	for _, f := range fs {
		if n := len(out); n > 0 {
			last := &out[n-1]
			if f.start == last.start {
				continue // another name
			}
			if last.end == last.start { // of assembler, without size: up to the next
				last.end = f.start
			}
			last.end = min(last.end, f.start)
		}
		out = append(out, f)
	}
	return out
}

func cmpUint(a, b uint64) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// plainer orders names of one function: free before __libc_free.
func plainer(a, b string) int {
	ua, ub := len(a)-len(strings.TrimLeft(a, "_")), len(b)-len(strings.TrimLeft(b, "_"))
	switch {
	case ua != ub:
		return ua - ub
	case len(a) != len(b):
		return len(a) - len(b)
	}
	return strings.Compare(a, b)
}

// loadLines finds DWARF.
func (m *image) loadLines() {
	if hasDWARF(m.elf) {
		m.debug = m.elf
	} else if f, e := m.findDebug(); e != nil {
		m.debug, m.debugFile = e, f
	}
	if m.debug == nil {
		return
	}
	d, err := dwarfOf(m.debug)
	if err == nil {
		m.lines = newLines(d)
	}
}

func dwarfOf(e *elf.File) (d *dwarf.Data, err error) {
	for _, s := range e.Sections {
		if strings.HasPrefix(s.Name, ".debug_") && s.Size > maxSection {
			return nil, fmt.Errorf("section %s has %d bytes", s.Name, s.Size)
		}
	}
	return e.DWARF()
}

func hasDWARF(e *elf.File) bool {
	for _, n := range []string{".debug_info", ".zdebug_info"} {
		if s := e.Section(n); s != nil && s.Type != elf.SHT_NOBITS {
			return true
		}
	}
	return false
}

// debugRoot is where distributions keep debug files.
var debugRoot = "/usr/lib/debug"

// findDebug finds the separate debug file: by build-id, or by its name and
// checksum next to the file.
func (m *image) findDebug() (*os.File, *elf.File) {
	if len(m.buildID) > 2 {
		name := filepath.Join(debugRoot, ".build-id", m.buildID[:2], m.buildID[2:]+".debug")
		if f, e := openDebug(name, func(_ *os.File, e *elf.File) bool { return buildID(e) == m.buildID }); e != nil {
			return f, e
		}
	}
	link := section(m.elf, ".gnu_debuglink")
	i := bytes.IndexByte(link, 0)
	at := (i + 4) &^ 3 // behind the name, padded
	if i <= 0 || at+4 > len(link) || strings.ContainsRune(string(link[:i]), '/') {
		return nil, nil
	}
	sum := m.elf.ByteOrder.Uint32(link[at:])
	dir, name := filepath.Dir(m.name), string(link[:i])
	for _, p := range []string{filepath.Join(dir, name), filepath.Join(dir, ".debug", name), filepath.Join(debugRoot, dir, name)} {
		f, e := openDebug(p, func(f *os.File, _ *elf.File) bool {
			h := crc32.NewIEEE()
			_, err := io.Copy(h, io.NewSectionReader(f, 0, maxSection))
			return err == nil && h.Sum32() == sum
		})
		if e != nil {
			return f, e
		}
	}
	return nil, nil
}

func openDebug(name string, fits func(*os.File, *elf.File) bool) (*os.File, *elf.File) {
	f, err := os.Open(name)
	if err != nil {
		return nil, nil
	}
	e, err := elf.NewFile(f)
	if err != nil || !hasDWARF(e) && e.Section(".symtab") == nil || !fits(f, e) {
		f.Close()
		return nil, nil
	}
	return f, e
}

// demangled is the name as its author wrote it, for C++ and Rust.
func demangled(name string) string {
	return demangle.Filter(name, demangle.NoClones)
}
