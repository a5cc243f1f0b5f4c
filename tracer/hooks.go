// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/mm"
)

// hook is one attachment of a tier. Order matters: where two hooks
// see the same call, the first attached runs first.
type hook struct {
	id       mm.Hook
	name     string // of the coverage table and of records
	sees     string
	required bool
	// what the program is attached to; points lists the tracepoint's names
	// on different kernels, newest first
	points  []string
	group   string // classic tracepoints: their group
	program string // its name in the object
	kprobe  string // the function to probe
}

var syscallHooks = []hook{
	{layout.HookSysEnter, "tp_btf/sys_enter", "entry of every call that changes mappings, all ABIs", true,
		nil, "", "hook_sys_enter", ""},
	{layout.HookSysExit, "tp_btf/sys_exit", "end and result of those calls, new mappings", true,
		nil, "", "hook_sys_exit", ""},
	{layout.HookEnterMunmap, "tracepoint/syscalls/sys_enter_munmap", "munmap, if the main hook is skipped", false,
		[]string{"sys_enter_munmap"}, "syscalls", "hook_enter_munmap", ""},
	{layout.HookEnterMremap, "tracepoint/syscalls/sys_enter_mremap", "mremap, if the main hook is skipped", false,
		[]string{"sys_enter_mremap"}, "syscalls", "hook_enter_mremap", ""},
	{layout.HookEnterMprotect, "tracepoint/syscalls/sys_enter_mprotect", "mprotect, if the main hook is skipped", false,
		[]string{"sys_enter_mprotect"}, "syscalls", "hook_enter_mprotect", ""},
	{layout.HookExitMunmap, "tracepoint/syscalls/sys_exit_munmap", "end of munmap, if the main hook is skipped", false,
		[]string{"sys_exit_munmap"}, "syscalls", "hook_exit_munmap", ""},
	{layout.HookExitMremap, "tracepoint/syscalls/sys_exit_mremap", "end of mremap, if the main hook is skipped", false,
		[]string{"sys_exit_mremap"}, "syscalls", "hook_exit_mremap", ""},
	{layout.HookExitMprotect, "tracepoint/syscalls/sys_exit_mprotect", "end of mprotect, if the main hook is skipped", false,
		[]string{"sys_exit_mprotect"}, "syscalls", "hook_exit_mprotect", ""},
	{layout.HookUringSubmit, "raw_tp/io_uring_submit_req", "madvise submitted to io_uring", false,
		[]string{"io_uring_submit_req", "io_uring_submit_sqe"}, "", "hook_uring_submit", ""},
	{layout.HookUringQueue, "raw_tp/io_uring_queue_async_work", "madvise handed to an io_uring worker", false,
		[]string{"io_uring_queue_async_work"}, "", "hook_uring_queue", ""},
	{layout.HookUringComplete, "raw_tp/io_uring_complete", "end of io_uring's madvise", false,
		[]string{"io_uring_complete"}, "", "hook_uring_complete", ""},
}

// lifeHooks are part of every tier.
var lifeHooks = []hook{
	{layout.HookSchedFork, "raw_tp/sched_process_fork", "new tasks", true,
		[]string{"sched_process_fork"}, "", "hook_fork", ""},
	{layout.HookSchedExec, "raw_tp/sched_process_exec", "program execution", true,
		[]string{"sched_process_exec"}, "", "hook_exec", ""},
	{layout.HookSchedExit, "raw_tp/sched_process_exit", "exit of tasks", true,
		[]string{"sched_process_exit"}, "", "hook_exit", ""},
	{layout.HookExitMmap, "raw_tp/exit_mmap", "death of address spaces", true,
		[]string{"exit_mmap"}, "", "hook_space_death", ""},
}

// registrationHooks see io_uring's registrations; with any tier, where asked for.
// libibverbs is probed when it is found ([Tracer.ProbeVerbs]).
var registrationHooks = []hook{
	{layout.HookRegisterEnter, "tp_btf/sys_enter:register", "buffers registered with io_uring, rings closed", true,
		nil, "", "hook_register_enter", ""},
	{layout.HookRegisterExit, "tp_btf/sys_exit:register", "results of those registrations", true,
		nil, "", "hook_register_exit", ""},
}

// verbsHooks name what is attached to libibverbs.
var verbsHooks = []hook{
	{layout.HookVerbs, "uprobe/libibverbs", "memory regions registered and deregistered", false, nil, "", "", ""},
	{layout.HookVerbsReturn, "uretprobe/libibverbs", "results of those registrations", false, nil, "", "", ""},
}

