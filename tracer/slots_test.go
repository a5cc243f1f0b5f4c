// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"os"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func pidfdOf(t testing.TB, p *tracee) int {
	t.Helper()
	fd, err := unix.PidfdOpen(p.pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	return fd
}

// waitReady waits until a tracer has as many slots ready as it should.
func (t *Tracer) waitReady(tb testing.TB) {
	tb.Helper()
	for start := time.Now(); ; time.Sleep(100 * time.Microsecond) {
		t.slots.mu.Lock()
		n, gone := len(t.slots.ready), len(t.slots.gone)
		t.slots.mu.Unlock()
		if n >= t.slots.keep && gone == 0 {
			return
		}
		if time.Since(start) > 20*time.Second {
			tb.Fatalf("%d slots are ready, want %d", n, t.slots.keep)
		}
	}
}

func openReady(tb testing.TB, o Options) *Tracer {
	tb.Helper()
	tr, err := Open(o)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := tr.Close(); err != nil {
			tb.Errorf("close tracer: %v", err)
		}
	})
	tr.waitReady(tb)
	return tr
}

// A daemon's whole way from a pidfd to a feed it can hand out.
func BenchmarkOpenFeedOf(b *testing.B) {
	for name, ready := range map[string]int{"ready": 16, "not-ready": 0} {
		b.Run(name, func(b *testing.B) {
			tr := openReady(b, Options{Ready: ready})
			fd := pidfdOf(b, startTracee(b))
			b.ResetTimer()
			var took []time.Duration
			for range b.N {
				start := time.Now()
				f, err := tr.OpenFeedOf(fd, FeedOptions{})
				if err != nil {
					b.Fatal(err)
				}
				if still, err := f.StillOf(fd); !still || err != nil {
					b.Fatal(still, err)
				}
				b.StopTimer()
				took = append(took, time.Since(start))
				f.Close()
				tr.waitReady(b)
				b.StartTimer()
			}
			slices.Sort(took)
			for name, at := range map[string]int{"p10": b.N / 10, "p50": b.N / 2, "p90": b.N * 9 / 10} {
				b.ReportMetric(float64(took[at].Microseconds()), name+"-us/op")
			}
		})
	}
}

func BenchmarkCloseFeed(b *testing.B) {
	tr := openReady(b, Options{Ready: 16})
	p := startTracee(b)
	b.ResetTimer()
	for range b.N {
		b.StopTimer()
		f, err := tr.OpenFeed(PID(p.pid), FeedOptions{})
		if err != nil {
			b.Fatal(err)
		}
		tr.waitReady(b)
		b.StartTimer()
		if err := f.Close(); err != nil {
			b.Fatal(err)
		}
	}
}

// All ranks of a job come at once.
func Benchmark256Opens(b *testing.B) {
	tr := openReady(b, Options{Ready: 16})
	var fds [8]int
	for i := range fds {
		fds[i] = pidfdOf(b, startTracee(b))
	}
	var feeds [256]*Feed
	b.ResetTimer()
	for range b.N {
		var g sync.WaitGroup
		for i := range feeds {
			g.Go(func() {
				f, err := tr.OpenFeedOf(fds[i%len(fds)], FeedOptions{})
				if err != nil {
					b.Error(err)
					return
				}
				if still, err := f.StillOf(fds[i%len(fds)]); !still || err != nil {
					b.Error(still, err)
				}
				feeds[i] = f
			})
		}
		g.Wait()
		b.StopTimer()
		for _, f := range feeds {
			if f != nil {
				f.Close()
			}
		}
		tr.waitReady(b)
		b.StartTimer()
	}
}

