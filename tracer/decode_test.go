// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// raw is the ring's image of r.
func raw(r *layout.Record) []byte {
	return append([]byte(nil), unsafe.Slice((*byte)(unsafe.Pointer(r)), recordSize)...)
}

func sample() layout.Record {
	return layout.Record{
		Time_ns: 1, Start: 0x1000, End: 0x3000, To_start: 0x5000, To_end: 0x7000, Lost: 8, Space: 9,
		Arg: [2]uint64{10, 11}, Ret: -12, Pid: 13, Tid: 14, Child_pid: 15, Child_tid: 16, Nr: 17,
		Flags: uint16(mm.Superset | mm.Rescued), Kind: uint8(mm.Move), Phase: uint8(mm.PhaseEnd),
		Hook: layout.HookSysExit, Abi: uint8(mm.ABICompat), Comm: [16]int8{'c', 'o', 'm', 'm'},
	}
}

func TestDecode(t *testing.T) {
	in := sample()
	want := mm.Record{
		Time: 1 * time.Nanosecond, Range: mm.Range{Start: 0x1000, End: 0x3000}, To: mm.Range{Start: 0x5000, End: 0x7000},
		Space: 9, Arg: [2]uint64{10, 11}, Ret: -12, PID: 13, TID: 14, ChildPID: 15, ChildTID: 16,
		Call: mm.Call{NR: 17, ABI: mm.ABICompat}, Flags: mm.Superset | mm.Rescued, Kind: mm.Move, Phase: mm.PhaseEnd,
		Hook: layout.HookSysExit, Comm: mm.Comm{'c', 'o', 'm', 'm'},
	}
	for _, extra := range []int{0, 1, 64} { // a newer kernel side writes longer records
		got := mm.Record{Seq: 99, Lost: 99} // nothing of the last record stays
		b := append(raw(&in), make([]byte, extra)...)
		if err := decode(b, &got); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, got); d != "" {
			t.Errorf("with %d bytes more: %s", extra, d)
		}
		if n := lostBefore(b); n != 8 {
			t.Errorf("lost before: %d, want 8", n)
		}
	}
}

func TestDecodeCorrupt(t *testing.T) {
	for name, b := range map[string][]byte{
		"empty":      nil,
		"short":      make([]byte, recordSize-1),
		"zeroes":     make([]byte, recordSize),
		"kind 0":     func() []byte { r := sample(); r.Kind = 0; return raw(&r) }(),
		"kind 13":    func() []byte { r := sample(); r.Kind = layout.KindDeregister + 1; return raw(&r) }(),
		"phase 0":    func() []byte { r := sample(); r.Phase = 0; return raw(&r) }(),
		"phase 3":    func() []byte { r := sample(); r.Phase = 3; return raw(&r) }(),
		"kind max":   func() []byte { r := sample(); r.Kind = 255; return raw(&r) }(),
		"phase maxi": func() []byte { r := sample(); r.Phase = 255; return raw(&r) }(),
	} {
		var r mm.Record
		if err := decode(b, &r); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: %v, want ErrCorrupt", name, err)
		}
	}
}

func FuzzDecode(f *testing.F) {
	r := sample()
	f.Add(raw(&r))
	f.Add(raw(&r)[:recordSize-1])
	f.Add(make([]byte, recordSize))
	f.Fuzz(func(t *testing.T, b []byte) {
		var rec mm.Record
		err := decode(b, &rec)
		if len(b) < recordSize {
			if !errors.Is(err, ErrCorrupt) {
				t.Fatalf("%d bytes: %v", len(b), err)
			}
			return
		}
		in := *(*layout.Record)(unsafe.Pointer(unsafe.SliceData(append([]byte(nil), b[:recordSize]...))))
		known := in.Kind >= uint8(mm.Unmap) && in.Kind <= layout.KindDeregister && in.Phase >= 1 && in.Phase <= 2
		if known != (err == nil) || err != nil && !errors.Is(err, ErrCorrupt) {
			t.Fatalf("kind %d, phase %d: %v", in.Kind, in.Phase, err)
		}
		if err != nil {
			return
		}
		// nothing is lost on the way: the image made of the record is the same
		in.Reserved = [4]uint8{}
		if rec.Kind == mm.Register || rec.Kind == mm.Deregister {
			in.All = min(in.All, 1)
			in.Arg[1] = uint64(uint32(in.Arg[1]))
		} else {
			in.By, in.All = 0, 0
		}
		back := layout.Record{
			Time_ns: uint64(rec.Time), Start: uint64(rec.Range.Start), End: uint64(rec.Range.End),
			To_start: uint64(rec.To.Start), To_end: uint64(rec.To.End), Lost: lostBefore(b), Space: rec.Space,
			Arg: rec.Arg, Ret: rec.Ret, Pid: rec.PID, Tid: rec.TID, Child_pid: rec.ChildPID, Child_tid: rec.ChildTID,
			Nr: rec.Call.NR, Flags: uint16(rec.Flags), Kind: uint8(rec.Kind), Phase: uint8(rec.Phase),
			Hook: uint8(rec.Hook), Abi: uint8(rec.Call.ABI), Comm: *(*[16]int8)(unsafe.Pointer(&rec.Comm)),
		}
		if g := rec.Registration; rec.Kind == mm.Register || rec.Kind == mm.Deregister {
			back.To_start, back.To_end, back.Arg[1], back.By = g.Device, g.Handle, uint64(g.Access), uint8(g.By)
			back.Child_pid, back.Child_tid = g.LKey, g.RKey
			if g.By == mm.ByIOUring {
				back.Child_pid, in.Child_tid = uint32(g.FD), 0
			}
			if g.All {
				back.All = 1
			}
		}
		if back != in {
			t.Fatalf("in  %+v\nout %+v", in, back)
		}
		// records are printed: nothing may panic
		_, _, _, _ = rec.Kind.String(), rec.Phase.String(), rec.Range.String(), rec.Comm.String()
		_, _ = rec.Range.Len(), HookName(rec.Hook)
	})
}

func BenchmarkDecode(b *testing.B) {
	in := sample()
	image := raw(&in)
	var r mm.Record
	b.ReportAllocs()
	for b.Loop() {
		if err := decode(image, &r); err != nil {
			b.Fatal(err)
		}
	}
}

func TestDecodeDoesNotAllocate(t *testing.T) {
	in := sample()
	image := raw(&in)
	var r mm.Record
	if n := testing.AllocsPerRun(1000, func() { decode(image, &r) }); n != 0 {
		t.Errorf("%v allocations a record", n)
	}
}
