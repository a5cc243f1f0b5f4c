// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"

	"github.com/ummu/ummu/internal/wire"
	"github.com/ummu/ummu/tracer"
)

// watch is what one client has.
type watch struct {
	id     uint64
	pid    int
	uid    uint32
	comm   [16]byte
	opened uint64 // CLOCK_MONOTONIC, nanoseconds
	tier   tracer.Tier
	feed   *tracer.Feed
	conn   *net.UnixConn
}

// registry knows who is connected and what they have, and keeps the limits.
// The places that a user or a process takes are counted before anything is
// made for them.
type registry struct {
	cfg *Config

	mu       sync.Mutex // guards what follows; held over nothing that waits
	stopping bool
	conns    map[*net.UnixConn]struct{}
	users    map[uint32]*user
	byPID    map[int]int // watches
	watches  map[uint64]*watch
	lastID   uint64
}

// user is the account of one uid.
type user struct {
	conns, watches int
	// opening has a place for each watch that may be opened at once, so that
	// one user cannot keep the others waiting for long.
	opening chan struct{}
}

const (
	openingPerUser = 4
	// connections of a user beyond its watches: handshakes and status
	sparePerUser = 32
)

func (r *registry) init(cfg *Config) {
	r.cfg = cfg
	r.conns = make(map[*net.UnixConn]struct{})
	r.users = make(map[uint32]*user)
	r.byPID = make(map[int]int)
	r.watches = make(map[uint64]*watch)
}

// refusal is an error that the client is told.
type refusal struct {
	code wire.Code
	text string
}

func (e *refusal) Error() string { return e.text }

func refuse(code wire.Code, format string, args ...any) error {
	return &refusal{code, fmt.Sprintf(format, args...)}
}

// connected counts a connection; it must be followed by one disconnected.
func (r *registry) connected(c *net.UnixConn, uid uint32) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	u := r.users[uid]
	switch {
	case r.stopping:
		return refuse(wire.CodeStopping, "it is being stopped")
	case len(r.conns) >= r.cfg.MaxClients:
		return refuse(wire.CodeLimit, "%d clients are connected (--max-clients)", r.cfg.MaxClients)
	case u != nil && u.conns >= r.cfg.MaxWatchesPerUID+sparePerUser:
		return refuse(wire.CodeLimit, "user %d has %d connections (--max-watches-per-uid)", uid, u.conns)
	case u == nil:
		u = &user{opening: make(chan struct{}, openingPerUser)}
		r.users[uid] = u
	}
	u.conns++
	r.conns[c] = struct{}{}
	return nil
}

func (r *registry) disconnected(c *net.UnixConn, uid uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.conns, c)
	u := r.users[uid]
	if u.conns--; u.conns == 0 {
		delete(r.users, uid)
	}
}

// opening waits for one of the user's places to open watches in; the caller
// calls the result when it has.
func (r *registry) opening(uid uint32) (done func()) {
	r.mu.Lock()
	places := r.users[uid].opening
	r.mu.Unlock()
	places <- struct{}{}
	return func() { <-places }
}

// reserve takes the places of one watch, and its number.
func (r *registry) reserve(pid int, uid uint32) (id uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	u := r.users[uid]
	switch {
	case r.stopping:
		return 0, refuse(wire.CodeStopping, "it is being stopped")
	case u.watches >= r.cfg.MaxWatchesPerUID:
		return 0, refuse(wire.CodeLimit, "user %d has %d watches (--max-watches-per-uid)", uid, u.watches)
	case r.byPID[pid] >= r.cfg.MaxWatchesPerProcess:
		return 0, refuse(wire.CodeLimit, "process %d has %d watches (--max-watches-per-process)", pid, r.byPID[pid])
	}
	u.watches++
	r.byPID[pid]++
	r.lastID++
	return r.lastID, nil
}

// unreserve gives the places back.
func (r *registry) unreserve(pid int, uid uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.unreserveLocked(pid, uid)
}

func (r *registry) unreserveLocked(pid int, uid uint32) {
	r.users[uid].watches--
	if r.byPID[pid]--; r.byPID[pid] == 0 {
		delete(r.byPID, pid)
	}
}

// add shows a watch in status.
func (r *registry) add(w *watch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.watches[w.id] = w
}

// remove hides a watch again and gives its places back: when it is dead, so
// that nobody is counted in its place before.
func (r *registry) remove(w *watch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.watches, w.id)
	r.unreserveLocked(w.pid, w.uid)
}

// sweep disconnects those of a process whose watches have died, as those of
// an address space that it has left while a child kept the connection.
func (r *registry) sweep(uid uint32) (n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, w := range r.watches {
		if w.uid == uid && !w.feed.Alive() {
			w.conn.SetReadDeadline(past)
			n++
		}
	}
	return n
}

// stop refuses everybody from now on.
func (r *registry) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.stopping = true
}

// disconnect makes every session end.
func (r *registry) disconnect() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for c := range r.conns {
		c.SetDeadline(past)
	}
}

// visible are the watches that a user may see, by number.
func (r *registry) visible(uid uint32, all bool) (out []*watch) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(r.watches)) {
		if w := r.watches[id]; all || w.uid == uid {
			out = append(out, w)
		}
	}
	return out
}

// entry is a watch in a status; nil: it has been closed meanwhile.
func (w *watch) entry() *wire.Entry {
	st, err := w.feed.Stats()
	if err != nil {
		return nil
	}
	bytes, err := w.feed.Bytes()
	if err != nil {
		return nil
	}
	return &wire.Entry{
		Watch: w.id, OpenedNanos: w.opened,
		Records: st.Records, Lost: st.Lost, Filtered: st.Filtered, Unpaired: st.Unpaired, Deaths: st.Deaths, Untracked: st.Untracked,
		PID: uint32(w.pid), UID: w.uid,
		Tier: uint32(w.tier), RingBytes: uint32(w.feed.RingBytes()), MemoryBytes: uint32(bytes),
		Comm: w.comm,
	}
}
