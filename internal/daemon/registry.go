// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"maps"
	"net"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

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
	known    int         // processes, of all users
	byPID    map[int]int // watches
	watches  map[uint64]*watch
	lastID   uint64
}

// user is the account of one uid. It is kept until nothing is in it.
type user struct {
	conns, watches int
	// opening has a place for each watch that may be opened at once, so that
	// one user cannot keep the others waiting for long.
	opening chan struct{}
	// paid is until when the watches that were opened are paid for, at one
	// each openInterval. What a client was handed it may keep when its watch
	// is closed, and the kernel with it, so it is not enough to count watches.
	paid time.Time
	// known has the pidfds of the living processes that ever had a watch:
	// the kernel side's tables keep a place for each.
	known map[int]int
}

const (
	openingPerUser = 64
	// connections of a user beyond its watches: handshakes and status
	sparePerUser = 32
	// openInterval is how often a user may open a watch for ever. As many as
	// it may have it may open at once.
	openInterval = time.Second
	// living processes that ever had a watch, in terms of what there may be at once
	knownPerWatch  = 2
	knownPerClient = 4
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
		r.tidy()
		u = &user{opening: make(chan struct{}, openingPerUser), known: make(map[int]int)}
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
	u.conns--
	r.tidyUser(uid, u)
}

// tidyUser forgets processes that have ended, and the user if nothing is left
// of it; mu is held.
func (r *registry) tidyUser(uid uint32, u *user) {
	if len(u.known) > 0 {
		p := make([]unix.PollFd, 0, len(u.known))
		pids := make([]int, 0, len(u.known))
		for pid, fd := range u.known {
			p, pids = append(p, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN}), append(pids, pid)
		}
		unix.Poll(p, 0) // one that fails has found none
		for i := range p {
			if p[i].Revents != 0 {
				r.forget(u, pids[i])
			}
		}
	}
	if u.conns == 0 && u.watches == 0 && len(u.known) == 0 && !u.paid.After(time.Now()) {
		delete(r.users, uid)
	}
}

func (r *registry) tidy() {
	for uid, u := range r.users {
		r.tidyUser(uid, u)
	}
}

// forget closes a pidfd; mu is held.
func (r *registry) forget(u *user, pid int) {
	unix.Close(u.known[pid])
	delete(u.known, pid)
	r.known--
}

// forgetAll closes all pidfds.
func (r *registry) forgetAll() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, u := range r.users {
		for pid := range u.known {
			r.forget(u, pid)
		}
	}
}

// remember counts a process for as long as it lives; mu is held.
func (r *registry) remember(u *user, id *identity) error {
	most, mostOfAll := knownPerWatch*r.cfg.MaxWatchesPerUID, knownPerClient*r.cfg.MaxClients
	if _, ok := u.known[id.pid]; ok || len(u.known) >= most {
		r.tidyUser(id.uid, u) // the number may have been another process's
	}
	if _, ok := u.known[id.pid]; ok {
		return nil
	}
	if r.known >= mostOfAll {
		r.tidy()
	}
	switch {
	case len(u.known) >= most:
		return refuse(wire.CodeLimit, "user %d has %d processes that have, or had, a watch (--max-watches-per-uid)", id.uid, len(u.known))
	case r.known >= mostOfAll:
		return refuse(wire.CodeLimit, "%d processes have, or had, a watch (--max-clients)", r.known)
	}
	fd, err := unix.FcntlInt(uintptr(id.pidfd), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("duplicate pidfd: %w", err)
	}
	u.known[id.pid] = fd
	r.known++
	return nil
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
func (r *registry) reserve(id *identity) (watch uint64, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	u, now := r.users[id.uid], time.Now()
	switch {
	case r.stopping:
		return 0, refuse(wire.CodeStopping, "it is being stopped")
	case u.watches >= r.cfg.MaxWatchesPerUID:
		return 0, refuse(wire.CodeLimit, "user %d has %d watches (--max-watches-per-uid)", id.uid, u.watches)
	case r.byPID[id.pid] >= r.cfg.MaxWatchesPerProcess:
		return 0, refuse(wire.CodeLimit, "process %d has %d watches (--max-watches-per-process)", id.pid, r.byPID[id.pid])
	case u.paid.Sub(now) > time.Duration(r.cfg.MaxWatchesPerUID-1)*openInterval:
		return 0, refuse(wire.CodeLimit, "user %d opens watches faster than one each %v, after %d at once (--max-watches-per-uid)",
			id.uid, openInterval, r.cfg.MaxWatchesPerUID)
	}
	if err := r.remember(u, id); err != nil {
		return 0, err
	}
	if u.paid.Before(now) {
		u.paid = now
	}
	u.paid = u.paid.Add(openInterval)
	u.watches++
	r.byPID[id.pid]++
	r.lastID++
	return r.lastID, nil
}

// refund is for a watch of which the client was handed nothing.
func (r *registry) refund(uid uint32) {
	r.mu.Lock()
	defer r.mu.Unlock()
	u := r.users[uid]
	u.paid = u.paid.Add(-openInterval)
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
