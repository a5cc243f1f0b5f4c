// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"testing"
	"unsafe"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

func BenchmarkValid(b *testing.B) {
	_, w := pair(b, feedtest.Options{})
	b.ReportAllocs()
	n := 0
	for range b.N { // b.Loop would keep Valid from being inlined
		if w.Valid() {
			n++
		}
	}
	if n != b.N {
		b.Fatal("not valid")
	}
}

// One operation is one record read; writing the records is not timed.
func BenchmarkDrain(b *testing.B) {
	p, w := pair(b, feedtest.Options{Everything: true, RingBytes: 1 << 20})
	b.ReportAllocs()
	const batch = 7000
	n := 0
	apply := func(r *mm.Record) { n++ }
	b.ResetTimer()
	for done := 0; done < b.N; done += batch {
		b.StopTimer()
		for range batch {
			p.Change(mm.Zap, pages(1, 2))
		}
		b.StartTimer()
		if w.Drain(apply) != feed.Fresh {
			b.Fatal("drain")
		}
	}
	if n < b.N {
		b.Fatal(n)
	}
	b.ReportMetric(float64(n)/b.Elapsed().Seconds()/1e6, "Mrecords/s")
}

func benchmarkCommit(b *testing.B, gaps uint32, r mm.Range) {
	_, w := pair(b, feedtest.Options{Gaps: gaps})
	b.ReportAllocs()
	insert := func() {}
	for b.Loop() {
		if v := w.Commit(w.Begin(r), nil, insert); v != feed.Cacheable {
			b.Fatal(v)
		}
		w.Forget(r)
	}
}

func BenchmarkCommit(b *testing.B) {
	b.Run("64KiB", func(b *testing.B) { benchmarkCommit(b, 0, pages(16, 32)) })
	b.Run("128MiB", func(b *testing.B) { benchmarkCommit(b, 0, pages(0, 1<<15)) })
	b.Run("classified", func(b *testing.B) {
		buf := make([]byte, 1<<16)
		start := mm.Addr(uintptr(unsafe.Pointer(&buf[0])))
		benchmarkCommit(b, layout.GapFile, mm.Range{Start: start, End: start + mm.Addr(len(buf))}.Pages())
	})
}
