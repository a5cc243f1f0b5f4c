// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/ummu/ummu/bpf"
	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// hook is one attachment of the syscall tier. Order matters: where two hooks
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
	program func(*bpf.SyscallPrograms) *ebpf.Program
}

var syscallHooks = []hook{
	{layout.HookSysEnter, "tp_btf/sys_enter", "entry of every call that changes mappings, all ABIs", true,
		nil, "", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookSysEnter }},
	{layout.HookSysExit, "tp_btf/sys_exit", "end and result of those calls, new mappings", true,
		nil, "", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookSysExit }},
	{layout.HookEnterMunmap, "tracepoint/syscalls/sys_enter_munmap", "munmap, if the main hook is skipped", false,
		[]string{"sys_enter_munmap"}, "syscalls", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookEnterMunmap }},
	{layout.HookEnterMremap, "tracepoint/syscalls/sys_enter_mremap", "mremap, if the main hook is skipped", false,
		[]string{"sys_enter_mremap"}, "syscalls", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookEnterMremap }},
	{layout.HookEnterMprotect, "tracepoint/syscalls/sys_enter_mprotect", "mprotect, if the main hook is skipped", false,
		[]string{"sys_enter_mprotect"}, "syscalls", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookEnterMprotect }},
	{layout.HookExitMunmap, "tracepoint/syscalls/sys_exit_munmap", "end of munmap, if the main hook is skipped", false,
		[]string{"sys_exit_munmap"}, "syscalls", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookExitMunmap }},
	{layout.HookExitMremap, "tracepoint/syscalls/sys_exit_mremap", "end of mremap, if the main hook is skipped", false,
		[]string{"sys_exit_mremap"}, "syscalls", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookExitMremap }},
	{layout.HookExitMprotect, "tracepoint/syscalls/sys_exit_mprotect", "end of mprotect, if the main hook is skipped", false,
		[]string{"sys_exit_mprotect"}, "syscalls", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookExitMprotect }},
	{layout.HookUringSubmit, "raw_tp/io_uring_submit_req", "madvise submitted to io_uring", false,
		[]string{"io_uring_submit_req", "io_uring_submit_sqe"}, "", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookUringSubmit }},
	{layout.HookUringQueue, "raw_tp/io_uring_queue_async_work", "madvise handed to an io_uring worker", false,
		[]string{"io_uring_queue_async_work"}, "", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookUringQueue }},
	{layout.HookUringComplete, "raw_tp/io_uring_complete", "end of io_uring's madvise", false,
		[]string{"io_uring_complete"}, "", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookUringComplete }},
	{layout.HookSchedFork, "raw_tp/sched_process_fork", "new tasks", true,
		[]string{"sched_process_fork"}, "", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookFork }},
	{layout.HookSchedExec, "raw_tp/sched_process_exec", "program execution", true,
		[]string{"sched_process_exec"}, "", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookExec }},
	{layout.HookSchedExit, "raw_tp/sched_process_exit", "exit of tasks", true,
		[]string{"sched_process_exit"}, "", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookExit }},
	{layout.HookExitMmap, "raw_tp/exit_mmap", "death of address spaces", true,
		[]string{"exit_mmap"}, "", func(p *bpf.SyscallPrograms) *ebpf.Program { return p.HookSpaceDeath }},
}

// HookName returns the name of a hook as in [Coverage], e.g.
// "tp_btf/sys_enter", or "none".
func HookName(h mm.Hook) string {
	for i := range syscallHooks {
		if syscallHooks[i].id == h {
			return syscallHooks[i].name
		}
	}
	if h == 0 {
		return "none"
	}
	return fmt.Sprintf("hook(%d)", h)
}

func (h *hook) attach(objs *bpf.SyscallPrograms) (link.Link, error) {
	prog := h.program(objs)
	if len(h.points) == 0 {
		return link.AttachTracing(link.TracingOptions{Program: prog})
	}
	var last error
	for _, p := range h.points {
		var l link.Link
		if h.group != "" {
			l, last = link.Tracepoint(h.group, p, prog, nil)
		} else {
			l, last = link.AttachRawTracepoint(link.RawTracepointOptions{Name: p, Program: prog})
		}
		if last == nil || !errors.Is(last, os.ErrNotExist) {
			return l, last
		}
	}
	return nil, last
}

// The kinds of change that the syscall tier cannot see.
var syscallGaps = []Gap{
	{"file-truncate", "pages of a mapped file or shared object dropped by truncation, hole punching or MADV_REMOVE through another mapping, by any process (hugetlb files too)"},
	{"file-direct-write", "page-cache pages of a mapped file replaced by an O_DIRECT write"},
	{"uffd-writeprotect", "rights taken away through a userfaultfd (UFFDIO_WRITEPROTECT)"},
	{"driver-mapping", "mappings that a device driver changes or revokes"},
	{"hugetlb-mremap", "the rounding of mremap lengths to huge pages while the process has no huge page populated"},
}
