// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Remapring is a ring of buffers that never has to be copied out of: a sender
// writes messages into it by RDMA, and the receiver keeps the pages of a block
// that is full and puts fresh ones behind the ring, at the same addresses
// (mmap with MAP_FIXED, mremap). A key of the block that the sender had goes on
// leading to the old pages, so the receiver needs to register the block again
// exactly then, and to tell the sender:
//
//	go run ./examples/remapring -device rxe0
//
// It does that in three ways. "cache": each message's key comes from a
// registration cache with a feed, which finds out by itself. "on-demand": one
// region over the ring that follows the page tables, where the device has
// such. "naive": a cache that nobody tells, to see what goes wrong; only if
// asked for with -modes. Sender and receiver are one process here, with a queue
// pair each.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache/ibv"
	"github.com/ummu/ummu/tracer"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintf(os.Stderr, "remapring: %v\n", err)
		os.Exit(1)
	}
}

type options struct {
	device                        string
	modes                         []string
	messages, size, blocks, pages int
	tier                          tracer.Tier
}

func run(ctx context.Context, args []string, out io.Writer) error {
	var o options
	fs := flag.NewFlagSet("remapring", flag.ContinueOnError)
	fs.StringVar(&o.device, "device", "rxe0", "RDMA device")
	modes := fs.String("modes", "cache,on-demand", "of cache, on-demand, naive")
	fs.IntVar(&o.messages, "messages", 4096, "messages of each mode")
	fs.IntVar(&o.size, "size", 1024, "bytes of a message, at most a page; each starts a page")
	fs.IntVar(&o.blocks, "blocks", 4, "blocks of the ring")
	fs.IntVar(&o.pages, "pages", 16, "pages, and so messages, of a block")
	fs.Func("tier", "of the feed: syscall (default), notifier/tracepoint, notifier/probe", func(s string) error {
		for _, t := range []tracer.Tier{tracer.TierSyscall, tracer.TierNotifierTracepoint, tracer.TierNotifierProbe} {
			if t.String() == s {
				o.tier = t
				return nil
			}
		}
		return errors.New("no such tier")
	})
	if err := fs.Parse(args); err != nil {
		return err
	}
	o.modes = strings.Split(*modes, ",")
	if o.size < 1 || o.size > int(mm.PageSize()) || o.blocks < 1 || o.pages < 1 || o.messages < 1 {
		return errors.New("size is 1 byte to a page; messages, blocks and pages are positive")
	}
	for _, m := range o.modes {
		if !slices.Contains([]string{"cache", "on-demand", "naive"}, m) {
			return fmt.Errorf("unknown mode %q", m)
		}
	}
	w, err := local.Open(local.Options{Tier: o.tier})
	if err != nil {
		fmt.Fprintf(os.Stderr, "remapring: every message will register its block: %v\n", err)
		w = feed.Dead()
	}
	return errors.Join(overDevice(ctx, o, w, out), w.Close())
}

func overDevice(ctx context.Context, o options, w *feed.Watch, out io.Writer) (err error) {
	dev, err := ibv.Open(o.device)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, dev.Close()) }()
	pd, err := dev.NewPD(ibv.Options{})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, pd.Close()) }()
	bad := 0
	for _, mode := range o.modes {
		if l := dev.Limits(); mode == "on-demand" && !l.OnDemandWrite {
			fmt.Fprintf(out, "%-10s not on this device\n", mode)
			continue
		}
		n, err := oneMode(ctx, o, mode, w, pd)
		if err != nil {
			return fmt.Errorf("%s: %w", mode, err)
		}
		fmt.Fprintf(out, "%-10s %d messages, %.0f a second, %.4f registrations per message (%d), stale bytes %d\n",
			mode, n.messages, float64(n.messages)/n.took.Seconds(), float64(n.registrations)/float64(n.messages), n.registrations, n.stale)
		if mode != "naive" {
			bad += n.stale
		}
	}
	if bad > 0 {
		return fmt.Errorf("%d stale bytes", bad)
	}
	return nil
}

type tally struct {
	messages, stale int
	registrations   uint64
	took            time.Duration
}

// keys is where the receiver gets the key of a block from, for one message.
// The returned function says that the message has come.
type keys interface {
	key(block mm.Range) (remote uint64, rkey uint32, done func(), err error)
	registrations() uint64
	close() error
}

