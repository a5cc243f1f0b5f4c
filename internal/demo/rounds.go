// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache/uring"
)

// change is one way of putting other pages behind an address. It leaves the
// range mapped, readable and writable.
type change struct {
	name string
	do   func(m mm.Range, ring *uring.Ring) error
	ring bool // needs io_uring
}

var changes = []change{
	{"munmap, mmap at the same address", func(m mm.Range, _ *uring.Ring) error {
		if err := unmap(m); err != nil {
			return err
		}
		return mapAt(m, unix.MAP_FIXED_NOREPLACE)
	}, false},
	{"mmap MAP_FIXED over it", func(m mm.Range, _ *uring.Ring) error {
		return mapAt(m, unix.MAP_FIXED)
	}, false},
	{"madvise DONTNEED", func(m mm.Range, _ *uring.Ring) error {
		return unix.Madvise(view(m), unix.MADV_DONTNEED)
	}, false},
	{"io_uring MADVISE DONTNEED", func(m mm.Range, ring *uring.Ring) error {
		return ring.Madvise(m, unix.MADV_DONTNEED)
	}, true},
	{"mremap away, mmap at the same address", func(m mm.Range, _ *uring.Ring) error {
		to, err := mremap(m, 0, unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP)
		if err != nil {
			return err
		}
		return errors.Join(unmap(to), mapAt(m, unix.MAP_FIXED))
	}, false},
	{"another mapping mremapped onto it", func(m mm.Range, _ *uring.Ring) error {
		other, err := mapAnywhere(int(m.Len() / mm.PageSize()))
		if err != nil {
			return err
		}
		_, err = mremap(other, m.Start, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED)
		return err
	}, false},
}

// transfersPerRound: the first of a round may have to register, the others
// should hit.
const transfersPerRound = 4

// row runs the rounds of one row in all its threads.
func (r *runner[H]) row(ctx context.Context, row Row, get acquire[H]) (Counts, error) {
	i := slices.IndexFunc(changes, func(ch change) bool { return ch.name == row.Change })
	var transfers, stale atomic.Uint64
	errs := make([]error, row.Threads)
	var wg sync.WaitGroup
	for t := range row.Threads {
		wg.Go(func() { errs[t] = r.thread(ctx, t, changes[i], get, &transfers, &stale) })
	}
	wg.Wait()
	return Counts{Transfers: transfers.Load(), Stale: stale.Load()}, errors.Join(errs...)
}

func (r *runner[H]) thread(ctx context.Context, id int, ch change, get acquire[H], transfers, stale *atomic.Uint64) (err error) {
	// Far from where the kernel puts mappings by itself, so that no other
	// thread is given the address while it is free.
	m := mm.Range{Start: 64<<30 + mm.Addr(id)<<28}
	m.End = m.Start + mm.Addr(uint64(r.o.Pages)*mm.PageSize())
	if err := mapAt(m, unix.MAP_FIXED_NOREPLACE); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unmap(m)) }()
	for round := range r.o.Rounds {
		if err := ctx.Err(); err != nil {
			return err
		}
		for range transfersPerRound {
			ok, err := r.transfer(get, m)
			if err != nil {
				return fmt.Errorf("round %d: %w", round, err)
			}
			transfers.Add(1)
			if !ok {
				stale.Add(1)
			}
		}
		if err := ch.do(m, r.ring); err != nil {
			return fmt.Errorf("round %d: %w", round, err)
		}
	}
	return nil
}

// transfer puts the known bytes into m through its registration and reports
// whether the CPU sees them in each page.
func (r *runner[H]) transfer(get acquire[H], m mm.Range) (bool, error) {
	data := view(m)
	page := int(mm.PageSize())
	for off := 0; off < len(data); off += page {
		data[off] = 0 // so that bytes of the last transfer do not count
	}
	h, ref, err := get(m)
	if err != nil {
		return false, err
	}
	err = r.dev.transfer(h, m)
	ref.Release()
	if err != nil {
		return false, err
	}
	for off := 0; off < len(data); off += page {
		if binary.LittleEndian.Uint64(data[off:]) != word(off) {
			return false, nil
		}
	}
	return true, nil
}

// word is what the source has at the start of each page; its first byte is
// never 0.
func word(off int) uint64 { return uint64(off)<<8 | 0xa5 }

// known writes the known bytes.
func known(data []byte) {
	for off := 0; off < len(data); off += int(mm.PageSize()) {
		binary.LittleEndian.PutUint64(data[off:], word(off))
	}
}

const readWrite, anonymous = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS

// mapAnywhere maps and touches pages.
func mapAnywhere(pages int) (mm.Range, error) {
	size := uintptr(pages) * uintptr(mm.PageSize())
	p, err := unix.MmapPtr(-1, 0, nil, size, readWrite, anonymous|unix.MAP_POPULATE)
	if err != nil {
		return mm.Range{}, fmt.Errorf("map %d pages: %w", pages, err)
	}
	return mm.MakeRange(mm.Addr(uintptr(p)), uint64(size))
}

func mapAt(m mm.Range, how int) error {
	if _, err := unix.MmapPtr(-1, 0, pointer(m), uintptr(m.Len()), readWrite, anonymous|how); err != nil {
		return fmt.Errorf("map %v: %w", m, err)
	}
	return nil
}

func unmap(m mm.Range) error {
	if err := unix.MunmapPtr(pointer(m), uintptr(m.Len())); err != nil {
		return fmt.Errorf("unmap %v: %w", m, err)
	}
	return nil
}

func mremap(m mm.Range, to mm.Addr, flags int) (mm.Range, error) {
	p, err := unix.MremapPtr(pointer(m), uintptr(m.Len()), pointer(mm.Range{Start: to}), uintptr(m.Len()), flags)
	if err != nil {
		return mm.Range{}, fmt.Errorf("mremap %v: %w", m, err)
	}
	return mm.MakeRange(mm.Addr(uintptr(p)), m.Len())
}

// pointer to memory that is not Go's: a conversion that go vet takes for a
// mistake when it is written as such.
func pointer(m mm.Range) unsafe.Pointer {
	a := uintptr(m.Start)
	return *(*unsafe.Pointer)(unsafe.Pointer(&a))
}

func view(m mm.Range) []byte { return unsafe.Slice((*byte)(pointer(m)), m.Len()) }
