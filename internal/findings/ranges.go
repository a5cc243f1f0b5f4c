// SPDX-License-Identifier: Apache-2.0

package findings

import (
	"slices"

	"github.com/ummu/ummu/mm"
)

// ranges is a set of addresses: sorted, without overlaps.
type ranges []mm.Range

// from is the place of the first range that ends behind a.
func (s ranges) from(a mm.Addr) int {
	i, _ := slices.BinarySearchFunc(s, a, func(x mm.Range, a mm.Addr) int {
		if x.End <= a {
			return -1
		}
		return 1
	})
	return i
}

func (s *ranges) remove(r mm.Range) {
	i := s.from(r.Start)
	if r.Empty() || i == len(*s) || !(*s)[i].Overlaps(r) {
		return
	}
	var keep []mm.Range
	j := i
	for ; j < len(*s) && (*s)[j].Overlaps(r); j++ {
		x := (*s)[j]
		if x.Start < r.Start {
			keep = append(keep, mm.Range{Start: x.Start, End: r.Start})
		}
		if r.End < x.End {
			keep = append(keep, mm.Range{Start: r.End, End: x.End})
		}
	}
	*s = slices.Replace(*s, i, j, keep...)
}

func (s *ranges) add(r mm.Range) {
	if r.Empty() {
		return
	}
	s.remove(r)
	*s = slices.Insert(*s, s.from(r.Start), r)
}

// contains reports whether all of r, which is not empty, is in the set.
func (s ranges) contains(r mm.Range) bool {
	if r.Empty() {
		return false
	}
	for i := s.from(r.Start); i < len(s) && s[i].Start <= r.Start; i++ {
		if s[i].End >= r.End {
			return true
		}
		r.Start = s[i].End
	}
	return false
}