func oneMode(ctx context.Context, o options, mode string, w *feed.Watch, pd *ibv.PD) (n tally, err error) {
	r, err := newRing(o.blocks, o.pages)
	if err != nil {
		return n, err
	}
	defer func() { err = errors.Join(err, r.close()) }()
	k, err := newKeys(mode, w, pd, r.span)
	if err != nil {
		return n, err
	}
	defer func() { err = errors.Join(err, k.close()) }()
	s, err := newSender(pd, o.size)
	if err != nil {
		return n, err
	}
	defer func() { err = errors.Join(err, s.close()) }()

	// The sender is told where to write what, and says when it has.
	ctx, cancel := context.WithCancel(ctx)
	credits, written := make(chan credit), make(chan error)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.run(ctx, credits, written)
	}()
	defer func() { cancel(); <-ended }()

	start := time.Now()
	for n.messages < o.messages {
		for b := 0; b < o.blocks && n.messages < o.messages; b++ {
			block := r.block(b)
			for p := 0; p < o.pages && n.messages < o.messages; p++ {
				remote, rkey, done, err := k.key(block)
				if err != nil {
					return n, err
				}
				at := uint64(p) * mm.PageSize()
				err = tell(ctx, credits, written, credit{remote + at, rkey, uint32(n.messages)})
				done()
				if err != nil {
					return n, err
				}
				n.stale += missing(view(block)[at:][:o.size], uint32(n.messages))
				n.messages++
			}
			if err := r.renew(b); err != nil {
				return n, err
			}
		}
	}
	n.took = time.Since(start)
	n.registrations = k.registrations()
	return n, nil
}

func tell(ctx context.Context, credits chan<- credit, written <-chan error, c credit) error {
	select {
	case credits <- c:
		return <-written
	case <-ctx.Done():
		return ctx.Err()
	}
}

// ring is blocks of pages, one behind the other.
type ring struct {
	span  mm.Range
	size  mm.Addr // of a block
	turns int
}

func newRing(blocks, pages int) (*ring, error) {
	size := uint64(pages) * mm.PageSize()
	p, err := unix.MmapPtr(-1, 0, nil, uintptr(uint64(blocks)*size), readWrite, anonymous)
	if err != nil {
		return nil, fmt.Errorf("map ring: %w", err)
	}
	start := mm.Addr(uintptr(p))
	return &ring{span: mm.Range{Start: start, End: start + mm.Addr(uint64(blocks)*size)}, size: mm.Addr(size)}, nil
}

func (r *ring) close() error { return unix.MunmapPtr(pointer(r.span.Start), uintptr(r.span.Len())) }

func (r *ring) block(i int) mm.Range {
	start := r.span.Start + mm.Addr(i)*r.size
	return mm.Range{Start: start, End: start + r.size}
}

// renew puts fresh pages behind a block: mapped over the old ones, or every
// other time after those were moved away, where a program that works on its
// messages in place would go on using them.
func (r *ring) renew(i int) error {
	b := r.block(i)
	r.turns++
	if r.turns%2 == 0 {
		_, err := unix.MmapPtr(-1, 0, pointer(b.Start), uintptr(b.Len()), readWrite, anonymous|unix.MAP_FIXED)
		return err
	}
	old, err := unix.MremapPtr(pointer(b.Start), uintptr(b.Len()), nil, uintptr(b.Len()), unix.MREMAP_MAYMOVE|unix.MREMAP_DONTUNMAP)
	if err != nil {
		return fmt.Errorf("move the block away: %w", err)
	}
	return unix.MunmapPtr(old, uintptr(b.Len()))
}

// credit allows the sender one message.
type credit struct {
	remote uint64
	rkey   uint32
	seq    uint32
}

type sender struct {
	pd   *ibv.PD
	pair [2]*ibv.Queue // its own, and the receiver's
	mr   *ibv.MR
	data []byte
}

func newSender(pd *ibv.PD, size int) (_ *sender, err error) {
	s := &sender{pd: pd, data: make([]byte, size)}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	for i := range s.pair {
		if s.pair[i], err = pd.NewQueue(ibv.QueueOptions{}); err != nil {
			return nil, err
		}
	}
	for i := range s.pair {
		if err := s.pair[i].Connect(s.pair[1-i].Endpoint()); err != nil {
			return nil, err
		}
	}
	s.mr, err = pd.RegisterBytes(s.data, 0)
	return s, err
}

func (s *sender) run(ctx context.Context, credits <-chan credit, written chan<- error) {
	for {
		select {
		case <-ctx.Done():
			return
		case c := <-credits:
			fill(s.data, c.seq)
			written <- s.pair[0].Write(s.mr, s.mr.Range(), c.remote, c.rkey)
		}
	}
}

func (s *sender) close() error {
	var errs []error
	for _, q := range s.pair {
		if q != nil {
			errs = append(errs, q.Close())
		}
	}
	if s.mr != nil {
		errs = append(errs, s.pd.Deregister(s.mr))
	}
	return errors.Join(errs...)
}

func fill(b []byte, seq uint32) {
	for i := range b {
		b[i] = contents(seq, i)
	}
}

// missing counts the bytes of message seq that are not there.
func missing(b []byte, seq uint32) (n int) {
	for i := range b {
		if b[i] != contents(seq, i) {
			n++
		}
	}
	return n
}

// contents is never 0, which is what fresh pages have.
func contents(seq uint32, i int) byte { return byte((seq*31+uint32(i/8))%255) + 1 }

const readWrite, anonymous = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS

// pointer to memory that is not Go's: a conversion that go vet takes for a
// mistake when it is written as such.
func pointer(a mm.Addr) unsafe.Pointer {
	u := uintptr(a)
	return *(*unsafe.Pointer)(unsafe.Pointer(&u))
}

func view(r mm.Range) []byte { return unsafe.Slice((*byte)(pointer(r.Start)), r.Len()) }
