// SPDX-License-Identifier: Apache-2.0

// Package mm holds the words of address-space changes: [Addr], [Range],
// [Kind], [Phase], [Record]. It imports nothing of this module and nothing
// outside the standard library, so that every other package can speak it.
package mm

import (
	"errors"
	"fmt"
	"os"
	"strconv"
)

// Addr is a user-space virtual address in some address space (one mm_struct).
type Addr uint64

// String formats a as 0x-prefixed hexadecimal.
func (a Addr) String() string { return "0x" + strconv.FormatUint(uint64(a), 16) }

// Range is the half-open range of addresses [Start, End). Ranges of records
// are rounded outward to pages. The zero Range is empty.
type Range struct{ Start, End Addr }

// MaxAddr is the end of [Whole]. No user-space mapping reaches it.
const MaxAddr Addr = 1<<64 - 1

// Whole is the range that covers every user-space address. A change whose
// range the hook cannot know is reported as Whole (see [Superset]).
var Whole = Range{0, MaxAddr}

// Errors of [MakeRange].
var (
	ErrEmptyRange = errors.New("range is empty")
	ErrWraps      = errors.New("range wraps around the address space")
	ErrKernelAddr = errors.New("range reaches into kernel addresses")
)

// MakeRange returns [addr, addr+length). It fails with [ErrEmptyRange] for
// length 0, with [ErrWraps] if addr+length overflows, and with
// [ErrKernelAddr] if the range reaches into the upper half of the 64-bit
// address space, where the kernels of x86-64 and arm64 live.
func MakeRange(addr Addr, length uint64) (Range, error) {
	r := Range{addr, addr + Addr(length)}
	switch {
	case length == 0:
		return Range{}, fmt.Errorf("address %v: %w", addr, ErrEmptyRange)
	case r.End < addr:
		return Range{}, fmt.Errorf("address %v, length %d: %w", addr, length, ErrWraps)
	case r.End > 1<<63:
		return Range{}, fmt.Errorf("address %v, length %d: %w", addr, length, ErrKernelAddr)
	}
	return r, nil
}

// String formats r as "start-end" in hexadecimal, as /proc/PID/maps does.
func (r Range) String() string {
	return strconv.FormatUint(uint64(r.Start), 16) + "-" + strconv.FormatUint(uint64(r.End), 16)
}

// Len is the number of bytes in r; 0 if r is empty.
func (r Range) Len() uint64 {
	if r.Empty() {
		return 0
	}
	return uint64(r.End - r.Start)
}

// Empty reports whether r holds no address.
func (r Range) Empty() bool { return r.End <= r.Start }

// Contains reports whether every address of s is in r. An empty s is
// contained in every r.
func (r Range) Contains(s Range) bool {
	return s.Empty() || r.Start <= s.Start && s.End <= r.End
}

// Has reports whether r holds a.
func (r Range) Has(a Addr) bool { return r.Start <= a && a < r.End }

// Overlaps reports whether some address is in both r and s.
func (r Range) Overlaps(s Range) bool {
	return r.Start < s.End && s.Start < r.End && !r.Empty() && !s.Empty()
}

// Intersect returns the addresses that are in both r and s.
func (r Range) Intersect(s Range) Range {
	x := Range{max(r.Start, s.Start), min(r.End, s.End)}
	if x.Empty() {
		return Range{}
	}
	return x
}

// Hull returns the smallest range that holds both r and s.
func (r Range) Hull(s Range) Range {
	switch {
	case r.Empty():
		return s
	case s.Empty():
		return r
	}
	return Range{min(r.Start, s.Start), max(r.End, s.End)}
}

var pageMask = Addr(os.Getpagesize() - 1)

// PageSize is the base page size of this machine in bytes.
func PageSize() uint64 { return uint64(pageMask) + 1 }

// Pages returns r rounded outward to base pages of this machine. An empty
// range stays empty.
func (r Range) Pages() Range {
	if r.Empty() {
		return Range{}
	}
	end := (r.End + pageMask) &^ pageMask
	if end < r.End {
		end = MaxAddr
	}
	return Range{r.Start &^ pageMask, end}
}
