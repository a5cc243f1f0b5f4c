// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf/btf"

	"github.com/ummu/ummu/bpf/layout"
)

func feedOf(t *testing.T, tr *Tracer, fd int) *Feed {
	t.Helper()
	f, err := tr.OpenFeedOf(fd, FeedOptions{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := f.Close(); err != nil {
			t.Errorf("close feed: %v", err)
		}
	})
	return f
}

func (f *Feed) expectStill(t *testing.T, fd int, want bool) {
	t.Helper()
	if still, err := f.StillOf(fd); still != want || err != nil {
		t.Errorf("still of the process: %v, %v; want %v", still, err, want)
	}
}

// A feed is of one address space, whatever becomes of the process behind the
// pidfd: it executes another program, loses its first thread, ends, and
// another process gets its pid.
func TestIdentity(t *testing.T) {
	p, q := startTracee(t), startTracee(t)
	fd, other := pidfdOf(t, p), pidfdOf(t, q)
	f := feedOf(t, shared, fd)
	st := statusOf(t, f)
	p.zap(t, 1)
	q.zap(t, 1)
	if n := begun(st); n != 1 {
		t.Errorf("%d changes, want the one of the process", n)
	}
	f.expectStill(t, fd, true)
	f.expectStill(t, other, false)

	p.tell(t, "exec") // of itself
	p.ready(t)
	f.expectStill(t, fd, false)
	if f.Alive() {
		t.Error("alive though its address space is gone")
	}
	again := feedOf(t, shared, fd)
	again.expectStill(t, fd, true)
	f.expectStill(t, fd, false)

	p.cmd.Process.Kill()
	eventually(t, "no task has the address space", func() bool { still, err := again.StillOf(fd); return !still && err == nil })
	if _, err := shared.OpenFeedOf(fd, FeedOptions{}); !errors.Is(err, ErrNoSpace) { // not waited for yet
		t.Errorf("feed of a zombie: %v, want ErrNoSpace", err)
	}
	p.end()
	again.expectStill(t, fd, false)
	if _, err := shared.OpenFeedOf(fd, FeedOptions{}); !errors.Is(err, ErrNoProcess) {
		t.Errorf("feed of nobody: %v, want ErrNoProcess", err)
	}
}

// The first thread may have ended: the others have the address space.
func TestIdentityWithoutLeader(t *testing.T) {
	p := startTracee(t)
	fd := pidfdOf(t, p)
	before := feedOf(t, shared, fd)
	p.do(t, "mainexit")
	eventually(t, "the first thread has ended", func() bool {
		stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p.pid))
		return err == nil && strings.Contains(string(stat), ") Z ")
	})
	before.expectStill(t, fd, true)
	after := feedOf(t, shared, fd)
	after.expectStill(t, fd, true)
	if before.space != after.space {
		t.Error("two address spaces")
	}
}

// Another process got the pid before it was looked for among the tasks.
func TestIdentityPidUsedAgain(t *testing.T) {
	p, q := startTracee(t), startTracee(t)
	fd := pidfdOf(t, p)
	p.cmd.Process.Kill()
	p.end() // and waits
	if f, err := shared.openFeedOf(fd, q.pid, FeedOptions{}); !errors.Is(err, ErrNoProcess) {
		if f != nil {
			f.Close()
		}
		t.Errorf("a feed of another process: %v", err)
	}
	f := openFeed(t, shared, PID(q.pid))
	if still, err := f.stillOf(fd, q.pid); still || err != nil {
		t.Errorf("still of the process: %v, %v", still, err)
	}
	if n := shared.streamCount(); n != 1 {
		t.Errorf("%d places are taken, want 1", n)
	}
}

