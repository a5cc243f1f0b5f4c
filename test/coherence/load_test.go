// SPDX-License-Identifier: Apache-2.0

package coherence

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

var loadChanges = flag.Int("load-changes", 20_000, "changes of each thread under load")

// A child process with this environment variable updates a BPF map on two
// threads until it is killed: meanwhile the kernel runs no kprobe program and
// no classic tracepoint program on their processors.
const hammerEnv = "UMMU_TEST_HAMMER"

func hammer() error {
	m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 8, MaxEntries: 1024})
	if err != nil {
		return fmt.Errorf("create map: %w", err)
	}
	defer m.Close()
	failed := make(chan error)
	for range 2 {
		go func() {
			runtime.LockOSThread()
			for i := uint32(0); ; i++ {
				if err := m.Put(i%1024, uint64(i)); err != nil {
					failed <- err
					return
				}
			}
		}()
	}
	fmt.Println("ready")
	return <-failed
}

func startHammer(t *testing.T) {
	t.Helper()
	c := exec.Command("/proc/self/exe")
	c.Env = append(os.Environ(), hammerEnv+"=1")
	c.Stderr = os.Stderr
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Process.Kill()
		c.Wait()
	})
	if _, err := out.Read(make([]byte, 1)); err != nil {
		t.Fatalf("hammer: %v", err)
	}
}

// watchOver opens a watch of the calling process over its own kernel side. If
// letGo the notifier's virtual machine is gone again when it returns: the
// kernel goes on to call the notifier functions, but not KVM.
func watchOver(t *testing.T, tier tracer.Tier, letGo bool, ringBytes int) (*tracer.Tracer, *feed.Watch) {
	t.Helper()
	tr, err := tracer.Open(tracer.Options{Tier: tier})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	})
	if tier == tracer.TierNotifierProbe || tier == tracer.TierNotifierTracepoint {
		n, err := tracer.MakeNotifier()
		if err != nil {
			t.Fatal(err)
		}
		if letGo {
			if err := n.Close(); err != nil {
				t.Fatal(err)
			}
		}
		t.Cleanup(func() { n.Close() })
	}
	f, err := tr.OpenFeed(tracer.Self(), tracer.FeedOptions{RingBytes: ringBytes, Witness: !letGo})
	if err != nil {
		t.Fatal(err)
	}
	m, err := feed.Descriptors{
		Status: f.StatusFD(), Epoch: f.EpochFD(), Interest: f.InterestFD(), Ring: f.RingFD(), RingBytes: f.RingBytes(),
	}.Map()
	if err != nil {
		t.Fatal(errors.Join(err, f.Close()))
	}
	m.Release = f.Close
	if tier != tracer.TierSyscall && tier != tracer.TierNone {
		m.Settle = f.Settled
	}
	w, err := feed.New(m)
	if err != nil {
		m.Unmap()
		t.Fatal(errors.Join(err, f.Close()))
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return tr, w
}

// More threads than processors, and a process that makes the kernel skip
// programs: by the time a change has returned there is a record of it, or a
// loss. Afterwards nothing is in flight.
func TestEveryChangeUnderLoad(t *testing.T) {
	t.Run("notifier kept", func(t *testing.T) { everyChange(t, false) })
	if tier == tracer.TierNotifierProbe { // the only one that works without KVM
		t.Run("notifier let go", func(t *testing.T) {
			if tracer.Preemptible() {
				refusedWithoutWitness(t)
				return
			}
			everyChange(t, true)
		})
	}
}

// Where the kernel may skip all probes of a change there is no feed without a
// machine, whose tracepoint tells.
func refusedWithoutWitness(t *testing.T) {
	tr, err := tracer.Open(tracer.Options{Tier: tier})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	if f, err := tr.OpenFeed(tracer.Self(), tracer.FeedOptions{}); !errors.Is(err, tracer.ErrNoWitness) {
		t.Errorf("feed %v, error %v, want %v", f, err, tracer.ErrNoWitness)
	}
	f, err := tr.OpenFeed(tracer.Self(), tracer.FeedOptions{Witness: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}
}

func everyChange(t *testing.T, letGo bool) {
	tr, w := watchOver(t, tier, letGo, 4<<20)
	startHammer(t)
	const threads = 4
	var seen [threads]atomic.Uint64
	var losses atomic.Uint64
	var blocks [threads]block
	for i := range blocks {
		blocks[i] = mapBlock(t, 16)
		defer blocks[i].unmap(t)
		defer w.Abandon(w.Begin(blocks[i].span()))
	}
	apply := func(r *mm.Record) {
		if r.Kind == mm.Lost {
			losses.Add(1)
		}
		for i := range blocks {
			if r.Touches(blocks[i].span()) {
				seen[i].Add(1)
			}
		}
	}
	var rescued, silent, dead atomic.Uint64
	var g sync.WaitGroup
	start := time.Now()
	for i := range threads {
		g.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			for n := range *loadChanges {
				before, lost := seen[i].Load(), losses.Load()
				blocks[i].part(n%16*page, page).zap(t)
				for {
					s := w.Drain(apply)
					if s == feed.DeadState {
						dead.Add(1)
						return
					}
					if s == feed.Fresh || seen[i].Load() != before {
						break
					}
					runtime.Gosched()
				}
				if seen[i].Load() == before {
					if losses.Load() == lost {
						silent.Add(1)
					}
					rescued.Add(1)
				}
			}
		})
	}
	g.Wait()
	// figures, for docs/kernels.md
	t.Attr("tier", tr.Coverage().Tier.String())
	t.Attr("changes", fmt.Sprint(threads**loadChanges))
	t.Attr("seconds", fmt.Sprintf("%.0f", time.Since(start).Seconds()))
	t.Attr("unrecorded", fmt.Sprint(rescued.Load()))
	t.Attr("silent", fmt.Sprint(silent.Load()))
	misses, err := tr.Misses()
	if err != nil {
		t.Error(err)
	}
	for _, m := range misses {
		if m.Skipped+m.Rescued != 0 {
			t.Logf("%s: skipped %d, rescued %d", m.Name, m.Skipped, m.Rescued)
		}
	}
	t.Logf("%v, %d changes: %d without a record of their own, %d of them without a loss; watch %+v",
		tr.Coverage().Tier, threads**loadChanges, rescued.Load(), silent.Load(), w.Stats())
	if silent.Load() != 0 {
		t.Errorf("%d changes left neither a record nor a loss", silent.Load())
	}
	if dead.Load() != 0 {
		t.Errorf("the watch died")
	}
	// A registration waits 2 ms to see that nothing is in flight, which may be
	// too short for emulated processors; not again and again.
	for begin := time.Now(); ; {
		before := w.Stats().Unsettled
		w.Abandon(w.Begin(blocks[0].span()))
		if w.Stats().Unsettled == before {
			break
		}
		if time.Since(begin) > time.Minute {
			t.Error("a change seems to be in flight for ever: every registration of a minute had to give up")
			break
		}
	}
}
