// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"testing"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

func TestSmoke(t *testing.T) {
	p, err := feedtest.New(feedtest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	w, err := p.Watch()
	if err != nil {
		t.Fatal(err)
	}
	if !w.Valid() {
		t.Fatal("new watch not valid")
	}
	r := mm.Range{Start: 0x10000, End: 0x20000}
	tk := w.Begin(r)
	in := false
	if v := w.Commit(tk, nil, func() { in = true }); v != feed.Cacheable || !in {
		t.Fatal(v)
	}
	p.Change(mm.Unmap, r)
	if w.Valid() {
		t.Fatal("valid")
	}
	n := 0
	if s := w.Drain(func(r *mm.Record) { n++ }); s != feed.Fresh || n != 1 || !w.Valid() {
		t.Fatal(s, n)
	}
	p.Kill()
	if s := w.Drain(func(r *mm.Record) { n++ }); s != feed.DeadState || n != 2 || w.Valid() {
		t.Fatal(s, n)
	}
	w.Close()
	p.Close()
}
