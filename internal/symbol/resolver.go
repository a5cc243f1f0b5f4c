// SPDX-License-Identifier: Apache-2.0

package symbol

import (
	"cmp"
	"errors"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/ummu/ummu/mm"
)

// Resolver resolves stacks of processes. It is safe for concurrent use.
type Resolver struct {
	mu     sync.Mutex // guards everything
	procs  map[int]*process
	images map[fileID]*image // nil: cannot be read
	side   *sideband         // nil: there is none
	all    bool              // follow every process
	stats  Stats
}

// Stats count what a resolver could not do.
type Stats struct {
	// Stacks were asked for.
	Stacks uint64
	// Unmapped of them began outside every mapping that is known.
	Unmapped uint64
	// Overruns: the kernel's account of mappings had gaps.
	Overruns uint64
	// Unreadable files could not be opened or are no ELF files.
	Unreadable uint64
}

// process is a snapshot of one process.
type process struct {
	maps  []mapping
	stale bool // something was mapped or unmapped since
	told  bool // the kernel told everything from its first mapping on
}

// New returns an empty resolver. Close frees it.
func New() *Resolver {
	return &Resolver{procs: make(map[int]*process), images: make(map[fileID]*image)}
}

// Watch makes the resolver follow the mappings of the processes that it has
// snapshots of, and of their descendants, by what the kernel tells; with all, of
// every process. Without it what a process maps and executes is read from /proc
// when it is needed, which fails if the process has ended by then. It needs
// CAP_PERFMON.
func (r *Resolver) Watch(all bool) error {
	side, err := newSideband()
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.side != nil {
		return side.close()
	}
	r.side, r.all = side, all
	return nil
}

// Advance says that the next questions are about the time at, of
// CLOCK_MONOTONIC, or later. It returns the processes that have mapped code
// since it was last called, once each.
func (r *Resolver) Advance(at time.Duration) (mapped []int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.side == nil {
		return nil
	}
	for _, e := range r.side.take(at) {
		p := r.procs[e.pid]
		if p == nil && !r.all {
			continue
		}
		switch e.kind {
		case eventExec:
			r.procs[e.pid] = &process{told: true}
		case eventFork:
			child := &process{told: true}
			if p != nil {
				child.maps = slices.Clone(p.maps)
			}
			r.procs[e.child] = child
		case eventMapped:
			if p == nil {
				p = &process{}
				r.procs[e.pid] = p
			}
			p.maps = put(p.maps, e.m)
			r.open(e.pid, &e.m)
			if !slices.Contains(mapped, e.pid) {
				mapped = append(mapped, e.pid)
			}
		}
	}
	if r.side.lost {
		r.side.lost = false
		r.stats.Overruns++
		for _, p := range r.procs {
			p.stale, p.told = true, false
		}
	}
	return mapped
}

// Close closes all files.
func (r *Resolver) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	var errs []error
	for _, m := range r.images {
		if m != nil {
			errs = append(errs, m.close())
		}
	}
	if r.side != nil {
		errs = append(errs, r.side.close())
		r.side = nil
	}
	r.images, r.procs = make(map[fileID]*image), make(map[int]*process)
	return errors.Join(errs...)
}

// Stats returns the counts so far.
func (r *Resolver) Stats() Stats {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.stats
}

// Snapshot reads the mappings of a process now and opens the files behind
// them. It fails if the process has ended; what was known stays.
func (r *Resolver) Snapshot(pid int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.snapshot(pid)
}

func (r *Resolver) snapshot(pid int) error {
	ms, err := readMaps(pid)
	if err == nil && len(ms) == 0 && !hasSpace(pid) { // a zombie; one that is in execve has none yet
		err = os.ErrNotExist
	}
	if err != nil {
		return err
	}
	for i := range ms {
		r.open(pid, &ms[i])
	}
	r.procs[pid] = &process{maps: ms}
	return nil
}

// open opens the file of a mapping, if it is not open yet.
func (r *Resolver) open(pid int, m *mapping) {
	if m.file.inode == 0 {
		return
	}
	if _, ok := r.images[m.file]; ok {
		return
	}
	var im *image
	f, err := openMapped(pid, m)
	if err == nil {
		if im, err = openImage(f, m.path); err != nil {
			f.Close()
		}
	}
	if err != nil {
		r.stats.Unreadable++
	}
	r.images[m.file] = im
}

// put adds a mapping, in the place of what was there.
func put(ms []mapping, m mapping) []mapping {
	var out []mapping
	for _, x := range ms {
		if !x.Overlaps(m.Range) {
			out = append(out, x)
			continue
		}
		if x.Start < m.Start {
			head := x
			head.End = m.Start
			out = append(out, head)
		}
		if m.End < x.End {
			tail := x
			tail.Start = m.End
			tail.offset += uint64(m.End - x.Start)
			out = append(out, tail)
		}
	}
	out = append(out, m)
	slices.SortFunc(out, func(a, b mapping) int { return cmp.Compare(a.Start, b.Start) })
	return out
}

// Stale says that executable mappings of a process have changed: they are read
// again when they are needed.
func (r *Resolver) Stale(pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.procs[pid]; p != nil && r.side == nil {
		p.stale = true
	}
}

// Exec says that a process executes another program: nothing of what is known
// holds, even if the new one ends before anybody looks.
func (r *Resolver) Exec(pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.side == nil { // else it is told so in time
		delete(r.procs, pid)
	}
}

