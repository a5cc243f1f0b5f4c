// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"encoding/binary"
	"errors"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

// FuzzRing: whatever the ring and the words hold, a drain ends, reads nothing
// outside, and never makes a watch valid whose ring it did not understand.
func FuzzRing(f *testing.F) {
	record := make([]byte, 8+unsafe.Sizeof(layout.Record{}))
	binary.LittleEndian.PutUint32(record, 128)
	record[8+116+2] = byte(mm.Unmap)
	record[8+16] = 0xff
	f.Add(record, uint64(len(record)), uint64(0), uint64(2))
	f.Add(record, uint64(1<<63), uint64(8), uint64(1<<48))
	f.Add([]byte{0xff, 0xff, 0xff, 0x3f}, uint64(136), uint64(0), uint64(2))
	f.Add([]byte{0, 0, 0, 0x80}, uint64(136), uint64(0), uint64(2))
	f.Add([]byte{0, 0, 0, 0x40}, uint64(8), uint64(0), uint64(1))
	f.Add([]byte{1, 0, 0, 0}, uint64(4096), uint64(0), uint64(1))
	p, err := feedtest.New(feedtest.Options{RingBytes: int(mm.PageSize())})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(p.Close)
	size := len(p.Data) / 2
	f.Fuzz(func(t *testing.T, data []byte, ahead, start, generation uint64) {
		clear(p.Data[:size])
		start &^= 7
		for i := range min(len(data), size) {
			p.Data[(int(start%uint64(size))+i)%size] = data[i]
		}
		*p.Status = layout.Status{Generation: layout.GenStart, Version: layout.Version, Size: uint32(unsafe.Sizeof(*p.Status))}
		atomic.StoreUint64(p.Consumer, start)
		atomic.StoreUint64(p.Producer, start)
		w, err := p.Watch()
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		atomic.StoreUint64(p.Producer, start+ahead)
		atomic.StoreUint64(&p.Status.Generation, generation)
		n := 0
		s := w.Drain(func(*mm.Record) {
			if n++; n > 2*size/8 {
				t.Fatal("more records than fit")
			}
		})
		// A record that is being written, and nothing counted, leaves it valid.
		valid := s == feed.Fresh || s == feed.Busy && generation == layout.GenStart
		if w.Valid() != valid {
			t.Errorf("drain: %v, valid: %v", s, w.Valid())
		}
		if s == feed.Fresh && atomic.LoadUint64(p.Consumer) != start+ahead {
			t.Errorf("fresh at %d of %d", atomic.LoadUint64(p.Consumer)-start, ahead)
		}
		if ahead > uint64(size) && s != feed.DeadState {
			t.Errorf("%d bytes in a ring of %d: %v", ahead, size, s)
		}
		w.Commit(w.Begin(pages(1, 2)), nil, func() {})
	})
}

// Each kind of damage ends the watch.
func TestRingCorrupt(t *testing.T) {
	for name, damage := range map[string]func(p *feedtest.Producer){
		"length 0":                func(p *feedtest.Producer) { header(p, 0) },
		"record too short":        func(p *feedtest.Producer) { header(p, 120) },
		"record past the end":     func(p *feedtest.Producer) { header(p, 256) },
		"length of everything":    func(p *feedtest.Producer) { header(p, 1<<30-1) },
		"discard past the end":    func(p *feedtest.Producer) { header(p, 1<<30|1<<20) },
		"producer behind":         func(p *feedtest.Producer) { atomic.AddUint64(p.Producer, ^uint64(135)-8) },
		"producer far ahead":      func(p *feedtest.Producer) { atomic.AddUint64(p.Producer, 1<<20) },
		"producer not a multiple": func(p *feedtest.Producer) { atomic.AddUint64(p.Producer, 4) },
	} {
		t.Run(name, func(t *testing.T) {
			p, w := pair(t, everything)
			p.Change(mm.Zap, pages(1, 2))
			w.Drain(nil)
			p.Change(mm.Zap, pages(1, 2))
			damage(p)
			s, got := drain(w)
			if s != feed.DeadState || w.Valid() || len(got) != 1 || got[0].Kind != mm.Exit || w.Stats().Corrupt != 1 {
				t.Errorf("%v, valid %v, delivered %v, %+v", s, w.Valid(), got, w.Stats())
			}
		})
	}
}

// header overwrites the header of the second record.
func header(p *feedtest.Producer, v uint32) {
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&p.Data[136])), v)
}

// A longer record of a newer kernel side is read by its first bytes.
func TestRingLongerRecord(t *testing.T) {
	p, w := pair(t, everything)
	if !p.Discard(168) {
		t.Fatal("no room")
	}
	*(*layout.Record)(unsafe.Pointer(&p.Data[8])) = layout.Record{Start: 4096, End: 8192, Kind: uint8(mm.Zap)}
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&p.Data[0])), 168)
	atomic.AddUint64(&p.Status.Generation, layout.GenRecord)
	p.Change(mm.Zap, pages(1, 2))
	s, got := drain(w)
	if s != feed.Fresh || len(got) != 2 || got[0].Range != (mm.Range{Start: 4096, End: 8192}) || got[1].Range != pages(1, 2) {
		t.Errorf("%v %v", s, got)
	}
}

func TestNewRefuses(t *testing.T) {
	cases := []struct {
		name    string
		spoil   func(p *feedtest.Producer, m *feed.Memory)
		version bool
	}{
		{"status version", func(p *feedtest.Producer, m *feed.Memory) { p.Status.Version++ }, true},
		{"status size", func(p *feedtest.Producer, m *feed.Memory) { p.Status.Size = 64 }, true},
		{"epoch version", func(p *feedtest.Producer, m *feed.Memory) { p.Epoch.Version = 0 }, true},
		{"epoch size", func(p *feedtest.Producer, m *feed.Memory) { p.Epoch.Size = 0 }, true},
		{"no status", func(p *feedtest.Producer, m *feed.Memory) { m.Status = nil }, true},
		{"no epoch", func(p *feedtest.Producer, m *feed.Memory) { m.Epoch = nil }, true},
		{"small interest", func(p *feedtest.Producer, m *feed.Memory) { m.Interest = m.Interest[:100] }, true},
		{"no consumer", func(p *feedtest.Producer, m *feed.Memory) { m.RingConsumer = nil }, false},
		{"no ring", func(p *feedtest.Producer, m *feed.Memory) { m.RingProducer = nil }, false},
		{"ring not doubled", func(p *feedtest.Producer, m *feed.Memory) {
			m.RingProducer = m.RingProducer[:len(m.RingProducer)-int(mm.PageSize())]
		}, false},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			p, err := feedtest.New(feedtest.Options{})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			m, err := p.Memory()
			if err != nil {
				t.Fatal(err)
			}
			c.spoil(p, &m)
			w, err := feed.New(m)
			if err == nil {
				w.Close()
				t.Fatal("accepted")
			}
			if got := errors.Is(err, feed.ErrVersion); got != c.version {
				t.Errorf("is ErrVersion: %v: %v", got, err)
			}
		})
	}
}
