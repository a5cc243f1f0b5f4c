// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"sync/atomic"

	"github.com/ummu/ummu/mm"
)

// The state word of an entry: everything a hit has to change, in one word, so
// that a hit is one compare-and-swap and a release one addition.
//
//	bits 0..22   references
//	bit  23      guard: too many references, no more are given
//	bit  24      dropped: out of the index, no more references are given
//	bit  25      changed: the memory changed while references were held
//	bit  26      parked: was in use when a victim was looked for
//	bits 27..62  hits since they were last folded into the cache's total
//	bit  63      guard: fold the hits before the next one
const (
	refOne   uint64 = 1
	refMask  uint64 = 1<<24 - 1
	refGuard uint64 = 1 << 23
	dropped  uint64 = 1 << 24
	changed  uint64 = 1 << 25
	parked   uint64 = 1 << 26
	hitShift        = 27
	hitOne   uint64 = 1 << hitShift
	hitMask  uint64 = ^(hitOne - 1)
	hitGuard uint64 = 1 << 63
	noTake          = refGuard | dropped | hitGuard
	lastSlow        = dropped | parked // the last release has something to do
)

// entry is one registration: in the index, or held by references only, or
// waiting to be deregistered. It is what a hit touches: one cache line, an
// object of 64 bytes if handles have up to 8, so that two entries share no line
// and 100,000 of them few pages.
type entry[H any] struct {
	start, end mm.Addr
	state      atomic.Uint64
	c          *Cache[H]
	handle     H
	access     Access
	reason     Reason // Cached, or why it never was in the index; constant
	interest   bool   // the feed watches it; set before it is shared, cleared by who deregisters it
	*links[H]
}

// links is the rest of an entry, guarded by the index lock.
type links[H any] struct {
	left, right *entry[H]
	maxEnd      mm.Addr // largest end in this subtree
	id          uint64  // unique; its hash is the treap priority
	prev, next  *entry[H]
	in          *list[H]
	seen        uint64 // hits when a victim was last looked for
	failure     error  // what Deregister returned, of a zombie
	tree        uint8  // which tree it is linked in, or noTree
}

func (e *entry[H]) span() mm.Range { return mm.Range{Start: e.start, End: e.end} }

// size is what the registration pins, in bytes: whole pages.
func (e *entry[H]) size() uint64 { return e.span().Pages().Len() }

// take adds a reference and counts a hit, unless the entry was dropped or a
// counter is full.
func (e *entry[H]) take() bool {
	for {
		s := e.state.Load()
		if s&noTake != 0 {
			return false
		}
		if e.state.CompareAndSwap(s, s+refOne+hitOne) {
			return true
		}
	}
}

// list is a doubly linked list of entries, each in one list at most. The
// index lock guards it.
type list[H any] struct {
	front, back *entry[H]
	n           int
}

func (l *list[H]) push(e *entry[H]) {
	e.in, e.prev, e.next = l, l.back, nil
	if l.back != nil {
		l.back.next = e
	} else {
		l.front = e
	}
	l.back = e
	l.n++
}

func (l *list[H]) remove(e *entry[H]) {
	if e.prev != nil {
		e.prev.next = e.next
	} else {
		l.front = e.next
	}
	if e.next != nil {
		e.next.prev = e.prev
	} else {
		l.back = e.prev
	}
	e.in, e.prev, e.next = nil, nil, nil
	l.n--
}

func (l *list[H]) pop() *entry[H] {
	e := l.front
	if e != nil {
		l.remove(e)
	}
	return e
}
