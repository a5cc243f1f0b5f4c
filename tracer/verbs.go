// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

var errNoRegistrations = errors.New("registrations: the tracer was opened without Options.Registrations")

// ErrNotVerbs: the file is no libibverbs.
var ErrNotVerbs = errors.New("not a libibverbs")

// verbs is what is attached to copies of libibverbs.
type verbs struct {
	mu       sync.Mutex // guards the fields below
	attached map[fileID]struct{}
	links    []link.Link
	count    bool // the kernel's own count is attached
}

type fileID struct{ dev, inode uint64 }

// verb is one function: the programs at its entry and at its return.
type verb struct{ entry string }

const verbsReturn = "verbs_return"

// verbFunctions are the functions that register memory with addresses of the
// program (infiniband/verbs.h). ibv_reg_dmabuf_mr is not: its memory has none.
var verbFunctions = map[string]verb{
	"ibv_reg_mr":       {"verbs_reg_mr"},
	"ibv_reg_mr_iova":  {"verbs_reg_mr_iova"},
	"ibv_reg_mr_iova2": {"verbs_reg_mr_iova"},
	"ibv_dereg_mr":     {"verbs_dereg_mr"},
	"ibv_rereg_mr":     {"verbs_rereg_mr"},
}

const countMRDereg = "count_mr_dereg"

// programs are what to load for v, which may be nil.
func (v *verbs) programs() []string {
	if v == nil {
		return nil
	}
	return []string{"verbs_reg_mr", "verbs_reg_mr_iova", "verbs_dereg_mr", "verbs_rereg_mr", verbsReturn, countMRDereg}
}

func (v *verbs) close() []link.Link {
	if v == nil {
		return nil
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	links := v.links
	v.links = nil
	return links
}

// ProbeVerbs attaches to a copy of libibverbs, for every process that maps it
// now or later, in whatever mount namespace: path is only how this process
// finds the file, as /proc/PID/root/usr/lib/libibverbs.so.1. A file that is
// probed already is left as it is.
//
// It fails with [ErrNotVerbs] if the file has not the functions, and with a
// [*HookError] if the kernel refuses.
func (t *Tracer) ProbeVerbs(path string) error {
	if t.verbs == nil {
		return errNoRegistrations
	}
	if err := t.begin(); err != nil {
		return err
	}
	defer t.ops.Done()
	v := t.verbs
	v.mu.Lock()
	defer v.mu.Unlock()
	f, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("probe libibverbs: %w", err)
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fmt.Errorf("probe %s: %w", path, err)
	}
	id := fileID{st.Dev, st.Ino}
	if _, ok := v.attached[id]; ok {
		return nil
	}
	places, err := verbPlaces(f)
	if err != nil {
		return fmt.Errorf("probe %s: %w", path, err)
	}
	x, err := link.OpenExecutable(path)
	if err != nil {
		return fmt.Errorf("probe %s: %w", path, err)
	}
	var links []link.Link
	for _, p := range places {
		fn := verbFunctions[p.name]
		o := &link.UprobeOptions{Address: p.offset}
		// The return first: a call that is seen to begin is seen to end.
		for _, attach := range []struct {
			how  func(string, *ebpf.Program, *link.UprobeOptions) (link.Link, error)
			prog string
		}{{x.Uretprobe, verbsReturn}, {x.Uprobe, fn.entry}} {
			l, err := attach.how(p.name, t.objs.programs[attach.prog], o)
			if err != nil {
				return errors.Join(hookError("uprobe/"+p.name, err), closeLinks(links))
			}
			links = append(links, l)
		}
	}
	v.links = append(v.links, links...)
	v.attached[id] = struct{}{}
	if !v.count { // where the module is loaded; it is by whoever opens a device
		l, err := link.AttachRawTracepoint(link.RawTracepointOptions{Name: "mr_dereg", Program: t.objs.programs[countMRDereg]})
		if err == nil {
			v.links = append(v.links, l)
			v.count = true
		}
	}
	return nil
}

// VerbsUnprobed reports whether a file is not probed yet.
func (t *Tracer) VerbsUnprobed(path string) (bool, error) {
	if t.verbs == nil {
		return false, errNoRegistrations
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return false, fmt.Errorf("look at %s: %w", path, err)
	}
	t.verbs.mu.Lock()
	defer t.verbs.mu.Unlock()
	_, ok := t.verbs.attached[fileID{st.Dev, st.Ino}]
	return !ok, nil
}

// VerbsGap is how many memory regions of watched processes the kernel says were
// given back since [Open] of which the probes saw nothing: of programs that
// speak to the kernel by themselves, or that were registered before, or that
// went with their device. ok is false where the kernel has no such count
// (rdma_core:mr_dereg).
func (t *Tracer) VerbsGap() (n uint64, ok bool, err error) {
	if t.verbs == nil {
		return 0, false, errNoRegistrations
	}
	if err := t.begin(); err != nil {
		return 0, false, err
	}
	defer t.ops.Done()
	t.verbs.mu.Lock()
	ok = t.verbs.count
	t.verbs.mu.Unlock()
	if !ok {
		return 0, false, nil
	}
	var kernel, probes uint64
	if err := errors.Join(t.objs.VerbsDeregs.Get(&probes), t.objs.KernelDeregs.Get(&kernel)); err != nil {
		return 0, false, fmt.Errorf("read counts of memory regions: %w", err)
	}
	return max(kernel, probes) - probes, true, nil
}

// verbPlace is one function in a file.
type verbPlace struct {
	name   string
	offset uint64
}

// oldVersion is of functions that are wrappers around newer ones of the same
// name, which a program of before 2006 was linked with.
const oldVersion = "IBVERBS_1.0"

// verbPlaces finds the functions in a library, of their newest versions: the
// old ones call these.
func verbPlaces(f *os.File) ([]verbPlace, error) {
	e, err := elf.NewFile(f)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotVerbs, err)
	}
	if e.Class != elf.ELFCLASS64 {
		return nil, fmt.Errorf("%w for 64-bit programs", ErrNotVerbs)
	}
	syms, err := e.DynamicSymbols()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNotVerbs, err)
	}
	newer := map[string]bool{}
	for i := range syms {
		if syms[i].Version != oldVersion {
			newer[syms[i].Name] = true
		}
	}
	seen := map[verbPlace]bool{}
	var places []verbPlace
	for i := range syms {
		s := &syms[i]
		if _, ok := verbFunctions[s.Name]; !ok || s.Section == elf.SHN_UNDEF || elf.ST_TYPE(s.Info) != elf.STT_FUNC {
			continue
		}
		if s.Version == oldVersion && newer[s.Name] {
			continue
		}
		for _, p := range e.Progs {
			if p.Type == elf.PT_LOAD && p.Flags&elf.PF_X != 0 && p.Vaddr <= s.Value && s.Value < p.Vaddr+p.Filesz {
				at := verbPlace{s.Name, s.Value - p.Vaddr + p.Off}
				if !seen[at] {
					seen[at] = true
					places = append(places, at)
				}
			}
		}
	}
	if len(places) == 0 {
		return nil, ErrNotVerbs
	}
	return places, nil
}
