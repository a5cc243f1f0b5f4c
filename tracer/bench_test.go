// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// madvise is DONTNEED of one page, so many times.
var madvise = fmt.Sprintf("call %%d %d A %d %d", unix.SYS_MADVISE, mm.PageSize(), unix.MADV_DONTNEED)

// BenchmarkStream is end to end: a C program changes its memory as fast as it
// can, a goroutine reads the records. One operation is one record made; the
// lost share is what the reader did not keep up with.
func BenchmarkStream(b *testing.B) {
	for name, call := range map[string]string{
		"madvise": madvise,
		"munmap":  fmt.Sprintf("call %%d %d A+1 %d", unix.SYS_MUNMAP, mm.PageSize()),
	} {
		b.Run(name, func(b *testing.B) {
			p := startTracee(b)
			s := watch(b, shared, PID(p.pid), WatchOptions{RingBytes: 64 << 20})
			read := make(chan uint64)
			go func() {
				var r mm.Record
				var n uint64
				for {
					err := s.Read(&r)
					if errors.Is(err, ErrFlushed) {
						break
					}
					if err != nil {
						b.Error(err)
						break
					}
					if r.Kind != mm.Lost {
						n++
					}
				}
				read <- n
			}()
			b.ReportAllocs()
			b.ResetTimer()
			p.do(b, call, (b.N+1)/2) // two records a call
			if err := s.Flush(); err != nil {
				b.Fatal(err)
			}
			n := <-read
			b.StopTimer()
			b.ReportMetric(float64(n)/b.Elapsed().Seconds(), "records/s")
			b.ReportMetric(100*float64(s.Stats().Lost)/float64(b.N), "%lost")
		})
	}
}

// BenchmarkRead is the reader alone: the ring is full when it begins.
func BenchmarkRead(b *testing.B) {
	p := startTracee(b)
	s := watch(b, shared, PID(p.pid), WatchOptions{RingBytes: 64 << 20})
	const batch = 200_000
	var r mm.Record
	b.ReportAllocs()
	for i := 0; i < b.N; i++ {
		if i%batch == 0 {
			b.StopTimer()
			p.do(b, madvise, batch/2)
			b.StartTimer()
		}
		if err := s.Read(&r); err != nil {
			b.Fatal(err)
		}
	}
	b.StopTimer()
	if st := s.Stats(); st.Lost != 0 {
		b.Fatalf("%d lost", st.Lost)
	}
}

// BenchmarkTarget is the processor time that one call costs its thread: munmap of
// one touched page and madvise(DONTNEED) of an untouched one, with nothing
// loaded, with the hooks attached but another process watched, and watched.
func BenchmarkTarget(b *testing.B) {
	p, other := startTracee(b), startTracee(b)
	ns := func(b *testing.B, format string, at int) {
		const most = 100_000 // pages mapped at once
		var total int64
		for left := b.N; left > 0; left -= most {
			w := p.do(b, format, min(left, most))
			total += w[at]
		}
		b.ReportMetric(float64(total)/float64(b.N), "ns/call")
		b.ReportMetric(0, "ns/op")
	}
	all := func(b *testing.B) {
		b.Run("munmap", func(b *testing.B) { ns(b, "sweep %d", 0) })
		b.Run("madvise", func(b *testing.B) { ns(b, madvise, 1) })
		b.Run("getppid", func(b *testing.B) { ns(b, fmt.Sprintf("call %%d %d", unix.SYS_GETPPID), 1) })
	}
	// other tests of this process share a tracer: without hooks means without it
	if err := shared.Close(); err != nil {
		b.Fatal(err)
	}
	defer func() {
		var err error
		if shared, err = Open(Options{}); err != nil {
			b.Fatal(err)
		}
	}()
	b.Run("none", all)
	tr, err := Open(Options{})
	if err != nil {
		b.Fatal(err)
	}
	defer tr.Close()
	watch(b, tr, PID(other.pid), WatchOptions{})
	b.Run("attached", all)
	s := watch(b, tr, PID(p.pid), WatchOptions{RingBytes: 1 << 20})
	done := make(chan error)
	go func() {
		var r mm.Record
		for {
			if err := s.Read(&r); err != nil {
				done <- err
				return
			}
		}
	}()
	b.Run("watched", all)
	s.Close()
	<-done
}

// BenchmarkOpen is Open and Close of a tracer, BenchmarkWatch of one stream.
func BenchmarkOpen(b *testing.B) {
	var closing time.Duration
	for b.Loop() {
		tr, err := Open(Options{})
		if err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		if err := tr.Close(); err != nil {
			b.Fatal(err)
		}
		closing += time.Since(start)
	}
	b.ReportMetric(closing.Seconds()*1e3/float64(b.N), "ms-closing")
}

func BenchmarkWatch(b *testing.B) {
	p := startTracee(b)
	var closing time.Duration
	for b.Loop() {
		s, err := shared.Watch(PID(p.pid), WatchOptions{RingBytes: unix.Getpagesize()})
		if err != nil {
			b.Fatal(err)
		}
		start := time.Now()
		if err := s.Close(); err != nil {
			b.Fatal(err)
		}
		closing += time.Since(start)
	}
	b.ReportMetric(closing.Seconds()*1e3/float64(b.N), "ms-closing")
}
