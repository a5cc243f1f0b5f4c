// SPDX-License-Identifier: Apache-2.0

package top

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/mm"
)

// spread is how far apart two ranges may be and still be drawn on one line.
const spread = 8 << 20

// clusters joins ranges that are close to each other, in order of address, and
// then the closest ones until there are no more than n.
func clusters(ranges []mm.Range, n int) (out []mm.Range) {
	slices.SortFunc(ranges, func(a, b mm.Range) int { return cmp.Compare(a.Start, b.Start) })
	for _, r := range ranges {
		if k := len(out); k > 0 && r.Start <= out[k-1].End+spread {
			out[k-1].End = max(out[k-1].End, r.End)
			continue
		}
		out = append(out, r)
	}
	for len(out) > max(n, 1) {
		at := 1
		for i := 2; i < len(out); i++ {
			if out[i].Start-out[i-1].End < out[at].Start-out[at-1].End {
				at = i
			}
		}
		out[at-1].End = out[at].End
		out = slices.Delete(out, at, at+1)
	}
	return out
}

// memoryMap draws where memory is registered and where it was changed, each
// line to its scale.
func memoryMap(d *activity.Detail, width, lines int, th theme) []string {
	var ranges []mm.Range
	known := func(r mm.Range) bool { return !r.Empty() && r.End != mm.MaxAddr }
	for _, r := range d.Registrations {
		ranges = append(ranges, r.Range)
	}
	for _, e := range d.Events {
		if e.Kind.IsChange() && known(e.Range) {
			ranges = append(ranges, e.Range)
		}
		if e.Kind.IsChange() && known(e.To) {
			ranges = append(ranges, e.To)
		}
	}
	out := []string{th.title(cut(" MEMORY   = registered  # changed  ! both: a registration that was changed", width))}
	if len(ranges) == 0 {
		return append(out, " nothing registered, nothing changed")
	}
	bar := width - 24
	for _, c := range clusters(ranges, lines-1) {
		if bar < 4 {
			out = append(out, cut(" "+rangeText(c), width))
			continue
		}
		cells := []byte(strings.Repeat(".", bar))
		mark := func(r mm.Range, with byte) {
			r = r.Intersect(c)
			if r.Empty() {
				return
			}
			from := scale(uint64(r.Start-c.Start), c.Len(), bar)
			to := max(scale(uint64(r.End-c.Start-1), c.Len(), bar)+1, from+1)
			for i := from; i < min(to, bar); i++ {
				cells[i] = with
			}
		}
		for _, e := range d.Events {
			if e.Kind.IsChange() {
				mark(e.Range, '#')
				mark(e.To, '#')
			}
		}
		for _, r := range d.Registrations {
			mark(r.Range, '=')
		}
		for _, r := range d.Registrations {
			if r.Changes == 0 {
				continue
			}
			for _, e := range d.Events {
				if e.Kind.IsChange() && e.Time >= r.Since {
					mark(e.Range.Intersect(r.Range), '!')
					mark(e.To.Intersect(r.Range), '!')
				}
			}
			mark(r.Last.Range.Intersect(r.Range), '!')
		}
		out = append(out, fmt.Sprintf(" %12x |%s| %5s", uint64(c.Start), cells, sizeOf(c)))
	}
	return out
}

// scale is the cell of a bar that an offset within a length falls into.
func scale(offset, length uint64, cells int) int {
	return int(float64(offset) / float64(length) * float64(cells))
}
