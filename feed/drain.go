// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"fmt"
	"iter"
	"runtime"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/mm"
)

// State is the outcome of a drain.
type State uint8

const (
	// Fresh: everything counted before the drain began was applied.
	Fresh State = iota
	// Busy: another thread drains, or this thread already does (re-entry
	// from a callback), or a record is still being written. A lookup misses.
	Busy
	// DeadState: nothing will ever be valid again.
	DeadState
)

// String is "fresh", "busy" or "dead".
func (s State) String() string {
	switch s {
	case Fresh:
		return "fresh"
	case Busy:
		return "busy"
	case DeadState:
		return "dead"
	}
	return fmt.Sprintf("state(%d)", uint8(s))
}

// The header of a record in a BPF ring buffer (linux/bpf.h).
const (
	ringBusy    = 1 << 31
	ringDiscard = 1 << 30
	ringHeader  = 8
)

// busySpins bounds the wait for a record that is being written. The program
// that writes it may have been interrupted or preempted.
const busySpins = 100

// sink is where a drain delivers: one of the two is set, or none.
type sink struct {
	apply func(*mm.Record)
	yield func(*mm.Record) bool // false: stop
}

// Drain applies what happened since the last drain, in order, and makes the
// watch valid again as of its beginning. apply gets each change
// ([mm.Kind.IsChange]), a record of kind [mm.Lost] where events were lost
// (Lost says how many, 0 if that is unknown: everything is doubtful), and
// once a record of kind [mm.Exit] with [mm.SpaceDeath] when the watch died.
// The record is valid during the call only. A nil apply discards.
//
// apply runs under the drain lock; see the package comment. If it panics, the
// record is delivered again by the next drain. Drain never waits for another
// thread, and ends even if changes come faster than it reads.
func (w *Watch) Drain(apply func(*mm.Record)) State {
	if !w.seen.isAlive() {
		return DeadState
	}
	if !w.mu.TryLock() {
		return Busy
	}
	defer w.endDrain()
	return w.drain(sink{apply: apply})
}

// Changes is Drain as an iterator: the loop body is apply, and the same rules
// hold for it. Leaving the loop early leaves the rest to the next drain, and
// the watch invalid until then. A loop that ends by itself may have ended for
// any [State]; ask Valid.
func (w *Watch) Changes() iter.Seq[*mm.Record] {
	return func(yield func(*mm.Record) bool) {
		if !w.seen.isAlive() || !w.mu.TryLock() {
			return
		}
		defer w.endDrain()
		w.drain(sink{yield: yield})
	}
}

// endDrain tells the kernel what was consumed and unlocks, also on a panic.
func (w *Watch) endDrain() {
	w.ring.release()
	w.unlock()
}

func (r *ring) release() {
	if r.stored != r.pos {
		r.stored = r.pos
		atomic.StoreUint64(r.consumer, r.pos)
	}
}

// movesOf and lossesOf are the parts of a generation word: moves, modulo
// 1<<48, and losses plus 256 for each death, modulo 1<<16.
func movesOf(g uint64) uint64  { return (g - layout.GenStart) & (1<<48 - 1) }
func lossesOf(g uint64) uint16 { return uint16((g - layout.GenStart) >> 48) }

const deathUnits = layout.GenDeath >> 48

// died reports whether the kernel side has given the watch up, or every watch.
func (w *Watch) died() bool {
	return atomic.LoadUint64(&w.status.Deaths)|atomic.LoadUint64(&w.status.Untracked)|
		atomic.LoadUint64(&w.epochPage.Deaths) != 0 || atomic.LoadUint64(&w.epochPage.Untracked) != w.untracked ||
		atomic.LoadUint64(w.generation) == 0 || w.wrong.Load()
}

