// SPDX-License-Identifier: Apache-2.0

// Package kill kills, stops and restarts the daemon at random while programs
// use its feed, and looks for what they must never see: a transfer to pages
// that are not there any more.
package kill

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/uring"
)

const (
	bucketNanos = 10_000_000
	buckets     = 1 << 14
	events      = 1 << 10
	patterns    = 64
	lookers     = 2 // threads that look up, in each program
)

// board is shared memory in which a program tells how it fares.
type board struct {
	Lookups, Hits, Uncached, Stale, Dials uint64
	// of a second watch, in a crowd
	Records, Losses, Foreign uint64
	Watching                 uint64          // nonzero: it is open
	Go                       uint64          // set by the test: lookups may begin
	Events                   uint64          // total
	Back                     [events]uint64  // CLOCK_MONOTONIC at the first hits of new watches, in turns
	Work                     [buckets]uint64 // of the worker, by time, in turns
}

const boardBytes = (int(unsafe.Sizeof(board{})) + 4095) &^ 4095

func mapBoard(fd int) (*board, error) {
	b, err := unix.Mmap(fd, 0, boardBytes, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map board: %w", err)
	}
	return (*board)(unsafe.Pointer(unsafe.SliceData(b))), nil
}

func nanos() uint64 {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return uint64(ts.Nano())
}

// target is a program with registered buffers. It never stops, whatever the
// daemon does: with a feed it caches, without one it registers each time.
type target struct {
	board *board
	ring  *uring.Ring
	file  int // of known bytes: page i has the byte i+1

	mu    sync.RWMutex // held for reading during a lookup, for writing to change what follows
	cache *regcache.Cache[uring.Buf]
	watch *feed.Watch
	fresh atomic.Bool // the watch has had no hit yet
	dead  chan struct{}
}

func newTarget(fd int) (*target, error) {
	b, err := mapBoard(fd)
	if err != nil {
		return nil, err
	}
	t := &target{board: b, watch: feed.Dead(), dead: make(chan struct{}, 1)}
	if t.ring, err = uring.Open(uring.Options{}); err != nil {
		return nil, err
	}
	if t.cache, err = regcache.New(t.watch, t.ring, regcache.Options{}); err != nil {
		return nil, err
	}
	t.file, err = patternFile()
	return t, err
}

// Target runs until the process is killed.
func Target(socket string, fd int) error {
	t, err := newTarget(fd)
	if err != nil {
		return err
	}
	atomic.StoreUint64(&t.board.Go, 1)
	failed := make(chan error)
	for i := range lookers {
		go func() { failed <- t.look(uint64(i)) }()
	}
	go func() { failed <- t.work() }()
	go func() { failed <- t.renew(socket) }()
	return <-failed
}

// Member is one of many: it looks up in one thread, and looks at the records
// of a second watch in another. It runs until the process is killed.
func Member(socket string, fd int) error {
	t, err := newTarget(fd)
	if err != nil {
		return err
	}
	failed := make(chan error)
	t.gone()
	go func() { failed <- t.look(uint64(os.Getpid())) }() // the address tells whose it is
	go func() { failed <- t.renew(socket) }()
	go func() { failed <- t.listen(socket) }()
	return <-failed
}

