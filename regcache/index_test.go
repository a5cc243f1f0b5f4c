// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"math/rand/v2"
	"testing"

	"pgregory.net/rapid"

	"github.com/ummu/ummu/mm"
)

// checkTrees checks order, heap property and largest ends of every tree and
// returns the nodes by tree.
func (x *index[H]) checkTrees(t testing.TB) (nodes [accessValues + 1][]*entry[H]) {
	t.Helper()
	for i, root := range x.trees {
		var walk func(e *entry[H]) mm.Addr
		walk = func(e *entry[H]) mm.Addr {
			if e == nil {
				return 0
			}
			end := max(e.end, walk(e.left))
			if n := len(nodes[i]); n > 0 && !nodes[i][n-1].less(e) {
				t.Fatalf("tree %d: %v is not before %v", i, nodes[i][n-1].span(), e.span())
			}
			nodes[i] = append(nodes[i], e)
			end = max(end, walk(e.right))
			if e.maxEnd != end {
				t.Fatalf("tree %d: largest end below %v is %v, kept as %v", i, e.span(), end, e.maxEnd)
			}
			if e.tree != uint8(i) {
				t.Fatalf("tree %d: %v says it is in tree %d", i, e.span(), e.tree)
			}
			for _, child := range []*entry[H]{e.left, e.right} {
				if child != nil && child.priority() > e.priority() {
					t.Fatalf("tree %d: %v has a child of higher priority", i, e.span())
				}
			}
			return end
		}
		walk(root)
	}
	return nodes
}

// check checks the table against the trees as well.
func (x *index[H]) check(t testing.TB) [accessValues + 1][]*entry[H] {
	t.Helper()
	nodes := x.checkTrees(t)
	var n int
	var bytes uint64
	for i, tree := range nodes[:watchOnly] {
		for _, e := range tree {
			if e.access != Access(i) {
				t.Fatalf("%v with %v is in the tree of %v", e.span(), e.access, Access(i))
			}
			if x.exact(e.span()) != e {
				t.Fatalf("%v is in a tree and not in the table", e.span())
			}
			n++
			bytes += e.size()
		}
	}
	slots := x.table.Load().slots
	var used int
	for i := range slots {
		if slots[i].Load() != nil {
			used++
		}
	}
	if n != x.n || used != x.n || bytes != x.bytes {
		t.Fatalf("%d entries of %d bytes in the trees, %d in the table, counted %d of %d", n, bytes, used, x.n, x.bytes)
	}
	if used*maxLoad > len(slots) && len(slots) > minTable {
		t.Fatalf("%d of %d slots used", used, len(slots))
	}
	return nodes
}

// naiveIndex is a map, searched in full.
type naiveIndex map[mm.Range]*entry[int]

func (n naiveIndex) overlapping(r mm.Range) (found []*entry[int]) {
	for _, e := range n {
		if e.span().Overlaps(r) {
			found = append(found, e)
		}
	}
	return found
}

func (n naiveIndex) covers(r mm.Range, a Access) bool {
	for _, e := range n {
		if e.span().Contains(r) && e.access.Has(a) {
			return true
		}
	}
	return false
}

// indexPair does each operation on both.
type indexPair struct {
	t      testing.TB
	x      index[int]
	naive  naiveIndex
	nextID uint64
}

func newIndexPair(t testing.TB) *indexPair {
	p := &indexPair{t: t, naive: naiveIndex{}}
	p.x.table.Store(newTable[int](minTable))
	return p
}

func (p *indexPair) insert(r mm.Range, a Access) {
	if p.naive[r] != nil {
		return
	}
	p.nextID++
	e := &entry[int]{start: r.Start, end: r.End, access: a, links: &links[int]{id: p.nextID, tree: noTree}}
	p.x.insert(e)
	p.naive[r] = e
}

func (p *indexPair) remove(r mm.Range) {
	if e := p.naive[r]; e != nil {
		p.x.remove(e)
		delete(p.naive, r)
	}
}

func (p *indexPair) lookup(r mm.Range, a Access) {
	if got, want := p.x.exact(r), p.naive[r]; got != want {
		p.t.Fatalf("exact %v: got %p, want %p", r, got, want)
	}
	e := p.x.covering(r, a)
	switch want := p.naive.covers(r, a); {
	case (e != nil) != want:
		p.t.Fatalf("an entry covers %v with %v: got %v, want %v", r, a, e != nil, want)
	case e != nil && (p.naive[e.span()] != e || !e.span().Contains(r) || !e.access.Has(a)):
		p.t.Fatalf("covering %v with %v: got %v with %v", r, a, e.span(), e.access)
	}
}

// invalidate removes what overlaps r, as Cache.invalidate does.
func (p *indexPair) invalidate(r mm.Range) {
	want := p.naive.overlapping(r)
	var got int
	for tree := range p.x.trees {
		for e := p.x.trees[tree].overlapping(r); e != nil; e = p.x.trees[tree].overlapping(r) {
			if p.naive[e.span()] != e || !e.span().Overlaps(r) {
				p.t.Fatalf("%v does not overlap %v, or was reported twice", e.span(), r)
			}
			p.remove(e.span())
			got++
		}
	}
	if got != len(want) {
		p.t.Fatalf("%v overlaps %d entries, got %d", r, len(want), got)
	}
}

// cases.md I6: removal must not break the order, nor let duplicates arise.
func TestIndexAgainstNaive(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		p := newIndexPair(t)
		access := rapid.Custom(func(t *rapid.T) Access { return Access(rapid.IntRange(0, int(allAccess)).Draw(t, "access")) })
		span := rapid.Custom(func(t *rapid.T) mm.Range {
			start := rapid.Uint64Range(0, 64).Draw(t, "start")
			return mm.Range{Start: mm.Addr(start), End: mm.Addr(start + rapid.Uint64Range(1, 16).Draw(t, "length"))}
		})
		rt.Repeat(map[string]func(*rapid.T){
			"insert":     func(t *rapid.T) { p.insert(span.Draw(t, "range"), access.Draw(t, "access")) },
			"remove":     func(t *rapid.T) { p.remove(span.Draw(t, "range")) },
			"lookup":     func(t *rapid.T) { p.lookup(span.Draw(t, "range"), access.Draw(t, "access")) },
			"invalidate": func(t *rapid.T) { p.invalidate(span.Draw(t, "range")) },
			"":           func(*rapid.T) { p.x.check(t) },
		})
	})
}

// cases.md I6 again, long: a million operations on a changing population.
func TestIndexMillion(t *testing.T) {
	p := newIndexPair(t)
	rng := rand.New(rand.NewPCG(1, 2))
	const ops = 1_000_000
	for i := range ops {
		// The population breathes between almost none and 80.
		space := 1 << (6 + i/(ops/8)%4*2)
		start := mm.Addr(rng.IntN(space))
		r := mm.Range{Start: start, End: start + 1 + mm.Addr(rng.IntN(16))}
		a := Access(rng.IntN(accessValues))
		switch op := rng.IntN(16); {
		case op < 7:
			if len(p.naive) < 80 {
				p.insert(r, a)
			}
		case op < 10:
			p.remove(r)
		case op < 14:
			p.lookup(r, a)
		default:
			r.End = r.Start + 1
			p.invalidate(r)
		}
		if i%10_000 == 0 {
			p.x.check(t)
		}
	}
	p.x.check(t)
}
