// SPDX-License-Identifier: Apache-2.0

package findings

import (
	"slices"

	"github.com/zyedidia/generic/interval"

	"github.com/ummu/ummu/mm"
)

// index finds things by the ranges they overlap. All that begin at one address
// are one node of the tree, which knows a start only once.
type index[T comparable] struct {
	tree *interval.Tree[mm.Addr, []item[T]]
}

type item[T comparable] struct {
	r mm.Range
	v T
}

func newIndex[T comparable]() index[T] {
	return index[T]{interval.New[mm.Addr, []item[T]]()}
}

func (x index[T]) insert(r mm.Range, v T) {
	items, end := []item[T]{{r, v}}, r.End
	if old, ok := x.tree.Get(r.Start); ok {
		items, end = append(old.Val, items[0]), max(end, old.High)
	}
	x.tree.Put(r.Start, end, items)
}

func (x index[T]) remove(r mm.Range, v T) {
	old, ok := x.tree.Get(r.Start)
	if !ok {
		return
	}
	items := slices.DeleteFunc(old.Val, func(i item[T]) bool { return i == item[T]{r, v} })
	if len(items) == 0 {
		x.tree.Remove(r.Start)
		return
	}
	end := r.Start
	for _, i := range items {
		end = max(end, i.r.End)
	}
	x.tree.Put(r.Start, end, items)
}

// overlapping lists what touches r, by start.
func (x index[T]) overlapping(r mm.Range) (vs []T) {
	if r.Empty() {
		return nil
	}
	for _, n := range x.tree.Overlaps(r.Start, r.End) {
		for _, i := range n.Val {
			if i.r.Overlaps(r) {
				vs = append(vs, i.v)
			}
		}
	}
	return vs
}

// each calls f for everything, by start.
func (x index[T]) each(f func(T)) {
	x.tree.Each(func(_, _ mm.Addr, items []item[T]) {
		for _, i := range items {
			f(i.v)
		}
	})
}
