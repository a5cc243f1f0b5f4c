// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"fmt"
	"math"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// HookMisses is what one hook has missed since [Open].
type HookMisses struct {
	Hook mm.Hook
	Name string
	// Skipped is how often the kernel says that it did not run the program.
	// Before 6.12 it does not count all of them for kprobes and classic
	// tracepoints, before 5.12 none.
	Skipped uint64
	// Rescued is how many events its partner saw and it did not, as far as
	// the notifier probes noticed.
	Rescued uint64
}

// Counters of bpf/watch.bpf.h (enum counter).
const (
	countMissedStartFentry = 8 + iota
	countMissedStartKprobe
	countMissedStartFentry2
	countMissedEndFentry
	countMissedEndKprobe
	countMissedEndFentry2
)

// together are hooks that see the same events, of programs whose skips the
// kernel counts exactly: an event may be lost if all of them were skipped.
// Copies that are not attached do not count, so up to 6.x a hook that is never
// skipped is alone; from 7.0 on the classic tracepoints count too.
//
// Of no importance are the kprobes, which are not counted before 6.12; the
// classic tracepoints of single calls, which only stand in for the others; the
// witness, which is not there for every notifier; and ends, which leave a change
// in flight that the kernel side closes.
var together = [][]mm.Hook{
	{layout.HookNotifierStartFentry, layout.HookNotifierStartFentry2},
	{layout.HookSysEnter, layout.HookSysEnterCopy, layout.HookSysEnterClassic},
	{layout.HookSysExit, layout.HookSysExitCopy, layout.HookSysExitClassic},
	{layout.HookUringSubmit, layout.HookUringSubmitCopy, layout.HookUringSubmitClassic},
	{layout.HookUringQueue, layout.HookUringQueueCopy, layout.HookUringQueueClassic},
	{layout.HookUringComplete, layout.HookUringCompleteCopy, layout.HookUringCompleteClassic},
	{layout.HookKVMUnmap, layout.HookKVMUnmapCopy, layout.HookKVMUnmapClassic},
	{layout.HookSchedFork, layout.HookSchedForkCopy},
	{layout.HookSchedExec, layout.HookSchedExecCopy},
	{layout.HookSchedExit, layout.HookSchedExitCopy},
	{layout.HookExitMmap, layout.HookExitMmapCopy, layout.HookExitMmapClassic},
	{layout.HookExitMmapFentry},
	{layout.HookRegisterEnter},
	{layout.HookRegisterExit},
	// of the mm tier, where an end that was not skipped tells as well
	{layout.HookUnmapFentry, layout.HookUnmapFentry2},
	{layout.HookZapFentry, layout.HookZapFentry2},
	{layout.HookHugetlbFentry, layout.HookHugetlbFentry2},
	{layout.HookProtectFentry, layout.HookProtectFentry2},
	{layout.HookMoveFentry, layout.HookMoveFentry2},
}

// lostOf is how many events were lost at most, by the miss counters of the
// hooks that see them: now, at the look before, and at the one before that.
func lostOf(each [][3]uint64) uint64 {
	switch len(each) {
	case 0:
		return 0
	case 1:
		return max(each[0][0], each[0][1]) - each[0][1]
	}
	least := uint64(math.MaxUint64)
	for _, n := range each {
		least = min(least, max(n[0], n[2])-n[2])
	}
	return least
}

var rescues = map[mm.Hook]uint32{
	layout.HookNotifierStartFentry:  countMissedStartFentry,
	layout.HookNotifierStartKprobe:  countMissedStartKprobe,
	layout.HookNotifierStartFentry2: countMissedStartFentry2,
	layout.HookNotifierEndFentry2:   countMissedEndFentry2,
	layout.HookNotifierEndFentry:    countMissedEndFentry,
	layout.HookNotifierEndKprobe:    countMissedEndKprobe,
	layout.HookZapFentry:            countMissedStartFentry, // of the mm tier, for all functions
	layout.HookZapKprobe:            countMissedStartKprobe,
	layout.HookZapFentry2:           countMissedStartFentry2,
}

// Misses reports what each hook has missed. A miss is not yet a loss: most
// events are covered by more than one hook.
func (t *Tracer) Misses() ([]HookMisses, error) {
	if err := t.begin(); err != nil {
		return nil, err
	}
	defer t.ops.Done()
	t.mu.Lock()
	skipped := t.skipped
	t.mu.Unlock()
	var all []HookMisses
	for i := range t.hooks {
		h := &t.hooks[i]
		m := HookMisses{Hook: h.id, Name: h.name}
		// a kernel that does not count says 0
		if n, err := skipped(t.objs.programs[h.program]); err == nil {
			m.Skipped = n
		}
		if c, ok := rescues[h.id]; ok {
			var err error
			if m.Rescued, err = t.counter(c); err != nil {
				return nil, err
			}
		}
		all = append(all, m)
	}
	return all, nil
}

// counter is the sum over processors of one of the kernel side's counters.
func (t *Tracer) counter(which uint32) (sum uint64, err error) {
	var each []uint64
	if err := t.objs.Counters.Lookup(which, &each); err != nil {
		return 0, fmt.Errorf("read counter %d: %w", which, err)
	}
	for _, n := range each {
		sum += n
	}
	return sum, nil
}
