// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"fmt"
	"sync"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/mm"
)

// seen is what one watch remembers, in a cache line of a private page that a
// forked child finds wiped.
type seen struct {
	generation uint64 // last generation published by a drain; 0: dead
	epoch      uint64
	alive      uint64 // 1 from New to Close; 0 also in a forked child
	_          [5]uint64
}

// seenSlots hands out the lines of MADV_WIPEONFORK pages. The pages are never
// unmapped, since Valid may be called at any time while the watch is
// reachable; a line is used again when its watch is not. So there are at most
// as many pages as watches were reachable at once, divided by 64.
var seenSlots struct {
	sync.Mutex // guards free
	free       []*seen
}

func takeSeen() (*seen, error) {
	seenSlots.Lock()
	defer seenSlots.Unlock()
	if len(seenSlots.free) == 0 {
		size := uintptr(mm.PageSize())
		page, err := unix.MmapPtr(-1, 0, nil, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
		if err != nil {
			return nil, fmt.Errorf("map page wiped on fork: %w", err)
		}
		advice := unix.MADV_WIPEONFORK
		if guard.Off(guard.WipeOnFork) {
			advice = unix.MADV_NORMAL
		}
		if err := unix.Madvise(unsafe.Slice((*byte)(page), size), advice); err != nil {
			unix.MunmapPtr(page, size)
			return nil, fmt.Errorf("madvise MADV_WIPEONFORK (Linux 4.14): %w", err)
		}
		lines := unsafe.Slice((*seen)(page), size/unsafe.Sizeof(seen{}))
		for i := range lines {
			seenSlots.free = append(seenSlots.free, &lines[i])
		}
	}
	last := len(seenSlots.free) - 1
	s := seenSlots.free[last]
	seenSlots.free = seenSlots.free[:last]
	return s, nil
}

func giveSeen(s *seen) {
	s.kill()
	seenSlots.Lock()
	seenSlots.free = append(seenSlots.free, s)
	seenSlots.Unlock()
}

// kill makes Valid false for ever and keeps every method away from the memory
// shared with the kernel side.
func (s *seen) kill() {
	atomic.StoreUint64(&s.generation, 0)
	atomic.StoreUint64(&s.alive, 0)
}

func (s *seen) isAlive() bool { return atomic.LoadUint64(&s.alive) != 0 }
