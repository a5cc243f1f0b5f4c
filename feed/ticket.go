// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"fmt"
	"runtime"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/mm"
)

// Verdict says whether a registration may be cached, and if not, why.
type Verdict uint8

const (
	Cacheable     Verdict = iota // insert was called
	Changed                      // the range changed since Begin
	InFlight                     // a change that began before, or a record of one, was not finished in time
	LostRecords                  // events were lost since Begin
	IsDead                       // the watch is dead or closed, or never lived
	FileBacked                   // pages of a file or shared object, whose changes this tier cannot see
	NoMapping                    // part of the range is not mapped
	DriverMapping                // part of the range is mapped by a driver or the kernel: not host memory
	Unclassified                 // what the range is could not be found out, or the ticket is not open
	numVerdicts
)

var verdictNames = [numVerdicts]string{
	"cacheable", "changed", "in-flight", "lost", "dead", "file-backed", "no-mapping", "driver-mapping", "unclassified",
}

// String is the verdict in a word, as in statistics.
func (v Verdict) String() string {
	if v < numVerdicts {
		return verdictNames[v]
	}
	return fmt.Sprintf("verdict(%d)", uint8(v))
}

// Ticket is a registration between Begin and Commit. The zero Ticket is
// refused by Commit and ignored by Abandon, and so is one that was used.
type Ticket struct {
	t  *ticket
	id uint64
}

// What has happened to a ticket.
const (
	ticketChanged = 1 << iota
	ticketLost
	ticketDead
)

type ticket struct {
	id      uint64 // 0: not open
	at      int    // index in interest.tickets
	r       mm.Range
	pos     uint64 // records before this position of the ring do not concern it
	settled bool
	marks   uint8
}

// mark notes in the open tickets that the record at pos touches them. It runs
// in each drain, by whatever thread.
//
// A ticket that is opened meanwhile is not missed: its pos is loaded from the
// producer after it was counted in open. A record at or behind pos that a
// drain reads was reserved later, so the drain sees the ticket.
func (in *interest) mark(pos uint64, r *mm.Record) {
	if in.open.Load() == 0 {
		return
	}
	in.mu.Lock()
	for _, t := range in.tickets {
		if pos >= t.pos && r.Touches(t.r) && !guard.Off(guard.TicketMarked) {
			t.marks |= ticketChanged
		}
	}
	in.mu.Unlock()
}

func (in *interest) markAll(why uint8) {
	in.mu.Lock()
	for _, t := range in.tickets {
		t.marks |= why
	}
	in.mu.Unlock()
}

// close ends a ticket, and its interest unless keep.
func (in *interest) close(t Ticket, keep bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if t.t == nil || t.t.id != t.id {
		return
	}
	last := len(in.tickets) - 1
	in.tickets[t.t.at] = in.tickets[last]
	in.tickets[t.t.at].at = t.t.at
	in.tickets = in.tickets[:last]
	in.open.Add(-1)
	in.spare = append(in.spare, t.t)
	t.t.id = 0
	if !keep {
		in.remove(t.t.r)
	}
}

// look returns a copy of an open ticket; false: it is not open.
func (in *interest) look(t Ticket) (ticket, bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if t.t == nil || t.t.id != t.id {
		return ticket{}, false
	}
	return *t.t, true
}

// Begin opens a registration of r, rounded to pages. It makes r interesting
// to the kernel side and waits, for 2 ms at most, until no change is in
// flight that began before it was. Then the caller registers the memory and
// calls Commit, or Abandon if that failed; exactly one of them.
//
// Begin never fails: what went wrong is in the verdict of Commit.
func (w *Watch) Begin(r mm.Range) Ticket {
	r = r.Pages()
	if !w.seen.isAlive() || r.Empty() {
		return Ticket{}
	}
	settled := guard.Off(guard.BeginWaits) || guard.Off(guard.InterestFirst) && w.settle()
	t := w.watchFor(r)
	if settled || w.settle() {
		w.interest.mu.Lock()
		t.t.settled = true
		w.interest.mu.Unlock()
	}
	return t
}

// watchFor opens a ticket for pages and makes them interesting, without
// waiting: who only looks for records need not.
func (w *Watch) watchFor(r mm.Range) Ticket {
	in := &w.interest
	in.mu.Lock()
	defer in.mu.Unlock()
	in.add(r)
	// Full barrier between the bits, whoever set them, and the loads below;
	// its partner is the one between begun++ and the test of the interest.
	in.fence.Add(1)
	var t *ticket
	if n := len(in.spare); n > 0 {
		t, in.spare = in.spare[n-1], in.spare[:n-1]
	} else {
		t = new(ticket)
	}
	in.lastID++
	*t = ticket{id: in.lastID, at: len(in.tickets), r: r}
	in.tickets = append(in.tickets, t)
	in.open.Add(1)
	// Before the banks are looked at: the change behind a record before this
	// position began earlier, so it has ended when they are quiet.
	t.pos = atomic.LoadUint64(w.ring.producer)
	return Ticket{t, t.id}
}

// settleLimit bounds the wait of Begin for changes in flight.
const settleLimit = 2 * time.Millisecond

// quiet reports that no change was in flight in a bank at some moment of the
// call. Both words only grow and ended <= begun always, so if ended, loaded
// first, equals begun, loaded later, they were equal when ended was loaded.
// (ended >= begun with begun loaded first proves nothing.)
func (w *Watch) quiet(bank int) bool {
	if guard.Off(guard.EndedFirst) {
		begun := atomic.LoadUint64(&w.status.Begun[bank])
		return atomic.LoadUint64(&w.status.Ended[bank]) >= begun
	}
	return w.equal(&w.status.Ended[bank], &w.status.Begun[bank])
}

