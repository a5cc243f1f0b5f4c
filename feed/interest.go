// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"sync"
	"sync/atomic"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// denseGranules is the number of granules of one level above which a range is
// counted in dense[level] instead of setting bits: the kernel side then tests
// at the next, coarser level.
const denseGranules = 4096

var interestShifts = [layout.InterestLevels]uint{layout.InterestShift0, layout.InterestShift1, layout.InterestShift2}

// interestHash is UMMU_INTEREST_HASH: the bit of granule g.
func interestHash(g uint64) uint64 {
	return g * 0x9E3779B97F4A7C15 >> 49 & (layout.InterestBits - 1)
}

// interest is the client's side of the interest page, and the open tickets.
type interest struct {
	open atomic.Int32 // len(tickets), readable without mu

	mu sync.Mutex // guards everything below and all writes to page.bits and page.dense
	// page is shared with the kernel side.
	page *layout.Interest
	// refs counts the ranges behind each bit. A count that reached its
	// maximum stays: a bit too many is only a false positive.
	refs    *[layout.InterestLevels][layout.InterestBits]uint32
	tickets []*ticket
	spare   []*ticket
	lastID  uint64
	fence   atomic.Uint32
}

func (in *interest) init(page *layout.Interest) {
	in.page = page
	in.refs = new([layout.InterestLevels][layout.InterestBits]uint32)
}

// granules are the first and the last granule of r, not empty, at a level.
func granules(r mm.Range, level int) (first, last uint64) {
	return uint64(r.Start) >> interestShifts[level], (uint64(r.End) - 1) >> interestShifts[level]
}

// add makes r interesting, once more. Under mu.
func (in *interest) add(r mm.Range) {
	for level := range in.refs {
		first, last := granules(r, level)
		if last-first >= denseGranules {
			atomic.AddUint64(&in.page.Dense[level], 1)
			continue
		}
		for g := first; g <= last; g++ {
			bit := interestHash(g)
			n := &in.refs[level][bit]
			if *n == 0 {
				atomic.OrUint64(&in.page.Bits[level][bit/64], 1<<(bit%64))
			}
			if *n != ^uint32(0) {
				*n++
			}
		}
	}
}

// remove undoes one add of r. Under mu.
func (in *interest) remove(r mm.Range) {
	for level := range in.refs {
		first, last := granules(r, level)
		if last-first >= denseGranules {
			if atomic.LoadUint64(&in.page.Dense[level]) != 0 {
				atomic.AddUint64(&in.page.Dense[level], ^uint64(0))
			}
			continue
		}
		for g := first; g <= last; g++ {
			bit := interestHash(g)
			switch n := &in.refs[level][bit]; *n {
			case 0, ^uint32(0):
			case 1:
				*n = 0
				atomic.AndUint64(&in.page.Bits[level][bit/64], ^(uint64(1) << (bit % 64)))
			default:
				*n--
			}
		}
	}
}