// drain does the work of Drain, under mu. The order of its loads is what the
// package comment proves; do not change it.
func (w *Watch) drain(to sink) State {
	if w.dead {
		return DeadState
	}
	g := atomic.LoadUint64(w.generation)
	e := atomic.LoadUint64(w.epoch)
	lost, unpaired := atomic.LoadUint64(&w.status.Lost), atomic.LoadUint64(&w.status.Unpaired)
	dying := w.dying || w.died()
	limit := atomic.LoadUint64(w.ring.producer)

	// If no counter moved, those losses of the word that the counters do not
	// explain; 256 of them are a death whose counter is not visible yet. (If
	// one moved, there is a loss to deliver anyway, and since it may have
	// moved long after g was loaded the two cannot be compared.)
	var rest int16
	if lost == w.lost && unpaired == w.unpaired {
		rest = int16(lossesOf(g) - uint16(w.excess+lost+unpaired))
	}
	if rest >= deathUnits/2 {
		dying = true
	}
	if dying {
		w.giveUp()
	}

	if e != w.epochKnown && !dying {
		ok := w.deliverLoss(to, 0)
		w.epochKnown = e
		if !ok {
			return Busy
		}
	}
	if guard.Off(guard.PublishLast) {
		w.publish(g, e)
	}
	switch w.consume(to, limit) {
	case unfinished:
		if !dying && !guard.Off(guard.BusyRecord) {
			w.stats.busy.Add(1)
			return Busy
		}
	case stopped:
		return Busy
	case corrupt:
		if !w.dying {
			w.stats.corrupt.Add(1)
		}
		dying = true
	}
	if dying {
		return w.die(to)
	}

	var n uint64
	if lost > w.lost { // not so if a record told of later ones
		n = lost - w.lost
	}
	n += unpaired - w.unpaired
	w.excess += uint64(max(rest, 0))
	// records that the word counts and the ring did not hold
	missing := int64((movesOf(g)-w.read-lost-unpaired-w.excess)<<16) >> 16
	if n > 0 || (rest > 0 || missing > 0) && !guard.Off(guard.WordExplained) {
		ok := w.deliverLoss(to, n)
		w.lost, w.unpaired = max(lost, w.lost), unpaired
		w.read += uint64(max(missing, 0))
		if !ok {
			return Busy
		}
	}

	if guard.Off(guard.GenerationOld) {
		g = atomic.LoadUint64(w.generation)
	}
	// Everything counted in g and e was applied.
	if !w.publish(g, e) {
		return DeadState
	}
	return Fresh
}

// publish makes the watch valid as of g and e; false: not so, because Close
// has stored 0 meanwhile, which must stay.
func (w *Watch) publish(g, e uint64) bool {
	atomic.StoreUint64(&w.seen.epoch, e)
	if !atomic.CompareAndSwapUint64(&w.seen.generation, w.published, g) {
		return false
	}
	w.published = g
	return true
}

// giveUp makes the watch invalid for ever; its end is still to be delivered.
func (w *Watch) giveUp() {
	w.dying = true
	atomic.StoreUint64(&w.seen.generation, 0)
}

// die delivers the end, once.
func (w *Watch) die(to sink) State {
	w.giveUp()
	w.interest.markAll(ticketDead)
	w.rec = mm.Record{
		Seq: w.seq, Time: now(), Range: mm.Whole, Call: mm.Call{ABI: mm.ABINone},
		Flags: mm.SpaceDeath, Kind: mm.Exit, Phase: mm.PhaseEnd,
	}
	to.deliver(&w.rec)
	w.dead = true
	return DeadState
}

// deliverLoss delivers a loss of n events (0: unknown); false: the sink stops.
func (w *Watch) deliverLoss(to sink, n uint64) bool {
	w.stats.losses.Add(1)
	w.stats.lost.Add(n)
	w.interest.markAll(ticketLost)
	w.loss = mm.Record{
		Seq: w.seq + n, Time: now(), Range: mm.Whole, Lost: n, Call: mm.Call{ABI: mm.ABINone},
		Flags: mm.Superset, Kind: mm.Lost, Phase: mm.PhaseEnd,
	}
	ok := to.deliver(&w.loss)
	w.seq += n
	return ok
}

