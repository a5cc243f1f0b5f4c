// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"fmt"

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

// What a miss of a hook means.
const (
	coveredAlone    = iota // something was lost
	coveredTogether        // lost if all of this kind missed it
	coveredElse            // nothing: others tell
)

// covers says so for the notifier probes. A begin is lost if all programs with
// an exact counter were skipped; the kprobe's is not exact before 6.12. An end
// that is missed leaves a change in flight, which the kernel side closes.
var covers = map[mm.Hook]uint8{
	layout.HookNotifierStartFentry:  coveredTogether,
	layout.HookNotifierStartFentry2: coveredTogether,
	layout.HookKVMWitness:           coveredElse, // it is not there for every notifier
	layout.HookNotifierStartKprobe:  coveredElse,
	layout.HookNotifierEndFentry:    coveredElse,
	layout.HookNotifierEndFentry2:   coveredElse,
	layout.HookNotifierEndKprobe:    coveredElse,
}

var rescues = map[mm.Hook]uint32{
	layout.HookNotifierStartFentry:  countMissedStartFentry,
	layout.HookNotifierStartKprobe:  countMissedStartKprobe,
	layout.HookNotifierStartFentry2: countMissedStartFentry2,
	layout.HookNotifierEndFentry2:   countMissedEndFentry2,
	layout.HookNotifierEndFentry:    countMissedEndFentry,
	layout.HookNotifierEndKprobe:    countMissedEndKprobe,
}

// Misses reports what each hook has missed. A miss is not yet a loss: most
// events are covered by more than one hook.
func (t *Tracer) Misses() ([]HookMisses, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	var all []HookMisses
	for i := range t.hooks {
		h := &t.hooks[i]
		m := HookMisses{Hook: h.id, Name: h.name}
		// a kernel that does not count says 0
		if n, err := t.skipped(t.objs.programs[h.program]); err == nil {
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
