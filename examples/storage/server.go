// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/uring"
)

// The protocol: a request is op, block number, length (1, 8 and 4 bytes, big
// endian) and, for a put, as many bytes; a response is status and length (1
// and 4 bytes) and, for a get, as many bytes.
const (
	opGet = 'G'
	opPut = 'P'

	statusOK     = 0
	statusFailed = 1

	blockSize = 64 << 10

	requestLen  = 1 + 8 + 4
	responseLen = 1 + 4
)

// server keeps blocks in a file. Each connection has a buffer, which the
// kernel reads into and writes from by READ_FIXED and WRITE_FIXED; the
// registration comes from the cache, so that the server neither registers for
// each request nor has to know when a buffer's memory is given back.
type server struct {
	ring  *uring.Ring
	cache *regcache.Cache[uring.Buf]
	file  *os.File
	// recycle is after how many requests a connection frees its buffer and
	// allocates another, which often gets the same address. 0: never.
	recycle int
}

// serve accepts connections until ctx is done, then closes them and waits.
func (s *server) serve(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var conns sync.WaitGroup
	defer conns.Wait()
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	for {
		c, err := l.Accept()
		if ctx.Err() != nil {
			if err == nil {
				c.Close()
			}
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		conns.Go(func() {
			defer context.AfterFunc(ctx, func() { c.Close() })()
			defer c.Close()
			if err := s.handle(c); err != nil && ctx.Err() == nil {
				fmt.Fprintf(os.Stderr, "storage: %v: %v\n", c.RemoteAddr(), err)
			}
		})
	}
}

// handle answers the requests of one connection until it ends.
func (s *server) handle(c net.Conn) (err error) {
	in := bufio.NewReader(c)
	var buf buffer
	defer func() { err = errors.Join(err, buf.free()) }()
	var req [requestLen]byte
	for n := 1; ; n++ {
		if _, err := io.ReadFull(in, req[:]); err == io.EOF {
			return nil
		} else if err != nil {
			return fmt.Errorf("read request: %w", err)
		}
		if err := buf.allocate(); err != nil {
			return err
		}
		block, length := binary.BigEndian.Uint64(req[1:]), binary.BigEndian.Uint32(req[9:])
		if length > blockSize || block > 1<<40 {
			return fmt.Errorf("request for %d bytes of block %d: too large", length, block)
		}
		off := int64(block * blockSize)
		switch req[0] {
		case opGet:
			n, err := s.get(buf[:length], off)
			if err := respond(c, buf[:n], err); err != nil {
				return err
			}
		case opPut:
			if _, err := io.ReadFull(in, buf[:length]); err != nil {
				return fmt.Errorf("read block %d: %w", block, err)
			}
			if err := respond(c, nil, s.put(buf[:length], off)); err != nil {
				return err
			}
		default:
			return fmt.Errorf("unknown request %q", req[0])
		}
		if s.recycle > 0 && n%s.recycle == 0 {
			if err := buf.free(); err != nil {
				return err
			}
		}
	}
}

func respond(c net.Conn, data []byte, failed error) error {
	var head [responseLen]byte
	if failed != nil {
		fmt.Fprintf(os.Stderr, "storage: %v\n", failed)
		head[0], data = statusFailed, nil
	}
	binary.BigEndian.PutUint32(head[1:], uint32(len(data)))
	if _, err := (&net.Buffers{head[:], data}).WriteTo(c); err != nil {
		return fmt.Errorf("send response: %w", err)
	}
	return nil
}

// get reads the file at off into data and returns how much there was.
func (s *server) get(data []byte, off int64) (n int, err error) {
	err = s.transfer(data, func(b uring.Buf, r mm.Range) error {
		n, err = s.ring.ReadFixed(int(s.file.Fd()), off, b, r)
		if err == io.EOF {
			return nil
		}
		return err
	})
	return n, err
}

// put writes data to the file at off.
func (s *server) put(data []byte, off int64) error {
	return s.transfer(data, func(b uring.Buf, r mm.Range) error {
		for !r.Empty() {
			n, err := s.ring.WriteFixed(int(s.file.Fd()), off, b, r)
			if err != nil {
				return err
			}
			off, r.Start = off+int64(n), r.Start+mm.Addr(n)
		}
		return nil
	})
}

// transfer does io with the registration of data. The whole buffer is
// registered, not the part that this request needs, and for both directions,
// so that the next request hits.
func (s *server) transfer(data []byte, io func(uring.Buf, mm.Range) error) error {
	if len(data) == 0 {
		return nil
	}
	start := mm.Addr(uintptr(unsafe.Pointer(&data[0])))
	whole := mm.Range{Start: start, End: start + blockSize}
	ref, err := s.cache.Acquire(whole, regcache.LocalWrite)
	if err != nil {
		return err
	}
	// Release would report memory that changed during the transfer; nobody but
	// this connection frees its buffer, and it does so between requests.
	defer ref.Release()
	return io(ref.Handle(), mm.Range{Start: start, End: start + mm.Addr(len(data))})
}

// buffer is memory of blockSize bytes that comes from and goes back to the
// kernel, as with an allocator that maps large blocks. Nothing in it knows
// about the cache.
type buffer []byte

func (b *buffer) allocate() error {
	if *b != nil {
		return nil
	}
	m, err := unix.Mmap(-1, 0, blockSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("allocate buffer: %w", err)
	}
	*b = m
	return nil
}

func (b *buffer) free() error {
	if *b == nil {
		return nil
	}
	m := *b
	*b = nil
	if err := unix.Munmap(m); err != nil {
		return fmt.Errorf("free buffer: %w", err)
	}
	return nil
}
