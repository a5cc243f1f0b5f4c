// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/internal/wire"
	"github.com/ummu/ummu/tracer"
)

// session is one connection, from its first message to its end.
type session struct {
	s       *Server
	c       *net.UnixConn
	id      *identity
	version uint16
	// theirs are the client's descriptors. Closing one may take as long as the
	// client likes, so it is the last that is done.
	theirs []int
	// alive: a watch that could not be marked dead, which needs the client's
	// virtual machine to go on telling the truth.
	alive bool
}

// serve owns c. What it returns frees what is left of the session: c, and the
// client's descriptors. That may take as long as the client likes, and until
// then the session counts as one of its user's.
func (s *Server) serve(c *net.UnixConn) (free func()) {
	pid, uid, err := peerOf(c)
	if err != nil {
		s.log.Warn("cannot identify a client", "error", err)
		return func() { c.Close() }
	}
	ss := &session{s: s, c: c, version: s.cfg.versions.Max}
	if err := s.clients.connected(c, uid); err != nil {
		ss.end(pid, uid, err)
		return func() { c.Close() }
	}
	ss.end(pid, uid, ss.run(pid, uid))
	return func() {
		for _, fd := range ss.theirs {
			if !ss.alive {
				unix.Close(fd)
			}
		}
		c.Close()
		s.clients.disconnected(c, uid)
	}
}

// end tells the client why, if there is something to tell.
func (ss *session) end(pid int, uid uint32, err error) {
	var r *refusal
	switch {
	case err == nil, errors.Is(err, io.EOF):
		return
	case errors.As(err, &r):
		ss.s.log.Warn("client refused", "pid", pid, "uid", uid, "reason", r.text)
	case errors.Is(err, os.ErrDeadlineExceeded):
		ss.s.log.Warn("client took too long", "pid", pid, "uid", uid)
		r = &refusal{wire.CodeProtocol, "the handshake took too long"}
	case errors.Is(err, wire.ErrMalformed), errors.Is(err, wire.ErrVersion):
		ss.s.log.Warn("client does not speak the protocol", "pid", pid, "uid", uid, "error", err)
		r = &refusal{wire.CodeProtocol, err.Error()}
	default:
		ss.s.log.Error("client failed", "pid", pid, "uid", uid, "error", err)
		r = &refusal{wire.CodeInternal, "it failed; its log says why"}
	}
	ss.send(&wire.Refused{Code: r.code, Text: r.text})
}

// send waits for a client that does not read, as long as for one that does
// not write.
func (ss *session) send(m wire.Message, fds ...int) error {
	ss.c.SetWriteDeadline(time.Now().Add(ss.s.cfg.Patience))
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	_, _, err := ss.c.WriteMsgUnix(wire.Append(make([]byte, 0, 160), ss.version, m), oob, nil)
	return gone(err)
}

// gone makes the end of the connection io.EOF.
func gone(err error) error {
	if errors.Is(err, unix.EPIPE) || errors.Is(err, unix.ECONNRESET) {
		return io.EOF
	}
	return err
}

// receive waits for one message, which has as many descriptors as it should,
// until the deadline for reading. room is how many that may be: the kernel
// drops what there is no room for. They are closed with the session.
func (ss *session) receive(room int) (wire.Message, wire.Attachments, error) {
	var buf [wire.MaxBytes]byte
	oob := make([]byte, wire.ControlBytes(room))
	n, oobn, flags, _, err := ss.c.ReadMsgUnix(buf[:], oob)
	// Before err: an empty message is io.EOF, and may have a descriptor.
	a, badly := wire.Attached(oob[:oobn], flags)
	ss.theirs = append(ss.theirs, a.FDs...)
	if err != nil {
		return nil, wire.Attachments{}, gone(err)
	}
	if badly != nil {
		return nil, wire.Attachments{}, badly
	}
	version, m, err := wire.Decode(buf[:n])
	switch {
	case err != nil:
	case len(a.FDs) != wire.Descriptors(m):
		err = fmt.Errorf("%w: %v with %d descriptors", wire.ErrMalformed, wire.TypeOf(m), len(a.FDs))
	case version != 0 && version != ss.version:
		err = fmt.Errorf("%w: %v of version %d, agreed on %d", wire.ErrVersion, wire.TypeOf(m), version, ss.version)
	}
	if err != nil {
		return nil, wire.Attachments{}, err
	}
	return m, a, nil
}

