// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/mm"
)

// ErrVersion is returned by [New] for pages of a layout that this package
// does not know, or that are too small for it.
var ErrVersion = errors.New("unknown version of the shared layout")

// Memory is what a watch shares with the kernel side. The slices are whole
// mappings (mmap), each its own; from a successful [New] on they belong to
// the watch.
type Memory struct {
	Status, Epoch []byte // one page each at least, read-only
	Interest      []byte // struct ummu_interest, read-write
	RingConsumer  []byte // one page, read-write
	RingProducer  []byte // producer page and the data area twice, read-only
	// RingFD, if positive, is a descriptor that polls readable when the ring
	// has records: Wait is woken by it instead of a timer only. The watch
	// duplicates it while it waits; whoever made it closes it, in Release.
	RingFD int
	// Maps is the maps file of the watched address space; empty means
	// /proc/self/maps.
	Maps string
	// Settle, if not nil, reports that no change which began before the call
	// is in flight. Begin asks it where the tier sees no ends of changes.
	Settle func() bool
	// Holder, if not 0, is the start of a page of the watched address space
	// that keeps the notifier of the tier registered. A change of it, of its
	// rights apart, ends the watch: nothing would be seen any more.
	Holder mm.Addr
	// Release, if not nil, is called once by Close.
	Release func() error
}

// Watch is one consumer of the changes of one address space. All methods are
// safe for concurrent use. Lock order: mu, then interest.mu.
type Watch struct {
	// What Valid reads: never nil, always mapped.
	generation *uint64
	epoch      *uint64
	seen       *seen

	status    *layout.Status
	epochPage *layout.Epoch
	marker    []byte // a page of ours; see settle
	interest  interest
	ring      ring
	mem       Memory
	closed    atomic.Bool
	gone      chan struct{} // closed when Close has done its work
	closeErr  error         // written before gone is closed

	// mu is the drain lock. It is only ever taken by TryLock, and callbacks
	// run under it: whoever cannot have it at once says Busy, or polls for a
	// bounded time.
	mu         sync.Mutex
	dying      bool   // seen to have ended
	dead       bool   // and that was delivered
	published  uint64 // what this side stored in seen.generation
	untracked  uint64 // epoch.untracked when the watch was made
	epochKnown uint64 // epoch up to which losses were delivered
	lost       uint64 // status.lost up to which losses were delivered
	unpaired   uint64 // status.unpaired likewise
	read       uint64 // records read, in the count of the generation word
	excess     uint64 // losses of the generation word that no counter explained
	seq        uint64
	rec        mm.Record // handed to callbacks
	loss       mm.Record

	wrong atomic.Bool // the kernel side counted more ends than begins

	flip sync.Mutex // serialises changes of interest.bank; only TryLock

	maps  maps
	stats counters
}

// ring is the consumer's view of a BPF ring buffer (kernel/bpf/ringbuf.c).
type ring struct {
	consumer, producer *uint64
	data               unsafe.Pointer // mask+1 bytes, mapped twice
	mask               uint64
	pos                uint64 // next record; under Watch.mu
	stored             uint64 // pos as the kernel knows it; under Watch.mu
}

