// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
)

var errFailed = errors.New("server could not do it")

// client is one connection. Not for concurrent use.
type client struct {
	c  net.Conn
	in *bufio.Reader
}

func dial(addr string) (*client, error) {
	c, err := net.Dial("tcp", addr)
	if err != nil {
		return nil, err
	}
	return &client{c, bufio.NewReader(c)}, nil
}

func (c *client) close() error { return c.c.Close() }

// get fills data from the start of a block and returns how much there was.
func (c *client) get(block uint64, data []byte) (int, error) {
	n, err := c.do(opGet, block, len(data), nil, data)
	if err != nil {
		return 0, fmt.Errorf("get block %d: %w", block, err)
	}
	return n, nil
}

// put stores data, at most blockSize bytes, at the start of a block.
func (c *client) put(block uint64, data []byte) error {
	if _, err := c.do(opPut, block, len(data), data, nil); err != nil {
		return fmt.Errorf("put block %d: %w", block, err)
	}
	return nil
}

func (c *client) do(op byte, block uint64, length int, out, in []byte) (int, error) {
	var req [requestLen]byte
	req[0] = op
	binary.BigEndian.PutUint64(req[1:], block)
	binary.BigEndian.PutUint32(req[9:], uint32(length))
	if _, err := (&net.Buffers{req[:], out}).WriteTo(c.c); err != nil {
		return 0, err
	}
	var head [responseLen]byte
	if _, err := io.ReadFull(c.in, head[:]); err != nil {
		return 0, err
	}
	n := int(binary.BigEndian.Uint32(head[1:]))
	switch {
	case head[0] != statusOK:
		return 0, errFailed
	case n > len(in):
		return 0, fmt.Errorf("%d bytes for a request of %d", n, len(in))
	}
	return io.ReadFull(c.in, in[:n])
}