// next is receive within the handshake.
func (ss *session) next(room int) (wire.Message, wire.Attachments, error) {
	ss.c.SetReadDeadline(time.Now().Add(ss.s.cfg.Patience))
	// In this order: Close says that it stops, then sets deadlines.
	if ss.s.stopping() {
		return nil, wire.Attachments{}, refuse(wire.CodeStopping, "it is being stopped")
	}
	m, a, err := ss.receive(room)
	if err != nil && ss.s.stopping() {
		err = refuse(wire.CodeStopping, "it is being stopped")
	}
	return m, a, err
}

func (s *Server) stopping() bool {
	s.clients.mu.Lock()
	defer s.clients.mu.Unlock()
	return s.clients.stopping
}

func unexpected(m wire.Message, want string) error {
	return refuse(wire.CodeProtocol, "%v instead of %s", wire.TypeOf(m), want)
}

func (ss *session) run(pid int, uid uint32) error {
	m, _, err := ss.next(0)
	if err != nil {
		return err
	}
	hello, ok := m.(*wire.Hello)
	if !ok {
		return unexpected(m, "HELLO")
	}
	if ss.version, ok = ss.s.cfg.versions.Choose(hello.Versions); !ok {
		return refuse(wire.CodeVersion, "it speaks protocol version %v, the client %v", ss.s.cfg.versions, hello.Versions)
	}
	if ss.id, err = openIdentity(pid, uid); err != nil {
		return err
	}
	defer ss.id.close()
	switch hello.Purpose {
	case wire.PurposeStatus:
		return ss.status()
	case wire.PurposeWatch:
		if _, ok := layouts.Choose(hello.Layouts); !ok {
			return refuse(wire.CodeVersion, "it has layout version %v of the shared memory, the client knows %v", layouts, hello.Layouts)
		}
		if hello.RingBytes == 0 {
			hello.RingBytes = defaultRingBytes
		}
		if n := int(hello.RingBytes); n < os.Getpagesize() || n&(n-1) != 0 || n > ss.s.cfg.MaxRingBytes {
			return refuse(wire.CodeLimit, "a ring of %d bytes is not a power of two from %d to %d", n, os.Getpagesize(), ss.s.cfg.MaxRingBytes)
		}
		return ss.watch(hello)
	}
	return refuse(wire.CodeProtocol, "purpose %d is not known", hello.Purpose)
}

// challenge makes the client say that it is there, now.
func (ss *session) challenge() (*unix.Ucred, error) {
	var c wire.Challenge
	rand.Read(c.Nonce[:])
	if err := ss.send(&c); err != nil {
		return nil, err
	}
	m, a, err := ss.next(0)
	if err != nil {
		return nil, err
	}
	echo, ok := m.(*wire.Echo)
	if !ok {
		return nil, unexpected(m, "ECHO")
	}
	if echo.Nonce != c.Nonce && !guard.Off(guard.NonceEchoed) {
		return nil, refuse(wire.CodeIdentity, "the challenge was not echoed")
	}
	if err := ss.id.sent(a.Cred); err != nil {
		return nil, err
	}
	return a.Cred, ss.id.alive()
}

// watch tries one tier after the other until the client sees its own changes.
func (ss *session) watch(hello *wire.Hello) error {
	why := bytes.NewBufferString("no tier that may be used sees the changes of this process")
	for _, w := range ss.s.why {
		fmt.Fprintf(why, "; %s", w)
	}
	for _, t := range ss.s.tiers {
		took, err := ss.try(t, hello, why)
		if took || err != nil {
			return err
		}
	}
	return refuse(wire.CodeUnavailable, "%s", why.String())
}

