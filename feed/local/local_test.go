// SPDX-License-Identifier: Apache-2.0

package local

import (
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"unsafe"
)

func TestChangeIsSeen(t *testing.T) {
	w, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	b, err := unix.Mmap(-1, 0, 8*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	start := mm.Addr(uintptr(unsafe.Pointer(&b[0])))
	r := mm.Range{Start: start, End: start + 8*4096}
	inserted := false
	tk := w.Begin(r)
	v := w.Commit(tk, func(*mm.Record) {}, func() { inserted = true })
	if v != feed.Cacheable || !inserted {
		t.Fatalf("commit: %v, inserted %v", v, inserted)
	}
	if !w.Valid() {
		if s := w.Drain(func(r *mm.Record) { t.Errorf("%+v", r) }); s != feed.Fresh {
			t.Fatal(s)
		}
	}
	unix.Madvise(b[4096:8192], unix.MADV_DONTNEED)
	if w.Valid() {
		t.Fatal("valid after DONTNEED")
	}
	var got []mm.Record
	if s := w.Drain(func(r *mm.Record) { got = append(got, *r) }); s != feed.Fresh {
		t.Fatal(s)
	}
	t.Logf("%+v", got)
	if len(got) != 1 || got[0].Kind != mm.Zap || got[0].Range != (mm.Range{Start: start + 4096, End: start + 8192}) {
		t.Fatal(got)
	}
	if !w.Valid() {
		t.Fatal("not valid after drain")
	}
	w.Forget(r)
	unix.Munmap(b)
	t.Logf("%+v", w.Stats())
}
