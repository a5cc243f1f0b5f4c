// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"context"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/tracer"
)

func withCancel(t *testing.T) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	return ctx, cancel
}

func now() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts); err != nil {
		panic(err)
	}
	return time.Duration(ts.Nano())
}

// cpu is the processor time of this process.
func cpu() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_PROCESS_CPUTIME_ID, &ts); err != nil {
		panic(err)
	}
	return time.Duration(ts.Nano())
}

// nowhere is a device that does nothing.
type nowhere struct{}

func (nowhere) Register(mm.Range, regcache.Access) (int, error) { return 0, nil }
func (nowhere) Deregister(int) error                            { return nil }

// purging is a device whose calls make the program that owns the memory
// allocate and free 64 MiB, which its allocator gives back at once.
type purging struct {
	mu    sync.Mutex // guards what follows: the program makes one call at a time
	p     *target
	live  int
	calls int
}

func (d *purging) purge() error {
	d.calls++
	_, err := d.p.ask("purge 1 %d", 64<<20)
	return err
}

func (d *purging) Register(mm.Range, regcache.Access) (int, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.live++
	return d.calls, d.purge()
}

func (d *purging) Deregister(int) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.live--
	return d.purge()
}

// Cases H2, H3, H4: registering and deregistering allocate and free, and the
// allocator gives the pages back inside of these calls: no hang, and what that
// does not touch stays in the cache.
func TestRegistrarUnderAllocator(t *testing.T) {
	const rounds = 10
	for _, a := range preloads {
		t.Run(a.name, func(t *testing.T) {
			watchdog(t)
			p := start(t, "dynamic", preload(t, a.lib, a.env)...)
			w, err := local.Open(local.Options{PID: p.pid})
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			s := watch(t, shared, p.pid, tracer.WatchOptions{Kinds: []mm.Kind{mm.Unmap, mm.Zap, mm.Protect, mm.Replace}})
			d := &purging{p: p}
			c, err := regcache.New(w, d, regcache.Options{MaxEntries: 3})
			if err != nil {
				t.Fatal(err)
			}
			ctx, cancel := withCancel(t)
			ended := make(chan error, 1)
			go func() { ended <- c.Run(ctx) }()
			for i := range rounds {
				r := p.pages(i%8, 1)
				for k := range 2 {
					before := c.Stats().Hits
					ref, err := c.Acquire(r, regcache.LocalWrite)
					if err != nil {
						t.Fatal(err)
					}
					ok, why := ref.Cached()
					if !ok && why != regcache.ReasonBusy {
						t.Errorf("round %d: %v", i, why)
					}
					ref.Release()
					if hit := c.Stats().Hits > before; hit && k == 0 {
						t.Errorf("round %d: hit of what was evicted or dropped", i)
					}
				}
			}
			st := c.Stats()
			if st.Hits == 0 {
				t.Errorf("no hits: %+v", st)
			}
			cancel()
			<-ended
			if err := c.Close(); err != nil {
				t.Error(err)
			}
			if d.live != 0 || d.calls < rounds {
				t.Errorf("%d registrations left, %d calls", d.live, d.calls)
			}
			made := whole(t, s)
			if len(made) < d.calls {
				t.Errorf("%d calls, and only %d records: the allocator gave nothing back", d.calls, len(made))
			}
			t.Logf("%d calls, %d hits, %d records", d.calls, st.Hits, len(made))
		})
	}
}
