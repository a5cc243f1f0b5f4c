// SPDX-License-Identifier: Apache-2.0

package source

import (
	"context"
	"os"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/target"
	"github.com/ummu/ummu/internal/top"
	"github.com/ummu/ummu/tracer"
)

// openLive is a source over the processes of a target.
func openLive(t *testing.T, of tracer.Target) *Live {
	t.Helper()
	tr, err := tracer.Open(tracer.Options{Tier: tracer.TierSyscall})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	})
	meta, err := target.NewMeta(tr.Coverage(), "")
	if err != nil {
		t.Fatal(err)
	}
	a, err := activity.New(activity.Options{Start: meta.Start.Sub(meta.MonotonicZero), Self: uint32(os.Getpid())})
	if err != nil {
		t.Fatal(err)
	}
	l := NewLive(tr, meta, a, nil, "test")
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	s, err := tr.Watch(of, tracer.WatchOptions{})
	if err != nil {
		t.Fatal(err)
	}
	l.Read(s)
	return l
}

// What the watcher does to its own memory is not counted, and does not keep it
// busy: collecting its garbage N times makes about as many records however
// long it has watched itself.
func TestItself(t *testing.T) {
	l := openLive(t, tracer.All())
	own := func() uint64 {
		// Behind a change of ours that is counted everything before is too.
		before := look(t, l).Own
		page, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			t.Fatal(err)
		}
		if err := unix.Munmap(page); err != nil {
			t.Fatal(err)
		}
		for {
			if now := look(t, l).Own; now > before {
				return now
			}
			runtime.Gosched()
		}
	}
	const collections = 50
	collect := func() uint64 {
		from := own()
		for range collections {
			runtime.GC()
			look(t, l) // makes garbage, as the screen does
		}
		return own() - from
	}
	collect() // the heap finds its size
	first, second := collect(), collect()
	if second > 3*first+1000 {
		t.Errorf("%d records of itself in %d collections, then %d", first, collections, second)
	}
	s := look(t, l)
	for _, p := range s.Processes {
		if p.PID == uint32(os.Getpid()) {
			t.Errorf("it counts itself: %+v", p)
		}
	}
}

func look(t *testing.T, l *Live) *top.State {
	t.Helper()
	s, err := l.State(context.Background(), top.Query{})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Hooks: which are attached; runs are counted only while somebody wants them.
func TestHooksAreCountedOnDemand(t *testing.T) {
	l := openLive(t, tracer.Self())
	if s := look(t, l); len(s.Hooks) == 0 || s.Hooks[0].Counted || l.counting != nil {
		t.Fatalf("%+v", s.Hooks)
	}
	hooks := func() (runs uint64) {
		s, err := l.State(context.Background(), top.Query{Hooks: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, h := range s.Hooks {
			if !h.Counted {
				t.Fatalf("%s is not counted: %v", h.Name, s.Missing)
			}
			runs += h.Runs
		}
		return runs
	}
	before := hooks()
	for range 100 {
		unix.Getppid()
	}
	if n := hooks() - before; n < 200 {
		t.Errorf("%d runs in 100 calls", n)
	}
	if look(t, l); l.counting != nil {
		t.Error("runs are counted on")
	}
}
