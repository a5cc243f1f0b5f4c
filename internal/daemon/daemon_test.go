// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
)

// mapPages maps memory of its own.
func mapPages(pages int) ([]byte, mm.Range, func(), error) {
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(pages*page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return nil, mm.Range{}, nil, err
	}
	b := unsafe.Slice((*byte)(p), pages*page)
	r := mm.Range{Start: mm.Addr(uintptr(p)), End: mm.Addr(uintptr(p)) + mm.Addr(len(b))}
	return b, r, func() { unix.MunmapPtr(p, uintptr(len(b))) }, nil
}

// watched is why a watch does not work, nil if it does: it makes a change and
// looks for its record.
func watched(w *feed.Watch) error {
	b, r, unmap, err := mapPages(1)
	if err != nil {
		return err
	}
	defer unmap()
	for try := 0; ; try++ {
		v := w.Commit(w.Begin(r), nil, func() {})
		if v == feed.Cacheable {
			break
		}
		if try == 100 || v == feed.IsDead {
			return fmt.Errorf("not cacheable: %v", v)
		}
	}
	defer w.Forget(r)
	if w.Drain(nil); !w.Valid() {
		return errors.New("not valid after a drain")
	}
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		return err
	}
	if w.Valid() {
		return errors.New("valid after a change")
	}
	seen := false
	w.Drain(func(rec *mm.Record) { seen = seen || rec.Touches(r) || rec.Kind == mm.Lost })
	if !seen {
		return errors.New("a change left no record")
	}
	return nil
}

func TestDial(t *testing.T) {
	s := shared(t)
	w := dial(t, s)
	for range 10 {
		if err := watched(w); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if w.Valid() || w.Drain(nil) != feed.DeadState {
		t.Error("closed and yet alive")
	}
}
