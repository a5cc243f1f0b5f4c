// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/internal/wire"
	"github.com/ummu/ummu/mm"
)

// DefaultSocket is where the daemon listens unless it is told otherwise.
const DefaultSocket = "/run/ummu/feed.sock"

// Options configure [Dial] and [Open]. The zero value works.
type Options struct {
	// Socket is the daemon's socket; empty: [DefaultSocket] for Dial, and for
	// Open the environment variable UMMU_SOCKET before it.
	Socket string
	// RingBytes is the size of the ring: a power of two, at least the page
	// size. 0: the daemon's default, 256 KiB. The daemon has a limit.
	RingBytes int
	// NoWakeup saves the wake-up of a waiting Wait per record, which then
	// looks every 20 ms instead.
	NoWakeup bool
	// Timeout bounds the handshake besides the context. 0: 5 s.
	Timeout time.Duration
	// Unavailable, if not nil, is told by Open why it returned [Dead] in the
	// mode "try".
	Unavailable func(error)
}

const defaultTimeout = 5 * time.Second

// Validate reports options out of range.
func (o Options) Validate() error {
	if n := o.RingBytes; n != 0 && (n < int(mm.PageSize()) || n&(n-1) != 0 || n > 1<<30) {
		return fmt.Errorf("option RingBytes %d is not a power of two from %d to %d", n, mm.PageSize(), 1<<30)
	}
	if o.Timeout < 0 {
		return fmt.Errorf("option Timeout %v is negative", o.Timeout)
	}
	if len(o.Socket) >= maxPath {
		return fmt.Errorf("option Socket of %d bytes: a socket's path has at most %d", len(o.Socket), maxPath-1)
	}
	return nil
}

const maxPath = len(unix.RawSockaddrUnix{}.Path)

// Dial opens a watch of the calling process by the daemon (ummufeed serve).
// When it returns every change is seen: one was made and arrived. It needs no
// privileges, no BPF, and no system call afterwards to ask [Watch.Valid].
//
// The watch ends with the daemon. A connection is kept until Close, and has
// no other use than to end the watch when this process does.
//
// If there is no watch to be had the error is an [*UnavailableError], which
// is [ErrUnavailable]. Other errors: those of ctx, of [Options.Validate] and of [New].
func Dial(ctx context.Context, o Options) (*Watch, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("open feed: %w", err)
	}
	if o.Socket == "" {
		o.Socket = DefaultSocket
	}
	if o.Timeout == 0 {
		o.Timeout = defaultTimeout
	}
	w, err := dial(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("open feed: %w", err)
	}
	return w, nil
}

func dial(ctx context.Context, o Options) (*Watch, error) {
	l, err := connect(ctx, o)
	if err != nil {
		return nil, err
	}
	w, err := l.handshake(ctx, o)
	if err != nil {
		return nil, errors.Join(err, l.release())
	}
	return w, nil
}

// lease is a connection to the daemon: as long as it is open the watch lives.
type lease struct {
	path     string
	deadline time.Time
	version  uint16

	mu   sync.Mutex // guards what follows, and is held over a request and its answer
	held *held
	seq  uint32
	stop runtime.Cleanup
}

// held is what must be given back, by release or when everything is forgotten.
type held struct {
	fd   int // the connection; -1: given back
	ring int // of the watch, -1: none
	// ours is wiped in a forked child, which must not end its parent's watch.
	ours *seen
}

// connect opens the connection. It does not wait but for a daemon that is
// busy accepting others.
func connect(ctx context.Context, o Options) (*lease, error) {
	deadline := time.Now().Add(o.Timeout)
	if d, ok := ctx.Deadline(); ok && d.Before(deadline) {
		deadline = d
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("make socket: %w", err)
	}
	for pause := 100 * time.Microsecond; ; pause = min(2*pause, 10*time.Millisecond) {
		err = unix.Connect(fd, &unix.SockaddrUnix{Name: o.Socket})
		if err == nil {
			break
		}
		if err == unix.EINTR {
			continue
		}
		if err != unix.EAGAIN { // its queue is full
			unix.Close(fd)
			return nil, noDaemon(o.Socket, err)
		}
		if err := ctx.Err(); err != nil {
			unix.Close(fd)
			return nil, err
		}
		if time.Now().After(deadline) {
			unix.Close(fd)
			return nil, noDaemon(o.Socket, err)
		}
		time.Sleep(pause)
	}
	if err := believe(fd, o.Socket); err != nil {
		unix.Close(fd)
		return nil, err
	}
	ours, err := takeSeen()
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	atomic.StoreUint64(&ours.alive, 1)
	l := &lease{path: o.Socket, deadline: deadline, held: &held{fd: fd, ring: -1, ours: ours}}
	// A watch that is forgotten, not closed, ends as well.
	l.stop = runtime.AddCleanup(l, func(h *held) { h.release() }, l.held)
	return l, nil
}

