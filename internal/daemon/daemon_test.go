// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
)

// block is memory of its own at an address of its own.
func block(t testing.TB, pages int) ([]byte, mm.Range) {
	t.Helper()
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(pages*page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.MunmapPtr(p, uintptr(pages*page)) })
	b := unsafe.Slice((*byte)(p), pages*page)
	return b, mm.Range{Start: mm.Addr(uintptr(p)), End: mm.Addr(uintptr(p)) + mm.Addr(len(b))}
}

// sees makes a change and reports whether w has its record.
func sees(t testing.TB, w *feed.Watch) bool {
	t.Helper()
	b, r := block(t, 1)
	if v := w.Commit(w.Begin(r), nil, func() {}); v != feed.Cacheable {
		t.Logf("not cacheable: %v", v)
		return false
	}
	defer w.Forget(r)
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
	seen := false
	w.Drain(func(rec *mm.Record) { seen = seen || rec.Touches(r) })
	return seen
}

func TestDial(t *testing.T) {
	s := start(t, Config{})
	w := dial(t, s)
	for range 10 {
		if !sees(t, w) {
			t.Fatal("a change is not seen")
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if w.Valid() || w.Drain(nil) != feed.DeadState {
		t.Error("closed and yet alive")
	}
}
