// SPDX-License-Identifier: Apache-2.0

package symbol

import (
	"cmp"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// sideband is the kernel's own account of code being mapped, as perf(1) uses it
// (PERF_RECORD_MMAP2, perf_event_open(2)): with file names, and in time, so
// that the stack of a process that has ended in the meantime can be resolved.
// One event per processor, of the whole machine.
type sideband struct {
	rings   [][]byte // a control page, then data
	fds     []int
	pending []event // not applied yet, by time
	lost    bool    // something was, since it was last asked
	scratch []byte
}

// event is one record of interest.
type event struct {
	at    time.Duration // CLOCK_MONOTONIC
	kind  eventKind
	pid   int
	child int // of a fork
	m     mapping
}

type eventKind uint8

const (
	eventMapped eventKind = iota
	eventExec
	eventFork
)

const (
	sidebandPages = 32 // of data, a processor

	recordLost    = 2 // PERF_RECORD_*
	recordComm    = 3
	recordFork    = 7
	recordMmap2   = 10
	miscCommExec  = 1 << 13
	trailerSize   = 16 // pid, tid, time: sample_id_all
	swDummy       = 9
	sampleTIDTime = unix.PERF_SAMPLE_TID | unix.PERF_SAMPLE_TIME
)

func newSideband() (_ *sideband, err error) {
	s := &sideband{}
	defer func() {
		if err != nil {
			s.close()
		}
	}()
	cpus, err := onlineCPUs()
	if err != nil {
		return nil, err
	}
	page := os.Getpagesize()
	for _, cpu := range cpus {
		attr := unix.PerfEventAttr{
			Type: unix.PERF_TYPE_SOFTWARE, Config: swDummy, Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{})),
			Sample_type: sampleTIDTime, Clockid: unix.CLOCK_MONOTONIC,
			Bits: unix.PerfBitMmap | unix.PerfBitMmap2 | unix.PerfBitComm | unix.PerfBitCommExec | unix.PerfBitTask |
				unix.PerfBitSampleIDAll | unix.PerfBitUseClockID | unix.PerfBitWatermark,
			Wakeup: 1 << 30, // nobody waits
		}
		fd, err := unix.PerfEventOpen(&attr, -1, cpu, -1, unix.PERF_FLAG_FD_CLOEXEC)
		if errors.Is(err, unix.ENODEV) {
			continue // went offline
		}
		if err != nil {
			return nil, fmt.Errorf("watch mappings of code on processor %d: %w", cpu, err)
		}
		s.fds = append(s.fds, fd)
		ring, err := unix.Mmap(fd, 0, (1+sidebandPages)*page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		if err != nil {
			return nil, fmt.Errorf("map the ring of processor %d: %w", cpu, err)
		}
		s.rings = append(s.rings, ring)
	}
	return s, nil
}

func (s *sideband) close() error {
	var errs []error
	for _, r := range s.rings {
		errs = append(errs, unix.Munmap(r))
	}
	for _, fd := range s.fds {
		errs = append(errs, unix.Close(fd))
	}
	s.rings, s.fds = nil, nil
	return errors.Join(errs...)
}

// onlineCPUs reads a list as "0-3,5".
func onlineCPUs() ([]int, error) {
	b, err := os.ReadFile("/sys/devices/system/cpu/online")
	if err != nil {
		cpus := make([]int, runtime.NumCPU())
		for i := range cpus {
			cpus[i] = i
		}
		return cpus, nil
	}
	var cpus []int
	for _, part := range strings.Split(strings.TrimSpace(string(b)), ",") {
		from, to, ok := strings.Cut(part, "-")
		if !ok {
			to = from
		}
		a, err1 := strconv.Atoi(from)
		z, err2 := strconv.Atoi(to)
		if err1 != nil || err2 != nil || z < a || z > 1<<16 {
			return nil, fmt.Errorf("list of processors: %q", b)
		}
		for ; a <= z; a++ {
			cpus = append(cpus, a)
		}
	}
	return cpus, nil
}

// drain moves what is in the rings to pending.
func (s *sideband) drain() {
	before := len(s.pending)
	for _, r := range s.rings {
		c := (*unix.PerfEventMmapPage)(unsafe.Pointer(unsafe.SliceData(r)))
		head := atomic.LoadUint64(&c.Data_head)
		tail := atomic.LoadUint64(&c.Data_tail)
		if head == tail {
			continue
		}
		s.read(r[len(r)-sidebandPages*os.Getpagesize():], tail, head)
		atomic.StoreUint64(&c.Data_tail, head)
	}
	if len(s.pending) != before {
		slices.SortStableFunc(s.pending, func(a, b event) int { return cmp.Compare(a.at, b.at) })
	}
}

// read decodes the records from tail to head, which wrap around.
func (s *sideband) read(data []byte, tail, head uint64) {
	size := uint64(len(data))
	for tail < head {
		at := tail % size
		n := uint64(binary.NativeEndian.Uint16(data[at+6:])) // headers do not wrap: 8 bytes, aligned
		if n < 8 || n%8 != 0 || n > head-tail {
			s.lost = true
			return
		}
		b := data[at:]
		if uint64(len(b)) < n {
			s.scratch = append(append(s.scratch[:0], b...), data[:n-uint64(len(b))]...)
			b = s.scratch
		}
		if e, ok := s.decode(b[:n]); ok {
			s.pending = append(s.pending, e)
		}
		tail += n
	}
}

// decode decodes one record; false if it is of no interest.
func (s *sideband) decode(b []byte) (e event, ok bool) {
	order := binary.NativeEndian
	kind, misc := order.Uint32(b), order.Uint16(b[4:])
	if kind == recordLost {
		s.lost = true
		return e, false
	}
	if len(b) < 8+8+trailerSize {
		return e, false
	}
	body := b[8 : len(b)-trailerSize]
	e.at = time.Duration(order.Uint64(b[len(b)-8:]))
	switch kind {
	case recordComm:
		e.kind, e.pid = eventExec, int(order.Uint32(body))
		return e, misc&miscCommExec != 0
	case recordFork:
		if len(body) < 16 {
			return e, false
		}
		e.kind, e.child, e.pid = eventFork, int(order.Uint32(body)), int(order.Uint32(body[4:]))
		return e, e.child != e.pid
	case recordMmap2:
		// pid, tid, addr, len, pgoff, major, minor, inode, generation, prot, flags, name
		const name = 64
		if len(body) < name {
			return e, false
		}
		start := mm.Addr(order.Uint64(body[8:]))
		e.kind, e.pid = eventMapped, int(order.Uint32(body))
		e.m = mapping{
			Range:  mm.Range{Start: start, End: start + mm.Addr(order.Uint64(body[16:]))},
			offset: order.Uint64(body[24:]),
			file:   fileID{fmt.Sprintf("%02x:%02x", order.Uint32(body[32:]), order.Uint32(body[36:])), order.Uint64(body[40:])},
		}
		text := string(body[name:])
		if i := strings.IndexByte(text, 0); i >= 0 {
			text = text[:i]
		}
		e.m.path = text
		return e, true
	}
	return e, false
}

// take returns what happened up to a time, in order.
func (s *sideband) take(until time.Duration) []event {
	s.drain()
	n := 0
	for n < len(s.pending) && s.pending[n].at <= until {
		n++
	}
	out := s.pending[:n:n]
	s.pending = s.pending[n:]
	return out
}
