// SPDX-License-Identifier: Apache-2.0

// Package feedtest is the kernel side of a feed in ordinary memory, for tests
// of package feed and of what is built on it. It writes the formats of
// bpf/ummu.h and of the kernel's ring buffer, in the order in which the BPF
// programs do, one step at a time if a test wants to look between them.
package feedtest

import (
	"fmt"
	"math/bits"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
)

// Options of a producer; the zero value works.
type Options struct {
	RingBytes int    // data area; 0: 64 KiB; else a power of two, a page at least
	Tier      uint32 // status.tier; 0: syscall
	Gaps      uint32 // status.gaps
	// Everything sets interest.all, so that changes outside of any Begin
	// leave records too.
	Everything bool
}

// Producer is one kernel side: a status, an epoch and an interest page, and a
// ring. Its methods are safe for concurrent use, as CPUs are.
type Producer struct {
	// The pages, writable here. Tests of hostile content write to them.
	Status   *layout.Status
	Epoch    *layout.Epoch
	Interest *layout.Interest
	// Consumer and Producer are the positions of the ring, Data its data
	// area (mapped twice, so twice its size).
	Consumer, Producer *uint64
	Data               []byte

	fds  [4]int // status, epoch, interest, ring
	size int
	maps [][]byte

	reserve sync.Mutex // guards *Producer, as the ring's spinlock does
}

// New makes a producer with a live watch: generation 1, nothing in the ring.
// Close it after the watches made of it.
func New(o Options) (*Producer, error) {
	page := int(mm.PageSize())
	if o.RingBytes == 0 {
		o.RingBytes = 64 << 10
	}
	if o.Tier == 0 {
		o.Tier = layout.TierSyscall
	}
	if o.RingBytes < page || bits.OnesCount(uint(o.RingBytes)) != 1 {
		return nil, fmt.Errorf("make producer: ring of %d bytes is not a power of two of pages", o.RingBytes)
	}
	p := &Producer{size: o.RingBytes, fds: [4]int{-1, -1, -1, -1}}
	fail := func(err error) (*Producer, error) {
		p.Close()
		return nil, fmt.Errorf("make producer: %w", err)
	}
	for i, n := range []int{int(unsafe.Sizeof(*p.Status)), int(unsafe.Sizeof(*p.Epoch)), interestBytes(), 2*page + p.size} {
		fd, err := unix.MemfdCreate("feedtest", unix.MFD_CLOEXEC)
		if err != nil {
			return fail(err)
		}
		p.fds[i] = fd
		if err := unix.Ftruncate(fd, int64(n)); err != nil {
			return fail(err)
		}
	}
	m, err := p.mapAll(unix.PROT_READ | unix.PROT_WRITE)
	if err != nil {
		return fail(err)
	}
	p.maps = [][]byte{m.Status, m.Epoch, m.Interest, m.RingConsumer, m.RingProducer}
	p.Status = (*layout.Status)(unsafe.Pointer(&m.Status[0]))
	p.Epoch = (*layout.Epoch)(unsafe.Pointer(&m.Epoch[0]))
	p.Interest = (*layout.Interest)(unsafe.Pointer(&m.Interest[0]))
	p.Consumer = (*uint64)(unsafe.Pointer(&m.RingConsumer[0]))
	p.Producer = (*uint64)(unsafe.Pointer(&m.RingProducer[0]))
	p.Data = m.RingProducer[page:]

	p.Status.Version, p.Status.Size = layout.Version, uint32(unsafe.Sizeof(*p.Status))
	p.Status.Tier, p.Status.Gaps = o.Tier, o.Gaps
	p.Status.Generation = layout.GenStart
	p.Epoch.Version, p.Epoch.Size = layout.Version, uint32(unsafe.Sizeof(*p.Epoch))
	p.Epoch.Word = layout.GenStart
	if o.Everything {
		p.Interest.All = 1
	}
	return p, nil
}

func interestBytes() int {
	page := int(mm.PageSize())
	return (int(unsafe.Sizeof(layout.Interest{})) + page - 1) &^ (page - 1)
}

// Memory maps the producer's pages once more, as a client does: status, epoch
// and the ring's data read-only. A ring has one consumer: make one watch of a
// producer at a time.
func (p *Producer) Memory() (feed.Memory, error) {
	m, err := p.mapAll(unix.PROT_READ)
	if err != nil {
		return feed.Memory{}, fmt.Errorf("map memory of producer: %w", err)
	}
	return m, nil
}

// Descriptors are files with the producer's pages, for a client that maps
// them itself. They stay the producer's. (The ring's file begins with the
// consumer page, as a BPF ring buffer does.)
func (p *Producer) Descriptors() (status, epoch, interest, ring int) {
	return p.fds[0], p.fds[1], p.fds[2], p.fds[3]
}

// Watch makes a watch of Memory.
func (p *Producer) Watch() (*feed.Watch, error) {
	m, err := p.Memory()
	if err != nil {
		return nil, err
	}
	w, err := feed.New(m)
	if err != nil {
		unmap(m.Status, m.Epoch, m.Interest, m.RingConsumer, m.RingProducer)
	}
	return w, err
}

