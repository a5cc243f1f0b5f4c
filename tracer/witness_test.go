// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"encoding/binary"
	"runtime"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf"
	"github.com/ummu/ummu/bpf/layout"
)

// rig is the witness without its tracepoint: run by BPF_PROG_TEST_RUN, on one
// processor, in a call that may be about anybody's address space.
type rig struct {
	*ebpf.Collection
	t *testing.T
}

func newRig(t *testing.T) rig {
	t.Helper()
	runtime.LockOSThread() // ends with the test's goroutine, which has one processor
	var one unix.CPUSet
	one.Set(0)
	if err := unix.SchedSetaffinity(0, &one); err != nil {
		t.Fatal(err)
	}
	spec, err := bpf.LoadSyscall()
	if err != nil {
		t.Fatal(err)
	}
	for name := range spec.Programs {
		if name != "hook_kvm_witness" && name != "hook_kvm_witness_copy" {
			delete(spec.Programs, name)
		}
	}
	if err := spec.Variables["page_size"].Set(uint64(4096)); err != nil {
		t.Fatal(err)
	}
	c, err := ebpf.NewCollection(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return rig{c, t}
}

// told runs a program for an event of [start, end) and returns how many losses
// it told of.
func (r rig) told(program string, start, end uint64) uint64 {
	r.t.Helper()
	before := r.misses()
	if _, err := r.Programs[program].Run(&ebpf.RunOptions{Context: [2]uint64{start, end}}); err != nil {
		r.t.Fatal(err)
	}
	return r.misses() - before
}

func (r rig) misses() uint64 {
	var e layout.Epoch
	if err := r.Maps["epoch"].Lookup(uint32(0), &e); err != nil {
		r.t.Fatal(err)
	}
	return e.Misses
}

// aside is what the probes leave behind for an event of this thread that is
// nobody's change. The thread's number is the one that the last event left.
func (r rig) aside(start, end uint64) {
	r.t.Helper()
	var each [][]byte
	if err := r.Maps["last_unwatched"].Lookup(uint32(0), &each); err != nil {
		r.t.Fatal(err)
	}
	u := each[0] // start, end, ns, tid, seen
	binary.NativeEndian.PutUint64(u, start)
	binary.NativeEndian.PutUint64(u[8:], end)
	binary.NativeEndian.PutUint64(u[16:], uint64(monotonic()))
	u[28] = 0
	if err := r.Maps["last_unwatched"].Update(uint32(0), each, ebpf.UpdateAny); err != nil {
		r.t.Fatal(err)
	}
}

// The witness takes each event that was set aside for one event: another of
// the same range, of which all probes were skipped, is a loss. So is one of a
// range that it told of itself just now.
func TestWitnessTakesOneForOne(t *testing.T) {
	const first, copied = "hook_kvm_witness", "hook_kvm_witness_copy"
	r := newRig(t)
	for _, step := range []struct {
		what    string
		aside   bool
		program string
		start   uint64
		want    uint64
	}{
		{"nobody saw it", false, first, 1 << 20, 1},
		{"the same by the other program", false, copied, 1 << 20, 0},
		{"another of that range", false, first, 1 << 20, 1},
		{"the same by the other program", false, copied, 1 << 20, 0},
		{"set aside by the probes", true, first, 2 << 20, 0},
		{"the same by the other program", false, copied, 2 << 20, 0},
		{"the same range again, and no probe ran", false, first, 2 << 20, 1},
		{"set aside by the probes again", true, first, 2 << 20, 0},
		{"another range", false, first, 3 << 20, 1},
	} {
		if step.aside {
			r.aside(step.start, step.start+4096)
		}
		if got := r.told(step.program, step.start, step.start+4096); got != step.want {
			t.Errorf("%s (%s): %d losses, want %d", step.what, step.program, got, step.want)
		}
	}
}