func (to sink) deliver(r *mm.Record) bool {
	switch {
	case to.apply != nil:
		to.apply(r)
	case to.yield != nil:
		return to.yield(r)
	}
	return true
}

func now() time.Duration {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}

// progress says why consume ended.
type progress uint8

const (
	complete   progress = iota // the limit was reached
	unfinished                 // at a record that is still being written
	stopped                    // by the sink
	corrupt                    // the ring makes no sense
)

// consume reads the ring up to position limit. Nothing that the ring holds is
// trusted: each length is checked against the limit, the limit against the
// size, and a record is copied before it is looked at.
func (w *Watch) consume(to sink, limit uint64) progress {
	r := &w.ring
	size := r.mask + 1
	if limit-r.pos > size || limit%8 != 0 || r.pos%8 != 0 {
		return corrupt
	}
	first := w.read
	defer func() { w.stats.records.Add(w.read - first) }()
	for r.pos != limit {
		at := unsafe.Add(r.data, r.pos&r.mask)
		head := atomic.LoadUint32((*uint32)(at))
		for spin := 0; head&ringBusy != 0; spin++ {
			if spin == busySpins {
				return unfinished
			}
			if spin > busySpins/4 {
				runtime.Gosched()
			}
			head = atomic.LoadUint32((*uint32)(at))
		}
		length := uint64(head &^ (ringBusy | ringDiscard))
		step := (length + ringHeader + 7) &^ 7
		if step > limit-r.pos {
			return corrupt
		}
		if head&ringDiscard == 0 {
			if length < uint64(unsafe.Sizeof(layout.Record{})) {
				return corrupt
			}
			// In bounds: the data area is mapped twice, and pos&mask is
			// below its size, which is a page at least.
			raw := *(*layout.Record)(unsafe.Add(at, ringHeader))
			// A loss before this record is delivered before it.
			if raw.Lost > w.lost {
				ok := w.deliverLoss(to, raw.Lost-w.lost)
				w.lost = raw.Lost
				if !ok {
					return stopped
				}
			}
			decode(&w.rec, &raw)
			w.rec.Seq = w.seq + 1
			ok := true
			switch kind := w.rec.Kind; {
			case kind.IsChange() && !w.rec.Range.Empty():
				w.interest.mark(r.pos, &w.rec)
				ok = to.deliver(&w.rec)
			case kind >= mm.Map && kind <= mm.Deregister && kind != mm.Lost:
				// Information; death is known by its counter.
			default:
				// A loss, or nothing that this version understands.
				ok = w.deliverLoss(to, 0)
			}
			w.read++
			w.seq++
			if !ok {
				r.pos += step
				return stopped
			}
		}
		r.pos += step
		if r.pos-r.stored > size/8 {
			r.release()
		}
	}
	return complete
}

// decode copies a raw record; Seq is the caller's.
func decode(r *mm.Record, raw *layout.Record) {
	r.Time = time.Duration(raw.Time_ns)
	r.Range = mm.Range{Start: mm.Addr(raw.Start), End: mm.Addr(raw.End)}
	r.To = mm.Range{Start: mm.Addr(raw.To_start), End: mm.Addr(raw.To_end)}
	r.Space = raw.Space
	r.Lost = 0
	r.Arg = raw.Arg
	r.Ret = raw.Ret
	r.PID, r.TID = raw.Pid, raw.Tid
	r.ChildPID, r.ChildTID = raw.Child_pid, raw.Child_tid
	r.Call = mm.Call{NR: raw.Nr, ABI: mm.ABI(raw.Abi)}
	r.Flags = mm.Flags(raw.Flags)
	r.Kind = mm.Kind(raw.Kind)
	r.Phase = mm.Phase(raw.Phase)
	r.Hook = mm.Hook(raw.Hook)
	r.Comm = *(*mm.Comm)(unsafe.Pointer(&raw.Comm))
}