// Modules lists the files of which a process has code mapped, as it sees them
// and as of the last snapshot.
func (r *Resolver) Modules(pid int) (names []string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.procs[pid]
	if p == nil {
		return nil
	}
	for i := range p.maps {
		if m := &p.maps[i]; m.file.inode != 0 && !slices.Contains(names, m.path) {
			names = append(names, m.path)
		}
	}
	return names
}

// Fork says that child begins with the mappings of parent.
func (r *Resolver) Fork(parent, child int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.procs[parent]; p != nil && r.side == nil {
		r.procs[child] = &process{maps: p.maps, stale: true}
	}
}

// Exit says that a process has ended and nothing of it will be asked for.
func (r *Resolver) Exit(pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.procs, pid)
}

// current returns the snapshot of a process, which is new if it has to be; nil
// if there is none.
func (r *Resolver) current(pid int, a mm.Addr) *process {
	p := r.procs[pid]
	if p == nil || p.stale || find(p.maps, a) == nil && !p.told {
		if r.snapshot(pid) == nil {
			return r.procs[pid]
		}
		if p != nil {
			p.stale = false // it has ended: this is all there will be
		}
	}
	return p
}

// Stack unwinds a stack of a process and resolves it, innermost frame first.
// The first frame is there even if nothing is known of it, unless s is empty.
func (r *Resolver) Stack(pid int, s *mm.Stack) []Frame {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s.PC == 0 {
		return nil
	}
	r.stats.Stacks++
	p := r.current(pid, s.PC)
	if p == nil || find(p.maps, s.PC) == nil {
		r.stats.Unmapped++
	}
	return r.resolve(p, unwind(s, func(a mm.Addr) (*image, uint64) {
		_, im, at := r.locate(p, a)
		return im, at
	}))
}

// Frames resolves program counters of a process, innermost first.
func (r *Resolver) Frames(pid int, pcs []mm.Addr) []Frame {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(pcs) == 0 {
		return nil
	}
	return r.resolve(r.current(pid, pcs[0]), pcs)
}

// locate finds the mapping, the file and the address in it; the image is nil
// if there is none.
func (r *Resolver) locate(p *process, a mm.Addr) (*mapping, *image, uint64) {
	if p == nil {
		return nil, nil, 0
	}
	m := find(p.maps, a)
	if m == nil {
		return nil, nil, 0
	}
	im := r.images[m.file]
	if im == nil {
		return m, nil, 0
	}
	at, ok := im.address(uint64(a-m.Start) + m.offset)
	if !ok {
		return m, nil, 0
	}
	return m, im, at
}

func (r *Resolver) resolve(p *process, pcs []mm.Addr) []Frame {
	var out []Frame
	for i, pc := range pcs {
		look := pc
		if i > 0 {
			look-- // in the call, not behind it
		}
		m, im, at := r.locate(p, look)
		f := Frame{Addr: pc}
		if m != nil {
			f.Module = m.path
		}
		if im == nil {
			out = append(out, f)
			continue
		}
		f.Offset, f.BuildID = at, im.buildID
		if i > 0 {
			f.Offset++
		}
		if fs, ok := im.resolved[at]; ok {
			for _, x := range fs {
				x.Addr, x.Module, x.Offset, x.BuildID = f.Addr, f.Module, f.Offset, f.BuildID
				out = append(out, x)
			}
			continue
		}
		from := len(out)
		name := im.function(at)
		var ps []place
		if im.lines != nil {
			ps = im.lines.find(at)
		}
		if g, ok := im.goPlace(at); ok && len(ps) == 0 {
			ps = []place{g}
		}
		if len(ps) == 0 {
			ps = []place{{name: name}}
		}
		for j, x := range ps {
			f.Func, f.File, f.Line, f.Inlined = demangled(x.name), x.file, x.line, x.inlined
			if j == len(ps)-1 && (x.name == "" || name != "") {
				f.Func = demangled(name)
			}
			out = append(out, f)
		}
		if len(im.resolved) >= maxResolved {
			clear(im.resolved)
		}
		im.resolved[at] = slices.Clone(out[from:])
	}
	return out
}

// maxResolved bounds the addresses that are remembered of a file.
const maxResolved = 1 << 16

// Stacks numbers stacks: equal ones once. The zero value is ready. It is not
// safe for concurrent use.
type Stacks struct {
	ids    map[string]uint32
	frames [][]Frame
	key    []byte
}

// Add returns the number of a stack of a process, from 1; 0 if it is empty.
func (t *Stacks) Add(pid int, fs []Frame) uint32 {
	if len(fs) == 0 {
		return 0
	}
	k := t.key[:0]
	k = appendWord(k, uint64(pid))
	for i := range fs {
		k = appendWord(k, uint64(fs[i].Addr))
		k = append(k, fs[i].Func...)
	}
	t.key = k
	if id, ok := t.ids[string(k)]; ok {
		return id
	}
	if t.ids == nil {
		t.ids = make(map[string]uint32)
	}
	t.frames = append(t.frames, fs)
	id := uint32(len(t.frames))
	t.ids[string(k)] = id
	return id
}

func appendWord(b []byte, v uint64) []byte {
	for range 8 {
		b, v = append(b, byte(v)), v>>8
	}
	return b
}

// Frames returns the stack of a number; nil if there is none.
func (t *Stacks) Frames(id uint32) []Frame {
	if id == 0 || int(id) > len(t.frames) {
		return nil
	}
	return t.frames[id-1]
}
