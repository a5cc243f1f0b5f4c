// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"slices"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// mmHooks are the attachments of the mm tier (bpf/mm.bpf.h). All are required:
// each closes a gap of another one.
var mmHooks = []hook{
	mmFentry(layout.HookUnmapFentry, "unmap_vmas", "hook_unmap_fentry", "begin of unmapping and replacing"),
	mmFentry(layout.HookUnmapFentry2, "unmap_vmas", "hook_unmap_fentry2", sameIfFirst),
	mmKprobe(layout.HookUnmapKprobe, "unmap_vmas", "hook_unmap_kprobe"),
	mmFentry(layout.HookZapFentry, zapFunction, "hook_zap_fentry", "begin of dropping pages: advice, truncation, hole punching, O_DIRECT"),
	mmFentry(layout.HookZapFentry2, zapFunction, "hook_zap_fentry2", sameIfFirst),
	mmKprobe(layout.HookZapKprobe, zapFunction, "hook_zap_kprobe"),
	mmFentry(layout.HookHugetlbFentry, "unmap_hugepage_range", "hook_hugetlb_fentry", "the same for files of huge pages"),
	mmFentry(layout.HookHugetlbFentry2, "unmap_hugepage_range", "hook_hugetlb_fentry2", sameIfFirst),
	mmKprobe(layout.HookHugetlbKprobe, "unmap_hugepage_range", "hook_hugetlb_kprobe"),
	mmFentry(layout.HookFixupFentry, "mprotect_fixup", "hook_fixup_fentry", "begin of mprotect, and whether it changes anything"),
	mmKprobe(layout.HookFixupKprobe, "mprotect_fixup", "hook_fixup_kprobe"),
	mmFentry(layout.HookProtectFentry, "change_protection", "hook_protect_fentry", "begin of every change of rights"),
	mmFentry(layout.HookProtectFentry2, "change_protection", "hook_protect_fentry2", sameIfFirst),
	mmKprobe(layout.HookProtectKprobe, "change_protection", "hook_protect_kprobe"),
	mmFentry(layout.HookMoveFentry, "move_page_tables", "hook_move_fentry", "begin of moving"),
	mmFentry(layout.HookMoveFentry2, "move_page_tables", "hook_move_fentry2", sameIfFirst),
	mmKprobe(layout.HookMoveKprobe, "move_page_tables", "hook_move_kprobe"),
	{layout.HookMoveFexit, "fexit/move_page_tables", "end of moving", true, nil, "", "hook_move_fexit", ""},
	mmFentry(layout.HookGather, "tlb_gather_mmu", "hook_gather", "that page tables will change somehow"),
	mmFentry(layout.HookFinishFentry, "tlb_finish_mmu", "hook_finish_fentry", "end of every change but moves; one whose begin nobody saw is a loss"),
	mmFentry(layout.HookFinishFentry2, "tlb_finish_mmu", "hook_finish_fentry2", sameIfFirst),
	mmKprobe(layout.HookFinishKprobe, "tlb_finish_mmu", "hook_finish_kprobe"),
}

const sameIfFirst = "the same, if the first program is skipped"

// zapFunction is what the function through which all zaps pass was first
// called; zapFunctions has its names, newest first: where a newer one exists
// the older, if it is there, calls it (see bpf/core_fixes.bpf.h).
const zapFunction = "zap_page_range_single"

var zapFunctions = []string{"zap_vma_range_batched", "zap_page_range_single_batched", zapFunction}

func mmFentry(id mm.Hook, function, program, sees string) hook {
	prefix := "fentry/"
	if sees == sameIfFirst {
		prefix = "fentry2/"
	}
	return hook{id, prefix + function, sees, true, nil, "", program, ""}
}

func mmKprobe(id mm.Hook, function, program string) hook {
	return hook{id, "kprobe/" + function, "the same, if fentry is skipped", true, nil, "", program, function}
}