// deathProbes take the place of the tracepoint before 6.1, where programs of
// the other types are allowed.
var deathProbes = []hook{
	{layout.HookExitMmapFentry, "fentry/exit_mmap", "death of address spaces", true,
		nil, "", "hook_space_death_fentry", ""},
	{layout.HookExitMmapKprobe, "kprobe/exit_mmap", "the same, if fentry is skipped", true,
		nil, "", "hook_space_death_kprobe", "exit_mmap"},
}

var tracepointHooks = []hook{
	{layout.HookKVMUnmap, "raw_tp/kvm_unmap_hva_range", "what KVM hears of changes, for processes with a virtual machine", true,
		[]string{"kvm_unmap_hva_range"}, "", "hook_kvm_unmap", ""},
}

var probeHooks = []hook{
	{layout.HookNotifierStartFentry, "fentry/__mmu_notifier_invalidate_range_start", "begin of every change of an address space with a notifier", true,
		nil, "", "hook_start_fentry", ""},
	{layout.HookNotifierStartFentry2, "fentry2/__mmu_notifier_invalidate_range_start", "the same, if the first program is skipped", false,
		nil, "", "hook_start_fentry2", ""},
	{layout.HookNotifierStartKprobe, "kprobe/__mmu_notifier_invalidate_range_start", "the same, if fentry is skipped", false,
		nil, "", "hook_start_kprobe", "__mmu_notifier_invalidate_range_start"},
	{layout.HookNotifierEndFentry, "fentry/__mmu_notifier_invalidate_range_end", "end of every change of an address space with a notifier", true,
		nil, "", "hook_end_fentry", ""},
	{layout.HookNotifierEndFentry2, "fentry2/__mmu_notifier_invalidate_range_end", "the same, if the first program is skipped", false,
		nil, "", "hook_end_fentry2", ""},
	{layout.HookNotifierEndKprobe, "kprobe/__mmu_notifier_invalidate_range_end", "the same, if fentry is skipped", false,
		nil, "", "hook_end_kprobe", "__mmu_notifier_invalidate_range_end"},
	{layout.HookKVMWitness, "raw_tp/kvm_unmap_hva_range:witness", "begins that all others missed, for processes that keep a virtual machine", false,
		[]string{"kvm_unmap_hva_range"}, "", "hook_kvm_witness", ""},
}