// listen counts what is told of other processes: who made the change is in
// each record, and so is its range, which tells whose memory it is.
func (t *target) listen(socket string) error {
	w, err := feed.Dial(context.Background(), feed.Options{Socket: socket})
	for errors.Is(err, feed.ErrUnavailable) {
		time.Sleep(10 * time.Millisecond)
		w, err = feed.Dial(context.Background(), feed.Options{Socket: socket})
	}
	if err != nil {
		return err
	}
	defer w.Close()
	atomic.StoreUint64(&t.board.Watching, 1)
	own := pageNumber(uint64(os.Getpid()))
	area := mm.Range{Start: pageNumber(0).Start, End: pageNumber(1 << 22).Start} // where processes have their pages
	w.Begin(own)                                                                 // for ever
	for {
		state := w.Drain(func(r *mm.Record) {
			if r.Kind == mm.Lost {
				atomic.AddUint64(&t.board.Losses, 1)
				return
			}
			atomic.AddUint64(&t.board.Records, 1)
			if int(r.PID) != os.Getpid() || r.Touches(area) && !r.Touches(own) {
				atomic.AddUint64(&t.board.Foreign, 1)
			}
		})
		if state == feed.DeadState {
			return errors.New("the second watch is dead")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func patternFile() (int, error) {
	fd, err := unix.MemfdCreate("patterns", unix.MFD_CLOEXEC)
	if err != nil {
		return -1, err
	}
	p := make([]byte, mm.PageSize())
	for i := range patterns {
		for k := range p {
			p[k] = byte(i + 1)
		}
		if _, err := unix.Pwrite(fd, p, int64(i*len(p))); err != nil {
			return -1, err
		}
	}
	return fd, nil
}

// renew gets a watch whenever there is none.
func (t *target) renew(socket string) error {
	for {
		<-t.dead
		w, err := feed.Dial(context.Background(), feed.Options{Socket: socket})
		if errors.Is(err, feed.ErrUnavailable) {
			time.Sleep(2 * time.Millisecond)
			t.gone()
			continue
		}
		if err != nil {
			return err
		}
		c, err := regcache.New(w, t.ring, regcache.Options{})
		if err != nil {
			return err
		}
		t.mu.Lock()
		oldCache, oldWatch := t.cache, t.watch
		t.cache, t.watch = c, w
		t.fresh.Store(true)
		select { // asked for by who saw the old one meanwhile
		case <-t.dead:
		default:
		}
		t.mu.Unlock()
		atomic.AddUint64(&t.board.Dials, 1)
		if err := errors.Join(oldCache.Close(), oldWatch.Close()); err != nil {
			return err
		}
	}
}

// gone asks for a new watch.
func (t *target) gone() {
	select {
	case t.dead <- struct{}{}:
	default:
	}
}

// pageNumber is where a page lies of which there is one number in the machine.
func pageNumber(n uint64) mm.Range {
	start := mm.Addr(1<<40 + n<<21)
	return mm.Range{Start: start, End: start + mm.Addr(mm.PageSize())}
}

// mapPage maps a page where nobody else maps anything, also while it is away
// for a moment.
func mapPage(number uint64) ([]byte, error) {
	at := unsafe.Add(unsafe.Pointer(nil), uintptr(pageNumber(number).Start))
	p, err := unix.MmapPtr(-1, 0, at, uintptr(mm.PageSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		return nil, err
	}
	return unsafe.Slice((*byte)(p), mm.PageSize()), nil
}

// change makes the page another one, or none and then another.
func change(b []byte, how uint32) error {
	p := unsafe.Pointer(unsafe.SliceData(b))
	switch how % 3 {
	case 0:
		return unix.Madvise(b, unix.MADV_DONTNEED)
	case 1:
		if err := unix.MunmapPtr(p, uintptr(len(b))); err != nil {
			return err
		}
	}
	_, err := unix.MmapPtr(-1, 0, p, uintptr(len(b)), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED)
	return err
}

// look changes a page now and then, and transfers known bytes into it through
// the cache: they must be what the program sees there.
func (t *target) look(seed uint64) error {
	runtime.LockOSThread()
	b, err := mapPage(seed)
	if err != nil {
		return err
	}
	start := mm.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	r := mm.Range{Start: start, End: start + mm.Addr(len(b))}
	random := rand.New(rand.NewPCG(seed, uint64(os.Getpid())))
	for atomic.LoadUint64(&t.board.Go) == 0 {
		time.Sleep(200 * time.Millisecond)
	}
	for n := uint64(0); ; n++ {
		if random.Uint32()%4 == 0 {
			// mapped at once: only this thread uses the address
			if err := change(b, random.Uint32()); err != nil {
				return err
			}
		}
		t.mu.RLock()
		err := t.transfer(b, r, int(n%patterns))
		t.mu.RUnlock()
		if err != nil {
			return err
		}
	}
}

func (t *target) transfer(b []byte, r mm.Range, pattern int) error {
	misses := t.cache.Stats().Misses // of both threads: only for the statistics
	ref, err := t.cache.Acquire(r, regcache.LocalWrite)
	if err != nil {
		return err
	}
	defer ref.Release()
	cached, why := ref.Cached()
	if !cached && why == regcache.ReasonDead {
		t.gone()
	}
	b[0], b[len(b)-1] = 0, 0
	n, err := t.ring.ReadFixed(t.file, int64(pattern*len(b)), ref.Handle(), r)
	if err != nil {
		return err
	}
	if want := byte(pattern + 1); n != len(b) || b[0] != want || b[len(b)-1] != want {
		atomic.AddUint64(&t.board.Stale, 1)
	}
	atomic.AddUint64(&t.board.Lookups, 1)
	switch {
	case !cached:
		atomic.AddUint64(&t.board.Uncached, 1)
	case t.cache.Stats().Misses == misses:
		atomic.AddUint64(&t.board.Hits, 1)
		if t.fresh.Swap(false) {
			i := atomic.AddUint64(&t.board.Events, 1) - 1
			atomic.StoreUint64(&t.board.Back[i%events], nanos())
		}
	}
	return nil
}

// work does what the program is for: it changes memory that is not registered,
// and counts how often, by time.
func (t *target) work() error {
	runtime.LockOSThread()
	b, err := mapPage(lookers)
	if err != nil {
		return err
	}
	for last := uint64(0); ; {
		for range 50 {
			b[0] = 1
			if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
				return err
			}
		}
		now := nanos() / bucketNanos
		if now != last {
			for last = max(last, now-10); last < now; { // also those that it slept through
				last++
				atomic.StoreUint64(&t.board.Work[last%buckets], 0)
			}
		}
		atomic.AddUint64(&t.board.Work[now%buckets], 50)
	}
}