// believe refuses a daemon that another user runs, who could tell of this
// process what is not true. Root runs it, or this user. In a user namespace
// that does not map the root of the machine root looks like every other user
// from outside; there the path must be enough.
func believe(fd int, path string) error {
	c, err := unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
	if err != nil {
		return fmt.Errorf("ask who listens at %s: %w", path, err)
	}
	if c.Uid == 0 || int(c.Uid) == unix.Geteuid() || c.Uid == overflowUID && !inFirstNamespace() {
		return nil
	}
	return &UnavailableError{
		Reason: fmt.Sprintf("user %d listens at %s: neither root nor this user", c.Uid, path),
		Try:    "set UMMU_SOCKET to the socket of a daemon that root runs",
		Err:    unix.EPERM,
	}
}

// overflowUID stands for users that a user namespace does not map
// (DEFAULT_OVERFLOWUID, include/linux/highuid.h).
const overflowUID = 65534

// inFirstNamespace reports whether this process is in the machine's own user
// namespace (PROC_USER_INIT_INO, include/linux/proc_ns.h); true if in doubt.
func inFirstNamespace() bool {
	const first = 0xeffffffd
	var st unix.Stat_t
	return unix.Stat("/proc/self/ns/user", &st) != nil || st.Ino == first
}

// release ends the watch at the daemon.
func (l *lease) release() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.stop.Stop()
	return l.held.release()
}

// release ends the connection for all who have it, as children may, unless
// this is one of them.
func (h *held) release() error {
	if h.fd < 0 {
		return nil
	}
	if h.ours.isAlive() && !guard.Off(guard.LeaseShut) {
		unix.Shutdown(h.fd, unix.SHUT_RDWR)
	}
	giveSeen(h.ours)
	err := unix.Close(h.fd)
	h.fd = -1
	return errors.Join(err, h.closeRing())
}

func (h *held) closeRing() error {
	if h.ring < 0 {
		return nil
	}
	err := unix.Close(h.ring)
	h.ring = -1
	return err
}

// wait waits until the connection can be read (POLLIN) or written (POLLOUT).
func (l *lease) wait(ctx context.Context, events int16) error {
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		left := time.Until(l.deadline)
		if left <= 0 {
			return &UnavailableError{
				Reason: fmt.Sprintf("the daemon at %s did not answer in time", l.path),
				Try:    "look whether it is stopped or overloaded: systemctl status ummufeed",
				Err:    unix.ETIMEDOUT,
			}
		}
		p := []unix.PollFd{{Fd: int32(l.held.fd), Events: events}}
		if ctx.Done() != nil { // cancelling it is noticed after 20 ms
			left = min(left, 20*time.Millisecond)
		}
		n, err := unix.Poll(p, int(left/time.Millisecond)+1)
		if err != nil && err != unix.EINTR {
			return fmt.Errorf("wait for daemon: %w", err)
		}
		if n > 0 {
			return nil
		}
	}
}

func (l *lease) send(ctx context.Context, m wire.Message, fds ...int) error {
	b := wire.Append(make([]byte, 0, 128), l.version, m)
	var oob []byte
	if len(fds) > 0 {
		oob = unix.UnixRights(fds...)
	}
	for {
		switch err := unix.Sendmsg(l.held.fd, b, oob, nil, unix.MSG_NOSIGNAL|unix.MSG_DONTWAIT); err {
		case nil:
			return nil
		case unix.EINTR:
		case unix.EAGAIN:
			if err := l.wait(ctx, unix.POLLOUT); err != nil {
				return err
			}
		case unix.EPIPE, unix.ECONNRESET:
			// It may have said why.
			if r, _, err := l.receiveNow(); err == nil && r != nil {
				if r, ok := r.(*wire.Refused); ok {
					return refused(l.path, r)
				}
			}
			return l.hungUp()
		default:
			return fmt.Errorf("send %v: %w", wire.TypeOf(m), err)
		}
	}
}