// Where the kernel skips raw tracepoint programs each of them has copies
// (bpf/copies.bpf.h), attached behind it.
var (
	syscallCopies = []hook{
		{layout.HookSysEnterCopy, "tp_btf2/sys_enter", "the same as tp_btf/sys_enter, if that is skipped", false,
			nil, "", "hook_sys_enter_copy", ""},
		{layout.HookSysExitCopy, "tp_btf2/sys_exit", "the same as tp_btf/sys_exit, if that is skipped", false,
			nil, "", "hook_sys_exit_copy", ""},
		{layout.HookSysEnterClassic, "tracepoint/raw_syscalls/sys_enter", "the same, if both are skipped", false,
			[]string{"sys_enter"}, "raw_syscalls", "hook_sys_enter_classic", ""},
		{layout.HookSysExitClassic, "tracepoint/raw_syscalls/sys_exit", "the same, if both are skipped", false,
			[]string{"sys_exit"}, "raw_syscalls", "hook_sys_exit_classic", ""},
		{layout.HookUringSubmitCopy, "raw_tp2/io_uring_submit_req", "madvise submitted to io_uring, if the first program is skipped", false,
			[]string{"io_uring_submit_req"}, "", "hook_uring_submit_copy", ""},
		{layout.HookUringQueueCopy, "raw_tp2/io_uring_queue_async_work", "madvise handed to an io_uring worker, if the first program is skipped", false,
			[]string{"io_uring_queue_async_work"}, "", "hook_uring_queue_copy", ""},
		{layout.HookUringCompleteCopy, "raw_tp2/io_uring_complete", "end of io_uring's madvise, if the first program is skipped", false,
			[]string{"io_uring_complete"}, "", "hook_uring_complete_copy", ""},
		{layout.HookUringSubmitClassic, "tracepoint/io_uring/io_uring_submit_req", "madvise submitted to io_uring, if both are skipped", false,
			[]string{"io_uring_submit_req"}, "io_uring", "hook_uring_submit_classic", ""},
		{layout.HookUringQueueClassic, "tracepoint/io_uring/io_uring_queue_async_work", "madvise handed to an io_uring worker, if both are skipped", false,
			[]string{"io_uring_queue_async_work"}, "io_uring", "hook_uring_queue_classic", ""},
		{layout.HookUringCompleteClassic, "tracepoint/io_uring/io_uring_complete", "end of io_uring's madvise, if both are skipped", false,
			[]string{"io_uring_complete"}, "io_uring", "hook_uring_complete_classic", ""},
	}
	tracepointCopies = []hook{
		{layout.HookKVMUnmapCopy, "raw_tp2/kvm_unmap_hva_range", "the same, if the first program is skipped", false,
			[]string{"kvm_unmap_hva_range"}, "", "hook_kvm_unmap_copy", ""},
		{layout.HookKVMUnmapClassic, "tracepoint/kvm/kvm_unmap_hva_range", "the same, if both are skipped", false,
			[]string{"kvm_unmap_hva_range"}, "kvm", "hook_kvm_unmap_classic", ""},
	}
	probeCopies = []hook{
		{layout.HookKVMWitnessCopy, "raw_tp2/kvm_unmap_hva_range:witness", "the same, if the first program is skipped", false,
			[]string{"kvm_unmap_hva_range"}, "", "hook_kvm_witness_copy", ""},
		{layout.HookKVMWitnessClassic, "tracepoint/kvm/kvm_unmap_hva_range:witness", "the same, if both are skipped", false,
			[]string{"kvm_unmap_hva_range"}, "kvm", "hook_kvm_witness_classic", ""},
	}
	lifeCopies = []hook{
		{layout.HookSchedForkCopy, "raw_tp2/sched_process_fork", "new processes of followed ones, if the first program is skipped", false,
			[]string{"sched_process_fork"}, "", "hook_fork_copy", ""},
		{layout.HookSchedExecCopy, "raw_tp2/sched_process_exec", "program execution by followed ones, if the first program is skipped", false,
			[]string{"sched_process_exec"}, "", "hook_exec_copy", ""},
		{layout.HookSchedExitCopy, "raw_tp2/sched_process_exit", "exit of tasks with something open, if the first program is skipped", false,
			[]string{"sched_process_exit"}, "", "hook_exit_copy", ""},
		{layout.HookExitMmapCopy, "raw_tp2/exit_mmap", "death of address spaces, if the first program is skipped", false,
			[]string{"exit_mmap"}, "", "hook_space_death_copy", ""},
		{layout.HookExitMmapClassic, "tracepoint/mmap/exit_mmap", "death of address spaces, if both are skipped", false,
			[]string{"exit_mmap"}, "mmap", "hook_space_death_classic", ""},
	}
)

// copiesOf are the copies of the attachments of a tier.
func copiesOf(t Tier) []hook {
	switch t {
	case TierSyscall:
		return slices.Concat(syscallCopies, lifeCopies)
	case TierNotifierTracepoint:
		return slices.Concat(tracepointCopies, lifeCopies)
	case TierNotifierProbe:
		return slices.Concat(probeCopies, lifeCopies)
	}
	return lifeCopies
}

// skipsRawTracepoints is since which kernel programs of raw tracepoints run
// preemptible, and are skipped where one is already running.
const skipsRawTracepoints = 7 << 16

// weakOf are the hooks that are missing on a kernel where the others may all be
// skipped.
func weakOf(c *Coverage, o Options) (weak []string) {
	var needed []hook
	if c.Tier == TierNotifierProbe && Preemptible() {
		for _, h := range probeHooks {
			switch h.id {
			case layout.HookNotifierStartFentry2, layout.HookNotifierStartKprobe, layout.HookKVMWitness:
				needed = append(needed, h)
			}
		}
	}
	if o.skipped() {
		needed = append(needed, copiesOf(o.Tier)...)
	}
	for i := range needed {
		if !slices.ContainsFunc(c.Hooks, func(st HookStatus) bool { return st.Hook == needed[i].id && st.Attached }) {
			weak = append(weak, needed[i].name+" is not attached: this kernel may skip the hooks that it stands in for")
		}
	}
	return weak
}

// skipped reports whether the kernel skips raw tracepoint programs.
func (o *Options) skipped() bool {
	v, err := features.LinuxVersionCode()
	return o.copied || !o.alone && (err != nil || v >= skipsRawTracepoints)
}

// copies reports whether the tier's raw tracepoint programs are attached more
// than once.
func (o *Options) copies() bool { return o.skipped() && !guard.Off(guard.Copies) }

// hooksOf are the attachments of a tier.
func hooksOf(t Tier) []hook {
	switch t {
	case TierSyscall:
		return slices.Concat(syscallHooks, lifeHooks)
	case TierNotifierTracepoint:
		return slices.Concat(tracepointHooks, lifeHooks)
	case TierNotifierProbe:
		return slices.Concat(probeHooks, lifeHooks)
	case TierMM:
		return slices.Concat(mmHooks, lifeHooks)
	}
	return nil
}