// Feeds open and close while every process changes its memory: each feed sees
// what happens after it was opened, and nothing of another process.
func TestOpenCloseDuringChanges(t *testing.T) {
	goroutines := goleak.IgnoreCurrent()
	procs := make([]*tracee, 3)
	for i := range procs {
		var stop func()
		procs[i], stop = busy(t, 2)
		defer stop()
	}
	quiet := startTracee(t)
	tr, err := Open(Options{Ready: 4, MaxWatches: 64})
	if err != nil {
		t.Fatal(err)
	}
	tr.waitReady(t)
	fds := descriptors(t)
	made := newObjects()
	var mu sync.Mutex // made
	var g sync.WaitGroup
	for w := range 6 {
		g.Go(func() {
			for i := range max(times(40), 3) {
				p := procs[(w+i)%len(procs)]
				o := FeedOptions{RingBytes: 64 << 10 << (i % 3)}
				if w == 5 {
					p = quiet
				}
				f, err := tr.OpenFeed(PID(p.pid), o)
				if err != nil {
					t.Errorf("open: %v", err)
					return
				}
				mu.Lock()
				made.addSlot(t, f.slot)
				mu.Unlock()
				before, err := f.Stats()
				if err != nil {
					t.Error(err)
				}
				if w == 5 {
					if before != (FeedStats{}) {
						t.Errorf("a feed of a quiet process has %+v", before)
					}
				} else {
					for start := time.Now(); ; runtime.Gosched() {
						st, err := f.Stats()
						if err != nil {
							t.Error(err)
							break
						}
						if st.Filtered > before.Filtered {
							break
						}
						if time.Since(start) > 10*time.Second {
							t.Errorf("sees nothing: %+v", st)
							return
						}
					}
				}
				if err := f.Close(); err != nil {
					t.Errorf("close: %v", err)
				}
				if f.Alive() {
					t.Error("alive after Close")
				}
			}
		})
	}
	g.Wait()
	tr.waitReady(t)
	if n := descriptors(t); n != fds {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
	if err := tr.Close(); err != nil {
		t.Fatal(err)
	}
	made.expectGone(t)
	if err := goleak.Find(goroutines); err != nil {
		t.Error(err)
	}
}

// Close comes while feeds open and close.
func TestCloseDuringOpens(t *testing.T) {
	p := startTracee(t)
	for i := range max(times(10), 2) {
		tr, err := Open(Options{Ready: i % 3})
		if err != nil {
			t.Fatal(err)
		}
		var g sync.WaitGroup
		var opened atomic.Int32
		for range 8 {
			g.Go(func() {
				for {
					f, err := tr.OpenFeed(PID(p.pid), FeedOptions{})
					if errors.Is(err, os.ErrClosed) {
						return
					}
					if err != nil {
						t.Errorf("open: %v", err)
						return
					}
					opened.Add(1)
					if _, err := f.StillOf(-1); err == nil {
						t.Error("no error for a descriptor that is none")
					}
					f.Settled()
					f.Stats()
					if opened.Load()%2 == 0 {
						continue // the tracer closes it
					}
					if err := f.Close(); err != nil {
						t.Errorf("close: %v", err)
					}
				}
			})
		}
		for opened.Load() < 10 {
			runtime.Gosched()
		}
		if err := tr.Close(); err != nil {
			t.Fatal(err)
		}
		g.Wait()
		if n := tr.streamCount(); n != 0 {
			t.Errorf("%d places are taken", n)
		}
	}
}

// A tracer's watches have a limit; what is ready does not count, and a place
// that was given back can be had at once.
func TestLimitWatches(t *testing.T) {
	tr := openReady(t, Options{MaxWatches: 3, Ready: 2})
	p := startTracee(t)
	var feeds []*Feed
	for range 3 {
		feeds = append(feeds, openFeed(t, tr, PID(p.pid)))
	}
	for range 20 {
		_, err := tr.OpenFeed(PID(p.pid), FeedOptions{})
		var limit *LimitError
		if !errors.As(err, &limit) || limit.Limit != LimitWatches || !errors.Is(err, ErrTooMany) {
			t.Fatalf("one more: %v", err)
		}
		if _, err := tr.Watch(PID(p.pid), WatchOptions{}); !errors.Is(err, ErrTooMany) {
			t.Fatalf("a stream more: %v", err)
		}
		if err := feeds[0].Close(); err != nil {
			t.Fatal(err)
		}
		feeds[0] = openFeed(t, tr, PID(p.pid))
	}
}

// What a watch costs the kernel, with the default ring: what ranks pay.
func TestFeedBytes(t *testing.T) {
	f := openFeed(t, shared, Self())
	n, err := f.Bytes()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d bytes", n)
	if n < f.RingBytes() || n > 1<<20 {
		t.Errorf("%d bytes, want at most 1 MiB", n)
	}
}