func (l *lease) hungUp() error {
	return &UnavailableError{
		Reason: fmt.Sprintf("the daemon at %s closed the connection", l.path),
		Try:    "look at its log: journalctl -u ummufeed",
		Err:    unix.ECONNRESET,
	}
}

// receive waits for a message. The descriptors are as many as belong to it,
// and the caller's.
func (l *lease) receive(ctx context.Context) (wire.Message, []int, error) {
	for {
		if err := l.wait(ctx, unix.POLLIN); err != nil {
			return nil, nil, err
		}
		m, fds, err := l.receiveNow()
		if m == nil && err == nil {
			continue
		}
		if r, ok := m.(*wire.Refused); ok {
			return nil, nil, refused(l.path, r)
		}
		return m, fds, err
	}
}

// receiveNow is receive without waiting: nil, nil, nil if there is nothing.
func (l *lease) receiveNow() (wire.Message, []int, error) {
	var buf [wire.MaxBytes]byte
	oob := make([]byte, wire.ControlBytes(wire.MaxDescriptors))
	n, oobn, flags, _, err := unix.Recvmsg(l.held.fd, buf[:], oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
	if err == unix.ECONNRESET { // reported once, before what the daemon has said
		n, oobn, flags, _, err = unix.Recvmsg(l.held.fd, buf[:], oob, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT)
	}
	switch {
	case err == unix.EAGAIN, err == unix.EINTR:
		return nil, nil, nil
	case err == unix.ECONNRESET, err == nil && n == 0:
		// An empty message may have descriptors all the same.
		a, _ := wire.Attached(oob[:oobn], flags)
		a.Close()
		return nil, nil, l.hungUp()
	case err != nil:
		return nil, nil, fmt.Errorf("receive: %w", err)
	}
	a, err := wire.Attached(oob[:oobn], flags)
	if err != nil {
		a.Close()
		return nil, nil, l.strange(err)
	}
	version, m, err := wire.Decode(buf[:n])
	if err == nil && len(a.FDs) != wire.Descriptors(m) {
		err = fmt.Errorf("%v with %d descriptors", wire.TypeOf(m), len(a.FDs))
	}
	if err != nil {
		a.Close()
		return nil, nil, l.strange(err)
	}
	if version != 0 {
		if l.version == 0 {
			l.version = version
		}
		if l.version != version {
			a.Close()
			return nil, nil, l.strange(fmt.Errorf("%v of version %d, agreed on %d", wire.TypeOf(m), version, l.version))
		}
	}
	return m, a.FDs, nil
}

// strange is the error for what a daemon does not say.
func (l *lease) strange(err error) error {
	return &UnavailableError{
		Reason: fmt.Sprintf("what listens at %s does not speak the protocol of ummufeed serve: %v", l.path, err),
		Try:    "set UMMU_SOCKET to the daemon's socket, or update the older of the two",
		Err:    err,
	}
}

// handshake is docs/protocol.md, the client's side.
func (l *lease) handshake(ctx context.Context, o Options) (*Watch, error) {
	hello := &wire.Hello{
		Versions:  wire.Supported,
		Layouts:   wire.Versions{Min: layout.Version, Max: layout.Version},
		Purpose:   wire.PurposeWatch,
		Flags:     wire.FlagMachine,
		RingBytes: uint32(o.RingBytes),
	}
	if o.NoWakeup {
		hello.Flags |= wire.FlagNoWakeup
	}
	if err := l.send(ctx, hello); err != nil {
		return nil, err
	}
	for {
		m, fds, err := l.receive(ctx)
		if err != nil {
			return nil, err
		}
		switch m := m.(type) {
		case *wire.Challenge:
			err = l.send(ctx, &wire.Echo{Nonce: m.Nonce})
		case *wire.Offer:
			err = l.makeMachine(ctx, fds[0])
		case *wire.Welcome:
			var w *Watch
			if w, err = l.take(m, fds); err != nil {
				return nil, err
			}
			if w.prove() || guard.Off(guard.Proven) {
				if err := l.send(ctx, &wire.Ready{}); err != nil {
					return nil, errors.Join(err, w.Close())
				}
				w.mem.Release = l.release
				return w, nil
			}
			err = errors.Join(w.Close(), l.held.closeRing(), l.send(ctx, &wire.Next{Reason: wire.ReasonSilent}))
		default:
			err = l.strange(fmt.Errorf("%v in the handshake", wire.TypeOf(m)))
		}
		if err != nil {
			return nil, err
		}
	}
}

// take makes a watch of what the daemon hands out. Its ring becomes the
// lease's; the lease stays the caller's until the watch is proven.
func (l *lease) take(m *wire.Welcome, fds []int) (*Watch, error) {
	if len(fds) == 4 {
		l.held.ring = fds[3]
	}
	for _, fd := range fds[:3] {
		defer unix.Close(fd)
	}
	mem, err := Descriptors{Status: fds[0], Epoch: fds[1], Interest: fds[2], Ring: l.held.ring, RingBytes: int(m.RingBytes)}.Map()
	if err != nil {
		return nil, err
	}
	if m.Tier == layout.TierNotifierTracepoint || m.Tier == layout.TierNotifierProbe {
		mem.Settle = l.settled
	}
	w, err := New(mem)
	if err != nil {
		mem.Unmap()
		return nil, err
	}
	return w, nil
}

// prove makes changes of this process and reports whether the watch sees them.
// Nobody else may drain the watch.
func (w *Watch) prove() bool {
	b, err := unix.MmapPtr(-1, 0, nil, uintptr(mm.PageSize()), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return false
	}
	defer unix.MunmapPtr(b, uintptr(mm.PageSize()))
	page := unsafe.Slice((*byte)(b), mm.PageSize())
	r := mm.Range{Start: mm.Addr(uintptr(b)), End: mm.Addr(uintptr(b)) + mm.Addr(len(page))}
	// Not Begin: the daemon is not to be asked (SETTLE) before READY.
	t := w.watchFor(r)
	defer w.Abandon(t)
	losses := 0
	for range 10 {
		if unix.Madvise(page, unix.MADV_DONTNEED) != nil {
			return false
		}
		seen, lost := false, false
		for range 100 {
			s := w.Drain(func(rec *mm.Record) {
				seen = seen || rec.Touches(r)
				lost = lost || rec.Kind == mm.Lost
			})
			if s == DeadState {
				return false
			}
			if s == Fresh {
				break
			}
			lost = true // a record was not finished: perhaps this one
			runtime.Gosched()
		}
		if seen || !lost {
			return seen
		}
		// What was lost may have been this change. Without a ring it always
		// is, and that is how a change is seen.
		if losses++; w.mem.RingFD < 0 && losses == 3 {
			return true
		}
	}
	return false
}

// makeMachine makes an empty virtual machine, by which the kernel tells the
// notifier tiers of each change of this process, and hands it over: the daemon
// keeps it, so that nothing is left here that the program could close.
func (l *lease) makeMachine(ctx context.Context, kvm int) error {
	defer unix.Close(kvm)
	const kvmCreateVM = 0xae01 // linux/kvm.h
	for {
		vm, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(kvm), kvmCreateVM, 0)
		if e == unix.EINTR { // while it takes the locks of many mappings
			continue
		}
		if e != 0 {
			return l.send(ctx, &wire.Next{Reason: wire.ReasonNoMachine})
		}
		defer unix.Close(int(vm))
		return l.send(ctx, &wire.Machine{}, int(vm))
	}
}

// settleTimeout is how long Begin waits for the daemon's answer.
const settleTimeout = 2 * time.Millisecond

// settled asks the daemon whether any change that began before is in flight.
func (l *lease) settled() bool {
	if !l.mu.TryLock() { // somebody else asks, and Begin tries again
		return false
	}
	defer l.mu.Unlock()
	if l.held.fd < 0 || !l.held.ours.isAlive() {
		return false
	}
	l.seq++
	l.deadline = time.Now().Add(settleTimeout)
	ctx := context.Background()
	if l.send(ctx, &wire.Settle{Seq: l.seq}) != nil {
		return false
	}
	for {
		m, fds, err := l.receive(ctx)
		if err != nil {
			return false
		}
		for _, fd := range fds {
			unix.Close(fd)
		}
		// One that came too late is not the answer to this question.
		if s, ok := m.(*wire.Settled); ok && s.Seq == l.seq {
			return s.Quiet == 1
		}
	}
}