// mmGaps are what the tier does not see.
var mmGaps = []Gap{
	{"driver-mapping", "mappings that a device driver fills again by itself"},
	{"memory-failure", "pages that the kernel takes away because their memory is broken (memory_failure, soft offlining)"},
	{"breakpoint", "pages of program text that are replaced by copies with a breakpoint (uprobes)"},
	guardUnmapped,
	{"pagemap-scan-writeprotect", "rights taken away by the ioctl PAGEMAP_SCAN, which a write gives back"},
}

// mmArgument says where a variable of bpf/core_fixes.bpf.h gets its value: the
// position of an argument of a function, by any of its names.
type mmArgument struct {
	variable, function string
	names              []string
	// instead: the variable that makes this one unnecessary
	instead string
}

var mmArguments = []mmArgument{
	{"unmap_tlb", "unmap_vmas", []string{"tlb"}, ""},
	{"unmap_desc_at", "unmap_vmas", []string{"unmap"}, "unmap_start"},
	{"unmap_start", "unmap_vmas", []string{"start_addr", "start"}, "unmap_desc_at"},
	{"unmap_end", "unmap_vmas", []string{"end_addr", "end"}, "unmap_desc_at"},
	{"zap_tlb", zapFunction, []string{"tlb"}, "zap_vma"}, // without it, it makes its own
	{"zap_vma", zapFunction, []string{"vma"}, ""},
	{"zap_start", zapFunction, []string{"address", "start"}, ""},
	{"zap_size", zapFunction, []string{"size"}, ""},
	{"hugetlb_vma", "unmap_hugepage_range", []string{"vma"}, ""},
	{"hugetlb_start", "unmap_hugepage_range", []string{"start"}, ""},
	{"hugetlb_end", "unmap_hugepage_range", []string{"end"}, ""},
	{"fixup_tlb", "mprotect_fixup", []string{"tlb"}, ""},
	{"fixup_vma", "mprotect_fixup", []string{"vma"}, ""},
	{"fixup_start", "mprotect_fixup", []string{"start"}, ""},
	{"fixup_end", "mprotect_fixup", []string{"end"}, ""},
	{"fixup_flags", "mprotect_fixup", []string{"newflags"}, ""},
	{"protect_tlb", "change_protection", []string{"tlb"}, ""},
	{"protect_vma", "change_protection", []string{"vma"}, ""},
	{"protect_start", "change_protection", []string{"start"}, ""},
	{"protect_end", "change_protection", []string{"end"}, ""},
	{"protect_cp", "change_protection", []string{"cp_flags"}, ""},
	{"move_control_at", "move_page_tables", []string{"pmc"}, "move_vma"},
	{"move_vma", "move_page_tables", []string{"vma"}, "move_control_at"},
	{"move_from", "move_page_tables", []string{"old_addr"}, "move_control_at"},
	{"move_to", "move_page_tables", []string{"new_addr"}, "move_control_at"},
	{"move_len", "move_page_tables", []string{"len"}, "move_control_at"},
}

// mmStructs are what arguments point to, where they are more than numbers, and
// the members that are read.
var mmStructs = map[string]struct {
	name    string
	members []string
}{
	"unmap_desc_at":   {"unmap_desc", []string{"vma_start", "vma_end"}},
	"move_control_at": {"pagetable_move_control", []string{"old", "old_addr", "old_end", "new_addr"}},
}

// noArgument is NO_ARG of bpf/core_fixes.bpf.h.
const noArgument = 255

// mmShape is the tier on one kernel: what its zap function is called, and the
// values of the variables of bpf/core_fixes.bpf.h.
type mmShape struct {
	zap       string
	arguments map[string]uint64
}

