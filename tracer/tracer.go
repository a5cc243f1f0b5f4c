// SPDX-License-Identifier: Apache-2.0

// Package tracer loads the kernel side, attaches its hooks, and turns what
// they see into records: every change of an address space, with who made it
// and how. It needs CAP_BPF and CAP_PERFMON (or CAP_SYS_ADMIN) and a kernel
// with BTF.
//
// A [Tracer] owns all BPF objects. Each [Tracer.Watch] opens a [Stream] of
// the records of one process, of a process tree, or of the whole machine.
package tracer

import (
	"bufio"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf"
	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/mm"
)

// Options configure [Open]. The zero value works.
type Options struct {
	// MaxSpaces bounds the address spaces that can be watched at once,
	// children of followed processes included. 0: 16384.
	MaxSpaces int
	// Tier is how changes are seen. 0: TierSyscall, the only one for streams
	// of people; a notifier tier needs a notifier in the watched process.
	Tier Tier

	// for tests: with copies as on a kernel that skips raw tracepoint programs,
	// or without any, whatever the kernel
	copied, alone bool
}

// Validate reports options out of range.
func (o Options) Validate() error {
	if o.MaxSpaces < 0 || o.MaxSpaces > 1<<20 {
		return fmt.Errorf("MaxSpaces %d is not in 0..%d", o.MaxSpaces, 1<<20)
	}
	if hooksOf(o.Tier) == nil && o.Tier != TierNone {
		return fmt.Errorf("tier %v cannot be opened", o.Tier)
	}
	return nil
}

// preallocated is how many changes in progress there is room for where they
// take memory, 500 bytes each, whether they are there or not.
const preallocated = 16384

// missInterval is how often the kernel's miss counters are read.
const missInterval = 100 * time.Millisecond

// Tracer owns the loaded kernel side. It is safe for concurrent use.
type Tracer struct {
	objs     kernelSide
	hooks    []hook
	links    []link.Link
	tasks    *link.Iter
	coverage Coverage
	inner    struct{ status, interest, ring *ebpf.MapSpec }
	// skipped is how often the kernel skipped a program; tests make some up.
	skipped func(*ebpf.Program) (uint64, error)

	stop chan struct{}
	done sync.WaitGroup // the miss poller

	mu      sync.Mutex // guards the fields below and control runs
	slots   []bool     // by slot: taken
	streams map[*Stream]struct{}
	feeds   map[*Feed]struct{}
	misses  map[*ebpf.Program]missed
	closed  bool
}

// Open loads the kernel side and attaches every hook that the kernel has. It
// fails with a [*HookError] if a hook without which nothing can be promised
// does not attach; [Tracer.Coverage] tells about the others. A change that is
// under way while Open runs is seen at its end, as an unpaired record.
func Open(o Options) (*Tracer, error) {
	t, err := open(o)
	if err != nil {
		return nil, err
	}
	for _, h := range t.coverage.Hooks {
		if h.Required && !h.Attached {
			t.Close()
			return nil, h.Err
		}
	}
	return t, nil
}

// Probe attaches what it can, detaches it again, and reports. With no hook
// attached at all the tier is "none".
func Probe() Coverage { return ProbeTier(TierSyscall) }

// ProbeTier is [Probe] for one tier.
func ProbeTier(tier Tier) Coverage {
	t, err := open(Options{Tier: tier})
	if err != nil {
		c := Coverage{Gaps: []Gap{{"everything", err.Error()}}}
		for _, h := range hooksOf(tier) {
			c.Hooks = append(c.Hooks, HookStatus{Hook: h.id, Name: h.name, Sees: h.sees, Required: h.required, Err: err})
		}
		return c
	}
	defer t.Close()
	return t.coverage
}