// New makes a watch over m. Nothing is cached by its user yet, so what is in
// the ring already is drained like everything else. The error is
// [ErrVersion], one that says which mapping is malformed, or that of
// mmap/madvise. On error m still belongs to the caller.
func New(m Memory) (*Watch, error) {
	page := int(mm.PageSize())
	data := (len(m.RingProducer) - page) / 2
	switch {
	case len(m.RingConsumer) < page:
		return nil, fmt.Errorf("make watch: consumer page of %d bytes", len(m.RingConsumer))
	case data < page || data&(data-1) != 0 || page+2*data != len(m.RingProducer):
		return nil, fmt.Errorf("make watch: ring mapping of %d bytes is not a page and twice a power of two", len(m.RingProducer))
	case len(m.Interest) < int(unsafe.Sizeof(layout.Interest{})):
		return nil, fmt.Errorf("make watch: interest of %d bytes: %w", len(m.Interest), ErrVersion)
	case len(m.Status) < int(unsafe.Sizeof(layout.Status{})):
		return nil, fmt.Errorf("make watch: status of %d bytes: %w", len(m.Status), ErrVersion)
	case len(m.Epoch) < int(unsafe.Sizeof(layout.Epoch{})):
		return nil, fmt.Errorf("make watch: epoch of %d bytes: %w", len(m.Epoch), ErrVersion)
	}
	st := (*layout.Status)(unsafe.Pointer(unsafe.SliceData(m.Status)))
	ep := (*layout.Epoch)(unsafe.Pointer(unsafe.SliceData(m.Epoch)))
	in := (*layout.Interest)(unsafe.Pointer(unsafe.SliceData(m.Interest)))
	if st.Version != layout.Version || uintptr(st.Size) < unsafe.Sizeof(layout.Status{}) {
		return nil, fmt.Errorf("make watch: status version %d, size %d: %w", st.Version, st.Size, ErrVersion)
	}
	if ep.Version != layout.Version || uintptr(ep.Size) < unsafe.Sizeof(layout.Epoch{}) {
		return nil, fmt.Errorf("make watch: epoch version %d, size %d: %w", ep.Version, ep.Size, ErrVersion)
	}
	s, err := takeSeen()
	if err != nil {
		return nil, fmt.Errorf("make watch: %w", err)
	}
	in.Version, in.Size = layout.Version, uint32(unsafe.Sizeof(layout.Interest{}))
	w := &Watch{
		generation: &st.Generation,
		epoch:      &ep.Word,
		epochPage:  ep,
		seen:       s,
		status:     st,
		mem:        m,
		gone:       make(chan struct{}),
		ring: ring{
			consumer: (*uint64)(unsafe.Pointer(unsafe.SliceData(m.RingConsumer))),
			producer: (*uint64)(unsafe.Pointer(unsafe.SliceData(m.RingProducer))),
			data:     unsafe.Pointer(&m.RingProducer[page]),
			mask:     uint64(data) - 1,
		},
	}
	w.interest.init(in)
	in.Holder = uint64(m.Holder)
	if st.Tier == layout.TierNotifierTracepoint && (m.Maps == "" || m.Maps == "/proc/self/maps") {
		b, err := unix.Mmap(-1, 0, page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			giveSeen(s)
			return nil, fmt.Errorf("make watch: %w", err)
		}
		w.marker = b
		in.Marker = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	}
	w.maps.path = m.Maps
	w.maps.files = st.Gaps&layout.GapFile == 0
	if w.maps.path == "" || w.maps.path == "/proc/self/maps" {
		w.maps.path = "/proc/thread-self/maps" // the leader may have ended
	}
	w.ring.pos = atomic.LoadUint64(w.ring.consumer)
	w.ring.stored = w.ring.pos
	w.untracked = atomic.LoadUint64(&ep.Untracked)
	w.epochKnown = atomic.LoadUint64(w.epoch)
	// Nothing is cached, so the present state is the one seen. Its losses
	// are counted from here; loaded after the generation, see Drain.
	w.published = atomic.LoadUint64(w.generation)
	w.lost, w.unpaired = atomic.LoadUint64(&st.Lost), atomic.LoadUint64(&st.Unpaired)
	if w.ring.pos != 0 {
		w.read = movesOf(w.published) - w.lost - w.unpaired
	}
	atomic.StoreUint64(&s.epoch, w.epochKnown)
	atomic.StoreUint64(&s.alive, 1)
	if !w.died() {
		atomic.StoreUint64(&s.generation, w.published)
	}
	// The pages that Valid reads, and with them all others, stay mapped as
	// long as somebody can call it.
	m.Release = nil // may refer to w
	runtime.AddCleanup(w, func(m mappings) { m.unmap() }, mappings{m, s, w.marker})
	return w, nil
}

// mappings is what outlives Close.
type mappings struct {
	mem  Memory
	seen *seen
	own  []byte // the marker page
}

func (m mappings) each(f func([]byte)) {
	for _, b := range [][]byte{m.mem.Status, m.mem.Epoch, m.mem.Interest, m.mem.RingConsumer, m.mem.RingProducer} {
		f(b)
	}
}

func (m mappings) unmap() {
	giveSeen(m.seen)
	if m.own != nil {
		unix.Munmap(m.own)
	}
	m.each(func(b []byte) {
		// Known to package unix if it made the mapping, else ours to undo.
		if unix.Munmap(b) != nil {
			unix.MunmapPtr(unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)))
		}
	})
}

var (
	deadWord  uint64
	deadSeen  seen
	deadWatch = &Watch{generation: &deadWord, epoch: &deadWord, seen: &deadSeen}
)

// Dead returns a watch without a feed: nothing is ever valid, Drain says
// DeadState and Commit IsDead. Every method works; Close does nothing.
func Dead() *Watch { return deadWatch }

// Valid reports whether nothing has changed that was not drained: neither the
// generation nor the epoch has moved since the last complete drain. It is
// false for ever once the watch is dead or closed, and in a forked child.
//
// It must be asked before the index is looked at. In the other order a drain
// by another thread between the two hides that the entry found was dropped.
func (w *Watch) Valid() bool {
	g := atomic.LoadUint64(w.generation)
	ok := (g != 0 || guard.Off(guard.ZeroDead)) && g == atomic.LoadUint64(&w.seen.generation) &&
		(atomic.LoadUint64(w.epoch) == atomic.LoadUint64(&w.seen.epoch) || guard.Off(guard.EpochCompared))
	runtime.KeepAlive(w) // the pages are unmapped when w is unreachable
	return ok
}

