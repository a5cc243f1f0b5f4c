// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"math/bits"
	"sync/atomic"

	"github.com/ummu/ummu/mm"
)

// index finds entries three ways: by their exact range without a lock (an
// open-addressing table), by a range they contain, and by a range they overlap
// (interval trees). One range has at most one entry.
//
// There is a tree per set of rights, so that a search for an entry that
// contains a range with at least some rights is logarithmic in each of the
// few trees that qualify; entries of the same range with other rights cannot
// make it linear. One more tree holds what is out of the index but in use, so
// that its holder can be told of a change.
//
// All methods but [index.exact] need the index lock.
type index[H any] struct {
	table atomic.Pointer[table[H]]

	_ [64]byte // each hit reads table; the rest is written by misses

	n     int    // entries in the table
	bytes uint64 // pages they pin, in bytes
	trees [accessValues + 1]*entry[H]
}

const (
	watchOnly = uint8(accessValues) // the tree of entries that cannot be hit
	noTree    = ^uint8(0)
	minTable  = 64
	// maxLoad is the least number of slots per entry. Each slot that is
	// looked at in vain costs the cache miss of an entry: with 100,000 entries
	// a hit took 80, 62 and 58 ns at 4/3, 2 and 4 slots.
	maxLoad = 4
)

// table is a power-of-two table with linear probing, sparse (maxLoad). Slots
// are written under the index lock and read without. A reader that races
// with a writer may fail to find an entry, which costs it a look under the
// lock; whether an entry it found is still in the index is decided by the
// entry's state.
type table[H any] struct {
	shift uint // 64 - log2(len(slots))
	slots []atomic.Pointer[entry[H]]
}

func newTable[H any](n int) *table[H] {
	return &table[H]{
		shift: uint(64 - bits.TrailingZeros(uint(n))),
		slots: make([]atomic.Pointer[entry[H]], n),
	}
}

// hash mixes both bounds: registrations are aligned, evenly spaced, and often
// of one length.
func hash(r mm.Range) uint64 {
	hi, lo := bits.Mul64(uint64(r.Start)^0x9E3779B97F4A7C15, uint64(r.End)^0xD1B54A32D192ED03)
	return (hi ^ lo) * 0x9E3779B97F4A7C15
}

func (t *table[H]) home(r mm.Range) uint { return uint(hash(r) >> t.shift) }

func (t *table[H]) find(r mm.Range) *entry[H] {
	mask := uint(len(t.slots) - 1)
	i := t.home(r)
	for range t.slots {
		e := t.slots[i&mask].Load()
		if e == nil {
			return nil
		}
		if e.start == r.Start && e.end == r.End {
			return e
		}
		i++
	}
	return nil
}

func (t *table[H]) insert(e *entry[H]) {
	mask := uint(len(t.slots) - 1)
	i := t.home(e.span())
	for t.slots[i&mask].Load() != nil {
		i++
	}
	t.slots[i&mask].Store(e)
}

// remove takes e out and moves later entries of the run back, so that there
// are no tombstones.
func (t *table[H]) remove(e *entry[H]) {
	mask := uint(len(t.slots) - 1)
	hole := t.home(e.span()) & mask
	for t.slots[hole].Load() != e {
		hole = (hole + 1) & mask
	}
	for i := (hole + 1) & mask; ; i = (i + 1) & mask {
		m := t.slots[i].Load()
		if m == nil {
			break
		}
		// m may move into the hole if its home is not after the hole.
		if (i-t.home(m.span()))&mask >= (i-hole)&mask {
			t.slots[hole].Store(m)
			hole = i
		}
	}
	t.slots[hole].Store(nil)
}

// exact finds the entry of exactly the range r. It needs no lock; without the
// index lock it may miss an entry and may return one that was dropped.
func (x *index[H]) exact(r mm.Range) *entry[H] { return x.table.Load().find(r) }

// covering finds an entry that contains r with at least the rights a.
func (x *index[H]) covering(r mm.Range, a Access) *entry[H] {
	if e := x.exact(r); e != nil && e.access.Has(a) {
		return e
	}
	for t, root := range x.trees[:watchOnly] {
		if root != nil && Access(t).Has(a) {
			if e := root.containing(r); e != nil {
				return e
			}
		}
	}
	return nil
}

