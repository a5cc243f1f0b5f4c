// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"fmt"
	"os"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

const recordSize = int(unsafe.Sizeof(layout.Record{}))

// decode stores the ring record b in rec, without allocation. b may be
// longer than this layout's record (a newer kernel side), never shorter.
func decode(b []byte, rec *mm.Record) error {
	if len(b) < recordSize {
		return fmt.Errorf("%w: %d bytes, need %d", ErrCorrupt, len(b), recordSize)
	}
	r := (*layout.Record)(unsafe.Pointer(unsafe.SliceData(b)))
	if r.Kind == 0 || r.Kind > layout.KindDeregister || r.Phase == 0 || r.Phase > uint8(mm.PhaseEnd) {
		return fmt.Errorf("%w: kind %d, phase %d", ErrCorrupt, r.Kind, r.Phase)
	}
	*rec = mm.Record{
		Time:     time.Duration(r.Time_ns),
		Range:    mm.Range{Start: mm.Addr(r.Start), End: mm.Addr(r.End)},
		To:       mm.Range{Start: mm.Addr(r.To_start), End: mm.Addr(r.To_end)},
		Space:    r.Space,
		Arg:      r.Arg,
		Ret:      r.Ret,
		PID:      r.Pid,
		TID:      r.Tid,
		ChildPID: r.Child_pid,
		ChildTID: r.Child_tid,
		Call:     mm.Call{NR: r.Nr, ABI: mm.ABI(r.Abi)},
		Flags:    mm.Flags(r.Flags),
		Kind:     mm.Kind(r.Kind),
		Phase:    mm.Phase(r.Phase),
		Hook:     mm.Hook(r.Hook),
		Comm:     *(*mm.Comm)(unsafe.Pointer(&r.Comm)),
	}
	if rec.Kind == mm.Register || rec.Kind == mm.Deregister {
		registration(r, rec)
	}
	return nil
}

// registration moves what is in other fields on such a record.
func registration(r *layout.Record, rec *mm.Record) {
	rec.Registration = mm.Registration{
		Device: r.To_start, Handle: r.To_end, Access: uint32(r.Arg[1]), By: mm.Registrar(r.By), All: r.All != 0,
	}
	if rec.Registration.By == mm.ByIOUring {
		rec.Registration.FD = int32(r.Child_pid)
	} else {
		rec.Registration.LKey, rec.Registration.RKey = r.Child_pid, r.Child_tid
	}
	rec.To, rec.ChildPID, rec.ChildTID, rec.Arg[1] = mm.Range{}, 0, 0, 0
}

// stackOf is the stack behind a record; it refers to b.
func stackOf(b []byte) mm.Stack {
	const size = int(unsafe.Sizeof(layout.Stack{}))
	if len(b) < recordSize+size {
		return mm.Stack{}
	}
	s := (*layout.Stack)(unsafe.Pointer(unsafe.SliceData(b[recordSize:])))
	return mm.Stack{
		PC: mm.Addr(s.Pc), SP: mm.Addr(s.Sp), FP: mm.Addr(s.Fp), LR: mm.Addr(s.Lr),
		Memory: s.Memory[:min(int(s.Size), len(s.Memory))],
	}
}

// lostBefore is the record's own count of events lost before it.
func lostBefore(b []byte) uint64 {
	return (*layout.Record)(unsafe.Pointer(unsafe.SliceData(b))).Lost
}

// mapStatus maps a status page for reading; unix.Munmap ends it.
func mapStatus(m *ebpf.Map) ([]byte, error) {
	size := (int(unsafe.Sizeof(layout.Status{})) + os.Getpagesize() - 1) &^ (os.Getpagesize() - 1)
	b, err := unix.Mmap(m.FD(), 0, size, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map status page: %w", err)
	}
	return b, nil
}

func monotonic() time.Duration {
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) // cannot fail for this clock
	return time.Duration(ts.Nano())
}