// mmShapeOf reads the kernel's types. A function or an argument that is not
// there is a [*HookError]: nothing is guessed.
func mmShapeOf(kernel *btf.Spec) (*mmShape, error) {
	protos := make(map[string]*btf.FuncProto)
	proto := func(function string) (*btf.FuncProto, error) {
		if p := protos[function]; p != nil {
			return p, nil
		}
		var f *btf.Func
		if err := kernel.TypeByName(function, &f); err != nil {
			return nil, err
		}
		p, ok := f.Type.(*btf.FuncProto)
		if !ok {
			return nil, fmt.Errorf("%s has no prototype", function)
		}
		protos[function] = p
		return p, nil
	}
	s := &mmShape{arguments: make(map[string]uint64)}
	for _, name := range zapFunctions {
		if _, err := proto(name); err == nil {
			s.zap = name
			break
		}
	}
	if s.zap == "" {
		return nil, hookError("fentry/"+zapFunction, fmt.Errorf("the kernel has none of %v: %w", zapFunctions, btf.ErrNotFound))
	}
	for _, a := range mmArguments {
		function := s.name(a.function)
		p, err := proto(function)
		if err != nil {
			return nil, hookError("fentry/"+function, fmt.Errorf("the kernel's types: %w", err))
		}
		s.arguments[a.variable] = noArgument
		if i := slices.IndexFunc(p.Params, func(p btf.FuncParam) bool { return slices.Contains(a.names, p.Name) }); i >= 0 {
			s.arguments[a.variable] = uint64(i)
		}
	}
	for _, a := range mmArguments {
		if s.arguments[a.variable] == noArgument && (a.instead == "" || s.arguments[a.instead] == noArgument) {
			function := s.name(a.function)
			return nil, hookError("fentry/"+function, fmt.Errorf("%s has no argument %q on this kernel, so what it changes, or when that is done, cannot be told", function, a.names[0]))
		}
	}
	for variable, want := range mmStructs {
		if s.arguments[variable] == noArgument {
			continue
		}
		var t *btf.Struct
		if err := kernel.TypeByName(want.name, &t); err != nil {
			return nil, hookError("struct "+want.name, err)
		}
		for _, name := range want.members {
			if !slices.ContainsFunc(t.Members, func(m btf.Member) bool { return m.Name == name }) {
				return nil, hookError("struct "+want.name, fmt.Errorf("no member %q on this kernel", name))
			}
		}
	}
	return s, nil
}

func (s *mmShape) name(function string) string {
	if function == zapFunction {
		return s.zap
	}
	return function
}

// adapt makes programs and hooks fit the kernel.
func (s *mmShape) adapt(spec *ebpf.CollectionSpec, hooks []hook) error {
	for variable, n := range s.arguments {
		v := spec.Variables[variable]
		if v == nil {
			return fmt.Errorf("set %s: no such variable", variable)
		}
		if err := v.Set(n); err != nil {
			return fmt.Errorf("set %s: %w", variable, err)
		}
	}
	for i := range hooks {
		h := &hooks[i]
		switch h.id {
		case layout.HookZapFentry, layout.HookZapFentry2:
			spec.Programs[h.program].AttachTo = s.zap
		case layout.HookZapKprobe:
			h.kprobe = s.zap
		}
	}
	return nil
}

// adaptMM makes the mm tier fit the running kernel.
func adaptMM(spec *ebpf.CollectionSpec, hooks []hook, types kernelTypes, slow bool) error {
	kernel, err := types()
	if err != nil {
		return hookError("the kernel's types", errors.Join(ErrNotSupported, err))
	}
	s, err := mmShapeOf(kernel)
	if err != nil {
		return err
	}
	if slow {
		for _, name := range []string{"mm_partner_start", "mm_partner_end"} {
			if err := spec.Variables[name].Set(uint64(1 << 62)); err != nil {
				return fmt.Errorf("set %s: %w", name, err)
			}
		}
	}
	return s.adapt(spec, hooks)
}

// seesEnds reports whether a change that a watch does not know of, because it
// began before, is a loss to it when it ends.
func (t Tier) seesEnds() bool { return t == TierNotifierProbe || t == TierMM }