// insert links e. There must be no entry of its range.
func (x *index[H]) insert(e *entry[H]) {
	t := x.table.Load()
	if maxLoad*(x.n+1) > len(t.slots) {
		bigger := newTable[H](2 * len(t.slots))
		for i := range t.slots {
			if old := t.slots[i].Load(); old != nil {
				bigger.insert(old)
			}
		}
		x.table.Store(bigger)
		t = bigger
	}
	t.insert(e)
	x.n++
	x.bytes += e.size()
	x.link(e, uint8(e.access))
}

// remove unlinks e from the table and its tree.
func (x *index[H]) remove(e *entry[H]) {
	x.table.Load().remove(e)
	x.n--
	x.bytes -= e.size()
	x.unlink(e)
}

// link puts e into a tree only.
func (x *index[H]) link(e *entry[H], tree uint8) {
	e.tree = tree
	e.maxEnd = e.end
	x.trees[tree] = insertNode(x.trees[tree], e)
}

// unlink takes e out of its tree, if it is in one.
func (x *index[H]) unlink(e *entry[H]) {
	if e.tree == noTree {
		return
	}
	x.trees[e.tree] = removeNode(x.trees[e.tree], e)
	e.left, e.right, e.tree = nil, nil, noTree
}

// The trees are treaps ordered by start, end and id, heap-ordered by a hash of
// id, each node with the largest end below it.

func (e *entry[H]) priority() uint64 { return e.id * 0x9E3779B97F4A7C15 }

func (e *entry[H]) less(o *entry[H]) bool {
	switch {
	case e.start != o.start:
		return e.start < o.start
	case e.end != o.end:
		return e.end < o.end
	}
	return e.id < o.id
}

func (e *entry[H]) update() {
	e.maxEnd = e.end
	if e.left != nil {
		e.maxEnd = max(e.maxEnd, e.left.maxEnd)
	}
	if e.right != nil {
		e.maxEnd = max(e.maxEnd, e.right.maxEnd)
	}
}

func insertNode[H any](t, e *entry[H]) *entry[H] {
	switch {
	case t == nil:
		return e
	case e.priority() > t.priority():
		e.left, e.right = split(t, e)
		e.update()
		return e
	case e.less(t):
		t.left = insertNode(t.left, e)
	default:
		t.right = insertNode(t.right, e)
	}
	t.update()
	return t
}

func removeNode[H any](t, e *entry[H]) *entry[H] {
	switch {
	case t == e:
		return merge(t.left, t.right)
	case e.less(t):
		t.left = removeNode(t.left, e)
	default:
		t.right = removeNode(t.right, e)
	}
	t.update()
	return t
}

// split returns the nodes of t before e and those after.
func split[H any](t, e *entry[H]) (before, after *entry[H]) {
	switch {
	case t == nil:
		return nil, nil
	case t.less(e):
		t.right, after = split(t.right, e)
		t.update()
		return t, after
	default:
		before, t.left = split(t.left, e)
		t.update()
		return before, t
	}
}

// merge joins two trees, all of a before all of b.
func merge[H any](a, b *entry[H]) *entry[H] {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	case a.priority() > b.priority():
		a.right = merge(a.right, b)
		a.update()
		return a
	default:
		b.left = merge(a, b.left)
		b.update()
		return b
	}
}

// containing finds a node of the tree that contains r.
func (e *entry[H]) containing(r mm.Range) *entry[H] {
	for e != nil && e.maxEnd >= r.End {
		switch {
		case e.start > r.Start:
			e = e.left
		case e.end >= r.End:
			return e
		case e.left != nil && e.left.maxEnd >= r.End:
			e = e.left // all of it starts early enough, some of it ends late enough
		default:
			e = e.right
		}
	}
	return nil
}

// overlapping finds the first node of the tree that overlaps r.
func (e *entry[H]) overlapping(r mm.Range) *entry[H] {
	for e != nil {
		switch {
		case e.left != nil && e.left.maxEnd > r.Start:
			// If nothing there overlaps, what ends after r.Start starts at or
			// after r.End, and so does everything to the right of it.
			e = e.left
		case e.start >= r.End:
			return nil
		case e.end > r.Start:
			return e
		default:
			e = e.right
		}
	}
	return nil
}
