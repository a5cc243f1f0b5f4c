// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// Descriptors are the shared memory of a watch as the kernel side hands it
// out: BPF maps by their file descriptors.
type Descriptors struct {
	Status, Epoch, Interest int
	// Ring is -1 if there is none: the kernel side counts each record as lost.
	Ring      int
	RingBytes int // data area of the ring
}

// Map maps the descriptors, which stay the caller's: they may be closed
// afterwards, except Ring, which becomes Memory.RingFD. Maps and Release are
// left for the caller to set.
func (d Descriptors) Map() (Memory, error) {
	m := Memory{RingFD: d.Ring}
	page := int(mm.PageSize())
	ring := unix.MAP_SHARED
	if d.Ring < 0 { // one that is always empty
		ring, d.RingBytes = unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, page
	}
	for _, w := range []struct {
		what   string
		dst    *[]byte
		fd     int
		off    int64
		length int
		prot   int
		flags  int
	}{
		{"status page", &m.Status, d.Status, 0, int(unsafe.Sizeof(layout.Status{})), unix.PROT_READ, unix.MAP_SHARED},
		{"epoch page", &m.Epoch, d.Epoch, 0, int(unsafe.Sizeof(layout.Epoch{})), unix.PROT_READ, unix.MAP_SHARED},
		{"interest pages", &m.Interest, d.Interest, 0, int(unsafe.Sizeof(layout.Interest{})), unix.PROT_READ | unix.PROT_WRITE, unix.MAP_SHARED},
		{"ring consumer page", &m.RingConsumer, d.Ring, 0, page, unix.PROT_READ | unix.PROT_WRITE, ring},
		{"ring", &m.RingProducer, d.Ring, int64(page), page + 2*d.RingBytes, unix.PROT_READ, ring},
	} {
		b, err := unix.Mmap(w.fd, w.off, (w.length+page-1)&^(page-1), w.prot, w.flags)
		if err != nil {
			m.Unmap()
			return Memory{}, fmt.Errorf("map %s: %w", w.what, err)
		}
		*w.dst = b
	}
	return m, nil
}

// Unmap unmaps memory that no watch was made of.
func (m Memory) Unmap() {
	for _, b := range [][]byte{m.Status, m.Epoch, m.Interest, m.RingConsumer, m.RingProducer} {
		if b != nil {
			unix.Munmap(b)
		}
	}
}
