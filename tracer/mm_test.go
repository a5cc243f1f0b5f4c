// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"bytes"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf"
	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// kernelOf makes the types of a kernel: a line for each function, with the
// names of its arguments, and for each struct, with those of its members.
func kernelOf(t *testing.T, text string) *btf.Spec {
	t.Helper()
	word := &btf.Int{Name: "long unsigned int", Size: 8}
	b, err := btf.NewBuilder([]btf.Type{word}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		var typ btf.Type
		if f[0] == "struct" {
			s := &btf.Struct{Name: f[1], Size: uint32(8 * len(f[2:]))}
			for i, name := range f[2:] {
				s.Members = append(s.Members, btf.Member{Name: name, Type: word, Offset: btf.Bits(64 * i)})
			}
			typ = s
		} else {
			p := &btf.FuncProto{Return: word}
			for _, name := range f[1:] {
				p.Params = append(p.Params, btf.FuncParam{Name: name, Type: word})
			}
			typ = &btf.Func{Name: f[0], Type: p, Linkage: btf.StaticFunc}
		}
		if _, err := b.Add(typ); err != nil {
			t.Fatal(err)
		}
	}
	raw, err := b.Marshal(nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := btf.LoadSpecFromReader(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

// Functions of Debian's kernels, as far as the tier reads them.
const (
	mm61 = `
unmap_vmas tlb mt vma start_addr end_addr
zap_page_range_single vma address size details
unmap_hugepage_range vma start end ref_page zap_flags
mprotect_fixup tlb vma pprev start end newflags
change_protection tlb vma start end newprot cp_flags
move_page_tables vma old_addr new_vma new_addr len need_rmap_locks`
	mm612 = `
unmap_vmas tlb mas vma start_addr end_addr tree_end mm_wr_locked
zap_page_range_single vma address size details
unmap_hugepage_range vma start end ref_page zap_flags
mprotect_fixup vmi tlb vma pprev start end newflags
change_protection tlb vma start end cp_flags
move_page_tables vma old_addr new_vma new_addr len need_rmap_locks for_stack`
	mm618 = `
unmap_vmas tlb mas vma start_addr end_addr tree_end mm_wr_locked
zap_page_range_single vma address size details
zap_page_range_single_batched tlb vma address size details
unmap_hugepage_range vma start end folio zap_flags
mprotect_fixup vmi tlb vma pprev start end newflags
change_protection tlb vma start end cp_flags
move_page_tables pmc
struct pagetable_move_control old new old_addr old_end new_addr len_in`
	mm73 = `
unmap_vmas tlb unmap
struct unmap_desc mas first pg_start pg_end vma_start vma_end tree_end
zap_vma_range_batched tlb vma address size details
unmap_hugepage_range vma start end folio zap_flags
mprotect_fixup vmi tlb vma pprev start end newflags
change_protection tlb vma start end cp_flags
move_page_tables pmc
struct pagetable_move_control old new old_addr old_end new_addr len_in`
)

// Arguments are found by their names, wherever they are.
func TestMMShape(t *testing.T) {
	for _, c := range []struct {
		name, kernel, zap string
		want              map[string]uint64 // among others
	}{
		{"6.1", mm61, "zap_page_range_single", map[string]uint64{
			"unmap_start": 3, "unmap_end": 4, "unmap_desc_at": noArgument, "zap_tlb": noArgument, "zap_vma": 0, "zap_start": 1,
			"fixup_tlb": 0, "fixup_flags": 5, "protect_cp": 5, "move_from": 1, "move_to": 3, "move_len": 4, "move_control_at": noArgument,
		}},
		{"6.12", mm612, "zap_page_range_single", map[string]uint64{"unmap_start": 3, "fixup_tlb": 1, "fixup_flags": 6, "protect_cp": 4}},
		{"6.18", mm618, "zap_page_range_single_batched", map[string]uint64{
			"zap_tlb": 0, "zap_vma": 1, "zap_start": 2, "zap_size": 3, "move_control_at": 0, "move_from": noArgument,
		}},
		{"7.3", mm73, "zap_vma_range_batched", map[string]uint64{"unmap_tlb": 0, "unmap_desc_at": 1, "unmap_start": noArgument, "zap_tlb": 0}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := mmShapeOf(kernelOf(t, c.kernel))
			if err != nil {
				t.Fatal(err)
			}
			got := maps.Clone(s.arguments)
			maps.DeleteFunc(got, func(name string, _ uint64) bool { _, ok := c.want[name]; return !ok })
			if d := cmp.Diff(c.want, got); d != "" || s.zap != c.zap {
				t.Errorf("zap is %s:\n%s", s.zap, d)
			}
			spec, err := bpf.LoadSyscall()
			if err != nil {
				t.Fatal(err)
			}
			hooks := hooksOf(TierMM)
			if err := s.adapt(spec, hooks); err != nil {
				t.Fatal(err)
			}
			for _, h := range hooks {
				if _, function, _ := strings.Cut(h.name, "/"); function == zapFunction {
					if to := spec.Programs[h.program].AttachTo; h.kprobe == "" && to != c.zap || h.kprobe != "" && h.kprobe != c.zap {
						t.Errorf("%s is attached to %q, %q", h.name, to, h.kprobe)
					}
				}
			}
		})
	}
}

// A kernel on which something is missing has no such tier.
func TestMMShapeRefused(t *testing.T) {
	without := func(kernel, line string) string {
		var b strings.Builder
		for l := range strings.Lines(kernel) {
			if !strings.HasPrefix(l, line) {
				b.WriteString(l)
			}
		}
		if b.Len() == len(kernel) {
			t.Fatalf("no line %q", line)
		}
		return b.String()
	}
	for _, c := range []struct{ name, kernel, says string }{
		{"no end of mprotect (5.10)", strings.ReplaceAll(mm61, "mprotect_fixup tlb", "mprotect_fixup"), `mprotect_fixup has no argument "tlb"`},
		{"no unmap_vmas", without(mm61, "unmap_vmas"), "unmap_vmas"},
		{"no zap", without(mm61, "zap_page_range_single"), "zap_page_range_single"},
		{"unknown unmap_vmas", strings.ReplaceAll(mm61, "start_addr", "from"), "unmap_vmas has no argument"},
		{"unknown move", strings.ReplaceAll(mm618, "pmc", "control"), "move_page_tables"},
		{"unknown struct", strings.ReplaceAll(mm73, "vma_end", "till"), `no member "vma_end"`},
		{"no flags", strings.ReplaceAll(mm612, "cp_flags", "how"), `change_protection has no argument "cp_flags"`},
	} {
		t.Run(c.name, func(t *testing.T) {
			s, err := mmShapeOf(kernelOf(t, c.kernel))
			if _, ok := err.(*HookError); !ok || !strings.Contains(err.Error(), c.says) {
				t.Errorf("%v, error %v", s, err)
			}
		})
	}
}

// Every variable and every program of the tier is in the object, and each hook
// has an identity of its own.
func TestMMHooks(t *testing.T) {
	spec, err := bpf.LoadSyscall()
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range mmArguments {
		if spec.Variables[a.variable] == nil {
			t.Errorf("no variable %s", a.variable)
		}
	}
	seen := map[string]bool{}
	for _, h := range mmHooks {
		p := spec.Programs[h.program]
		if p == nil {
			t.Errorf("no program %s", h.program)
			continue
		}
		if want := h.kprobe; want != "" && (p.Type != ebpf.Kprobe || p.SectionName != "kprobe/"+want) {
			t.Errorf("%s: %v %s", h.name, p.Type, p.SectionName)
		}
		if h.kprobe == "" && !strings.HasSuffix(h.name, "/"+p.AttachTo) {
			t.Errorf("%s: traces %s", h.name, p.AttachTo)
		}
		if HookName(h.id) != h.name || seen[h.name] || h.id >= layout.HookMax {
			t.Errorf("%s is hook %d, %s", h.name, h.id, HookName(h.id))
		}
		seen[h.name] = true
	}
	if i := slices.IndexFunc(mmHooks, func(h hook) bool { return !h.required }); i >= 0 {
		t.Errorf("%s is not required", mmHooks[i].name)
	}
}

// Functions, hooks and places on the stack, as bpf/mm.bpf.h knows them.
const (
	fnUnmap, fnZap, fnProtect, fnMove = 1, 2, 3, 4
	byFentry, byKprobe, byFentry2     = 1, 2, 4
	awaits                            = 1 << 24
)

// kernelPart calls the mm tier as the kernel would, in the calling thread.
type kernelPart struct {
	t     *testing.T
	tr    *Tracer
	space uint64
	st    *layout.Status
}

func playKernel(t *testing.T) *kernelPart {
	t.Helper()
	real := mmHooks
	mmHooks = []hook{{layout.HookGather, "raw_tp/ummu_mm", "what the test does", false, []string{"ummu_mm"}, "", "mm_play", ""}}
	tr, err := Open(Options{Tier: TierMM, slow: true})
	mmHooks = real
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := tr.Close(); err != nil {
			t.Error(err)
		}
	})
	f := openFeed(t, tr, Self())
	p, err := unix.MmapPtr(f.InterestFD(), 0, nil, uintptr(mm.PageSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	atomic.StoreUint32(&(*layout.Interest)(p).All, 1)
	unix.MunmapPtr(p, uintptr(mm.PageSize()))
	runtime.LockOSThread()
	t.Cleanup(runtime.UnlockOSThread)
	return &kernelPart{t, tr, f.space, statusOf(t, f)}
}

func (k *kernelPart) do(args ...uint64) {
	k.t.Helper()
	var ctx [6]uint64
	copy(ctx[:], args)
	if ret, err := k.tr.objs.programs["mm_play"].Run(&ebpf.RunOptions{Context: ctx}); err != nil || ret != 0 {
		k.t.Fatalf("%v: returned %d, %v", args, ret, err)
	}
}

func packed(function, saw int, place uint64) uint64 {
	return uint64(function) | uint64(saw)<<8 | uint64(layout.HookZapFentry)<<16 | place<<32
}

func (k *kernelPart) gather(place uint64) { k.do(0, packed(0, byFentry, place), k.space) }

// begin: page n, at a mmu_gather or of a function that makes one.
func (k *kernelPart) begin(function, saw int, flags, place, n uint64) {
	k.do(1, packed(function, saw, place)|flags, k.space, n<<12, (n+1)<<12, 99<<12)
}

func (k *kernelPart) explain(place uint64)         { k.do(2, packed(fnProtect, byFentry, place), k.space) }
func (k *kernelPart) finish(saw int, place uint64) { k.do(3, packed(0, saw, place), k.space) }

// want compares what the watch was told: records, changes begun, those still
// in flight, losses.
func (k *kernelPart) want(records, begun, open, losses uint64) {
	k.t.Helper()
	st := k.st
	got := [...]uint64{
		atomic.LoadUint64(&st.Records), atomic.LoadUint64(&st.Begun[0]) + atomic.LoadUint64(&st.Begun[1]),
		inFlight(st), atomic.LoadUint64(&st.Unpaired),
	}
	if want := [...]uint64{records, begun, open, losses}; got != want {
		k.t.Errorf("records, begun, in flight, losses: %d, want %d", got, want)
	}
	if g := atomic.LoadUint64(&st.Generation) >> 48; g != losses {
		k.t.Errorf("the generation says %d losses", g)
	}
}

// What the mm tier makes of the calls of its hooks, some of which are missed.
func TestMMFollows(t *testing.T) {
	const tlb = 0x3000 // an mmu_gather
	for _, c := range []struct {
		name string
		play func(k *kernelPart)
	}{
		{"all hooks", func(k *kernelPart) {
			k.gather(tlb)
			for _, saw := range []int{byKprobe, byFentry, byFentry2} {
				k.begin(fnUnmap, saw, 0, tlb, 1)
			}
			k.want(1, 1, 1, 0)
			for _, saw := range []int{byKprobe, byFentry, byFentry2} {
				k.finish(saw, tlb)
			}
			k.want(1, 1, 0, 0)
		}},
		{"one hook a side", func(k *kernelPart) {
			for i, saw := range []int{byKprobe, byFentry, byFentry2} {
				n := uint64(i)
				k.begin(fnUnmap, saw, 0, tlb, 1)
				k.want(n+1, n+1, 1, 0)
				k.finish(saw, tlb)
				k.want(n+1, n+1, 0, 0)
			}
		}},
		{"no begin", func(k *kernelPart) {
			k.gather(tlb)
			k.finish(byKprobe, tlb)
			k.want(0, 0, 0, 1)
			k.finish(byFentry, tlb)
			k.finish(byFentry2, tlb)
			k.want(0, 0, 0, 1) // once
		}},
		{"nothing but one end", func(k *kernelPart) {
			k.finish(byFentry2, tlb)
			k.want(0, 0, 0, 1)
		}},
		{"no begin after a change of the same place", func(k *kernelPart) {
			k.gather(tlb)
			k.begin(fnZap, byFentry, 0, tlb, 1)
			k.finish(byFentry, tlb)
			k.gather(tlb)
			k.finish(byKprobe, tlb) // not the partner of the finish before
			k.want(1, 1, 0, 1)
		}},
		{"no end, then the same again", func(k *kernelPart) {
			k.gather(tlb)
			k.begin(fnZap, byFentry, 0, tlb, 1)
			k.gather(tlb)
			k.want(1, 1, 0, 0) // closed
			k.begin(fnZap, byKprobe, 0, tlb, 1)
			k.want(2, 2, 1, 0)
			k.finish(byFentry, tlb)
			k.want(2, 2, 0, 0)
		}},
		{"no end and no gather, then the same again", func(k *kernelPart) {
			k.begin(fnZap, byFentry, 0, tlb, 1)
			k.begin(fnZap, byFentry, 0, tlb, 1)
			k.want(2, 1, 1, 0) // told, though it looks like part of the first
			k.finish(byFentry, tlb)
			k.want(2, 1, 0, 0)
		}},
		{"ranges of one gather", func(k *kernelPart) {
			k.gather(tlb)
			for n := range uint64(3) {
				k.begin(fnZap, byKprobe, 0, tlb, n)
				k.begin(fnZap, byFentry, 0, tlb, n)
			}
			k.want(3, 1, 1, 0)
			k.finish(byFentry, tlb)
			k.want(3, 1, 0, 0)
		}},
		{"a function that makes its gather", func(k *kernelPart) {
			for i := range uint64(2) {
				k.begin(fnZap, byKprobe, awaits, tlb+0x100, 1)
				k.begin(fnZap, byFentry, awaits, tlb+0x100-8, 1)
				if i == 0 { // the second time it is missed
					k.gather(tlb)
				}
				k.want(i+1, i+1, 1, 0)
				k.finish(byFentry, tlb)
				k.finish(byKprobe, tlb)
				k.want(i+1, i+1, 0, 0)
			}
		}},
		{"nothing of pinned pages", func(k *kernelPart) {
			k.gather(tlb)
			k.explain(tlb)
			k.finish(byKprobe, tlb)
			k.finish(byFentry, tlb)
			k.want(0, 0, 0, 0)
			k.gather(tlb)
			k.finish(byFentry, tlb)
			k.want(0, 0, 0, 1) // what was said is over
		}},
		{"a mapping that changes beside one that does not", func(k *kernelPart) {
			k.gather(tlb)
			k.explain(tlb)
			k.begin(fnProtect, byFentry, 0, tlb, 1)
			k.explain(tlb)
			k.want(1, 1, 1, 0)
			k.finish(byFentry, tlb)
			k.want(1, 1, 0, 0)
		}},
		{"a gather of hugetlb's own", func(k *kernelPart) {
			k.gather(tlb)
			k.begin(fnProtect, byFentry, 0, tlb, 1)
			k.finish(byFentry, tlb-0x200) // of tlb_gather_mmu_vma, which is not hooked
			k.finish(byKprobe, tlb-0x200)
			k.want(1, 1, 1, 0)
			k.finish(byFentry, tlb)
			k.want(1, 1, 0, 0)
		}},
		{"a change inside a change", func(k *kernelPart) {
			k.begin(fnMove, byFentry, 0, tlb, 1)
			k.gather(tlb - 0x200)
			k.begin(fnUnmap, byFentry, 0, tlb-0x200, 2)
			k.want(2, 2, 2, 0)
			k.finish(byFentry, tlb-0x200)
			k.want(2, 2, 1, 0)
			k.finish(byFentry, tlb) // of the move: its return
			k.want(2, 2, 0, 0)
		}},
		{"no begin of the one inside", func(k *kernelPart) {
			k.begin(fnMove, byFentry, 0, tlb, 1)
			k.gather(tlb - 0x200)
			k.finish(byFentry, tlb-0x200)
			k.want(1, 1, 1, 1)
			k.finish(byFentry, tlb)
			k.want(1, 1, 0, 1)
		}},
		{"no end of the one inside", func(k *kernelPart) {
			k.begin(fnMove, byFentry, 0, tlb, 1)
			k.gather(tlb - 0x200)
			k.begin(fnUnmap, byFentry, 0, tlb-0x200, 2)
			k.finish(byFentry, tlb)
			k.want(2, 2, 0, 0)
		}},
	} {
		t.Run(c.name, func(t *testing.T) { c.play(playKernel(t)) })
	}
}
