// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache/uring"
)

// maxEntries bounds the table; the oldest go.
const maxEntries = 24

// entry is a registration that the feed allowed to keep.
type entry struct {
	r       mm.Range
	buf     uring.Buf
	frames  []uint64 // of its pages when it was registered
	step    int      // that registered it
	fresh   bool     // since the last check
	dropped mm.Kind  // a record told so; KindNone: a lookup would hit
}

// table is what a registration cache is to a program, with the frames.
type table struct {
	watch   *feed.Watch
	ring    *uring.Ring
	pagemap *os.File
	source  *os.File // what transfers read
	data    []byte   // and its bytes
	got     []byte
	stamp   uint64

	entries []*entry // under the drain lock, or while no step runs
	apply   func(*mm.Record)
	// unseenGuards: guards over pages that are not mapped are in a gap of the
	// tier (guard-unmapped).
	unseenGuards bool

	mu       sync.Mutex // guards what is below
	verdicts map[string]int
	failed   int // registrations that the device refused
	wrong    *Finding
}

func newTable(w *feed.Watch, ring *uring.Ring) (*table, error) {
	t := &table{
		watch: w, ring: ring, verdicts: make(map[string]int),
		data: make([]byte, mostTransferred*page), got: make([]byte, mostTransferred*8),
	}
	t.apply = func(r *mm.Record) {
		for _, e := range t.entries {
			if e.dropped == mm.KindNone && (!r.Kind.IsChange() || r.Touches(e.r)) {
				e.dropped = r.Kind
			}
		}
	}
	var err error
	if t.pagemap, err = os.Open("/proc/self/pagemap"); err != nil {
		return nil, err
	}
	fd, err := unix.MemfdCreate("source", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make source: %w", err)
	}
	t.source = os.NewFile(uintptr(fd), "source")
	return t, nil
}

// Fields of an entry of pagemap (Documentation/admin-guide/mm/pagemap.rst).
const (
	pagePresent = 1 << 63
	pageFile    = 1 << 61 // of a file, or anonymous and shared
	pageGuard   = 1 << 58 // a guard (6.15)
	pageFrame   = 1<<55 - 1
)

// look returns what pagemap says of each page.
func (t *table) look(r mm.Range) ([]uint64, error) {
	b := make([]byte, r.Len()/page*8)
	if _, err := t.pagemap.ReadAt(b, int64(uint64(r.Start)/page)*8); err != nil {
		return nil, fmt.Errorf("read pagemap: %w", err)
	}
	v := make([]uint64, len(b)/8)
	for i := range v {
		v[i] = binary.NativeEndian.Uint64(b[8*i:])
	}
	return v, nil
}

// frame is 0 for a page that is not present.
func frame(entry uint64) uint64 {
	if entry&pagePresent == 0 {
		return 0
	}
	return entry & pageFrame
}

// register is a step. It runs at the same time as others.
func (t *table) register(step int, r mm.Range) error {
	ticket := t.watch.Begin(r)
	buf, err := t.ring.Register(r, 0)
	if err != nil {
		t.watch.Abandon(ticket)
		t.mu.Lock()
		t.failed++
		t.mu.Unlock()
		return nil // not mapped, not writable
	}
	pages, err := t.look(r)
	if err != nil {
		return err
	}
	e := &entry{r: r, buf: buf, step: step, fresh: true, frames: make([]uint64, len(pages))}
	ofFile := false
	for i, p := range pages {
		e.frames[i] = frame(p)
		ofFile = ofFile || p&pageFile != 0
	}
	v := t.watch.Commit(ticket, t.apply, func() { t.entries = append(t.entries, e) })
	t.mu.Lock()
	defer t.mu.Unlock()
	t.verdicts[v.String()]++
	if v != feed.Cacheable {
		return t.ring.Deregister(buf)
	}
	if ofFile && t.watch.Gaps()&gapFile != 0 {
		t.wrong = &Finding{Kind: WrongVerdict, Range: r, Registered: step,
			What: "cached, though the tier does not see what happens to files"}
	}
	return nil
}

var errDead = errors.New("the watch is dead")

// drain applies what happened, as a lookup does. False: a lookup would not
// hit anything now.
func (t *table) drain() (bool, error) {
	if t.watch.Valid() {
		return true, nil
	}
	for range 1000 {
		switch t.watch.Drain(t.apply) {
		case feed.Fresh:
			return true, nil
		case feed.DeadState: // coherent, but there is nothing left to test
			return false, errDead
		}
		runtime.Gosched()
	}
	return false, nil
}