// Descriptors that are no pidfds are errors, not processes that have ended.
func TestIdentityOfNoProcess(t *testing.T) {
	f := openFeed(t, shared, Self())
	null, err := os.Open("/dev/null")
	if err != nil {
		t.Fatal(err)
	}
	defer null.Close()
	for _, fd := range []int{-1, int(null.Fd()), f.StatusFD()} {
		if _, err := shared.OpenFeedOf(fd, FeedOptions{}); err == nil || errors.Is(err, ErrNoProcess) {
			t.Errorf("feed of descriptor %d: %v", fd, err)
		}
		if still, err := f.StillOf(fd); still || err == nil {
			t.Errorf("still of descriptor %d: %v, %v", fd, still, err)
		}
	}
}

// A process that executes programs all the time gets a feed of one address
// space that it had during the call, alive or dead, or none, and no other.
func TestIdentityDuringExec(t *testing.T) {
	p := startTracee(t)
	fd := pidfdOf(t, p)
	opened, moved := 0, 0
	for range max(times(40), 5) {
		p.tell(t, "exec")
		f, err := shared.OpenFeedOf(fd, FeedOptions{})
		if err == nil {
			opened++
			_, err := f.StillOf(fd)
			if err := errors.Join(err, f.Close()); err != nil {
				t.Fatal(err)
			}
		} else if moved++; !errors.Is(err, ErrNoSpace) && !errors.Is(err, ErrInFlight) {
			t.Fatalf("open: %v", err)
		}
		p.ready(t)
	}
	if opened == 0 {
		t.Errorf("none of %d was opened", moved)
	}
	f := feedOf(t, shared, fd)
	f.expectStill(t, fd, true)
	st := statusOf(t, f)
	p.zap(t, 1)
	if begun(st) != 1 {
		t.Errorf("%d changes, want 1", begun(st))
	}
}

// A feed without a ring tells of each change by a loss: where the ring is not
// safe in foreign hands there is none.
func TestFeedWithoutRing(t *testing.T) {
	p := startTracee(t)
	f, err := shared.OpenFeed(PID(p.pid), FeedOptions{NoRing: true})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if f.RingFD() != -1 || f.RingBytes() != 0 {
		t.Errorf("ring %d of %d bytes", f.RingFD(), f.RingBytes())
	}
	st := statusOf(t, f)
	in := interestOf(t, f)
	p.zap(t, 1)
	if g := generation(st); g != layout.GenStart || atomic.LoadUint64(&st.Filtered) != 1 {
		t.Errorf("generation %#x by what nobody is interested in", g)
	}
	atomic.StoreUint32(&in.All, 1)
	p.zap(t, 1)
	if g := generation(st); g != layout.GenStart+layout.GenLoss || atomic.LoadUint64(&st.Lost) != 1 {
		t.Errorf("generation %#x, %d lost, want one loss", g, atomic.LoadUint64(&st.Lost))
	}
	if n, err := f.Bytes(); err != nil || n > 64<<10 {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// What the kernel's types say of its ring, with and without the correction.
func TestRingsSafe(t *testing.T) {
	for _, c := range []struct {
		members []string
		want    bool
	}{
		{[]string{"spinlock", "consumer_pos", "producer_pos", "data"}, false},
		{[]string{"spinlock", "consumer_pos", "producer_pos", "pending_pos", "data"}, true},
	} {
		ring := &btf.Struct{Name: "bpf_ringbuf"}
		word := &btf.Int{Name: "unsigned long", Size: 8}
		for i, m := range c.members {
			ring.Members = append(ring.Members, btf.Member{Name: m, Type: word, Offset: btf.Bits(64 * i)})
			ring.Size += 8
		}
		b, err := btf.NewBuilder([]btf.Type{ring}, nil)
		if err != nil {
			t.Fatal(err)
		}
		spec, err := b.Spec()
		if err != nil {
			t.Fatal(err)
		}
		if got, err := ringsSafe(spec); got != c.want || err != nil {
			t.Errorf("%v: %v, %v", c.members, got, err)
		}
	}
	// Every kernel that these tests run on has it; see docs/kernels.md.
	if safe, err := RingsSafe(); err != nil || !safe {
		t.Errorf("here: %v, %v", safe, err)
	}
}
