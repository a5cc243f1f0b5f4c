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
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf"
	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
)

// Options configure [Open]. The zero value works.
type Options struct {
	// MaxSpaces bounds the address spaces that can be watched at once,
	// children of followed processes included. 0: 16384.
	MaxSpaces int
	// Tier is how changes are seen. 0: TierSyscall, the only one for streams
	// of people; a notifier tier needs a notifier in the watched process.
	Tier Tier
	// Registrations is for streams ([WatchOptions].Registrations): hooks that
	// see memory being registered by programs that know nothing of us: two
	// more programs at each system call of every process of the machine.
	Registrations bool
	// MaxWatches bounds the streams and feeds that are open at once.
	// 0: 1024.
	MaxWatches int
	// Ready is how many feeds are prepared ahead, in the background, for
	// OpenFeed to return without waiting; each takes the memory of a feed
	// ([Feed.Bytes]). More at once wait some 20 ms together. 0: none.
	Ready int
	// ReadyFeed says for which options: RingBytes and NoRing count.
	ReadyFeed FeedOptions

	poll bool // tests: as if programs could be skipped
	slow bool // tests of the mm tier: the hooks of one call may be any time apart

	// for tests: with copies as on a kernel that skips raw tracepoint programs,
	// or without any, whatever the kernel; attached in the other order
	copied, alone, backwards bool
}

func (o Options) watches() int {
	if o.MaxWatches == 0 {
		return defaultMaxWatches
	}
	return o.MaxWatches
}

const defaultMaxWatches = 1024

// Validate reports options out of range.
func (o Options) Validate() error {
	if o.MaxSpaces < 0 || o.MaxSpaces > 1<<20 {
		return fmt.Errorf("MaxSpaces %d is not in 0..%d", o.MaxSpaces, 1<<20)
	}
	if o.MaxWatches < 0 || o.MaxWatches > maxSlots/2 {
		return fmt.Errorf("MaxWatches %d is not in 0..%d", o.MaxWatches, maxSlots/2)
	}
	if o.Ready < 0 || o.Ready > o.watches() {
		return fmt.Errorf("%d feeds to be Ready is not in 0..MaxWatches", o.Ready)
	}
	if err := (WatchOptions{RingBytes: o.ReadyFeed.RingBytes}).Validate(); err != nil {
		return fmt.Errorf("ReadyFeed: %w", err)
	}
	if hooksOf(o.Tier) == nil && o.Tier != TierNone {
		return fmt.Errorf("tier %v cannot be opened", o.Tier)
	}
	return nil
}

// preallocated is how many changes in progress there is room for where they
// take memory, 500 bytes each, whether they are there or not.
const preallocated = 16384