// Intervals of Wait when nothing wakes it: losses, deaths and the epoch move
// words only.
const (
	waitMin = 200 * time.Microsecond
	waitMax = 20 * time.Millisecond
)

// Wait returns nil as soon as the watch is not Valid (at once for a dead
// watch), or the error of ctx. Records wake it at once if the memory has a
// RingFD; else, and for losses and death, it looks every 20 ms at least.
// Cancelling ctx takes as long.
func (w *Watch) Wait(ctx context.Context) error {
	fd := -1
	if w.mem.RingFD > 0 && w.lock(patience) {
		// Under the lock Release has not run, so the number is still the ring's.
		if !w.closed.Load() {
			if n, err := unix.FcntlInt(uintptr(w.mem.RingFD), unix.F_DUPFD_CLOEXEC, 0); err == nil {
				fd = n
				defer unix.Close(fd)
			}
		}
		w.unlock()
	}
	pause := waitMin
	timer := time.NewTimer(pause)
	defer timer.Stop()
	for w.Valid() {
		if err := ctx.Err(); err != nil {
			return err
		}
		if fd >= 0 {
			n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, int(waitMax/time.Millisecond))
			if n == 0 || err == unix.EINTR {
				continue
			}
			if err != nil {
				fd = -1 // closed by the deferred call above, which has its own copy
			}
			// Readable and yet valid: a record that is committed but not
			// counted. Look again soon, but do not spin.
			pause = waitMin
		}
		timer.Reset(pause)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-timer.C:
		}
		pause = min(2*pause, waitMax)
	}
	return nil
}

// patience bounds how long a call polls for the drain lock before it gives up.
const patience = 250 * time.Millisecond

// closePatience is that of Close, which promises more.
const closePatience = 2 * time.Second

// lock takes the drain lock, or gives up after a while: the holder may be our
// own caller, in a callback.
func (w *Watch) lock(limit time.Duration) bool {
	for i := 0; i < 100; i++ {
		if w.mu.TryLock() {
			return true
		}
		runtime.Gosched()
	}
	pause := 10 * time.Microsecond
	for start := time.Now(); time.Since(start) < limit; pause = min(2*pause, 5*time.Millisecond) {
		time.Sleep(pause)
		if w.mu.TryLock() {
			return true
		}
	}
	return false
}

// unlock releases the drain lock and does the work of a Close that could not
// have it.
func (w *Watch) unlock() {
	w.mu.Unlock()
	if w.closed.Load() && w.mu.TryLock() {
		w.tearDown()
		w.mu.Unlock()
	}
}

// Close ends the watch: lookups miss from its first instruction on, and no
// callback runs after it has returned. Called from a callback it returns
// after 2 s at most, and the rest is done when the callback has returned.
// It is idempotent; each call returns what Release returned.
func (w *Watch) Close() error {
	if w.status == nil {
		return nil // Dead
	}
	w.seen.kill()
	if !w.closed.Swap(true) {
		if w.mu.TryLock() {
			w.tearDown()
			w.mu.Unlock()
		}
	}
	select {
	case <-w.gone:
		return w.closeErr
	default:
	}
	timer := time.NewTimer(closePatience)
	defer timer.Stop()
	select {
	case <-w.gone:
		return w.closeErr
	case <-timer.C:
		return nil
	}
}

// tearDown gives the shared memory back, once, under mu. Other threads may be
// reading it, so zero pages take its place at the same addresses (mmap with
// MAP_FIXED replaces a mapping without a gap); the addresses themselves are
// freed when the watch is unreachable. What cannot be replaced stays mapped
// until then.
func (w *Watch) tearDown() {
	select {
	case <-w.gone:
		return
	default:
	}
	w.seen.kill()
	w.dead = true
	mappings{mem: w.mem}.each(func(b []byte) {
		unix.MmapPtr(-1, 0, unsafe.Pointer(unsafe.SliceData(b)), uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE,
			unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED|unix.MAP_NORESERVE)
	})
	w.maps.close()
	if w.mem.Release != nil {
		w.closeErr = w.mem.Release()
	}
	close(w.gone)
}

// Tier is the tier that the kernel side uses, by its number in bpf/ummu.h,
// and Gaps what it cannot see (bits of enum ummu_gap). Both are 0 for a dead
// or closed watch.
func (w *Watch) Tier() uint32 {
	if w.status == nil {
		return layout.TierNone
	}
	defer runtime.KeepAlive(w)
	return atomic.LoadUint32(&w.status.Tier)
}

// Gaps: see Tier.
func (w *Watch) Gaps() uint32 {
	if w.status == nil {
		return 0
	}
	defer runtime.KeepAlive(w)
	return atomic.LoadUint32(&w.status.Gaps)
}
