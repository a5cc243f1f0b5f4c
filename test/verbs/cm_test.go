// SPDX-License-Identifier: Apache-2.0

//go:build linux

package verbs

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/ibv"
)

const addrEnv = "UMMU_VERBS_ADDR"

func init() { children["peer"] = peer }

// peer connects to the address in its environment, and writes what it is told
// to, where it is told to, for each line of its standard input: the remote
// address, key, length and the first byte of a pattern.
func peer() error {
	addr, err := netip.ParseAddrPort(os.Getenv(addrEnv))
	if err != nil {
		return err
	}
	c, err := ibv.Resolve(addr)
	if err != nil {
		return err
	}
	m, err := unix.Mmap(-1, 0, maxPages*page, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	src := block(m)
	mr, err := c.PD().Register(src.span(), regcache.LocalWrite)
	if err != nil {
		return err
	}
	if err := c.Connect([]byte("hello")); err != nil {
		return err
	}
	fmt.Printf("connected %x\n", c.Data())
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		var remote uint64
		var key uint32
		var n int
		var first byte
		if _, err := fmt.Sscan(in.Text(), &remote, &key, &n, &first); err != nil {
			return err
		}
		pattern(src[:n], first)
		at := src.span()
		at.End = at.Start + mm.Addr(n)
		if err := c.Queue().Write(mr, at, remote, key); err != nil {
			return err
		}
		fmt.Println("written")
	}
	var busy *ibv.BusyError
	if err := c.Close(); !errors.As(err, &busy) {
		return fmt.Errorf("closed with a region: %v", err)
	}
	if err := c.PD().Deregister(mr); err != nil {
		return err
	}
	if err := c.Close(); err != nil {
		return err
	}
	fmt.Println("closed")
	return nil
}

func pattern(b []byte, first byte) {
	for i := range b {
		b[i] = first + byte(i/7)
	}
}

// ipv4 is an address of the device under test.
func ipv4(t *testing.T, r *rig) netip.Addr {
	t.Helper()
	a := netip.AddrFrom16(r.q.Endpoint().GID).Unmap()
	if !a.Is4() {
		t.Fatalf("the device has no IPv4 address: %v", a)
	}
	return a
}

// Two processes, connected by RDMA-CM. One registers by the cache and changes
// its memory in between, the other writes by the keys it is told.
func TestTwoProcesses(t *testing.T) {
	r := newRig(t)
	l, err := ibv.Listen(netip.AddrPortFrom(ipv4(t, r), 0))
	must(t, err)
	closing(t, "listener", l.Close)
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), childEnv+"=peer", addrEnv+"="+l.Addr().String())
	in, err := cmd.StdinPipe()
	must(t, err)
	out, err := cmd.StdoutPipe()
	must(t, err)
	cmd.Stderr = os.Stderr
	must(t, cmd.Start())
	defer func() { // whatever happened
		cmd.Process.Kill()
		cmd.Wait()
	}()
	lines := bufio.NewReader(out)
	await := func(want string) string {
		t.Helper()
		line, err := lines.ReadString('\n')
		if err != nil || !bytes.HasPrefix([]byte(line), []byte(want)) {
			t.Fatalf("the peer says %q, %v; want %q", line, err, want)
		}
		return line
	}

	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	c, err := l.Next(ctx)
	must(t, err)
	closing(t, "connection", c.Close)
	if !bytes.HasPrefix(c.Data(), []byte("hello")) {
		t.Errorf("the peer's data is %q", c.Data())
	}
	cache := newCache(t, openFeed(t), c.PD(), regcache.Options{})
	must(t, c.Connect([]byte{0xca, 0xfe}))
	await("connected cafe")
	private, part, _ := changes[0].prepare(t)
	done := 0
	for round := range 10 {
		for _, ch := range changes {
			if ch.shared || ch.stale == nothing {
				continue
			}
			ref, err := cache.Acquire(private.span(), regcache.RemoteWrite)
			must(t, err)
			first := byte(1 + done)
			fmt.Fprintln(in, ref.Handle().IOVA(), ref.Handle().RKey(), len(private), first)
			await("written")
			want := make(block, len(private))
			pattern(want, first)
			if got := pages(private, want); got != nothing {
				t.Errorf("round %d: the processor sees %s before: %s", round, got, ch.name)
			}
			ref.Release()
			must(t, ch.do(part, -1))
			done++
		}
	}
	t.Logf("%d transfers from the other process, %d registrations", done, cache.Stats().Registrations)
	must(t, in.Close())
	await("closed")
	if rest, err := io.ReadAll(lines); err != nil || len(rest) > 0 {
		t.Errorf("the peer says %q, %v", rest, err)
	}
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
}

// What RDMA-CM refuses.
func TestConnectErrors(t *testing.T) {
	r := newRig(t)
	addr := ipv4(t, r)
	if _, err := ibv.Listen(netip.MustParseAddrPort("203.0.113.9:0")); err == nil {
		t.Error("listens on an address that is not this machine's")
	}
	l, err := ibv.Listen(netip.AddrPortFrom(addr, 0))
	must(t, err)
	if _, err := ibv.Listen(l.Addr()); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("twice on one port: %v", err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := l.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("nobody came: %v", err)
	}
	must(t, l.Close())
	must(t, l.Close())
	if _, err := l.Next(t.Context()); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed: %v", err)
	}
	c, err := ibv.Resolve(l.Addr())
	must(t, err)
	if err := c.Connect(make([]byte, ibv.MaxData+1)); err == nil {
		t.Error("too much data")
	}
	if err := c.Connect(binary.NativeEndian.AppendUint64(nil, 1)); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("nobody listens: %v", err)
	}
	must(t, c.Close())
	must(t, c.Close())
}