// populate makes the pages of r present and writable, which fails where there
// is no mapping or no right. It takes nothing away.
func populate(r mm.Range) error {
	for {
		err := syscall6(unix.SYS_MADVISE, uintptr(r.Start), uintptr(r.Len()), unix.MADV_POPULATE_WRITE)
		if err != unix.EAGAIN && err != unix.EINTR {
			return err
		}
	}
}

// changed says how the translation of e differs from what it was; "": not.
func (t *table) changed(e *entry) (string, error) {
	if e.dropped != mm.KindNone { // do not fill in what is gone
		how, err := t.compare(e)
		if how != "" || err != nil {
			return how, err
		}
	}
	if err := populate(e.r); err != nil {
		if err == unix.EFAULT || err == unix.ENOMEM || err == unix.EINVAL { // EINVAL: no right
			if same, err := t.sameBehindGuard(e); same || err != nil {
				return "", err
			}
			return "not mapped, or fewer rights", nil
		}
		return "", fmt.Errorf("populate %v: %w", e.r, err)
	}
	return t.compare(e)
}

// sameBehindGuard takes guards away and reports whether the pages behind them
// are those of e.
func (t *table) sameBehindGuard(e *entry) (bool, error) {
	if !t.unseenGuards {
		return false, nil
	}
	pages, err := t.look(e.r)
	if err != nil {
		return false, err
	}
	guarded := false
	for i, p := range pages {
		if p&pageGuard != 0 {
			guarded = true
			if err := syscall6(unix.SYS_MADVISE, uintptr(e.r.Start)+uintptr(i)*uintptr(page), uintptr(page), advGuardRemove); err != nil {
				return false, fmt.Errorf("remove guard: %w", err)
			}
		}
	}
	if !guarded || populate(e.r) != nil {
		return false, nil
	}
	how, err := t.compare(e)
	return how == "", err
}

func (t *table) compare(e *entry) (string, error) {
	pages, err := t.look(e.r)
	if err != nil {
		return "", err
	}
	for i, p := range pages {
		switch now := frame(p); {
		case now == e.frames[i]:
		case now == 0:
			return fmt.Sprintf("page %d is not there", i), nil
		default:
			return fmt.Sprintf("page %d is frame %#x, registered as %#x", i, now, e.frames[i]), nil
		}
	}
	return "", nil
}

// mostTransferred bounds the pages of one transfer.
const mostTransferred = 16

// transfer writes through the buffer of e to some of its pages, another stamp
// to each, and looks at them through the CPU. It is for entries that changed
// says are true. Pages are chosen by pick.
func (t *table) transfer(e *entry, pick uint64) (string, error) {
	n := e.r.Len() / page
	first := uint64(0)
	if n > mostTransferred {
		first, n = pick%(n-mostTransferred+1), mostTransferred
	}
	at := mm.Range{Start: e.r.Start + mm.Addr(first*page)}
	at.End = at.Start + mm.Addr(n*page)
	data, got := t.data[:n*page], t.got[:n*8]
	remote := make([]unix.RemoteIovec, n)
	for i := range n {
		t.stamp++
		binary.NativeEndian.PutUint64(data[i*page:], t.stamp)
		remote[i] = unix.RemoteIovec{Base: uintptr(at.Start) + uintptr(i*page), Len: 8}
	}
	if _, err := t.source.WriteAt(data, 0); err != nil {
		return "", err
	}
	if _, err := t.ring.ReadFixed(int(t.source.Fd()), 0, e.buf, at); err != nil {
		return "", fmt.Errorf("transfer: %w", err)
	}
	local := []unix.Iovec{{Base: &got[0], Len: uint64(len(got))}}
	if _, err := unix.ProcessVMReadv(unix.Getpid(), local, remote, 0); err != nil {
		return "", fmt.Errorf("look at %v: %w", at, err)
	}
	for i := range n {
		last := i // a page that is mapped twice has the last of its stamps
		for j := i + 1; j < n; j++ {
			if e.frames[first+j] == e.frames[first+i] {
				last = j
			}
		}
		if !bytes.Equal(got[i*8:i*8+8], data[last*page:last*page+8]) {
			return fmt.Sprintf("what a transfer wrote to page %d is not there", first+i), nil
		}
	}
	return "", nil
}

// forget ends an entry.
func (t *table) forget(e *entry) error {
	t.watch.Forget(e.r)
	return t.ring.Deregister(e.buf)
}

// clear ends all entries.
func (t *table) clear() error {
	_, dead := t.drain()
	for _, e := range t.entries {
		if err := t.forget(e); err != nil {
			return err
		}
	}
	clear(t.entries)
	t.entries = t.entries[:0]
	return dead
}
