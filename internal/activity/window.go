// SPDX-License-Identifier: Apache-2.0

package activity

import "time"

// Windows are those over which there are rates.
var Windows = [...]time.Duration{time.Second, 10 * time.Second, time.Minute}

// kept is how many seconds a window holds: the longest of Windows, the one
// that is not over yet, and some for changes that are told late.
const kept = 64

// window holds the changes of the last seconds.
type window struct {
	newest int64 // the latest second that anything was counted in
	slots  [kept]slot
}

// slot is one second.
type slot struct {
	changes [NumKinds]uint32
	bytes   uint64 // of unmap, replace, zap and move
}

func second(t time.Duration) int64 { return int64(t / time.Second) }

// add counts a change. One that is older than what is kept counts nowhere.
func (w *window) add(t time.Duration, kind int, bytes uint64) {
	s := second(t)
	switch {
	case s <= w.newest-kept:
		return
	case s > w.newest:
		if s-w.newest >= kept {
			clear(w.slots[:])
		} else {
			for i := w.newest + 1; i <= s; i++ {
				w.slots[i%kept] = slot{}
			}
		}
		w.newest = s
	}
	x := &w.slots[s%kept]
	x.changes[kind]++
	if kind != index(Kinds[NumKinds-1]) { // protect unmaps nothing
		x.bytes += bytes
	}
}

// at is what happened in a second.
func (w *window) at(s int64) slot {
	if w == nil || s > w.newest || s <= w.newest-kept || s < 0 {
		return slot{}
	}
	return w.slots[s%kept]
}

// Rate is what happens in a second, on average.
type Rate struct {
	Changes [NumKinds]float64
	Bytes   float64 // unmapped, replaced, zapped or moved
}

// Sum is the rate of changes of all kinds.
func (r *Rate) Sum() (n float64) {
	for _, x := range r.Changes {
		n += x
	}
	return n
}

// rate is the mean over the whole seconds of the last `over` before now, since
// start; before the first whole second has passed, over the time until now.
func (w *window) rate(start, now, over time.Duration) (r Rate) {
	to := second(now) // the second that is not over
	from := max(to-second(over), second(start))
	length := float64(to - from)
	if from == second(start) { // which began before or in the middle of its second
		length = (time.Duration(to)*time.Second - start).Seconds()
	}
	if to == second(start) {
		to++
		length = max((now - start).Seconds(), 0.001)
	}
	for s := from; s < to; s++ {
		x := w.at(s)
		for k, n := range x.changes {
			r.Changes[k] += float64(n)
		}
		r.Bytes += float64(x.bytes)
	}
	for k := range r.Changes {
		r.Changes[k] /= length
	}
	r.Bytes /= length
	return r
}

// series are the changes in each of the last n seconds that are over, the
// latest last.
func (w *window) series(now time.Duration, n int) []uint32 {
	out := make([]uint32, min(n, kept-2))
	for i := range out {
		for _, c := range w.at(second(now) - int64(len(out)-i)).changes {
			out[i] += c
		}
	}
	return out
}

// ring keeps the latest events.
type ring struct {
	events []Event
	head   int // where the next one goes once it is full
}

// next is the place for the next event, and by how much the ring has grown for
// it: at most to limit events, and by no more than room. nil: there is none.
func (r *ring) next(limit, room int) (slot *Event, grown int) {
	if n := len(r.events); n < cap(r.events) {
		r.events = r.events[:n+1]
		return &r.events[n], 0
	}
	have := cap(r.events)
	if want := min(max(2*have, 8), limit); want > have && want-have <= room {
		bigger := make([]Event, have, want)
		for i := range have {
			bigger[i] = r.events[(r.head+i)%have]
		}
		r.events, r.head = bigger[:have+1], 0
		return &r.events[have], want - have
	}
	if have == 0 {
		return nil, 0
	}
	slot = &r.events[r.head]
	r.head = (r.head + 1) % have
	return slot, 0
}

// newest returns the events, the latest first.
func (r *ring) newest() []Event {
	out := make([]Event, 0, len(r.events))
	for i := len(r.events) - 1; i >= 0; i-- {
		out = append(out, r.events[(r.head+i)%len(r.events)])
	}
	return out
}

// release gives back everything and says how much it was.
func (r *ring) release() int {
	n := cap(r.events)
	*r = ring{}
	return n
}