// mapAll maps everything; prot concerns what a client has read-only.
func (p *Producer) mapAll(prot int) (m feed.Memory, err error) {
	const rw = unix.PROT_READ | unix.PROT_WRITE
	page := mm.PageSize()
	defer func() {
		if err != nil {
			unmap(m.Status, m.Epoch, m.Interest, m.RingConsumer, m.RingProducer)
			m = feed.Memory{}
		}
	}()
	if m.Status, err = mapShared(p.fds[0], 0, int(unsafe.Sizeof(*p.Status)), prot); err != nil {
		return m, err
	}
	if m.Epoch, err = mapShared(p.fds[1], 0, int(unsafe.Sizeof(*p.Epoch)), prot); err != nil {
		return m, err
	}
	if m.Interest, err = mapShared(p.fds[2], 0, interestBytes(), rw); err != nil {
		return m, err
	}
	if m.RingConsumer, err = mapShared(p.fds[3], 0, int(page), rw); err != nil {
		return m, err
	}
	// A reservation, then the producer page and the data twice inside.
	size := uintptr(p.size)
	base, err := unix.MmapPtr(-1, 0, nil, uintptr(page)+2*size, unix.PROT_NONE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return m, err
	}
	m.RingProducer = unsafe.Slice((*byte)(base), uintptr(page)+2*size)
	if _, err = unix.MmapPtr(p.fds[3], int64(page), base, uintptr(page)+size, prot, unix.MAP_SHARED|unix.MAP_FIXED); err != nil {
		return m, err
	}
	_, err = unix.MmapPtr(p.fds[3], 2*int64(page), unsafe.Add(base, uintptr(page)+size), size, prot, unix.MAP_SHARED|unix.MAP_FIXED)
	return m, err
}

func mapShared(fd int, offset int64, n, prot int) ([]byte, error) {
	p, err := unix.MmapPtr(fd, offset, nil, uintptr(n), prot, unix.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), n), nil
}

func unmap(bs ...[]byte) {
	for _, b := range bs {
		if b != nil {
			unix.MunmapPtr(unsafe.Pointer(&b[0]), uintptr(len(b)))
		}
	}
}

// Close frees the producer's own mappings and descriptors. Nothing else may be
// called afterwards; watches made of it live on and see no more change.
func (p *Producer) Close() {
	unmap(p.maps...)
	p.maps = nil
	for i, fd := range p.fds {
		if fd >= 0 {
			unix.Close(fd)
			p.fds[i] = -1
		}
	}
}

// Interesting reports what the interest test of the kernel side says about a
// change of r, or for a move of r or to.
func (p *Producer) Interesting(r, to mm.Range) bool {
	return atomic.LoadUint32(&p.Interest.All) != 0 || p.interesting(r) || p.interesting(to)
}

func (p *Producer) interesting(r mm.Range) bool {
	if r.Empty() {
		return false
	}
	for level, shift := range []uint{layout.InterestShift0, layout.InterestShift1, layout.InterestShift2} {
		first, last := uint64(r.Start)>>shift, (uint64(r.End)-1)>>shift
		if last-first >= layout.InterestSpan || atomic.LoadUint64(&p.Interest.Dense[level]) != 0 {
			continue
		}
		for g := first; g <= last; g++ {
			bit := g * 0x9E3779B97F4A7C15 >> 49 & (layout.InterestBits - 1)
			if atomic.LoadUint64(&p.Interest.Bits[level][bit/64])&(1<<(bit%64)) != 0 {
				return true
			}
		}
		return false
	}
	return true
}

// Change is one change on its way through the kernel side. A test that needs
// to look between the steps calls them in the order Start, Test, Reserve,
// Submit, Count, End; Begin does all of them but End.
type Change struct {
	Kind      mm.Kind
	Range, To mm.Range
	PID, TID  uint32
	Flags     mm.Flags

	p        *Producer
	bank     uint32
	pos      uint64
	reserved bool
	lost     bool
}

// Prepare returns a change of which nothing has happened yet.
func (p *Producer) Prepare(k mm.Kind, r, to mm.Range) *Change {
	return &Change{Kind: k, Range: r, To: to, PID: 1, TID: 1, p: p}
}

// Start counts the change as begun, in the bank that the client chose.
func (c *Change) Start() {
	c.bank = atomic.LoadUint32(&c.p.Interest.Bank) & 1
	c.StartIn(c.bank)
}

// StartIn is Start by a CPU that read the bank some time ago.
func (c *Change) StartIn(bank uint32) {
	c.bank = bank & 1
	atomic.AddUint64(&c.p.Status.Begun[c.bank], 1)
}

// Test is the interest test; false: counted as filtered, and the change goes
// on to End.
func (c *Change) Test() bool {
	if c.p.Interesting(c.Range, c.To) {
		return true
	}
	atomic.AddUint64(&c.p.Status.Filtered, 1)
	return false
}

// Reserve takes space in the ring: a record that is being written. It
// returns false if the ring is full; then Count counts a loss.
func (c *Change) Reserve() bool {
	c.pos, c.reserved = c.p.reserveBytes(uint32(unsafe.Sizeof(layout.Record{})))
	if !c.reserved {
		atomic.AddUint64(&c.p.Status.Lost, 1)
		c.lost = true
	}
	return c.reserved
}

