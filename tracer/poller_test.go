// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf"
	"github.com/ummu/ummu/bpf/layout"
)

// While the process that should read the counters of skipped programs is
// stopped, everything is doubtful: the kernel's timer says so, again and again.
func TestStoppedPoller(t *testing.T) {
	o := startOwner(t, "polled")
	if err := o.cmd.Process.Signal(unix.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		word, misses := atomic.LoadUint64(&o.epoch.Word), atomic.LoadUint64(&o.epoch.Misses)
		eventually(t, "a loss for everybody", func() bool { return atomic.LoadUint64(&o.epoch.Word) > word })
		if now := atomic.LoadUint64(&o.epoch.Word); now-word < layout.GenLoss || o.dead() {
			t.Errorf("time %d: epoch %#x, was %#x, want a loss", i, now, word)
		}
		if atomic.LoadUint64(&o.epoch.Misses) == misses {
			t.Error("nothing is counted as missed")
		}
	}
	if err := o.cmd.Process.Signal(unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	o.expectDeathFirst(t, func() { o.cmd.Process.Kill() })
}

// Nothing is lost while it runs, and when nothing is watched nobody looks.
func TestPollerRunsWhileWatched(t *testing.T) {
	p := startTracee(t)
	tr := polled(t)
	barks, beat := func() (n uint64) { tr.objs.Barks.Get(&n); return }, func() (n uint64) { tr.objs.BeatNs.Get(&n); return }
	f := openFeed(t, tr, PID(p.pid))
	s := watch(t, tr, PID(p.pid), WatchOptions{})
	eventually(t, "five looks in a row in time", func() bool {
		n := barks()
		for range 5 {
			b := beat()
			eventually(t, "a look", func() bool { return beat() != b })
		}
		return barks() == n
	})
	running := func() bool {
		tr.mu.Lock()
		defer tr.mu.Unlock()
		return tr.poller != nil
	}
	if err := f.Close(); err != nil || !running() {
		t.Errorf("%v; runs: %v, want it as long as the stream is open", err, running())
	}
	if err := s.Close(); err != nil || running() {
		t.Errorf("%v; it runs and nothing is watched", err)
	}
	tr.pollers.Wait() // else this hangs
	openFeed(t, tr, PID(p.pid))
	if !running() {
		t.Error("does not run again")
	}
	b := beat()
	eventually(t, "a look", func() bool { return beat() != b })
}

// Where no program can be skipped nobody looks.
func TestPollerNotNeeded(t *testing.T) {
	p := startTracee(t)
	openFeed(t, shared, PID(p.pid))
	o := Options{Tier: TierSyscall}
	if must := skippable(shared.hooks, programs(t), o.skipped(), Preemptible()); shared.mustPoll != must {
		t.Errorf("mustPoll %v, want %v", shared.mustPoll, must)
	}
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if (shared.poller != nil) != shared.mustPoll || (shared.objs.StartWatchdog != nil) != shared.mustPoll {
		t.Errorf("poller runs: %v, must: %v", shared.poller != nil, shared.mustPoll)
	}
}

func programs(t *testing.T) map[string]*ebpf.ProgramSpec {
	t.Helper()
	spec, err := bpf.LoadSyscall()
	if err != nil {
		t.Fatal(err)
	}
	return spec.Programs
}

// Which programs of which tier may be skipped.
func TestSkippable(t *testing.T) {
	specs := programs(t)
	for _, c := range []struct {
		tier                  Tier
		raw, preempts, expect bool
	}{
		{TierSyscall, false, false, false},
		{TierSyscall, false, true, false},
		{TierSyscall, true, false, true}, // 7.0
		{TierNotifierTracepoint, false, true, false},
		{TierNotifierTracepoint, true, true, true},
		{TierNotifierProbe, false, false, false},
		{TierNotifierProbe, false, true, true},
		{TierNotifierProbe, true, true, true},
	} {
		if got := skippable(hooksOf(c.tier), specs, c.raw, c.preempts); got != c.expect {
			t.Errorf("%v, raw tracepoints %v, preemptible %v: %v", c.tier, c.raw, c.preempts, got)
		}
	}
}

// Counters that cannot be read are a loss for everybody, for as long as that
// lasts, and no watch opens meanwhile.
func TestPollerCannotRead(t *testing.T) {
	tr, p := polled(t), startTracee(t)
	ep := epochOf(t, openFeed(t, tr, PID(p.pid)))
	s := watch(t, tr, PID(p.pid), WatchOptions{})
	fails := func(*ebpf.Program) (uint64, error) { return 0, unix.EIO }
	set := func(f func(*ebpf.Program) (uint64, error)) {
		tr.mu.Lock()
		tr.skipped = f
		tr.mu.Unlock()
	}
	set(fails)
	for range 2 {
		word, missed := atomic.LoadUint64(&ep.Word), s.Stats().Missed
		eventually(t, "a loss for the feed", func() bool { return atomic.LoadUint64(&ep.Word)-word >= layout.GenLoss })
		eventually(t, "a loss for the stream", func() bool { return s.Stats().Missed > missed })
	}
	set(recursionMisses)
	other := polled(t)
	other.skipped = fails
	if f, err := other.OpenFeed(PID(p.pid), FeedOptions{}); !errors.Is(err, unix.EIO) {
		if err == nil {
			f.Close()
		}
		t.Errorf("open feed: %v, want EIO", err)
	}
}
