// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf/ringbuf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// pollInterval bounds how long a record, or a loss that no record follows,
// stays unread: the kernel side wakes the reader only when the ring fills up,
// because a wakeup costs the watched task 2 to 6 us, more than the record.
const pollInterval = 20 * time.Millisecond

// Stream delivers the records of one watch in the order in which the kernel
// side reserved them: for one address, a change is before whatever reuses it.
// Read is for one goroutine at a time; the other methods are safe at any time.
type Stream struct {
	t      *Tracer
	slot   *slot
	all    bool
	reader *ringbuf.Reader
	status *layout.Status // mapped, written by the kernel side

	missed atomic.Uint64 // calls that a hook missed, from the miss counters

	deadline  atomic.Pointer[time.Time]
	flushLost atomic.Uint64 // of the status page, when Flush was called
	closing   sync.Once
	closeErr  error

	// owned by Read
	raw     ringbuf.Record
	seq     uint64
	lost    uint64 // of the status page, as far as reported
	told    uint64 // of missed, as far as reported
	held    mm.Record
	holding bool
	stacked bool // the record delivered last is that of raw
	flushed bool
}

// Stats are the totals of one stream on the sending side: every event that
// was seen is in Records or in Lost, and Read delivers exactly that many.
type Stats struct {
	Records  uint64 // written to the ring
	Lost     uint64 // not written because the ring was full
	Missed   uint64 // hook runs that the kernel skipped, machine-wide
	Unpaired uint64 // ends of calls whose begin was not seen
}

func newStream(t *Tracer, sl *slot, all bool) (*Stream, error) {
	mem, err := mapStatus(sl.status)
	if err != nil {
		return nil, err
	}
	rd, err := ringbuf.NewReader(sl.ring)
	if err != nil {
		unix.Munmap(mem)
		return nil, fmt.Errorf("read ring: %w", err)
	}
	s := &Stream{t: t, slot: sl, all: all, reader: rd}
	s.status = (*layout.Status)(unsafe.Pointer(unsafe.SliceData(mem)))
	// the totals can be read after Close: the page lives as long as s
	runtime.AddCleanup(s, func(b []byte) { unix.Munmap(b) }, mem)
	return s, nil
}

// Read waits for the next record and stores it in rec, without allocation.
// Besides records of the kernel side it delivers one of kind Lost, with
// their number, for each run of lost events, before the first record behind
// them, or at the latest 20 ms after the ring ran empty.
//
// Errors: [os.ErrDeadlineExceeded], [ErrFlushed], [os.ErrClosed],
// [ErrCorrupt]. After the first two reading can go on.
func (s *Stream) Read(rec *mm.Record) error {
	if s.holding {
		s.holding, s.stacked = false, true
		*rec = s.held
		s.seq++
		rec.Seq = s.seq
		return nil
	}
	s.stacked = false
	for {
		if s.flushed {
			s.flushed = false
			return ErrFlushed
		}
		// a loss up to here is behind every record that is not there by
		// the time the ring is found empty
		total := s.lost
		if s.raw.Remaining == 0 {
			total = atomic.LoadUint64(&s.status.Lost)
			now := time.Now()
			wait := now.Add(pollInterval)
			if total > s.lost || s.misses() {
				wait = now // only look
			}
			if user := s.deadline.Load(); user != nil && user.Before(wait) {
				wait = *user
			}
			s.reader.SetDeadline(wait)
		}
		err := s.reader.ReadInto(&s.raw)
		switch {
		case err == nil:
			if err := decode(s.raw.RawSample, rec); err != nil {
				return err
			}
			if total := lostBefore(s.raw.RawSample); total > s.lost {
				s.held, s.holding = *rec, true
				s.lose(rec, total)
				return nil
			}
			if s.misses() {
				s.held, s.holding = *rec, true
				s.lose(rec, s.lost)
				return nil
			}
			s.seq++
			rec.Seq = s.seq
			s.stacked = true
			return nil
		case errors.Is(err, ringbuf.ErrFlushed):
			s.flushed = true
			total = max(total, s.flushLost.Load())
		case errors.Is(err, os.ErrDeadlineExceeded):
		case errors.Is(err, os.ErrClosed):
			return os.ErrClosed
		default:
			return fmt.Errorf("read ring: %w", err)
		}
		if total > s.lost || s.misses() {
			s.lose(rec, total)
			return nil
		}
		if user := s.deadline.Load(); user != nil && !s.flushed && !time.Now().Before(*user) {
			return os.ErrDeadlineExceeded
		}
	}
}

// Stack is the user stack of the record that Read delivered last; its PC is 0 if
// there is none. The memory belongs to the stream and is valid until the next
// Read.
func (s *Stream) Stack() mm.Stack {
	if s.holding || !s.stacked { // a loss, which is before the record
		return mm.Stack{}
	}
	return stackOf(s.raw.RawSample)
}

func (s *Stream) misses() bool { return s.missed.Load() != s.told }

// lose makes rec the record of the loss up to total.
func (s *Stream) lose(rec *mm.Record, total uint64) {
	missed := s.missed.Load()
	n := total - s.lost + missed - s.told
	s.lost, s.told = total, missed
	s.seq += n
	*rec = mm.Record{
		Seq: s.seq, Time: monotonic(), Kind: mm.Lost, Phase: mm.PhaseEnd,
		Range: mm.Whole, Lost: n, Call: mm.Call{ABI: mm.ABINone},
	}
}

// SetDeadline makes Read return [os.ErrDeadlineExceeded] at d if there is no
// record by then. The zero time means no deadline. It takes effect within
// 20 ms in a Read that is already waiting.
func (s *Stream) SetDeadline(d time.Time) {
	if d.IsZero() {
		s.deadline.Store(nil)
		return
	}
	s.deadline.Store(&d)
}

// Flush makes Read return [ErrFlushed] once it has delivered everything that
// was recorded before Flush was called.
func (s *Stream) Flush() error {
	s.flushLost.Store(atomic.LoadUint64(&s.status.Lost))
	if err := s.reader.Flush(); err != nil {
		return fmt.Errorf("flush ring: %w", err)
	}
	return nil
}

// Stats returns the totals so far.
func (s *Stream) Stats() Stats {
	return Stats{
		Records:  atomic.LoadUint64(&s.status.Records),
		Lost:     atomic.LoadUint64(&s.status.Lost),
		Missed:   s.missed.Load(),
		Unpaired: atomic.LoadUint64(&s.status.Unpaired),
	}
}

// Close ends the watch; a waiting Read returns [os.ErrClosed]. It is
// idempotent.
func (s *Stream) Close() error {
	s.closing.Do(func() {
		t := s.t
		var errs []error
		if s.all {
			errs = append(errs, t.control(ctlUnwatchAll, 0, 0, s.slot.ref))
		}
		errs = append(errs, t.unbind(s.slot), s.reader.Close(), t.slots.retire(s.slot))
		s.closeErr = errors.Join(errs...)
		t.unuse()
		t.mu.Lock()
		delete(t.streams, s)
		t.mu.Unlock()
	})
	return s.closeErr
}
