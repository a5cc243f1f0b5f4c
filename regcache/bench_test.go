// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

// noDevice registers nothing.
type noDevice struct{}

func (noDevice) Register(mm.Range, Access) (uint32, error) { return 1, nil }
func (noDevice) Deregister(uint32) error                   { return nil }

// benchCache returns a cache of n idle entries, one page every two, and their
// ranges in random order.
func benchCache(b *testing.B, n int) (*Cache[uint32], *feedtest.Producer, []mm.Range) {
	b.Helper()
	p, err := feedtest.New(feedtest.Options{})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(p.Close)
	w, err := p.Watch()
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { w.Close() })
	c, err := New[uint32](w, noDevice{}, Options{MaxEntries: 1 << 20})
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { c.Close() })
	ranges := make([]mm.Range, n)
	for i := range ranges {
		ranges[i] = pages(uint64(2*i), uint64(2*i+1))
		use(b, c, ranges[i])
	}
	rand.Shuffle(n, func(i, j int) { ranges[i], ranges[j] = ranges[j], ranges[i] })
	return c, p, ranges
}

func use(b *testing.B, c *Cache[uint32], r mm.Range) {
	ref, err := c.Acquire(r, LocalWrite)
	if err != nil {
		b.Fatal(err)
	}
	ref.Release()
}

// A hit and its release, with the coherence check of both.
func BenchmarkHit(b *testing.B) {
	for _, n := range []int{1, 200, 10_000, 100_000} {
		b.Run(fmt.Sprintf("entries=%d", n), func(b *testing.B) {
			c, _, ranges := benchCache(b, n)
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				use(b, c, ranges[i])
				if i++; i == n {
					i = 0
				}
			}
			hitsOnly(b, c, n)
		})
	}
}

// The same in as many goroutines as CPUs, over the same entries.
func BenchmarkHitParallel(b *testing.B) {
	for _, n := range []int{1, 200, 10_000, 100_000} {
		b.Run(fmt.Sprintf("entries=%d", n), func(b *testing.B) {
			c, _, ranges := benchCache(b, n)
			b.ReportAllocs()
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				i := rand.IntN(n)
				for pb.Next() {
					ref, err := c.Acquire(ranges[i], LocalWrite)
					if err != nil {
						b.Error(err)
						return
					}
					ref.Release()
					if i++; i == n {
						i = 0
					}
				}
			})
			hitsOnly(b, c, n)
		})
	}
}

func hitsOnly(b *testing.B, c *Cache[uint32], n int) {
	if s := c.Stats(); s.Misses != uint64(n) || s.Hits < uint64(b.N) {
		b.Errorf("%d misses, %d hits", s.Misses, s.Hits)
	}
}

// A hit of a part of an entry, found through the trees, under the index lock.
func BenchmarkHitContained(b *testing.B) {
	for _, n := range []int{200, 100_000} {
		b.Run(fmt.Sprintf("entries=%d", n), func(b *testing.B) {
			c, _, ranges := benchCache(b, n)
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				r := ranges[i]
				r.Start += 64
				use(b, c, r)
				if i++; i == n {
					i = 0
				}
			}
			hitsOnly(b, c, n)
		})
	}
}

// A hit when a change elsewhere has to be drained first.
func BenchmarkHitAfterChange(b *testing.B) {
	c, p, ranges := benchCache(b, 200)
	elsewhere := pages(1, 2) // between entries: interesting to the filter
	b.ReportAllocs()
	i := 0
	for b.Loop() {
		p.Change(mm.Zap, elsewhere)
		use(b, c, ranges[i])
		if i++; i == len(ranges) {
			i = 0
		}
	}
}

// A miss in a full cache: registration (of nothing), insertion, eviction and
// deregistration.
func BenchmarkMiss(b *testing.B) {
	for _, n := range []int{200, 100_000} {
		b.Run(fmt.Sprintf("entries=%d", n), func(b *testing.B) {
			c, _, _ := benchCache(b, n)
			c.opt.MaxEntries = n
			b.ReportAllocs()
			i := uint64(2 * n)
			for b.Loop() {
				use(b, c, pages(i, i+1))
				i += 2
				if i > 1<<24 {
					i = uint64(2 * n)
				}
			}
		})
	}
}

// One change that drops one entry of n, the drain, and the miss that brings
// it back.
func BenchmarkInvalidate(b *testing.B) {
	for _, n := range []int{200, 100_000} {
		b.Run(fmt.Sprintf("entries=%d", n), func(b *testing.B) {
			c, p, ranges := benchCache(b, n)
			b.ReportAllocs()
			i := 0
			for b.Loop() {
				p.Change(mm.Unmap, ranges[i])
				use(b, c, ranges[i])
				if i++; i == n {
					i = 0
				}
			}
			if got := c.Stats().Invalidated[mm.Unmap]; got != uint64(b.N) {
				b.Errorf("%d invalidated, want %d", got, b.N)
			}
		})
	}
}

// One change that drops 100,000 overlapping entries.
func BenchmarkInvalidateOverlapping(b *testing.B) {
	const n = 100_000
	c, p, _ := benchCache(b, 1)
	for b.Loop() {
		b.StopTimer()
		for i := range uint64(n) {
			use(b, c, bytes((i%500)*mm.PageSize()+i/500, 501*mm.PageSize()))
		}
		b.StartTimer()
		p.Change(mm.Unmap, pages(500, 501))
		c.refresh()
		b.StopTimer()
		if left := c.Stats().Entries; left > 1 {
			b.Fatalf("%d entries left", left)
		}
		c.reapDead()
		b.StartTimer()
	}
}
