// SPDX-License-Identifier: Apache-2.0

package ibv

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Devices names the RDMA devices of this machine. None is no error.
func Devices() ([]string, error) {
	if err := load(false); err != nil {
		return nil, fmt.Errorf("list RDMA devices: %w", err)
	}
	names, err := libDevices()
	if err != nil && !errors.Is(err, unix.ENOSYS) {
		return nil, fmt.Errorf("list RDMA devices: %w", err)
	}
	return names, nil
}

// ForkStatus says what fork does to registered memory (enum ibv_fork_status).
type ForkStatus int

// What fork does to registered memory.
const (
	ForkUnknown  ForkStatus = -1 // a library before rdma-core 37: take it for unsafe
	ForkUnsafe   ForkStatus = 0  // the parent may lose the pages that it writes to
	ForkEnabled  ForkStatus = 1  // ibv_fork_init was called: children do not have the pages
	ForkUnneeded ForkStatus = 2  // the kernel copies pinned pages for children (Linux 5.12)
)

// String is the status in words.
func (s ForkStatus) String() string {
	switch s {
	case ForkUnsafe:
		return "unsafe"
	case ForkEnabled:
		return "enabled by ibv_fork_init"
	case ForkUnneeded:
		return "safe by the kernel"
	}
	return "unknown"
}

// ForkSafety says what fork does to registered memory here and now; see the
// documentation of the package.
func ForkSafety() (ForkStatus, error) {
	if err := load(false); err != nil {
		return ForkUnknown, fmt.Errorf("ask for fork safety: %w", err)
	}
	return libForkStatus(), nil
}

// Limits are what a device says of itself.
type Limits struct {
	MaxMR     int    // memory regions of all processes
	MaxMRSize uint64 // bytes of one
	Ports     int
	OnDemand  bool // regions that follow the page tables
	// OnDemandWrite and OnDemandRead: RDMA WRITE and READ can have such a
	// region as their target, over reliable connections.
	OnDemandWrite, OnDemandRead bool
}

// Device is an open RDMA device. Its methods may be called from several
// goroutines at once.
type Device struct {
	name   string
	limits Limits
	lent   bool // of an RDMA-CM identifier, which closes it

	mu      sync.Mutex // guards what follows; held over taking events, which do not block
	context object     // nil: closed
	pds     int
	mrs     int // of all PDs, those being registered included
	removed bool
}

// Open opens a device by its name, "mlx5_0" or "rxe0". Errors are [ErrNotBuilt],
// [ErrNoLibrary] and [*OpenError], which is [ErrNoDevice] if there is none of
// the name.
func Open(name string) (*Device, error) {
	if err := load(false); err != nil {
		return nil, fmt.Errorf("open RDMA device %q: %w", name, err)
	}
	c, err := libOpen(name)
	if err != nil {
		have, _ := Devices()
		return nil, &OpenError{Name: name, Have: have, Errno: errnoIn(err)}
	}
	d, err := newDevice(name, c)
	if err != nil {
		return nil, errors.Join(err, libClose(c))
	}
	return d, nil
}

func newDevice(name string, c object) (*Device, error) {
	l, err := libQuery(c)
	if err != nil {
		return nil, fmt.Errorf("query RDMA device %q: %w", name, err)
	}
	return &Device{name: name, limits: l, context: c}, nil
}

func errnoIn(err error) syscall.Errno {
	var e syscall.Errno
	errors.As(err, &e)
	return e
}

// Name is the device's name.
func (d *Device) Name() string { return d.name }

// Limits are what the device said when it was opened.
func (d *Device) Limits() Limits { return d.limits }

// Removed reports whether the kernel has said that the device is gone (removed,
// or its driver unloaded). It stays gone for this Device; a device of the same
// name that comes back has to be opened. What a cache has of it stays there until
// the cache is closed, and is of no use: transfers fail.
func (d *Device) Removed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.context != nil && !d.removed {
		fatal, err := libFatal(d.context)
		d.removed = fatal || errors.Is(err, unix.EIO) || errors.Is(err, unix.ENODEV)
	}
	return d.removed
}

// Close closes the device. While it has protection domains it does nothing
// and returns a [*BusyError]. Closing again returns nil.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case d.context == nil:
		return nil
	case d.pds > 0:
		return &BusyError{What: "RDMA device " + d.name, PDs: d.pds, MRs: d.mrs}
	case !d.lent:
		if err := libClose(d.context); err != nil {
			return fmt.Errorf("close RDMA device %s: %w", d.name, err)
		}
	}
	d.context = nil
	return nil
}

// Options of a protection domain: of what Register registers on it. The zero
// value works.
type Options struct {
	// OnDemand makes regions that follow the page tables (IBV_ACCESS_ON_DEMAND),
	// where [Limits] say that the device can: else Register fails with
	// EOPNOTSUPP.
	OnDemand bool
	// RelaxedOrdering lets the device write out of order
	// (IBV_ACCESS_RELAXED_ORDERING). A kernel that does not know it ignores it.
	RelaxedOrdering bool
}

// PD is a protection domain: what its memory regions and queue pairs have in
// common. It is a [regcache.Registrar]. Its methods may be called from several
// goroutines at once.
type PD struct {
	dev *Device
	opt Options

	mu     sync.Mutex // guards what follows; not held while registering; before Device.mu
	pd     object     // nil: closed
	mrs    int        // registered, or being so
	queues int
}

// NewPD makes a protection domain. It must be closed before the device.
func (d *Device) NewPD(o Options) (*PD, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.context == nil {
		return nil, fmt.Errorf("make protection domain: RDMA device %s: %w", d.name, os.ErrClosed)
	}
	p, err := libPD(d.context)
	if err != nil {
		return nil, fmt.Errorf("make protection domain on RDMA device %s: %w", d.name, err)
	}
	d.pds++
	return &PD{dev: d, opt: o, pd: p}, nil
}

// Device is the device of the protection domain.
func (p *PD) Device() *Device { return p.dev }

// Close frees the protection domain. While it has memory regions or queue pairs
// it does nothing and returns a [*BusyError]. Closing again returns nil.
func (p *PD) Close() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.pd == nil:
		return nil
	case p.mrs+p.queues > 0:
		return &BusyError{What: "protection domain", MRs: p.mrs, Queues: p.queues}
	}
	if err := libFreePD(p.pd); err != nil {
		return fmt.Errorf("close protection domain: %w", err)
	}
	p.pd = nil
	p.dev.mu.Lock()
	p.dev.pds--
	p.dev.mu.Unlock()
	return nil
}

// use adds to the counts of what lives on the protection domain, unless it is
// closed.
func (p *PD) use(mrs, queues int) (object, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.pd == nil {
		return nil, os.ErrClosed
	}
	p.mrs += mrs
	p.queues += queues
	p.dev.mu.Lock()
	p.dev.mrs += mrs
	p.dev.mu.Unlock()
	return p.pd, nil
}