func open(o Options) (*Tracer, error) {
	if err := o.Validate(); err != nil {
		return nil, err
	}
	if o.Tier == TierNone {
		o.Tier = TierSyscall
	}
	spec, err := bpf.LoadSyscall()
	if err != nil {
		return nil, fmt.Errorf("read embedded BPF objects: %w", err)
	}
	if o.MaxSpaces != 0 {
		spec.Maps["spaces"].MaxEntries = uint32(o.MaxSpaces)
		spec.Maps["procs"].MaxEntries = uint32(o.MaxSpaces)
	}
	var key [8]byte
	rand.Read(key[:])
	for name, v := range map[string]uint64{
		"page_size":      uint64(os.Getpagesize()),
		"huge_page_size": hugePageSize(),
		"guards_off":     guard.KernelMask(),
		"space_key":      binary.NativeEndian.Uint64(key[:]) | 1,
		"copies":         oneIf(o.copies()),
		"witness_needed": oneIf(Preemptible()),
	} {
		if err := spec.Variables[name].Set(v); err != nil {
			return nil, fmt.Errorf("set %s: %w", name, err)
		}
	}
	types := sync.OnceValues(btf.LoadKernelSpec)
	hooks, err := adapted(o, types)
	if err != nil {
		return nil, err
	}
	if v, err := features.LinuxVersionCode(); err == nil && v < 6<<16|1<<8 {
		// Before 6.1 programs of these types must not allocate
		// (check_map_prog_compatibility(), kernel/bpf/verifier.c).
		for _, name := range []string{"tasks", "requests"} {
			spec.Maps[name].Flags &^= unix.BPF_F_NO_PREALLOC
			spec.Maps[name].MaxEntries = preallocated
		}
	}
	t := &Tracer{
		hooks:   hooks,
		skipped: recursionMisses,
		stop:    make(chan struct{}),
		slots:   make([]bool, spec.Maps["slot_conf"].MaxEntries),
		streams: make(map[*Stream]struct{}),
		feeds:   make(map[*Feed]struct{}),
		misses:  make(map[*ebpf.Program]missed),
	}
	t.inner.status = spec.Maps["slot_status"].InnerMap.Copy()
	t.inner.interest = spec.Maps["slot_interest"].InnerMap.Copy()
	t.inner.ring = spec.Maps["slot_ring"].InnerMap.Copy()
	if err := t.objs.load(spec, t.hooks); err != nil {
		return nil, hookError("BPF programs", err)
	}
	if err := t.initEpoch(); err != nil {
		t.objs.Close()
		return nil, err
	}
	t.tasks, err = link.AttachIter(link.IterOptions{Program: t.objs.ListTasks})
	if err != nil {
		t.objs.Close()
		return nil, hookError("iter/task", err)
	}
	t.coverage = Coverage{Tier: o.Tier, Gaps: gapsOf(o.Tier)}
	for i := range t.hooks {
		h := &t.hooks[i]
		st := HookStatus{Hook: h.id, Name: h.name, Sees: h.sees, Required: h.required}
		l, err := h.attach(t.objs.programs[h.program], types)
		if err != nil {
			st.Err = hookError(h.name, err)
			if h.id != layout.HookKVMWitness { // it adds to what all see
				t.coverage.Gaps = append(t.coverage.Gaps, Gap{h.name, "hook not attached: " + h.sees})
			}
			if h.required {
				t.coverage.Tier = TierNone
			}
		} else {
			st.Attached = true
			t.links = append(t.links, l)
		}
		t.coverage.Hooks = append(t.coverage.Hooks, st)
	}
	t.coverage.Weak = weakOf(&t.coverage, o)
	t.done.Add(1)
	go t.pollMisses()
	return t, nil
}

// kernelSide is the loaded maps and programs.
type kernelSide struct {
	bpf.SyscallMaps
	bpf.SyscallVariables
	Control, ListTasks *ebpf.Program
	programs           map[string]*ebpf.Program // of the tier's hooks
}

// load loads the programs of some hooks, and what all need.
func (o *kernelSide) load(spec *ebpf.CollectionSpec, hooks []hook) error {
	needed := map[string]bool{"control": true, "list_tasks": true}
	for i := range hooks {
		needed[hooks[i].program] = true
	}
	for name := range spec.Programs {
		if !needed[name] {
			delete(spec.Programs, name)
		}
	}
	coll, err := ebpf.NewCollection(spec)
	if err != nil {
		return err
	}
	defer coll.Close() // what was not taken out
	var own struct {
		bpf.SyscallMaps
		bpf.SyscallVariables
	}
	if err := coll.Assign(&own); err != nil {
		return err
	}
	o.SyscallMaps, o.SyscallVariables = own.SyscallMaps, own.SyscallVariables
	o.Control, o.ListTasks = coll.DetachProgram("control"), coll.DetachProgram("list_tasks")
	o.programs = make(map[string]*ebpf.Program)
	for i := range hooks {
		o.programs[hooks[i].program] = coll.DetachProgram(hooks[i].program)
	}
	return nil
}

// Close frees everything. It is idempotent.
func (o *kernelSide) Close() error {
	errs := []error{o.SyscallMaps.Close(), o.Control.Close(), o.ListTasks.Close()}
	for _, p := range o.programs {
		errs = append(errs, p.Close())
	}
	return errors.Join(errs...)
}

func (t *Tracer) initEpoch() error {
	e := layout.Epoch{Word: layout.GenStart, Version: layout.Version, Size: uint32(unsafe.Sizeof(layout.Epoch{}))}
	if err := t.objs.Epoch.Put(uint32(0), &e); err != nil {
		return fmt.Errorf("initialise epoch page: %w", err)
	}
	if guard.Off(guard.PagesFrozen) {
		return nil
	}
	if err := t.objs.Epoch.Freeze(); err != nil {
		return fmt.Errorf("freeze epoch page: %w", err)
	}
	return nil
}

