// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"errors"
	"testing"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
)

// Case B9: any address and any length above 0 can be watched, and is rounded
// outward by the feed; what is no range is refused with a reason.
func TestRanges(t *testing.T) {
	const top = 1 << 63
	for _, c := range []struct {
		name   string
		at     mm.Addr
		length uint64
		want   error
	}{
		{"unaligned", 0x7f0000000780, 408, nil},
		{"a byte", 1, 1, nil},
		{"up to the middle", top - 1, 1, nil},
		{"empty", 0x1000, 0, mm.ErrEmptyRange},
		{"empty at 0", 0, 0, mm.ErrEmptyRange},
		{"wraps", 0x1000, 1<<64 - 0x1000 + 1, mm.ErrWraps},
		{"wraps to 0", 0x1000, 1<<64 - 0x1000, mm.ErrWraps},
		{"kernel", 0xffff888000000000, 0x1000, mm.ErrKernelAddr},
		{"into the kernel", top - 1, 2, mm.ErrKernelAddr},
	} {
		r, err := mm.MakeRange(c.at, c.length)
		if !errors.Is(err, c.want) || c.want == nil && (r.Start != c.at || r.Len() != c.length) || c.want != nil && err == nil {
			t.Errorf("%s: %v, %v, want %v", c.name, r, err, c.want)
		}
	}
}

// Case B9 with the kernel in it: 408 bytes at an odd address, in one page and
// over the end of one.
func TestOddBytesAreWatched(t *testing.T) {
	p := start(t, "dynamic")
	w, err := local.Open(local.Options{PID: p.pid})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, off := range []mm.Addr{0x780, page - 1, page - 408} {
		at := p.area + 8*page + off
		r := mm.Range{Start: at, End: at + 408}
		if v := w.Commit(w.Begin(r), nil, func() {}); v != feed.Cacheable {
			t.Fatalf("%v: %v", r, v)
		}
		p.do("random 200 9") // somewhere in the area
		touched := 0
		w.Drain(func(rec *mm.Record) {
			if rec.Touches(r.Pages()) {
				touched++
			}
		})
		if touched == 0 {
			t.Errorf("%v: no record of its pages", r)
		}
		w.Forget(r)
	}
}
