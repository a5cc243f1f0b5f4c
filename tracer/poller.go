// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/mm"
)

// missInterval is how often the kernel's miss counters are read.
const missInterval = 100 * time.Millisecond

// poller reads the counters of skipped programs, where programs may be
// skipped and something is watched; else it does not run at all. misses belongs
// to its goroutine.
type poller struct {
	stop   chan struct{}
	misses map[*ebpf.Program]missed
}

// missed is a miss counter as of the last look and of the one before.
type missed struct{ now, before uint64 }

// Releases of the kernel, as LINUX_VERSION_CODE has them.
const (
	linux512 = 5<<16 | 12<<8 // fentry programs are skipped
	linux515 = 5<<16 | 15<<8 // timers
)

// skippable reports whether the kernel may skip one of the programs whose
// skips are asked for (together): those of raw tracepoints, those of probes.
func skippable(hooks []hook, programs map[string]*ebpf.ProgramSpec, rawTracepoints, probes bool) bool {
	for i := range hooks {
		p := programs[hooks[i].program]
		asked := slices.ContainsFunc(together, func(g []mm.Hook) bool { return slices.Contains(g, hooks[i].id) })
		if p == nil || !asked {
			continue
		}
		switch p.Type {
		case ebpf.Kprobe:
		case ebpf.Tracing:
			if p.AttachType == ebpf.AttachTraceRawTp && rawTracepoints || p.AttachType != ebpf.AttachTraceRawTp && probes {
				return true
			}
		default:
			if rawTracepoints {
				return true
			}
		}
	}
	return false
}

var errNoWatchdog = errors.New("programs may be skipped while nobody reads their counters")

func kernelVersion() (uint32, error) {
	v, err := features.LinuxVersionCode()
	if err != nil {
		return 0, fmt.Errorf("find out the kernel's version: %w", err)
	}
	return v, nil
}

// use counts a watch that is about to open; with the first the poller starts.
// What was skipped before is no loss to it: nothing was promised yet.
func (t *Tracer) use() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.watches == 0 && t.mustPoll {
		if err := t.startPolling(); err != nil {
			return err
		}
	}
	t.watches++
	return nil
}

// unuse counts one that has closed.
func (t *Tracer) unuse() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.watches--; t.watches == 0 && t.poller != nil {
		t.objs.WatchdogOn.Set(uint32(0))
		close(t.poller.stop)
		t.poller = nil
	}
}

// startPolling starts the poller and who looks after it; t.mu is held.
func (t *Tracer) startPolling() error {
	p := &poller{stop: make(chan struct{}), misses: make(map[*ebpf.Program]missed)}
	for i := range t.hooks {
		prog := t.objs.programs[t.hooks[i].program]
		n, err := t.skipped(prog)
		if err != nil {
			return fmt.Errorf("read how often %s was skipped: %w", t.hooks[i].name, err)
		}
		p.misses[prog] = missed{n, n}
	}
	if t.objs.StartWatchdog != nil {
		if err := t.beat(monotonic()); err != nil {
			return err
		}
		if err := t.objs.WatchdogOn.Set(uint32(1)); err != nil {
			return fmt.Errorf("start watchdog: %w", err)
		}
		ret, err := t.objs.StartWatchdog.Run(&ebpf.RunOptions{})
		if e := int32(ret); err == nil && e != 0 {
			err = unix.Errno(-e)
		}
		if err != nil {
			return fmt.Errorf("start watchdog: %w", err)
		}
	}
	t.poller = p
	t.pollers.Go(func() { t.poll(p) })
	return nil
}

// beat tells the watchdog when the counters were looked at.
func (t *Tracer) beat(at time.Duration) error {
	if err := t.objs.BeatNs.Set(uint64(at)); err != nil {
		return fmt.Errorf("set heartbeat: %w", err)
	}
	return nil
}

// poll turns a rise of any program's recursion miss counter (bpf_prog_info,
// Linux 5.12 and later) into a loss for everybody. A look that fails is none:
// the watchdog, which nobody tells of it then, is the loss.
func (t *Tracer) poll(p *poller) {
	tick := time.NewTicker(missInterval)
	defer tick.Stop()
	for {
		select {
		case <-p.stop:
			return
		case <-tick.C:
		}
		at := monotonic()
		if err := t.checkMisses(p); err == nil && t.objs.StartWatchdog != nil {
			t.beat(at)
		}
	}
}

// recursionMisses reads a program's miss counter.
func recursionMisses(p *ebpf.Program) (uint64, error) {
	st, err := p.Stats()
	if err != nil {
		return 0, err
	}
	return st.RecursionMisses, nil
}

// checkMisses: an event is lost if all programs that see it were skipped. Of
// several that is between one look and the next but one: each look reads them
// one after the other. After an error the next look begins where this one did;
// streams, which hear nothing of the watchdog, have lost something unknown.
func (t *Tracer) checkMisses(p *poller) (err error) {
	t.mu.Lock()
	skipped := t.skipped
	t.mu.Unlock()
	defer func() {
		if err == nil {
			return
		}
		t.mu.Lock()
		for s := range t.streams {
			s.missed.Add(1)
		}
		t.mu.Unlock()
	}()
	misses := make(map[*ebpf.Program]missed)
	looks := make(map[mm.Hook][3]uint64) // now, and the two before
	for i := range t.hooks {
		h := &t.hooks[i]
		prog := t.objs.programs[h.program]
		if !t.coverage.Hooks[i].Attached {
			continue
		}
		n, err := skipped(prog)
		if err != nil {
			return fmt.Errorf("read how often %s was skipped: %w", h.name, err)
		}
		last := p.misses[prog]
		misses[prog] = missed{n, last.now}
		looks[h.id] = [3]uint64{n, last.now, last.before}
	}
	var rise uint64
	for _, group := range together {
		var each [][3]uint64
		for _, id := range group {
			if n, ok := looks[id]; ok {
				each = append(each, n)
			}
		}
		rise += lostOf(each)
	}
	if rise != 0 && !guard.Off(guard.MissPolled) {
		if err := t.control(ctlEpoch, layout.GenLoss, rise, 0); err != nil {
			return err
		}
		t.mu.Lock()
		for s := range t.streams {
			s.missed.Add(rise)
		}
		t.mu.Unlock()
	}
	p.misses = misses
	return nil
}