// Submit fills the record and commits it.
func (c *Change) Submit() {
	p := c.p
	var ts unix.Timespec
	unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts)
	*p.record(c.pos) = layout.Record{
		Time_ns: uint64(time.Duration(ts.Nano())),
		Start:   uint64(c.Range.Start), End: uint64(c.Range.End),
		To_start: uint64(c.To.Start), To_end: uint64(c.To.End),
		Lost: atomic.LoadUint64(&p.Status.Lost),
		Pid:  c.PID, Tid: c.TID,
		Flags: uint16(c.Flags),
		Kind:  uint8(c.Kind), Phase: uint8(mm.PhaseBegin),
	}
	atomic.StoreUint32(p.header(c.pos), uint32(unsafe.Sizeof(layout.Record{})))
}

// Count moves the generation, for the record or for its loss.
func (c *Change) Count() {
	if c.lost {
		atomic.AddUint64(&c.p.Status.Generation, layout.GenLoss)
		return
	}
	atomic.AddUint64(&c.p.Status.Records, 1)
	atomic.AddUint64(&c.p.Status.Generation, layout.GenRecord)
}

// End counts the change as ended.
func (c *Change) End() { atomic.AddUint64(&c.p.Status.Ended[c.bank], 1) }

// Begin does everything up to the moment at which the kernel changes the page
// tables. The caller ends the change.
func (p *Producer) Begin(k mm.Kind, r, to mm.Range) *Change {
	c := p.Prepare(k, r, to)
	c.Start()
	if c.Test() {
		if c.Reserve() {
			c.Submit()
		}
		c.Count()
	}
	return c
}

// Change is a whole change of r, begin and end.
func (p *Producer) Change(k mm.Kind, r mm.Range) { p.Begin(k, r, mm.Range{}).End() }

// Discard reserves n bytes and discards them: no record, nothing counted.
func (p *Producer) Discard(n uint32) bool {
	pos, ok := p.reserveBytes(n)
	if ok {
		atomic.StoreUint32(p.header(pos), n|ringDiscard)
	}
	return ok
}

// Lose counts n events as lost.
func (p *Producer) Lose(n int) {
	for ; n > 0; n-- {
		atomic.AddUint64(&p.Status.Lost, 1)
		atomic.AddUint64(&p.Status.Generation, layout.GenLoss)
	}
}

// Unpaired counts the end of a change whose begin was not seen: a loss.
func (p *Producer) Unpaired() {
	atomic.AddUint64(&p.Status.Unpaired, 1)
	atomic.AddUint64(&p.Status.Generation, layout.GenLoss)
}

// Kill is the death of the address space, or of the watch.
func (p *Producer) Kill() {
	atomic.AddUint64(&p.Status.Deaths, 1)
	atomic.AddUint64(&p.Status.Generation, layout.GenDeath)
}

// Untracked is a change that the kernel side could not track.
func (p *Producer) Untracked() {
	atomic.AddUint64(&p.Status.Untracked, 1)
	atomic.AddUint64(&p.Status.Generation, layout.GenDeath)
}

// LoseAll is a loss that concerns every watch of this kernel side.
func (p *Producer) LoseAll() { atomic.AddUint64(&p.Epoch.Word, layout.GenLoss) }

// KillAll is the end of this kernel side.
func (p *Producer) KillAll() {
	atomic.AddUint64(&p.Epoch.Deaths, 1)
	atomic.AddUint64(&p.Epoch.Word, layout.GenDeath)
}

// UntrackedAll is a change of nobody-knows-whose address space that the kernel
// side could not track.
func (p *Producer) UntrackedAll() {
	atomic.AddUint64(&p.Epoch.Untracked, 1)
	atomic.AddUint64(&p.Epoch.Word, layout.GenDeath)
}

// The header of a record in a BPF ring buffer.
const (
	ringBusy    = 1 << 31
	ringDiscard = 1 << 30
	ringHeader  = 8
)

// reserveBytes is __bpf_ringbuf_reserve: it fails when the area would be full
// to the last byte.
func (p *Producer) reserveBytes(n uint32) (pos uint64, ok bool) {
	step := (uint64(n) + ringHeader + 7) &^ 7
	p.reserve.Lock()
	defer p.reserve.Unlock()
	pos = atomic.LoadUint64(p.Producer)
	if pos+step-atomic.LoadUint64(p.Consumer) > uint64(p.size)-1 {
		return 0, false
	}
	atomic.StoreUint32(p.header(pos), n|ringBusy)
	atomic.StoreUint64(p.Producer, pos+step)
	return pos, true
}

func (p *Producer) header(pos uint64) *uint32 {
	return (*uint32)(unsafe.Pointer(&p.Data[pos&uint64(p.size-1)]))
}

func (p *Producer) record(pos uint64) *layout.Record {
	return (*layout.Record)(unsafe.Pointer(&p.Data[pos&uint64(p.size-1)+ringHeader]))
}