// adapted are the attachments of a tier on this kernel: where the notifier
// probes exist and mmap:exit_mmap does not, exit_mmap is probed too.
func adapted(o Options, types kernelTypes) ([]hook, error) {
	hooks := hooksOf(o.Tier)
	if o.Registrations {
		hooks = append(hooks, registrationHooks...)
	}
	if o.copies() {
		hooks = append(hooks, copiesOf(o.Tier)...)
	}
	if o.backwards {
		slices.Reverse(hooks)
	}
	if o.Tier != TierNotifierProbe {
		return hooks, nil
	}
	if guard.Off(guard.Copies) { // one program on each side
		hooks = slices.DeleteFunc(hooks, func(h hook) bool {
			return strings.HasPrefix(h.name, "fentry2/") || strings.HasPrefix(h.name, "kprobe/") || h.id == layout.HookKVMWitness
		})
	}
	kernel, err := types()
	if err != nil {
		return nil, fmt.Errorf("read the kernel's types: %w", err)
	}
	var def *btf.Typedef
	if err := kernel.TypeByName("btf_trace_exit_mmap", &def); errors.Is(err, btf.ErrNotFound) {
		hooks = slices.DeleteFunc(hooks, func(h hook) bool { return h.id == layout.HookExitMmap })
		hooks = append(hooks, deathProbes...)
	}
	return hooks, nil
}

// HookName returns the name of a hook as in [Coverage], e.g.
// "tp_btf/sys_enter", or "none".
func HookName(h mm.Hook) string {
	for _, hooks := range [][]hook{syscallHooks, lifeHooks, tracepointHooks, probeHooks, mmHooks, deathProbes, registrationHooks, verbsHooks, syscallCopies, lifeCopies, tracepointCopies, probeCopies} {
		for i := range hooks {
			if hooks[i].id == h {
				return hooks[i].name
			}
		}
	}
	if h == 0 {
		return "none"
	}
	return fmt.Sprintf("hook(%d)", h)
}

// kernelTypes returns what is known of the kernel's types. Reading them takes
// longer than loading a program, and every attachment asks.
type kernelTypes func() (*btf.Spec, error)

func (h *hook) attach(prog *ebpf.Program, types kernelTypes) (link.Link, error) {
	if h.kprobe != "" {
		return link.Kprobe(h.kprobe, prog, nil)
	}
	if len(h.points) == 0 {
		return link.AttachTracing(link.TracingOptions{Program: prog})
	}
	var last error
	for _, p := range h.points {
		var l link.Link
		if h.group != "" {
			l, last = link.Tracepoint(h.group, p, prog, nil)
		} else {
			kernel, err := types()
			if err != nil {
				return nil, err
			}
			if err := checkArguments(kernel, p); err != nil {
				return nil, err
			}
			l, last = link.AttachRawTracepoint(link.RawTracepointOptions{Name: p, Program: prog})
		}
		if last == nil || !errors.Is(last, os.ErrNotExist) {
			return l, last
		}
	}
	return nil, last
}

// gapsOf names the kinds of change that a tier cannot see.
func gapsOf(t Tier) []Gap {
	if t == TierSyscall {
		return slices.Clone(syscallGaps)
	}
	if t == TierMM {
		return slices.Clone(mmGaps)
	}
	return []Gap{guardUnmapped} // an MMU notifier hears of everything else
}

var guardUnmapped = Gap{"guard-unmapped", "rights taken away by a guard (MADV_GUARD_INSTALL) over pages of shared memory that reclaim had unmapped; they stay the object's, and are there again when the guard is removed"}

var syscallGaps = []Gap{
	{"file-truncate", "pages of a mapped file or shared object dropped by truncation, hole punching or MADV_REMOVE through another mapping, by any process (hugetlb files too)"},
	{"file-direct-write", "page-cache pages of a mapped file replaced by an O_DIRECT write"},
	{"uffd-writeprotect", "rights taken away through a userfaultfd (UFFDIO_WRITEPROTECT)"},
	{"driver-mapping", "mappings that a device driver changes or revokes"},
	{"uring-backlog", "a madvise that io_uring had queued for a worker before the watch was opened, until its result: it is told with the result, not before"},
	{"shadow-stack", "shadow stacks, which go with their thread or by arch_prctl"},
	{"argument-race", "arguments in memory, or a descriptor, that another thread changes while a call enters (the vector of process_madvise, a file that takes the place of one on hugetlbfs)"},
}
