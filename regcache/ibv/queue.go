// SPDX-License-Identifier: Apache-2.0

package ibv

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// QueueOptions of a queue pair. The zero value works.
type QueueOptions struct {
	// Port of the device, from 1. 0: the first that is active.
	Port int
	// GIDIndex is the entry of the port's table of addresses to send from. Nil:
	// the first of RoCE v2 with an IPv4 address, else the first of RoCE v2, else
	// the first.
	GIDIndex *int
}

// Endpoint is what the other side needs to connect to a queue pair. It has
// to be brought there by other means.
type Endpoint struct {
	QPN uint32   `json:"qpn"` // queue pair number
	PSN uint32   `json:"psn"` // first packet sequence number, 24 bits
	GID [16]byte `json:"gid"`
	LID uint16   `json:"lid"` // 0 on Ethernet
	MTU uint8    `json:"mtu"` // enum ibv_mtu
}

// Queue is a reliable-connected queue pair that makes one transfer at a time.
// Its methods may be called from several goroutines at once.
type Queue struct {
	pd       *PD
	cm       object // RDMA-CM identifier that owns the queue pair, or nil
	own      Endpoint
	port     int
	gidIndex int
	global   bool

	mu     sync.Mutex // guards what follows; held over a transfer
	q      *queueObject
	broken error
}

// transferTimeout bounds the wait for a completion. The device gives up
// earlier: 8 tries of at most 67 ms each, as the connection asks for.
const transferTimeout = 20_000 // ms

const depth = 16

// NewQueue makes a queue pair. It must be closed before the protection domain.
func (p *PD) NewQueue(o QueueOptions) (*Queue, error) {
	q, err := p.newQueue(o)
	if err != nil {
		return nil, fmt.Errorf("make queue pair on RDMA device %s: %w", p.dev.name, err)
	}
	return q, nil
}

func (p *PD) newQueue(o QueueOptions) (*Queue, error) {
	pd, err := p.use(0, 1)
	if err != nil {
		return nil, fmt.Errorf("protection domain: %w", err)
	}
	q := &Queue{pd: p}
	if err := q.choose(o); err != nil {
		p.use(0, -1)
		return nil, err
	}
	if q.q, err = libQueue(p.dev.context, pd, depth); err != nil {
		p.use(0, -1)
		return nil, err
	}
	q.own.QPN, q.own.PSN = q.q.number, rand.Uint32()&0xffffff
	return q, nil
}

// choose finds port and address.
func (q *Queue) choose(o QueueOptions) error {
	d := q.pd.dev
	var p portInfo
	for port := 1; port <= d.limits.Ports && q.port == 0; port++ {
		if o.Port != 0 && port != o.Port {
			continue
		}
		var err error
		if p, err = libPort(d.context, port); err != nil {
			return fmt.Errorf("query port %d: %w", port, err)
		}
		if p.active || o.Port != 0 {
			q.port = port
		}
	}
	if q.port == 0 {
		return fmt.Errorf("no active port: %w", unix.ENETDOWN)
	}
	q.own.LID, q.own.MTU = p.lid, p.mtu
	q.global = p.ethernet
	best := -1
	for i := range p.gids {
		if o.GIDIndex != nil && i != *o.GIDIndex {
			continue
		}
		gid, err := libGID(d.context, q.port, i)
		if err != nil || gid == [16]byte{} {
			continue
		}
		score := 0
		kind, _ := os.ReadFile(filepath.Join("/sys/class/infiniband", d.name, "ports", strconv.Itoa(q.port), "gid_attrs/types", strconv.Itoa(i)))
		if strings.TrimSpace(string(kind)) == "RoCE v2" {
			score = 1
			if [12]byte(gid[:12]) == [12]byte{10: 0xff, 11: 0xff} {
				score = 2
			}
		}
		if score > best {
			best, q.gidIndex, q.own.GID = score, i, gid
		}
	}
	if best < 0 && (q.global || o.GIDIndex != nil) {
		return fmt.Errorf("port %d has no address (GID): is its network interface up?: %w", q.port, unix.EADDRNOTAVAIL)
	}
	return nil
}