// Tracer owns the loaded kernel side. It is safe for concurrent use.
type Tracer struct {
	objs     kernelSide
	hooks    []hook
	links    []link.Link
	tasks    *link.Iter
	verbs    *verbs // nil: registrations were not asked for
	coverage Coverage
	slots    *slots
	mustPoll bool          // programs may be skipped
	closing  chan struct{} // closed when Close begins

	ops     sync.WaitGroup // calls that use the kernel side; Close waits for them
	pollers sync.WaitGroup

	// Locks, of which nobody holds two but mu over ctl.
	ctl  sync.Mutex // the control program, which runs once at a time
	iter sync.Mutex // the task iterator and its parameters

	mu      sync.Mutex // guards the fields below; nothing is waited for under it
	streams map[*Stream]struct{}
	feeds   map[*Feed]struct{}
	// unmarked are those of feeds that should be closed.
	unmarked map[*Feed]struct{}
	watches  int     // of both, open or about to be
	poller   *poller // nil: it does not run
	closed   bool
	// skipped is how often the kernel skipped a program; tests make some up.
	skipped func(*ebpf.Program) (uint64, error)

	closer   sync.Mutex // held by Close; guards the two that follow
	freed    bool
	closeErr error
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
	for _, name := range []string{"slot_conf", "slot_status", "slot_interest", "slot_ring"} {
		spec.Maps[name].MaxEntries = uint32(o.watches() + o.Ready)
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
		"stacks":         oneIf(o.Registrations),
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
	if o.Tier == TierMM {
		if err := adaptMM(spec, hooks, types, o.slow); err != nil {
			return nil, err
		}
	}
	version, err := kernelVersion()
	if err != nil {
		return nil, err
	}
	if version < 6<<16|1<<8 {
		// Before 6.1 programs of these types must not allocate
		// (check_map_prog_compatibility(), kernel/bpf/verifier.c).
		for _, name := range []string{"tasks", "requests"} {
			spec.Maps[name].Flags &^= unix.BPF_F_NO_PREALLOC
			spec.Maps[name].MaxEntries = preallocated
		}
	}
	t := &Tracer{
		hooks:    hooks,
		mustPoll: o.poll || skippable(hooks, spec.Programs, o.skipped(), version >= linux512 && Preemptible()),
		skipped:  recursionMisses,
		closing:  make(chan struct{}),
		streams:  make(map[*Stream]struct{}),
		feeds:    make(map[*Feed]struct{}),
		unmarked: make(map[*Feed]struct{}),
	}
	if t.mustPoll && version < linux515 {
		return nil, &HookError{Hook: "timer", Kernel: kernelRelease(), Need: "Linux 5.15 or later, or one before 5.12",
			Try: "another tier", Err: errNoWatchdog}
	}
	if o.Registrations {
		t.verbs = &verbs{attached: make(map[fileID]struct{})}
	}
	if err := t.objs.load(spec, t.hooks, t.verbs.programs(), t.mustPoll); err != nil {
		return nil, hookError("BPF programs", err)
	}
	if err := t.initEpoch(); err != nil {
		t.objs.Close()
		return nil, err
	}
	if err := t.control(ctlOwn, 0, 0, 0); err != nil {
		t.objs.Close()
		return nil, fmt.Errorf("tell the kernel side its owner: %w", err)
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
	t.slots = newSlots(&t.objs, spec, t.coverage.Tier, o)
	if t.coverage.Tier == TierMM && !o.slow {
		if err := t.proveFires(); err != nil {
			return nil, errors.Join(hookError("the mm tier", errors.Join(ErrNotSupported, err)), t.Close())
		}
	}
	return t, nil
}

// kernelSide is the loaded maps and programs.
type kernelSide struct {
	bpf.SyscallMaps
	bpf.SyscallVariables
	Control, ListTasks *ebpf.Program
	StartWatchdog      *ebpf.Program            // nil: not needed
	programs           map[string]*ebpf.Program // of the tier's hooks
}

// load loads the programs of some hooks, more that are named, and what all need.
func (o *kernelSide) load(spec *ebpf.CollectionSpec, hooks []hook, more []string, watchdog bool) error {
	needed := map[string]bool{"control": true, "list_tasks": true, "start_watchdog": watchdog}
	for i := range hooks {
		needed[hooks[i].program] = true
	}
	for _, name := range more {
		needed[name] = true
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
	o.StartWatchdog = coll.DetachProgram("start_watchdog")
	o.programs = make(map[string]*ebpf.Program)
	for i := range hooks {
		o.programs[hooks[i].program] = coll.DetachProgram(hooks[i].program)
	}
	for _, name := range more {
		o.programs[name] = coll.DetachProgram(name)
	}
	return nil
}

// Close frees everything. It is idempotent.
func (o *kernelSide) Close() error {
	errs := []error{o.SyscallMaps.Close(), o.Control.Close(), o.ListTasks.Close(), o.StartWatchdog.Close()}
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

// begin counts a call that uses the kernel side, which ends with t.ops.Done;
// after Close it fails.
func (t *Tracer) begin() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return os.ErrClosed
	}
	t.ops.Add(1)
	return nil
}

// Close marks every watch dead, detaches all hooks and closes all streams and
// feeds. It waits for what is being opened. It is idempotent, once it has not
// failed with [ErrNotMarked]; nothing can be opened after either.
func (t *Tracer) Close() error {
	t.closer.Lock()
	defer t.closer.Unlock()
	if t.freed {
		return t.closeErr
	}
	t.mu.Lock()
	if !t.closed {
		t.closed = true
		close(t.closing)
	}
	t.mu.Unlock()
	t.ops.Wait()
	var errs []error
	if !guard.Off(guard.CloseMarks) { // all of them, before the first hook goes
		err := t.control(ctlEpoch, layout.GenDeath, 0, 1)
		if err != nil && !guard.Off(guard.UnmarkedKept) {
			return fmt.Errorf("close tracer: %w: %w", ErrNotMarked, err)
		}
		errs = append(errs, err)
	}
	t.mu.Lock()
	streams := slices.Collect(maps.Keys(t.streams))
	feeds := slices.Collect(maps.Keys(t.feeds))
	t.mu.Unlock()
	for _, f := range feeds {
		errs = append(errs, f.close(true))
	}
	for _, s := range streams {
		errs = append(errs, s.Close())
	}
	t.pollers.Wait()
	errs = append(errs, t.slots.close(), closeLinks(append(t.links, t.verbs.close()...)), t.tasks.Close(), t.objs.Close())
	t.freed, t.closeErr = true, errors.Join(errs...)
	return t.closeErr
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
	ctlUnwatchSpace
	ctlOwn
)

// control runs the control program.
func (t *Tracer) control(op, a, b, ref uint64) error {
	t.ctl.Lock()
	defer t.ctl.Unlock()
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

// task is one line of the task iterator (struct task_line).
type task struct {
	MM         uint64
	PID, TID   uint32 // in this process's pid namespace
	TGID, Busy uint32
}

// question is what the task iterator is asked.
type question struct {
	pid    uint32 // list the tasks of this process,
	space  uint64 // and those of this address space
	ref    uint64 // that may be inside a change which was not counted for this watch;
	opened uint64 // and was bound when the kernel side had this many;
	called uint32 // or something else: iterEvents
}

// eachTask calls f for the tasks that the question is about, as this
// process's pid namespace shows them, until f returns false. A task without a
// user address space is not listed.
func (t *Tracer) eachTask(q question, f func(*task) bool) error {
	t.iter.Lock()
	defer t.iter.Unlock()
	if err := errors.Join(t.objs.IterPid.Set(q.pid), t.objs.IterMm.Set(q.space), t.objs.IterRef.Set(q.ref),
		t.objs.IterOpened.Set(q.opened), t.objs.IterCalled.Set(q.called)); err != nil {
		return fmt.Errorf("set iterator parameters: %w", err)
	}
	r, err := t.tasks.Open()
	if err != nil {
		return fmt.Errorf("open task iterator: %w", err)
	}
	defer r.Close()
	const size = int(unsafe.Sizeof(task{}))
	b := bufio.NewReaderSize(r, 4<<10)
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
