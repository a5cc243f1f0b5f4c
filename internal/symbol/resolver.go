// SPDX-License-Identifier: Apache-2.0

package symbol

import (
	"errors"
	"os"
	"sync"

	"github.com/ummu/ummu/mm"
)

// Resolver resolves stacks of processes. It is safe for concurrent use.
type Resolver struct {
	mu     sync.Mutex // guards everything
	procs  map[int]*process
	images map[fileID]*image // nil: cannot be read
	stats  Stats
}

// Stats count what a resolver could not do.
type Stats struct {
	// Stacks were asked for.
	Stacks uint64
	// Unmapped of them began outside every mapping that is known.
	Unmapped uint64
	// Unreadable files could not be opened or are no ELF files.
	Unreadable uint64
}

// process is a snapshot of one process.
type process struct {
	maps  []mapping
	stale bool // something was mapped or unmapped since
}

// New returns an empty resolver. Close frees it.
func New() *Resolver {
	return &Resolver{procs: make(map[int]*process), images: make(map[fileID]*image)}
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
	if err == nil && len(ms) == 0 { // a zombie has none
		err = os.ErrNotExist
	}
	if err != nil {
		return err
	}
	for i := range ms {
		m := &ms[i]
		if m.file.inode == 0 {
			continue
		}
		if _, ok := r.images[m.file]; ok {
			continue
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
	r.procs[pid] = &process{maps: ms}
	return nil
}

// Stale says that executable mappings of a process have changed, or that it
// executes another program: they are read again when they are needed.
func (r *Resolver) Stale(pid int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.procs[pid]; p != nil {
		p.stale = true
	}
}

// Fork says that child begins with the mappings of parent.
func (r *Resolver) Fork(parent, child int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if p := r.procs[parent]; p != nil {
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
	if p == nil || p.stale || find(p.maps, a) == nil {
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
		name := im.function(at)
		var ps []place
		if im.lines != nil {
			ps = im.lines.find(at)
		}
		if g, ok := im.goPlace(at); ok && len(ps) == 0 {
			ps = []place{g}
		}
		if len(ps) == 0 {
			f.Func = demangled(name)
			out = append(out, f)
			continue
		}
		for j, x := range ps {
			f.Func, f.File, f.Line, f.Inlined = demangled(x.name), x.file, x.line, x.inlined
			if j == len(ps)-1 && (x.name == "" || name != "") {
				f.Func = demangled(name)
			}
			out = append(out, f)
		}
	}
	return out
}

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