// Endpoint is what the other side needs.
func (q *Queue) Endpoint() Endpoint { return q.own }

// Connect connects the queue pair with another one, which has to connect with
// this one; or with itself, by its own endpoint.
func (q *Queue) Connect(peer Endpoint) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.q == nil {
		return fmt.Errorf("connect queue pair: %w", os.ErrClosed)
	}
	peer.MTU = min(peer.MTU, q.own.MTU)
	err := q.q.connect(path{Endpoint: peer, myPSN: q.own.PSN, port: q.port, gidIndex: q.gidIndex, global: q.global})
	if err != nil {
		return fmt.Errorf("connect queue pair %d with %d: %w", q.own.QPN, peer.QPN, err)
	}
	return nil
}

// Write writes the bytes of at, which lie in m, to the address and key of the
// peer (RDMA WRITE), and returns when they are there. A [*TransferError] says
// that the device or the peer refuses, and ends the queue pair.
func (q *Queue) Write(m *MR, at mm.Range, remote uint64, rkey uint32) error {
	return q.do(m, at, work{op: opWrite, remote: remote, rkey: rkey})
}

// Read reads from the address and key of the peer into at, which lies in m
// (RDMA READ). See Write.
func (q *Queue) Read(m *MR, at mm.Range, remote uint64, rkey uint32) error {
	return q.do(m, at, work{op: opRead, remote: remote, rkey: rkey})
}

// FetchAdd adds n to the eight bytes, in the order of the host, at the address
// and key of the peer, and puts what was there into the eight bytes of at. The
// addresses are multiples of eight. See Write.
func (q *Queue) FetchAdd(m *MR, at mm.Range, remote uint64, rkey uint32, n uint64) error {
	return q.do(m, at, work{op: opAdd, remote: remote, rkey: rkey, add: n})
}

func (q *Queue) do(m *MR, at mm.Range, w work) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	wrap := func(err error) error { return fmt.Errorf("%v of %v: %w", w.op, at, err) }
	switch {
	case q.q == nil:
		return wrap(os.ErrClosed)
	case q.broken != nil:
		return wrap(fmt.Errorf("queue pair %d ended with: %w", q.own.QPN, q.broken))
	}
	if err := m.live(q.pd, at); err != nil {
		return wrap(err)
	}
	w.addr, w.length, w.lkey = uint64(at.Start-m.rng.Start)+m.iova, uint32(at.Len()), m.keys.lkey
	if err := q.q.send(w); err != nil {
		return wrap(q.explain(err))
	}
	c, err := q.q.complete(transferTimeout)
	switch {
	case err != nil: // the device may still use the memory: let nobody think otherwise
		q.broken = q.explain(err)
		err = wrap(errors.Join(q.broken, q.q.disconnect()))
	case c.status != 0:
		q.broken = &TransferError{Op: w.op.String(), Range: at, Status: c.status, Vendor: c.vendor, Text: libStatus(c.status)}
		err = q.broken
		if q.pd.dev.Removed() {
			err = fmt.Errorf("%w: %w", ErrRemoved, err)
		}
	}
	return err
}

func (q *Queue) explain(err error) error {
	if q.pd.dev.Removed() {
		return fmt.Errorf("%w: %w", ErrRemoved, err)
	}
	return err
}

// Close ends the connection and frees the queue pair. Closing again returns
// nil.
func (q *Queue) Close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.q == nil {
		return nil
	}
	if q.cm != nil {
		cmFreeQueue(q.cm, q.q)
	} else if err := q.q.free(); err != nil {
		return fmt.Errorf("close queue pair %d: %w", q.own.QPN, err)
	}
	q.q = nil
	q.pd.use(0, -1)
	return nil
}
