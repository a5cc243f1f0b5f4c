// SPDX-License-Identifier: Apache-2.0

package uring

import (
	"errors"
	"fmt"
	"io"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// userData of completions that belong to no request.
const (
	cancelData = 1<<62 - 1
	tagData    = 1 << 62 // of a released buffer; the low bits are its bytes
)

// ReadFixed reads from fd at offset off into the addresses at, which lie in
// the registered buffer b, and returns the number of bytes. Like read(2) it
// may read less than asked for; at the end of the file it returns io.EOF. An
// off of -1 is the file's position, and what pipes and sockets need. The
// caller keeps fd open until ReadFixed returns. Errors: [ErrNotRegistered],
// [ErrOutside], os.ErrClosed, and those of read(2).
//
// The bytes go to the pages that were pinned when b was registered.
func (r *Ring) ReadFixed(fd int, off int64, b Buf, at mm.Range) (int, error) {
	n, err := r.transfer(opReadFixed, fd, off, b, at)
	if err != nil {
		return 0, fmt.Errorf("read into buffer %v: %w", at, err)
	}
	if n == 0 && !at.Empty() {
		return 0, io.EOF
	}
	return n, nil
}

// WriteFixed writes the bytes of the pages behind at, which lies in the
// registered buffer b, to fd at offset off. See [Ring.ReadFixed].
func (r *Ring) WriteFixed(fd int, off int64, b Buf, at mm.Range) (int, error) {
	n, err := r.transfer(opWriteFixed, fd, off, b, at)
	if err != nil {
		return 0, fmt.Errorf("write from buffer %v: %w", at, err)
	}
	return n, nil
}

// Madvise performs madvise(2) through the ring: an address-space change that
// no system-call hook sees. It exists to test those who have to see it.
func (r *Ring) Madvise(at mm.Range, advice int) error {
	if at.Len() > 1<<32-1 {
		return fmt.Errorf("madvise %v: %w", at, ErrTooLong)
	}
	s := sqe{opcode: opMadvise, fd: -1, addr: uint64(at.Start), len: uint32(at.Len()), opFlags: uint32(advice)}
	if _, err := r.do(&s, nil); err != nil {
		return fmt.Errorf("madvise %v: %w", at, err)
	}
	return nil
}

func (r *Ring) transfer(op uint8, fd int, off int64, b Buf, at mm.Range) (int, error) {
	if !b.rng.Contains(at) {
		return 0, fmt.Errorf("%w %v", ErrOutside, b.rng)
	}
	s := sqe{
		opcode: op, fd: int32(fd), off: uint64(off),
		addr: uint64(at.Start), len: uint32(at.Len()), bufIndex: b.slot,
	}
	return r.do(&s, &b)
}

// do submits s and waits for its completion. If b is not nil, it must be a
// live registration at the moment of submission; from then on the kernel
// holds its pages.
func (r *Ring) do(s *sqe, b *Buf) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.idle) == 0 && !r.closing {
		r.cond.Wait()
	}
	if r.closing {
		return 0, os.ErrClosed
	}
	if b != nil && !r.live(*b) {
		return 0, ErrNotRegistered
	}
	i := r.idle[len(r.idle)-1]
	s.userData = uint64(i)
	if err := r.submit(s); err != nil {
		return 0, fmt.Errorf("submit: %w", err)
	}
	r.idle = r.idle[:len(r.idle)-1]
	r.inFlight++
	r.stats.Requests++
	q := &r.requests[i]
	q.state = submitted
	if !r.waiting {
		r.reap()
	}
	for q.state == submitted {
		if r.waiting {
			r.cond.Wait()
			continue
		}
		r.waiting = true
		r.mu.Unlock()
		// Retried whatever it says: the kernel owns the buffer until the
		// completion is there.
		_ = enter(r.fd, 0, 1, enterGetEvents)
		r.mu.Lock()
		r.waiting = false
		r.reap()
		r.cond.Broadcast()
	}
	q.state = idle
	r.idle = append(r.idle, i)
	r.inFlight--
	if r.closing || len(r.idle) == 1 {
		r.cond.Broadcast()
	}
	if q.res < 0 {
		errno := syscall.Errno(-q.res)
		if errno == unix.ECANCELED && r.closing {
			return 0, os.ErrClosed
		}
		return 0, errno
	}
	return int(q.res), nil
}

// submit hands one entry to the kernel. Called with mu held.
func (r *Ring) submit(s *sqe) error {
	tail := *r.sqTail // only written here
	r.sq[tail&r.sqMask] = *s
	atomic.StoreUint32(r.sqTail, tail+1)
	for {
		err := enter(r.fd, 1, 0, 0)
		if atomic.LoadUint32(r.sqHead) == tail+1 {
			return nil // taken; what went wrong is in its completion
		}
		if !errors.Is(err, unix.EINTR) {
			atomic.StoreUint32(r.sqTail, tail)
			return err
		}
	}
}

// reap consumes all completions. Called with mu held, and by nobody but the
// waiting goroutine while there is one: a completion consumed behind its back
// could be the one it waits for.
func (r *Ring) reap() {
	for {
		head, tail := *r.cqHead, atomic.LoadUint32(r.cqTail)
		for ; head != tail; head++ {
			c := &r.cq[head&r.cqMask]
			switch {
			case c.userData&tagData != 0:
				r.stats.Releasing--
				r.stats.ReleasingBytes -= c.userData &^ tagData
			case c.userData != cancelData:
				r.requests[c.userData] = request{state: completed, res: c.res}
			}
		}
		atomic.StoreUint32(r.cqHead, head)
		if atomic.LoadUint32(r.sqFlags)&sqCQOverflow == 0 {
			return
		}
		if err := enter(r.fd, 0, 0, enterGetEvents); err != nil && !errors.Is(err, unix.EINTR) {
			return
		}
	}
}
