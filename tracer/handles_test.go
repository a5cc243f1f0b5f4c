// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/ummu/ummu/bpf/layout"
)

// maxFeeds is how many feeds one address space can have: DIRECT_REFS and
// CROWD_REFS of bpf/watch.bpf.h.
const maxFeeds = 12 + 116

// A process may have a hundred handles, as many libraries in it do: each sees
// every change, and no other is worse off for one that is closed.
func TestHundredHandles(t *testing.T) {
	tr, p, q := own(t), startTracee(t), startTracee(t)
	var feeds []*Feed
	var pages []*layout.Status
	for range maxFeeds {
		f := openFeed(t, tr, PID(p.pid))
		feeds = append(feeds, f)
		pages = append(pages, statusOf(t, f))
	}
	_, err := tr.OpenFeed(PID(p.pid), FeedOptions{})
	var limit *LimitError
	if !errors.Is(err, ErrTooMany) || !errors.As(err, &limit) || limit.Limit != LimitPerSpace {
		t.Fatalf("one more: %v", err)
	}
	if n := tr.streamCount(); n != maxFeeds {
		t.Fatalf("%d places taken, want %d", n, maxFeeds)
	}
	other := statusOf(t, openFeed(t, tr, PID(q.pid))) // nobody else is affected
	p.zap(t, 1)
	want := func(n uint64, who func(i int) bool) {
		t.Helper()
		for i, st := range pages {
			if !who(i) {
				continue
			}
			if b, e := begun(st), inFlight(st); b != n || e != 0 {
				t.Errorf("feed %d: %d changes, %d in flight; want %d and 0", i, b, e, n)
			}
		}
	}
	all := func(int) bool { return true }
	want(1, all)
	// close two of three, the last ones among them
	open := func(i int) bool { return i%3 == 0 }
	for i, f := range feeds {
		if !open(i) {
			if err := f.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	p.zap(t, 2)
	want(2, open)
	want(1, func(i int) bool { return !open(i) })
	// the places are used again
	for i := range feeds {
		if !open(i) {
			feeds[i] = openFeed(t, tr, PID(p.pid))
			pages[i] = statusOf(t, feeds[i])
		}
	}
	p.zap(t, 3)
	want(3, open)
	want(1, func(i int) bool { return !open(i) })
	if n := begun(other); n != 0 {
		t.Errorf("%d changes of another process", n)
	}
	// all die with their address space
	p.cmd.Process.Kill()
	p.end()
	for i, st := range pages {
		eventually(t, "death of a feed", func() bool { return atomic.LoadUint64(&st.Deaths) != 0 })
		if f := feeds[i]; f.Alive() {
			t.Errorf("feed %d is alive", i)
		}
	}
	n := 0
	var key uint64
	value := make([]byte, tr.objs.Crowds.ValueSize())
	for it := tr.objs.Crowds.Iterate(); it.Next(&key, &value); {
		n++
	}
	if n != 0 {
		t.Errorf("%d crowds are left", n)
	}
}

// A change that finds no room to be tracked ends every watch of the space.
func TestHundredWithoutRoomToTrack(t *testing.T) {
	tr, p := own(t), startTracee(t)
	var pages []*layout.Status
	for range 40 {
		pages = append(pages, statusOf(t, openFeed(t, tr, PID(p.pid))))
	}
	tr.fillTasks(t)
	p.zap(t, 1)
	for i, st := range pages {
		if atomic.LoadUint64(&st.Untracked) == 0 || generation(st) < layout.GenDeath {
			t.Errorf("feed %d is alive", i)
		}
	}
}
