// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"encoding/binary"
	"fmt"
)

// field is a cursor over the body of a message; sizes are checked before.
type field struct{ b []byte }

func (f *field) u16() (v uint16) {
	v, f.b = binary.LittleEndian.Uint16(f.b), f.b[2:]
	return v
}

func (f *field) u32() (v uint32) {
	v, f.b = binary.LittleEndian.Uint32(f.b), f.b[4:]
	return v
}

func (f *field) u64() (v uint64) {
	v, f.b = binary.LittleEndian.Uint64(f.b), f.b[8:]
	return v
}

func (f *field) put16(v uint16) {
	binary.LittleEndian.PutUint16(f.b, v)
	f.b = f.b[2:]
}

func (f *field) put32(v uint32) {
	binary.LittleEndian.PutUint32(f.b, v)
	f.b = f.b[4:]
}

func (f *field) put64(v uint64) {
	binary.LittleEndian.PutUint64(f.b, v)
	f.b = f.b[8:]
}

func (*Hello) size() int { return 24 }
func (m *Hello) put(b []byte) {
	f := field{b}
	f.put16(m.Versions.Min)
	f.put16(m.Versions.Max)
	f.put16(m.Layouts.Min)
	f.put16(m.Layouts.Max)
	f.put32(uint32(m.Purpose))
	f.put32(m.Flags)
	f.put32(m.RingBytes)
	f.put32(0)
}
func (m *Hello) get(b []byte) error {
	f := field{b}
	m.Versions = Versions{f.u16(), f.u16()}
	m.Layouts = Versions{f.u16(), f.u16()}
	m.Purpose = Purpose(f.u32())
	m.Flags = f.u32()
	m.RingBytes = f.u32()
	if m.Versions.Min > m.Versions.Max || m.Layouts.Min > m.Layouts.Max {
		return fmt.Errorf("%w: HELLO with an empty range of versions", ErrMalformed)
	}
	return nil // an unknown purpose or flag is the daemon's to refuse or ignore
}

func (*Challenge) size() int            { return len(Nonce{}) }
func (m *Challenge) put(b []byte)       { copy(b, m.Nonce[:]) }
func (m *Challenge) get(b []byte) error { m.Nonce = Nonce(b); return nil }

func (*Echo) size() int            { return len(Nonce{}) }
func (m *Echo) put(b []byte)       { copy(b, m.Nonce[:]) }
func (m *Echo) get(b []byte) error { m.Nonce = Nonce(b); return nil }

func (*Welcome) size() int { return 24 }
func (m *Welcome) put(b []byte) {
	f := field{b}
	f.put64(m.Watch)
	f.put32(m.Layout)
	f.put32(m.Tier)
	f.put32(m.RingBytes)
	f.put32(0)
}
func (m *Welcome) get(b []byte) error {
	f := field{b}
	m.Watch = f.u64()
	m.Layout, m.Tier, m.RingBytes = f.u32(), f.u32(), f.u32()
	if m.RingBytes&(m.RingBytes-1) != 0 || m.RingBytes > 1<<30 {
		return fmt.Errorf("%w: WELCOME with a ring of %d bytes", ErrMalformed, m.RingBytes)
	}
	return nil
}

func (*Ready) size() int        { return 0 }
func (*Ready) put([]byte)       {}
func (*Ready) get([]byte) error { return nil }

func (*Next) size() int      { return 8 }
func (m *Next) put(b []byte) { binary.LittleEndian.PutUint32(b, uint32(m.Reason)) }
func (m *Next) get(b []byte) error {
	m.Reason = Reason(binary.LittleEndian.Uint32(b))
	return nil
}

func (*Offer) size() int        { return 0 }
func (*Offer) put([]byte)       {}
func (*Offer) get([]byte) error { return nil }

func (*Machine) size() int        { return 0 }
func (*Machine) put([]byte)       {}
func (*Machine) get([]byte) error { return nil }

func (m *Refused) size() int { return 8 + min(len(m.Text), MaxText) }
func (m *Refused) put(b []byte) {
	f := field{b}
	f.put32(uint32(m.Code))
	f.put32(uint32(len(b) - 8))
	copy(f.b, m.Text)
}
func (m *Refused) get(b []byte) error {
	f := field{b}
	m.Code = Code(f.u32())
	n := f.u32()
	if n > MaxText || int(n) > len(f.b) {
		return fmt.Errorf("%w: REFUSED with %d bytes of text in %d", ErrMalformed, n, len(f.b))
	}
	m.Text = string(f.b[:n])
	return nil
}

func (*Settle) size() int            { return 8 }
func (m *Settle) put(b []byte)       { binary.LittleEndian.PutUint32(b, m.Seq) }
func (m *Settle) get(b []byte) error { m.Seq = binary.LittleEndian.Uint32(b); return nil }

func (*Settled) size() int { return 8 }
func (m *Settled) put(b []byte) {
	f := field{b}
	f.put32(m.Seq)
	f.put32(m.Quiet)
}
func (m *Settled) get(b []byte) error {
	f := field{b}
	m.Seq, m.Quiet = f.u32(), f.u32()
	if m.Quiet > 1 {
		return fmt.Errorf("%w: SETTLED says %d", ErrMalformed, m.Quiet)
	}
	return nil
}

func (*Entry) size() int { return 8*8 + 6*4 + 16 }
func (m *Entry) put(b []byte) {
	f := field{b}
	for _, v := range []uint64{m.Watch, m.OpenedNanos, m.Records, m.Lost, m.Filtered, m.Unpaired, m.Deaths, m.Untracked} {
		f.put64(v)
	}
	for _, v := range []uint32{m.PID, m.UID, m.Tier, m.RingBytes, m.MemoryBytes, 0} {
		f.put32(v)
	}
	copy(f.b, m.Comm[:])
}
func (m *Entry) get(b []byte) error {
	f := field{b}
	for _, v := range []*uint64{&m.Watch, &m.OpenedNanos, &m.Records, &m.Lost, &m.Filtered, &m.Unpaired, &m.Deaths, &m.Untracked} {
		*v = f.u64()
	}
	for _, v := range []*uint32{&m.PID, &m.UID, &m.Tier, &m.RingBytes, &m.MemoryBytes} {
		*v = f.u32()
	}
	f.u32() // reserved
	m.Comm = [16]byte(f.b)
	return nil
}

func (*End) size() int { return 32 }
func (m *End) put(b []byte) {
	f := field{b}
	f.put64(m.NowNanos)
	f.put64(m.StartedNanos)
	f.put64(m.Misses)
	f.put32(m.Entries)
	f.put32(0)
}
func (m *End) get(b []byte) error {
	f := field{b}
	m.NowNanos, m.StartedNanos, m.Misses, m.Entries = f.u64(), f.u64(), f.u64(), f.u32()
	return nil
}
