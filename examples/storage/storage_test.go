// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"net"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/feed/local"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start runs a server on loopback until the test ends.
func start(t *testing.T, w *feed.Watch, recycle int) (*storage, string) {
	t.Helper()
	st, err := open(w, "")
	if err != nil {
		t.Fatal(err)
	}
	st.server.recycle = recycle
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	served := make(chan error)
	go func() { served <- st.run(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := errors.Join(<-served, st.close()); err != nil {
			t.Error(err)
		}
	})
	return st, l.Addr().String()
}

func TestBlocks(t *testing.T) {
	_, addr := start(t, feed.Dead(), 3)
	c, err := dial(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer c.close()
	want := make([]byte, blockSize)
	fill(want, 5, 1)
	if err := c.put(5, want); err != nil {
		t.Fatal(err)
	}
	if err := c.put(5, []byte("short")); err != nil { // the rest stays
		t.Fatal(err)
	}
	copy(want, "short")
	for _, n := range []int{blockSize, 1, 1000, 0, blockSize} {
		got := make([]byte, n)
		if k, err := c.get(5, got); k != n || err != nil || !bytes.Equal(got, want[:n]) {
			t.Errorf("get %d bytes: %d, %v; or other bytes", n, k, err)
		}
	}
	got := make([]byte, blockSize)
	if n, err := c.get(4, got); n != blockSize || err != nil || !bytes.Equal(got, make([]byte, blockSize)) {
		t.Errorf("get of a hole: %d, %v; or not zeros", n, err)
	}
	if n, err := c.get(6, got); n != 0 || err != nil {
		t.Errorf("get past the end: %d, %v, want 0", n, err)
	}
	// A request that makes no sense ends the connection, and only this one.
	if _, err := c.get(1<<60, got); err == nil {
		t.Error("a block far outside was served")
	}
	d, err := dial(addr)
	if err != nil {
		t.Fatal(err)
	}
	defer d.close()
	if n, err := d.get(5, got); n != blockSize || err != nil || !bytes.Equal(got, want) {
		t.Errorf("next connection: %d, %v; or other bytes", n, err)
	}
}

func TestDeadFeed(t *testing.T) {
	st, addr := start(t, feed.Dead(), 2)
	sum, err := load(t.Context(), addr, 4, 100)
	if err != nil {
		t.Fatal(err)
	}
	if sum.wrong != 0 || sum.gets+sum.puts != 400 {
		t.Errorf("%+v, want 400 requests, none wrong", sum)
	}
	if s := st.server.cache.Stats(); s.Hits != 0 || s.Misses != 400 {
		t.Errorf("%d hits, %d misses through a dead feed", s.Hits, s.Misses)
	}
}

// Buffers are freed and allocated between requests, mostly at the same
// addresses: through stale registrations the clients would be sent what the
// new memory holds, not what was read from the file.
func TestLiveFeed(t *testing.T) {
	w, err := local.Open(local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	t.Run("serve", func(t *testing.T) {
		const clients, requests, recycle = 4, 400, 4
		st, addr := start(t, w, recycle)
		sum, err := load(t.Context(), addr, clients, requests)
		if err != nil {
			t.Fatal(err)
		}
		if sum.wrong != 0 || sum.gets+sum.puts != clients*requests {
			t.Errorf("%+v, want %d requests, none wrong", sum, clients*requests)
		}
		s := st.server.cache.Stats()
		if s.Hits == 0 || s.Misses < clients*requests/recycle {
			t.Errorf("%d hits, %d misses: want hits, and a miss for each of %d buffers", s.Hits, s.Misses, clients*requests/recycle)
		}
	})
}

// With a feed that is valid and hears of nothing the same load gets wrong
// answers: what TestLiveFeed looks for is there to be found.
func TestDeafFeed(t *testing.T) {
	p, err := feedtest.New(feedtest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	w, err := p.Watch()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	t.Run("serve", func(t *testing.T) {
		_, addr := start(t, w, 4)
		sum, err := load(t.Context(), addr, 1, 200)
		if err != nil {
			t.Fatal(err)
		}
		if sum.wrong == 0 {
			t.Errorf("%+v: no wrong answer", sum)
		}
	})
}

func TestRun(t *testing.T) {
	var out strings.Builder
	if err := run(t.Context(), []string{"bench", "-clients", "2", "-requests", "64"}, &out); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(out.String(), "wrong answers: 0\n") {
		t.Error(out.String())
	}
	for _, args := range [][]string{nil, {"frobnicate"}, {"serve", "-listen", "nowhere"}} {
		if err := run(t.Context(), args, &out); err == nil {
			t.Errorf("%q was accepted", args)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := run(ctx, []string{"serve"}, &out); err != nil {
		t.Errorf("serve until cancelled: %v", err)
	}
}