// hugePageSize is the default huge page size in bytes (/proc/meminfo), what
// MAP_HUGETLB without a size means; 2 MiB if it cannot be read.
func hugePageSize() uint64 {
	f, err := os.Open("/proc/meminfo")
	if err != nil {
		return 2 << 20
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		if rest, ok := strings.CutPrefix(s.Text(), "Hugepagesize:"); ok {
			kb, err := strconv.ParseUint(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err == nil && kb != 0 {
				return kb << 10
			}
		}
	}
	return 2 << 20
}

// Coverage says which hooks are attached and what the tier cannot see.
func (t *Tracer) Coverage() Coverage { return t.coverage }

// Close detaches all hooks and closes all streams. It is idempotent.
func (t *Tracer) Close() error {
	t.mu.Lock()
	if t.closed {
		t.mu.Unlock()
		return nil
	}
	t.closed = true
	streams := make([]*Stream, 0, len(t.streams))
	for s := range t.streams {
		streams = append(streams, s)
	}
	feeds := make([]*Feed, 0, len(t.feeds))
	for f := range t.feeds {
		feeds = append(feeds, f)
	}
	var errs []error
	if len(feeds) != 0 && !guard.Off(guard.CloseMarks) { // all of them, before the first hook goes
		errs = append(errs, t.control(ctlEpoch, layout.GenDeath, 0, 0))
	}
	t.mu.Unlock()

	close(t.stop)
	t.done.Wait()
	for _, f := range feeds {
		errs = append(errs, f.Close())
	}
	for _, s := range streams {
		errs = append(errs, s.Close())
	}
	errs = append(errs, closeLinks(t.links))
	errs = append(errs, t.tasks.Close(), t.objs.Close())
	return errors.Join(errs...)
}

// closeLinks closes at once what each would wait for the running programs:
// 70 ms instead of 190 on 2 cores.
func closeLinks(links []link.Link) error {
	errs := make([]error, len(links))
	var wg sync.WaitGroup
	for i, l := range links {
		wg.Go(func() { errs[i] = l.Close() })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// Operations of the control program (bpf/syscall.bpf.c).
const (
	ctlWatchSpace = 1 + iota
	ctlWatchAll
	ctlUnwatchAll
	ctlEpoch
	ctlKill
)

// control runs the control program; t.mu must be held.
func (t *Tracer) control(op, a, b, ref uint64) error {
	args := [4]uint64{op, a, b, ref}
	ret, err := t.objs.Control.Run(&ebpf.RunOptions{Context: args})
	if err != nil {
		return fmt.Errorf("run control program: %w", err)
	}
	if e := int32(ret); e < 0 {
		return unix.Errno(-e)
	}
	return nil
}

// pollMisses turns a rise of any program's recursion miss counter
// (bpf_prog_info, Linux 5.12 and later) into a loss for everybody.
func (t *Tracer) pollMisses() {
	defer t.done.Done()
	tick := time.NewTicker(missInterval)
	defer tick.Stop()
	for {
		select {
		case <-t.stop:
			return
		case <-tick.C:
			t.checkMisses()
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

// missed is a miss counter as of the last look and of the one before.
type missed struct{ now, before uint64 }

// checkMisses: an event is lost if all programs that see it were skipped. Of
// several that is between one look and the next but one: each look reads them
// one after the other.
func (t *Tracer) checkMisses() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	looks := make(map[mm.Hook][3]uint64) // now, and the two before
	for i := range t.hooks {
		h := &t.hooks[i]
		p := t.objs.programs[h.program]
		n, err := t.skipped(p)
		if err != nil || !t.coverage.Hooks[i].Attached {
			continue
		}
		last := t.misses[p]
		t.misses[p] = missed{n, last.now}
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
		// the program cannot fail once loaded, but if it did, nothing
		// could be promised: every stream is told through its own counter
		if err := t.control(ctlEpoch, layout.GenLoss, rise, 0); err != nil {
			for s := range t.streams {
				s.doubt.Add(1)
			}
		}
		for s := range t.streams {
			s.missed.Add(rise)
		}
	}
}

// task is one line of the task iterator (struct task_line).
type task struct {
	MM         uint64
	PID, TID   uint32 // in this process's pid namespace
	TGID, Busy uint32
}

// eachTask calls f for every task that has a user address space, as this
// process's pid namespace shows them, until f returns false.
func (t *Tracer) eachTask(f func(*task) bool) error {
	r, err := t.tasks.Open()
	if err != nil {
		return fmt.Errorf("open task iterator: %w", err)
	}
	defer r.Close()
	const size = int(unsafe.Sizeof(task{}))
	b := bufio.NewReaderSize(r, 64<<10)
	var line task
	buf := unsafe.Slice((*byte)(unsafe.Pointer(&line)), size)
	for {
		switch _, err := io.ReadFull(b, buf); {
		case err == io.EOF:
			return nil
		case err != nil:
			return fmt.Errorf("read task iterator: %w", err)
		}
		if !f(&line) {
			return nil
		}
	}
}
