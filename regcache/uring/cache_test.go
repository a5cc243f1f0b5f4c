// SPDX-License-Identifier: Apache-2.0

package uring

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

// liveCache is a cache over r whose feed is valid and hears of nothing.
func liveCache(r *Ring, o regcache.Options) (*regcache.Cache[Buf], func() error, error) {
	p, err := feedtest.New(feedtest.Options{})
	if err != nil {
		return nil, nil, err
	}
	w, err := p.Watch()
	if err != nil {
		p.Close()
		return nil, nil, err
	}
	c, err := regcache.New(w, r, o)
	if err != nil {
		p.Close()
		return nil, nil, errors.Join(err, w.Close())
	}
	return c, func() error {
		defer p.Close()
		return errors.Join(c.Close(), w.Close())
	}, nil
}

// TestSmallTable is case I1: a device with few slots and many buffers.
func TestSmallTable(t *testing.T) {
	const slots, buffers = 64, 10000
	r := openRing(t, Options{Slots: slots})
	c, done, err := liveCache(r, regcache.Options{})
	if err != nil {
		t.Fatal(err)
	}
	m, all := private(t, buffers)
	page := os.Getpagesize()
	src := file(t, pattern(4*page, 5))
	want := pattern(4*page, 5)
	for i := range buffers {
		rng := part(all, i*page, page)
		off := i % 3000
		for range 2 { // the second one hits
			ref, err := c.Acquire(rng, rw)
			if err != nil {
				t.Fatalf("buffer %d: %v", i, err)
			}
			if n, err := r.ReadFixed(src, int64(off), ref.Handle(), rng); n != page || err != nil {
				t.Fatalf("buffer %d: %d, %v", i, n, err)
			}
			ref.Release()
			if n := r.Stats().Registered; n > slots {
				t.Fatalf("%d buffers registered in %d slots", n, slots)
			}
		}
		if !bytes.Equal(m[i*page:(i+1)*page], want[off:off+page]) {
			t.Fatalf("buffer %d does not have its bytes", i)
		}
	}
	if s := c.Stats(); s.Hits != buffers || s.Misses != buffers || s.Registrations != buffers {
		t.Errorf("%d hits, %d misses, %d registrations, want %d of each", s.Hits, s.Misses, s.Registrations, buffers)
	}
	if n := r.Stats().Registered; n != slots {
		t.Errorf("%d slots used at the end, want all %d", n, slots)
	}

	// All in use: nothing to evict.
	var held []regcache.Ref[Buf]
	for i := range slots {
		ref, err := c.Acquire(part(all, i*page, page), rw)
		if err != nil {
			t.Fatal(err)
		}
		held = append(held, ref)
	}
	_, err = c.Acquire(part(all, slots*page, page), rw)
	var full *TableError
	if !errors.As(err, &full) || !errors.Is(err, regcache.ErrLimit) {
		t.Errorf("error %v, want a TableError in a LimitError", err)
	}
	for _, ref := range held {
		ref.Release()
	}
	if err := done(); err != nil {
		t.Error(err)
	}
}

// memlockThroughCache is case I10 with a cache in between: what is idle makes
// room, what is in use does not.
func memlockThroughCache(r *Ring, limit uint64, first, second mm.Range) error {
	c, done, err := liveCache(r, regcache.Options{})
	if err != nil {
		return err
	}
	ref, err := c.Acquire(first, rw)
	if err != nil {
		return fmt.Errorf("first of two: %w", err)
	}
	_, err = c.Acquire(second, rw)
	var full *regcache.LimitError
	if !errors.As(err, &full) || !errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("over the limit, nothing idle: %w, want a LimitError", err)
	}
	if full.Limit != limit || full.Need != second.Len() || full.Use < first.Len() {
		return fmt.Errorf("limit %d, in use %d, need %d", full.Limit, full.Use, full.Need)
	}
	ref.Release()
	ref, err = c.Acquire(second, rw)
	if err != nil {
		return fmt.Errorf("over the limit, the first one idle: %w", err)
	}
	ref.Release()
	if s := c.Stats(); s.Evicted != 1 {
		return fmt.Errorf("%d evicted, want 1", s.Evicted)
	}
	return done()
}
