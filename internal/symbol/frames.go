// SPDX-License-Identifier: Apache-2.0

package symbol

import (
	"debug/elf"
	"encoding/binary"
	"sort"

	"github.com/go-delve/delve/pkg/dwarf/frame"
)

// frameTable is the call frame information of a file. Of .eh_frame only the
// entries that are needed are read, found by .eh_frame_hdr: of the C library
// all are 3,000 and take a quarter of a second. Without that section, and of
// .debug_frame, all are read at once.
type frameTable struct {
	eh        []byte // .eh_frame
	ehAddress uint64
	index     []indexEntry
	entries   map[uint64]*frame.FrameDescriptionEntry // by address; nil: damaged
	all       frame.FrameDescriptionEntries
	rules     map[uint64]*frame.FrameContext // by address; nil: there is none
}

// indexEntry is a row of .eh_frame_hdr: the first address of a function, and
// where its entry is.
type indexEntry struct{ start, entry uint64 }

// rule finds what the call frame information says at a; nil: nothing.
func (m *image) rule(a uint64) (fc *frame.FrameContext) {
	defer func() {
		if recover() != nil { // damaged information
			fc = nil
		}
	}()
	m.framesOnce.Do(m.loadFrames)
	if fc, ok := m.frames.rules[a]; ok {
		return fc
	}
	if len(m.frames.rules) >= maxResolved {
		clear(m.frames.rules)
	}
	m.frames.rules[a] = nil
	fde := m.frames.find(a)
	if fde == nil {
		return nil
	}
	fc, err := fde.EstablishFrame(a)
	if err != nil {
		return nil
	}
	m.frames.rules[a] = fc
	return fc
}

func (m *image) loadFrames() {
	t := &m.frames
	t.rules = make(map[uint64]*frame.FrameContext)
	if s := m.elf.Section(".eh_frame"); s != nil {
		t.eh, t.ehAddress = section(m.elf, ".eh_frame"), s.Addr
	}
	if h := m.elf.Section(".eh_frame_hdr"); h != nil && t.eh != nil {
		t.index = parseIndex(section(m.elf, ".eh_frame_hdr"), h.Addr)
	}
	if t.index != nil {
		t.entries = make(map[uint64]*frame.FrameDescriptionEntry)
	} else {
		t.add(t.eh, t.ehAddress)
	}
	if m.elf.Class == elf.ELFCLASS64 {
		t.add(section(m.elf, ".debug_frame"), 0)
	}
}

// add reads a whole section.
func (t *frameTable) add(b []byte, at uint64) {
	defer func() { _ = recover() }() // damaged information: as if there were none
	if len(b) == 0 {
		return
	}
	if fdes, err := frame.Parse(b, binary.LittleEndian, 0, 8, at); err == nil {
		t.all = t.all.Append(fdes)
	}
}

// Encodings of .eh_frame_hdr (Linux Standard Base, DWARF extensions) as every
// linker makes them.
const (
	encRelative = 0x1b // 4 bytes, signed, from the place where it is
	encCount    = 0x03 // 4 bytes, unsigned
	encTable    = 0x3b // 4 bytes, signed, from the beginning of the section
)

func parseIndex(b []byte, at uint64) []indexEntry {
	if len(b) < 12 || b[0] != 1 || b[1] != encRelative || b[2] != encCount || b[3] != encTable {
		return nil
	}
	n := uint64(binary.LittleEndian.Uint32(b[8:]))
	rows := b[12:]
	if n > uint64(len(rows))/8 {
		return nil
	}
	out := make([]indexEntry, n)
	for i := range out {
		out[i] = indexEntry{at + offset32(rows[8*i:]), at + offset32(rows[8*i+4:])}
	}
	if !sort.SliceIsSorted(out, func(i, j int) bool { return out[i].start < out[j].start }) {
		return nil
	}
	return out
}

// offset32 is a signed distance.
func offset32(b []byte) uint64 { return uint64(int64(int32(binary.LittleEndian.Uint32(b)))) }

func (t *frameTable) find(a uint64) *frame.FrameDescriptionEntry {
	i := sort.Search(len(t.index), func(i int) bool { return t.index[i].start > a })
	if i > 0 {
		at := t.index[i-1].entry
		fde, ok := t.entries[at]
		if !ok {
			fde = t.read(at)
			t.entries[at] = fde
		}
		if fde != nil && fde.Cover(a) {
			return fde
		}
	}
	if fde, err := t.all.FDEForPC(a); err == nil {
		return fde
	}
	return nil
}

// read reads the entry at an address with the common entry that it refers to.
func (t *frameTable) read(at uint64) (fde *frame.FrameDescriptionEntry) {
	defer func() {
		if recover() != nil { // damaged information
			fde = nil
		}
	}()
	entry := t.record(at - t.ehAddress)
	common := t.record(at - t.ehAddress + 4 - uint64(binary.LittleEndian.Uint32(entry[4:])))
	// A section of these two, in which the entry is at its own address.
	b := make([]byte, 0, len(common)+len(entry))
	b = append(append(b, common...), entry...)
	binary.LittleEndian.PutUint32(b[len(common)+4:], uint32(len(common)+4))
	fdes, err := frame.Parse(b, binary.LittleEndian, 0, 8, at-uint64(len(common)))
	if err != nil || len(fdes) != 1 {
		return nil
	}
	return fdes[0]
}

// record is an entry of .eh_frame with its length. It panics outside of it.
func (t *frameTable) record(offset uint64) []byte {
	n := uint64(binary.LittleEndian.Uint32(t.eh[offset:]))
	return t.eh[offset:][:4+n]
}
