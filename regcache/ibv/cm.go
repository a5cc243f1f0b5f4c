// SPDX-License-Identifier: Apache-2.0

package ibv

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// MaxData is the most bytes that a side can send with [Conn.Connect].
const MaxData = 56

const (
	resolveTimeout = 5000 // ms
	acceptStep     = 100  // ms, until Next looks at its context
)

// Listener waits for connections by RDMA-CM. One goroutine may call Next at a
// time.
type Listener struct {
	addr netip.AddrPort

	mu sync.Mutex // guards id; held over Next
	id object
}

// Listen listens on an IP address of the network interface of an RDMA device.
// Port 0 is chosen. Errors are [ErrNotBuilt], [ErrNoLibrary], ENODEV without an
// RDMA device, EADDRNOTAVAIL, EADDRINUSE.
func Listen(addr netip.AddrPort) (*Listener, error) {
	if err := load(true); err != nil {
		return nil, fmt.Errorf("listen on %v: %w", addr, err)
	}
	id, err := cmListen(addr)
	if err != nil {
		return nil, fmt.Errorf("listen on %v: %w", addr, explainCM(err))
	}
	return &Listener{addr: netip.AddrPortFrom(addr.Addr(), cmPort(id)), id: id}, nil
}

func explainCM(err error) error {
	switch {
	case errors.Is(err, unix.ENODEV):
		return fmt.Errorf("no RDMA device with that address, or the module rdma_ucm is not loaded: %w", err)
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOSYS):
		return fmt.Errorf("/dev/infiniband/rdma_cm is not there (module rdma_ucm): %w", err)
	case errors.Is(err, unix.EACCES), errors.Is(err, unix.EPERM):
		return fmt.Errorf("/dev/infiniband/rdma_cm and uverbs* must be readable and writable for this user: %w", err)
	}
	return err
}

// Addr is where the listener listens.
func (l *Listener) Addr() netip.AddrPort { return l.addr }

// Next waits for a request. Connect accepts it.
func (l *Listener) Next(ctx context.Context) (*Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for {
		if err := ctx.Err(); err != nil {
			return nil, fmt.Errorf("accept: %w", err)
		}
		if l.id == nil {
			return nil, fmt.Errorf("accept: %w", os.ErrClosed)
		}
		id, err := cmNext(l.id, acceptStep)
		switch {
		case errors.Is(err, unix.ETIMEDOUT):
			continue
		case err != nil:
			return nil, fmt.Errorf("accept: %w", err)
		}
		return newConn(id, true)
	}
}

// Close stops listening; it waits for Next. Closing again returns nil.
func (l *Listener) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.id == nil {
		return nil
	}
	err := cmFree(l.id)
	l.id = nil
	return err
}

// Conn is one side of a connection by RDMA-CM: a device, which the address
// decides, with a protection domain and a queue pair. It is connected by
// Connect, so that memory can be registered first and its keys sent along.
type Conn struct {
	id     object
	accept bool
	dev    *Device
	pd     *PD
	queue  *Queue
	data   []byte

	mu        sync.Mutex // guards what follows; held over Connect and Close
	connected bool
	closed    bool
}

// Resolve finds the way to a listener. Connect sends it a request.
func Resolve(addr netip.AddrPort) (*Conn, error) {
	if err := load(true); err != nil {
		return nil, fmt.Errorf("resolve %v: %w", addr, err)
	}
	id, err := cmResolve(addr, resolveTimeout)
	if err != nil {
		return nil, fmt.Errorf("resolve %v: %w", addr, explainCM(err))
	}
	return newConn(id, false)
}

// newConn takes id over.
func newConn(id object, accept bool) (_ *Conn, err error) {
	c := &Conn{id: id, accept: accept}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("make connection: %w", err), c.Close())
		}
	}()
	if accept {
		c.data = cmData(id)
	}
	context := cmContext(id)
	if c.dev, err = newDevice(libName(context), context); err != nil {
		return nil, err
	}
	c.dev.lent = true
	if c.pd, err = c.dev.NewPD(Options{}); err != nil {
		return nil, err
	}
	pd, err := c.pd.use(0, 1)
	if err != nil {
		return nil, err
	}
	q, err := cmQueue(id, pd, depth)
	if err != nil {
		c.pd.use(0, -1)
		return nil, err
	}
	c.queue = &Queue{pd: c.pd, cm: id, q: q, own: Endpoint{QPN: q.number}}
	return c, nil
}

// PD is the connection's protection domain, for memory regions that its queue
// pair uses. Close closes it.
func (c *Conn) PD() *PD { return c.pd }

// Queue is the connection's queue pair: good for transfers once Connect has
// returned. Close closes it.
func (c *Conn) Queue() *Queue { return c.queue }

// Connect sends the request, or accepts it, with up to [MaxData] bytes for the
// other side, and returns when the connection stands.
func (c *Conn) Connect(data []byte) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.closed:
		return fmt.Errorf("connect: %w", os.ErrClosed)
	case len(data) > MaxData:
		return fmt.Errorf("connect: %d bytes of data, at most %d: %w", len(data), MaxData, os.ErrInvalid)
	}
	if err := cmConnect(c.id, c.accept, data); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	c.connected = true
	if !c.accept {
		c.data = cmData(c.id)
	}
	return nil
}

// Data is what the other side sent with its Connect; zeros may follow. The
// accepting side has it at once, the other after Connect.
func (c *Conn) Data() []byte { return c.data }

// Close ends the connection. While memory regions are registered on its
// protection domain it returns a [*BusyError], and only the queue pair is
// closed. Closing again returns nil.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil
	}
	if c.connected {
		c.connected = false
		cmDisconnect(c.id) // fails if the other side was first
	}
	if c.queue != nil {
		if err := c.queue.Close(); err != nil {
			return err
		}
	}
	if c.pd != nil {
		if err := c.pd.Close(); err != nil {
			return err
		}
	}
	if c.dev != nil {
		if err := c.dev.Close(); err != nil {
			return err
		}
	}
	c.closed = true
	if err := cmFree(c.id); err != nil {
		return fmt.Errorf("close connection: %w", err)
	}
	return nil
}