// try hands out a watch of one tier. took: the client had it, and is gone.
func (ss *session) try(t candidate, hello *wire.Hello, why *bytes.Buffer) (took bool, err error) {
	if t.machine {
		if hello.Flags&wire.FlagMachine == 0 {
			fmt.Fprintf(why, "; %v: the client cannot make a virtual machine", t.tier)
			return false, nil
		}
		// not for whoever was passed the connection: /dev/kvm goes to who
		// it was opened for
		if !guard.Off(guard.OfferLate) {
			if _, err := ss.challenge(); err != nil {
				return false, err
			}
		}
		made, err := ss.machine()
		if err != nil {
			return false, err
		}
		if !made {
			fmt.Fprintf(why, "; %v: the client could make no virtual machine", t.tier)
			return false, nil
		}
	}
	w, err := ss.open(t, hello)
	if errors.Is(err, tracer.ErrNoWitness) {
		fmt.Fprintf(why, "; %v: %v", t.tier, err)
		return false, nil
	}
	if err != nil {
		return false, err
	}
	// Dead first, then the place is free.
	defer func() {
		err = errors.Join(err, ss.close(w))
	}()
	if _, err := ss.challenge(); err != nil {
		return false, err
	}
	if err := ss.welcome(w); err != nil {
		return false, err
	}
	m, _, err := ss.next(0)
	if err != nil {
		return false, err
	}
	switch m.(type) {
	case *wire.Ready:
		return true, ss.lease(w)
	case *wire.Next:
		fmt.Fprintf(why, "; %v: a change was not seen", t.tier)
		return false, nil
	}
	return false, unexpected(m, "READY or NEXT")
}

// welcome hands a watch out, if it is still of the client's address space.
func (ss *session) welcome(w *watch) error {
	still, err := w.feed.StillOf(ss.id.pidfd)
	if err != nil {
		return err
	}
	if !still && !guard.Off(guard.SpaceSame) {
		return refuse(wire.CodeIdentity, "process %d executed another program meanwhile", w.pid)
	}
	if f := ss.s.cfg.welcoming; f != nil {
		f(w)
	}
	m := &wire.Welcome{Watch: w.id, Layout: layout.Version, Tier: uint32(w.tier), RingBytes: uint32(w.feed.RingBytes())}
	fds := []int{w.feed.StatusFD(), w.feed.EpochFD(), w.feed.InterestFD(), w.feed.RingFD()}
	return ss.send(m, fds[:wire.Descriptors(m)]...)
}

// machine lets the client make a virtual machine, which lives as long as the
// session, so longer than its watch. made: it could.
func (ss *session) machine() (made bool, err error) {
	kvm, err := openKVM()
	if err != nil {
		return false, err
	}
	err = ss.send(&wire.Offer{}, kvm)
	unix.Close(kvm)
	if err != nil {
		return false, err
	}
	m, a, err := ss.next(1)
	if err != nil {
		return false, err
	}
	switch m.(type) {
	case *wire.Machine:
		if err := isMachine(a.FDs[0]); err != nil {
			return false, refuse(wire.CodeProtocol, "MACHINE: %v", err)
		}
		return true, nil
	case *wire.Next:
		return false, nil
	}
	return false, unexpected(m, "MACHINE or NEXT")
}

// open opens a watch of the client's address space and registers it.
func (ss *session) open(t candidate, hello *wire.Hello) (_ *watch, err error) {
	r := &ss.s.clients
	done := r.opening(ss.id.uid)
	defer done()
	if ss.hungUp() { // while it waited
		return nil, io.EOF
	}
	id, err := r.reserve(ss.id)
	if err != nil && r.sweep(ss.id.uid) > 0 {
		// The sessions of the dead give their places back by themselves.
		for range 100 {
			time.Sleep(time.Millisecond)
			if id, err = r.reserve(ss.id); err == nil {
				break
			}
		}
	}
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			r.unreserve(ss.id.pid, ss.id.uid)
			r.refund(ss.id.uid)
		}
	}()
	f, err := t.tracer.OpenFeedOf(ss.id.pidfd, tracer.FeedOptions{
		RingBytes: int(hello.RingBytes),
		NoWakeup:  hello.Flags&wire.FlagNoWakeup != 0,
		Witness:   t.machine, // which the session keeps
		// Always: what a client has it may hand on.
		Unprivileged: true,
	})
	switch {
	case errors.Is(err, tracer.ErrNoProcess), errors.Is(err, tracer.ErrNoSpace):
		return nil, refuse(wire.CodeIdentity, "process %d is gone", ss.id.pid)
	case errors.Is(err, tracer.ErrTooMany):
		return nil, refuse(wire.CodeLimit, "%v", err)
	case errors.Is(err, tracer.ErrInFlight):
		return nil, refuse(wire.CodeInternal, "%v; try again", err)
	case errors.Is(err, os.ErrClosed):
		return nil, refuse(wire.CodeStopping, "it is being stopped")
	case err != nil:
		return nil, err
	}
	w := &watch{
		id: id, pid: ss.id.pid, uid: ss.id.uid, comm: ss.id.comm(), opened: monotonic(),
		tier: t.tier, feed: f, conn: ss.c,
	}
	r.add(w)
	return w, nil
}

