// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// HookRuns is how often one hook ran, and for how long, while somebody counted
// ([CountRuns]).
type HookRuns struct {
	Hook mm.Hook
	Name string
	Runs uint64
	Time time.Duration
}

// CountRuns makes the kernel count the runs of every BPF program of the
// machine and their time (kernel.bpf_stats_enabled), which costs each run some
// 20 ns, until it is closed. It needs Linux 5.8 and CAP_SYS_ADMIN; without it
// the error wraps [ErrPermission].
func CountRuns() (io.Closer, error) {
	c, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	switch {
	case errors.Is(err, os.ErrPermission):
		return nil, fmt.Errorf("count runs of BPF programs: %w: it needs CAP_SYS_ADMIN: %w", ErrPermission, err)
	case err != nil:
		return nil, fmt.Errorf("count runs of BPF programs: %w", err)
	}
	return c, nil
}

// Runs reports what each hook did while the runs were counted, since [Open].
func (t *Tracer) Runs() ([]HookRuns, error) {
	if err := t.begin(); err != nil {
		return nil, err
	}
	defer t.ops.Done()
	var all []HookRuns
	for i := range t.hooks {
		h := &t.hooks[i]
		s, err := t.objs.programs[h.program].Stats()
		if err != nil {
			return nil, fmt.Errorf("read statistics of %s: %w", h.name, err)
		}
		all = append(all, HookRuns{Hook: h.id, Name: h.name, Runs: s.RunCount, Time: s.Runtime})
	}
	return all, nil
}