// equal reports that ended equals begun. More ends than begins: the kernel
// side has counted wrongly, and what looks quiet later has a change in flight.
// That ends the watch.
func (w *Watch) equal(ended, begun *uint64) bool {
	e := atomic.LoadUint64(ended)
	b := atomic.LoadUint64(begun)
	if int64(b-e) < 0 {
		w.wrong.Store(true)
		atomic.StoreUint64(&w.seen.generation, 0)
	}
	return e == b
}

// foreign is which banks of the changes of unknown address spaces were quiet
// since the wait began.
type foreign [layout.Banks]bool

// look reports that each of them was by now.
func (q *foreign) look(w *Watch) bool {
	if guard.Off(guard.QuietForeign) {
		return true
	}
	for bank := range q {
		q[bank] = q[bank] || w.equal(&w.epochPage.Ended[bank], &w.epochPage.Begun[bank])
	}
	return q[0] && q[1]
}

// settle waits until each bank was quiet at some moment of the call; the
// moments may differ. A change that was counted before its bank's moment has
// ended. One counted later tests the interest later.
//
// A bank in which new changes are counted may never be quiet although each
// change is short. So once the other one was, new changes are directed there,
// by one thread at a time, and the first one dries up. A program that read
// interest.bank before that and counts after our look is a change counted
// later: it finds the interest. So changing the bank is always safe.
func (w *Watch) settle() bool {
	defer runtime.KeepAlive(w)
	var others foreign
	q0, q1, qf := w.quiet(0), w.quiet(1), others.look(w)
	if q0 && q1 && qf {
		return true
	}
	if w.marker != nil {
		// This thread's last change is over: show the kernel side that.
		unix.Madvise(w.marker, unix.MADV_DONTNEED)
		q0, q1, qf = q0 || w.quiet(0), q1 || w.quiet(1), qf || others.look(w)
		if q0 && q1 && qf {
			return true
		}
	}
	w.stats.waits.Add(1)
	start := time.Now()
	flipping := false
	defer func() {
		if flipping {
			w.flip.Unlock()
		}
	}()
	pause := 5 * time.Microsecond
	for i := 0; !w.wrong.Load(); i++ {
		q0, q1, qf = q0 || w.quiet(0), q1 || w.quiet(1), qf || others.look(w)
		if q0 && q1 && qf {
			return true
		}
		if w.mem.Settle != nil && i%10 == 5 && w.mem.Settle() {
			return true
		}
		if !flipping && (q0 || q1) && !guard.Off(guard.BankFlipped) && w.flip.TryLock() {
			flipping = true
			bank := uint32(0)
			if q1 {
				bank = 1
			}
			atomic.StoreUint32(&w.interest.page.Bank, bank)
		}
		if time.Since(start) > settleLimit {
			w.stats.unsettled.Add(1)
			return false
		}
		if i < 20 {
			runtime.Gosched()
			continue
		}
		time.Sleep(pause)
		pause = min(2*pause, 200*time.Microsecond)
	}
	return false
}

// Commit ends a registration. It finds out what the range is where the tier
// has gaps, drains with apply, and if nothing touched the range since Begin
// it calls insert, still under the drain lock, and returns Cacheable: then
// the caller owes one Forget of the range when its entry goes. For any other
// verdict insert was not called and nothing is owed; the registration may be
// used for the operation that asked for it, and not again. Changed, InFlight
// and LostRecords may turn out well when tried again.
//
// A Commit from a callback of the same watch cannot have the lock: InFlight,
// after 250 ms.
func (w *Watch) Commit(t Ticket, apply func(*mm.Record), insert func()) Verdict {
	v := w.commit(t, apply, insert)
	w.stats.verdicts[v].Add(1)
	return v
}

func (w *Watch) commit(t Ticket, apply func(*mm.Record), insert func()) (v Verdict) {
	if !w.seen.isAlive() {
		return IsDead
	}
	in := &w.interest
	open, ok := in.look(t)
	if !ok {
		return Unclassified
	}
	keep := false
	defer func() { in.close(t, keep) }() // also if a callback panics
	if w.died() {
		return IsDead
	}
	if !open.settled {
		return InFlight
	}
	// Classified before the drain: whoever changes the mapping after we
	// looked leaves a record, or is a change in flight.
	if w.Gaps() != 0 && !guard.Off(guard.FileRefused) {
		if v := w.maps.classify(open.r); v != Cacheable {
			return v
		}
	}
	if !w.lock(patience) {
		return InFlight
	}
	defer w.endDrain()
	state := w.drain(sink{apply: apply})
	open, _ = in.look(t)
	switch {
	case state == DeadState || open.marks&ticketDead != 0:
		return IsDead
	case state == Busy:
		return InFlight
	case open.marks&ticketLost != 0 && !guard.Off(guard.LossRefuses):
		return LostRecords
	case open.marks&ticketChanged != 0:
		return Changed
	}
	if guard.Off(guard.InsertLocked) {
		w.mu.Unlock()
		defer w.mu.Lock() // for endDrain
	}
	insert()
	keep = true
	return Cacheable
}

// Abandon ends a registration that failed, or that is not to be cached.
func (w *Watch) Abandon(t Ticket) {
	if w.seen.isAlive() {
		w.interest.close(t, false)
	}
}

// Forget ends the interest in a range whose entry is gone: once for each
// Commit of that range that was Cacheable, with the range given to Begin.
func (w *Watch) Forget(r mm.Range) {
	r = r.Pages()
	if !w.seen.isAlive() || r.Empty() {
		return
	}
	w.interest.mu.Lock()
	w.interest.remove(r)
	w.interest.mu.Unlock()
}