// close ends a watch, and only then gives its place back. One that cannot be
// marked dead keeps it until the daemon ends: it is in force, and in the status.
func (ss *session) close(w *watch) error {
	err := w.feed.Close()
	for pause := time.Millisecond; errors.Is(err, tracer.ErrNotMarked) && pause < unmarkedPatience; pause *= 2 {
		time.Sleep(pause) // the kernel may have been out of memory
		err = w.feed.Close()
	}
	if errors.Is(err, tracer.ErrNotMarked) {
		ss.alive = true
		return fmt.Errorf("watch %d of process %d: %w", w.id, w.pid, err)
	}
	ss.s.clients.remove(w)
	return err
}

// unmarkedPatience bounds the pauses between tries to mark a watch dead.
const unmarkedPatience = 100 * time.Millisecond

// hungUp reports whether the client has closed the connection already.
func (ss *session) hungUp() bool {
	gone := false
	control(ss.c, func(fd int) error {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		n, err := unix.Poll(p, 0)
		gone = err == nil && n > 0
		return err
	})
	return gone
}

// settleInterval is how often the daemon looks at the tasks for one client.
const settleInterval = time.Millisecond

// lease lasts until the client is gone: it closed the connection, or its
// process ended while a child kept it.
func (ss *session) lease(w *watch) error {
	ss.s.log.Debug("watch is open", "watch", w.id, "pid", w.pid, "uid", w.uid, "tier", w.tier.String())
	defer ss.s.log.Debug("watch is closed", "watch", w.id, "pid", w.pid)
	// No deadline, but others set one in the past to end the lease.
	ss.c.SetReadDeadline(time.Time{})
	if ss.s.stopping() || !w.feed.Alive() {
		return io.EOF
	}
	stop, err := ss.id.onExit(func() {
		if !guard.Off(guard.LeaseExit) {
			ss.c.SetReadDeadline(past)
		}
	})
	if err != nil {
		return err
	}
	defer stop()
	var last time.Time
	for {
		m, _, err := ss.receive(0)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return io.EOF
		}
		if err != nil {
			return err
		}
		ask, ok := m.(*wire.Settle)
		if !ok {
			return unexpected(m, "SETTLE")
		}
		answer := &wire.Settled{Seq: ask.Seq}
		// Who asks again soon waits: an answer without a look would only make
		// it ask once more, and give up in the end.
		time.Sleep(settleInterval - time.Since(last))
		last = time.Now()
		if w.feed.Settled() {
			answer.Quiet = 1
		}
		if err := ss.send(answer); err != nil {
			return err
		}
	}
}

// past is a deadline that is over.
var past = time.Unix(1, 0)

// status answers `ummufeed status`.
func (ss *session) status() error {
	if _, err := ss.challenge(); err != nil {
		return err
	}
	end := &wire.End{StartedNanos: ss.s.started}
	for _, w := range ss.s.clients.visible(ss.id.uid, ss.id.seesAll()) {
		e := w.entry()
		if e == nil {
			continue
		}
		if err := ss.send(e); err != nil {
			return err
		}
		end.Entries++
	}
	end.NowNanos = monotonic()
	var err error
	if end.Misses, err = misses(ss.s.tiers); err != nil {
		return err
	}
	return ss.send(end)
}
