// SPDX-License-Identifier: Apache-2.0

package ibv

import (
	"fmt"
	"os"
	"runtime"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

var (
	_ regcache.Registrar[*MR] = (*PD)(nil)
	_ regcache.Limiter        = (*PD)(nil)
)

// MR is a memory region: a range that is registered with a device. Its methods
// may be called from several goroutines at once, and after it was deregistered.
type MR struct {
	pd     *PD
	rng    mm.Range
	iova   uint64
	flags  uint32
	keys   keys
	pinner *runtime.Pinner // of Go memory
	state  atomic.Int32
}

const (
	registered int32 = iota
	leaving          // Deregister is at it
	gone
)

// Range is what was registered, to the byte.
func (m *MR) Range() mm.Range { return m.rng }

// IOVA is the address by which the device knows the first byte: where transfers
// of peers start. It is that of Range, unless RegisterAt gave another.
func (m *MR) IOVA() uint64 { return m.iova }

// LKey is the key for local use.
func (m *MR) LKey() uint32 { return m.keys.lkey }

// RKey is the key that a peer needs.
func (m *MR) RKey() uint32 { return m.keys.rkey }

// Access are the rights that were registered.
func (m *MR) Access() regcache.Access { return rightsOf(m.flags) }

// OnDemand reports whether the region follows the page tables.
func (m *MR) OnDemand() bool { return m.flags&flagOnDemand != 0 }

// Registered reports whether the region was not deregistered yet.
func (m *MR) Registered() bool { return m.state.Load() == registered }

// Register registers the bytes of r (ibv_reg_mr) with the rights a. Writing
// and atomics by peers include local writing. Errors are [*RegisterError],
// which explains the errno, [ErrGoMemory], [mm.ErrEmptyRange], and
// os.ErrClosed. See the documentation of the package for whose memory it may be.
func (p *PD) Register(r mm.Range, a regcache.Access) (*MR, error) {
	return p.RegisterAt(r, a, uint64(r.Start), p.opt)
}

// RegisterAt is Register with options of its own, and for a device that is to
// know the first byte of r by the address iova (ibv_reg_mr_iova2). The offsets
// of r.Start and iova in their pages must be the same.
func (p *PD) RegisterAt(r mm.Range, a regcache.Access, iova uint64, o Options) (*MR, error) {
	if !r.Empty() && heapUnpinned(r.Start) {
		return nil, fmt.Errorf("%s %v: %w", opRegister, r, ErrGoMemory)
	}
	return p.register(r, a, iova, o, nil)
}

// RegisterBytes registers b, memory of the Go heap or any other, and keeps it
// pinned until it is deregistered.
func (p *PD) RegisterBytes(b []byte, a regcache.Access) (*MR, error) {
	start := mm.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	r := mm.Range{Start: start, End: start + mm.Addr(len(b))}
	if len(b) == 0 {
		return nil, fmt.Errorf("%s %v: %w", opRegister, r, mm.ErrEmptyRange)
	}
	pinner := new(runtime.Pinner)
	pinner.Pin(unsafe.SliceData(b))
	m, err := p.register(r, a, uint64(start), p.opt, pinner)
	if err != nil {
		pinner.Unpin()
	}
	return m, err
}

func (p *PD) register(r mm.Range, a regcache.Access, iova uint64, o Options, pinner *runtime.Pinner) (*MR, error) {
	if r.Empty() {
		return nil, fmt.Errorf("%s %v: %w", opRegister, r, mm.ErrEmptyRange)
	}
	pd, err := p.use(1, 0)
	if err != nil {
		return nil, fmt.Errorf("%s %v: protection domain: %w", opRegister, r, err)
	}
	m := &MR{pd: p, rng: r, iova: iova, flags: flagsOf(a, o), pinner: pinner}
	if o.OnDemand && !p.dev.limits.OnDemand {
		// the kernel's word for it is EINVAL, which may mean anything
		p.use(-1, 0)
		return nil, p.explain(opRegister, m, unix.EOPNOTSUPP)
	}
	if m.keys, err = libRegister(pd, uint64(r.Start), r.Len(), iova, m.flags); err != nil {
		p.use(-1, 0)
		return nil, p.explain(opRegister, m, err)
	}
	return m, nil
}

// Deregister ends the registration (ibv_dereg_mr): peers and transfers in
// flight that use its keys fail. It returns [ErrNotRegistered] if m was
// deregistered, or is not of this protection domain. On any other error it is
// registered still.
func (p *PD) Deregister(m *MR) error {
	if m == nil || m.pd != p || !m.state.CompareAndSwap(registered, leaving) {
		return fmt.Errorf("%s: %w", opDeregister, ErrNotRegistered)
	}
	if err := libDeregister(m.keys.mr); err != nil {
		m.state.Store(registered)
		return p.explain(opDeregister, m, err)
	}
	m.state.Store(gone)
	if m.pinner != nil {
		m.pinner.Unpin()
	}
	p.use(-1, 0)
	return nil
}

func (p *PD) explain(op string, m *MR, err error) error {
	e := &RegisterError{
		Op: op, Range: m.rng, Flags: flagNames(m.flags), Errno: errnoIn(err),
		Need: m.rng.Pages().Len(), Max: p.dev.limits.MaxMR, MaxSize: p.dev.limits.MaxMRSize,
		Removed: p.dev.Removed(),
	}
	e.Memlock, e.Pinned = memlock()
	p.dev.mu.Lock()
	e.Live = p.dev.mrs
	p.dev.mu.Unlock()
	return e
}

// Limit returns RLIMIT_MEMLOCK, 0 if there is none or it does not bind, and what
// this process has pinned, in bytes. It implements [regcache.Limiter].
func (p *PD) Limit() (limit, use uint64) { return memlock() }

// live is an error unless the addresses at are in the region, and it is
// registered on p.
func (m *MR) live(p *PD, at mm.Range) error {
	switch {
	case m == nil || m.pd != p || !m.Registered():
		return ErrNotRegistered
	case at.Empty():
		return mm.ErrEmptyRange
	case !m.rng.Contains(at):
		return fmt.Errorf("%v: %w %v", at, ErrOutside, m.rng)
	case at.Len() > 1<<31: // of one message
		return fmt.Errorf("%v: longer than 2 GiB: %w", at, os.ErrInvalid)
	}
	return nil
}

// heapUnpinned reports whether a lies in the Go heap and is not pinned. The
// runtime checks the pointers in what C functions are given, and panics.
func heapUnpinned(a mm.Addr) (unpinned bool) {
	defer func() {
		if recover() != nil {
			unpinned = true
		}
	}()
	u := uintptr(a)
	// A conversion that go vet takes for a mistake when it is written as such.
	checkPointer(*(*unsafe.Pointer)(unsafe.Pointer(&u)))
	return false
}
