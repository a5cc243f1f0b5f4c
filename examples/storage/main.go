// SPDX-License-Identifier: Apache-2.0

// Storage is a small storage server whose buffers are io_uring registered
// buffers, taken from a registration cache:
//
//	go run ./examples/storage serve -listen 127.0.0.1:7070 -file blocks
//	go run ./examples/storage bench -clients 4 -requests 20000
//
// bench runs a server and its clients in one process. The clients know what
// each block holds and count wrong answers, while the connections free and
// allocate their buffers again and again (-recycle).
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/uring"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "storage: %v\n", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, args []string, out io.Writer) error {
	if len(args) == 0 {
		return errors.New("want a command: serve or bench")
	}
	fs := flag.NewFlagSet(args[0], flag.ContinueOnError)
	listen := fs.String("listen", "127.0.0.1:0", "address to serve on")
	path := fs.String("file", "", "file with the blocks (default: a temporary one)")
	recycle := fs.Int("recycle", 8, "requests after which a connection frees its buffer; 0: never")
	withFeed := fs.Bool("feed", true, "watch the address space; without, each request registers its buffer")
	clients := fs.Int("clients", 4, "bench: connections")
	requests := fs.Int("requests", 20000, "bench: requests of each")
	if err := fs.Parse(args[1:]); err != nil {
		return err
	}
	if args[0] != "serve" && args[0] != "bench" {
		return fmt.Errorf("unknown command %q: want serve or bench", args[0])
	}

	w := feed.Dead()
	if *withFeed {
		w = openFeed()
	}
	st, err := open(w, *path)
	if err != nil {
		return errors.Join(err, w.Close())
	}
	st.server.recycle = *recycle
	l, err := net.Listen("tcp", *listen)
	if err != nil {
		return errors.Join(err, st.close(), w.Close())
	}
	if args[0] == "bench" {
		err = bench(ctx, st, l, *clients, *requests, out)
	} else {
		fmt.Fprintf(out, "serving %s on %v\n", st.server.file.Name(), l.Addr())
		err = st.run(ctx, l)
	}
	return errors.Join(err, st.close(), w.Close())
}

// storage is a server and what it is made of.
type storage struct {
	server server
	remove string // file to remove at the end
}

// open opens the file and makes ring and cache, in the order that close takes
// back.
func open(w *feed.Watch, path string) (_ *storage, err error) {
	st := &storage{}
	defer func() {
		if err != nil {
			err = errors.Join(err, st.close())
		}
	}()
	if path == "" {
		if st.server.file, err = os.CreateTemp("", "storage"); err == nil {
			st.remove = st.server.file.Name()
		}
	} else {
		st.server.file, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o644)
	}
	if err != nil {
		return nil, err
	}
	if st.server.ring, err = uring.Open(uring.Options{}); err != nil {
		return nil, err
	}
	st.server.cache, err = regcache.New(w, st.server.ring, regcache.Options{})
	return st, err
}

// run serves until ctx is done. What the clients' buffers left behind is
// deregistered while nobody asks.
func (st *storage) run(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	reaped := make(chan struct{})
	go func() {
		defer close(reaped)
		st.server.cache.Run(ctx)
	}()
	err := st.server.serve(ctx, l)
	cancel()
	<-reaped
	return err
}

func (st *storage) close() error {
	var errs []error
	if st.server.cache != nil {
		errs = append(errs, st.server.cache.Close())
	}
	if st.server.ring != nil {
		errs = append(errs, st.server.ring.Close())
	}
	if st.server.file != nil {
		errs = append(errs, st.server.file.Close())
	}
	if st.remove != "" {
		errs = append(errs, os.Remove(st.remove))
	}
	return errors.Join(errs...)
}

// bench runs the clients against st and prints what they saw.
func bench(ctx context.Context, st *storage, l net.Listener, clients, requests int, out io.Writer) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	served := make(chan error, 1)
	go func() { served <- st.run(ctx, l) }()
	start := time.Now()
	sum, err := load(ctx, l.Addr().String(), clients, requests)
	elapsed := time.Since(start)
	s := st.server.cache.Stats()
	cancel()
	if err := errors.Join(err, <-served); err != nil {
		return err
	}
	n := sum.gets + sum.puts
	fmt.Fprintf(out, "%d requests (%d gets, %d puts of %d KiB) in %v: %.0f a second\n",
		n, sum.gets, sum.puts, blockSize>>10, elapsed.Round(time.Millisecond), float64(n)/elapsed.Seconds())
	fmt.Fprintf(out, "cache: %d hits, %d misses; registered %d times\n", s.Hits, s.Misses, s.Registrations)
	for why, n := range s.Uncached {
		if n > 0 {
			fmt.Fprintf(out, "not cached (%v): %d\n", why, n)
		}
	}
	fmt.Fprintf(out, "wrong answers: %d\n", sum.wrong)
	if sum.wrong > 0 {
		return fmt.Errorf("%d of %d answers did not have the block's contents", sum.wrong, sum.gets)
	}
	return nil
}

type tally struct{ gets, puts, wrong int }

// load runs clients, each with blocks of its own: one put to seven gets.
func load(ctx context.Context, addr string, clients, requests int) (tally, error) {
	var mu sync.Mutex // guards sum and errs
	var sum tally
	var errs []error
	var wg sync.WaitGroup
	for id := range clients {
		wg.Go(func() {
			t, err := loadOne(ctx, addr, uint64(id), requests)
			mu.Lock()
			defer mu.Unlock()
			sum.gets += t.gets
			sum.puts += t.puts
			sum.wrong += t.wrong
			if err != nil {
				errs = append(errs, err)
			}
		})
	}
	wg.Wait()
	return sum, errors.Join(errs...)
}

func loadOne(ctx context.Context, addr string, id uint64, requests int) (t tally, err error) {
	c, err := dial(addr)
	if err != nil {
		return t, err
	}
	defer c.close()
	defer context.AfterFunc(ctx, func() { c.close() })()
	const blocks = 4
	var versions [blocks]uint64
	data, want := make([]byte, blockSize), make([]byte, blockSize)
	for i := range requests {
		block := i % blocks
		number := id*blocks + uint64(block)
		if i%(8*blocks) < blocks { // each block first, then every eighth time
			versions[block]++
			fill(want, number, versions[block])
			if err := c.put(number, want); err != nil {
				return t, err
			}
			t.puts++
			continue
		}
		n, err := c.get(number, data)
		if err != nil {
			return t, err
		}
		t.gets++
		fill(want, number, versions[block])
		if string(data[:n]) != string(want) {
			t.wrong++
		}
	}
	return t, nil
}

// fill writes the contents of a version of a block.
func fill(data []byte, block, version uint64) {
	x := block<<32 ^ version*0x9e3779b97f4a7c15 | 1
	for i := range data {
		if i%8 == 0 {
			x ^= x << 13
			x ^= x >> 7
			x ^= x << 17
		}
		data[i] = byte(x >> (i % 8 * 8))
	}
}

// openFeed opens the feed of this process. Without one (no privileges, no BPF)
// the server works all the same, with a registration for each request.
func openFeed() *feed.Watch {
	w, err := local.Open(local.Options{})
	if err != nil {
		fmt.Fprintf(os.Stderr, "storage: nothing will be cached: %v\n", err)
		return feed.Dead()
	}
	return w
}
