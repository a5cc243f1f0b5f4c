// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package verbs tests registrations with a real RDMA device, soft-RoCE in the
// guests of make test-vm: without a feed what is registered goes stale, with
// regcache and a feed every transfer lands where the processor looks.
//
// A transfer is an RDMA WRITE over a pair of queue pairs of this process, by the
// keys that a peer would have. Its bytes are new ones each time.
package verbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"
	"unsafe"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/ibv"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

var (
	device = flag.String("device", "rxe0", "RDMA device")
	rounds = flag.Int("rounds", 500, "rounds with random changes")
	seed   = flag.Uint64("seed", 1, "of the random changes")
	tier   = tracer.TierSyscall
)

func init() {
	flag.Func("tier", "`tier` to test: syscall (default), notifier/tracepoint, notifier/probe", func(name string) error {
		for _, t := range []tracer.Tier{tracer.TierSyscall, tracer.TierNotifierTracepoint, tracer.TierNotifierProbe} {
			if t.String() == name {
				tier = t
				return nil
			}
		}
		return errors.New("no such tier")
	})
}

// children are what this program does when it runs itself, by name.
var children = map[string]func() error{}

const childEnv = "UMMU_VERBS_CHILD"

func TestMain(m *testing.M) {
	flag.Parse()
	if name := os.Getenv(childEnv); name != "" {
		if err := children[name](); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	code := m.Run()
	if keeper != nil {
		if err := keeper.Close(); err != nil {
			fmt.Println("close the first watch:", err)
			code = 1
		}
	}
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Println(err)
		code = 1
	}
	os.Exit(code)
}

// keeper keeps the kernel side loaded between tests: loading takes half a minute
// on an emulated processor.
var keeper *feed.Watch

var page = int(mm.PageSize())

const all = regcache.LocalWrite | regcache.RemoteRead | regcache.RemoteWrite | regcache.RemoteAtomic

// rig is a device with queue pairs, one connected with the other.
type rig struct {
	t    testing.TB
	dev  *ibv.Device
	pd   *ibv.PD
	q    *ibv.Queue // starts transfers
	peer *ibv.Queue // answers
	src  block      // where transfers come from
	dst  block      // where they are read back to
	srcM *ibv.MR
	dstM *ibv.MR
	word uint64 // of the last transfer
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// closing closes c at the end of the test.
func closing(t testing.TB, what string, closeIt func() error) {
	t.Helper()
	t.Cleanup(func() {
		if err := closeIt(); err != nil {
			t.Errorf("close %s: %v", what, err)
		}
	})
}

const maxPages = 64

func newRig(t testing.TB) *rig {
	t.Helper()
	machine.NeedRDMA(t)
	dev, err := ibv.Open(*device)
	must(t, err)
	closing(t, "device", dev.Close)
	pd, err := dev.NewPD(ibv.Options{})
	must(t, err)
	closing(t, "protection domain", pd.Close)
	r := &rig{t: t, dev: dev, pd: pd, src: mapPages(t, maxPages), dst: mapPages(t, maxPages)}
	r.connect()
	closing(t, "queue pairs", r.disconnect)
	r.srcM = r.register(r.src)
	r.dstM = r.register(r.dst)
	return r
}

// connect makes the queue pairs; again, after they have failed.
func (r *rig) connect() {
	r.t.Helper()
	must(r.t, r.disconnect())
	var err error
	r.q, err = r.pd.NewQueue(ibv.QueueOptions{})
	must(r.t, err)
	r.peer, err = r.pd.NewQueue(ibv.QueueOptions{})
	must(r.t, err)
	must(r.t, r.q.Connect(r.peer.Endpoint()))
	must(r.t, r.peer.Connect(r.q.Endpoint()))
}

func (r *rig) disconnect() error {
	if r.peer == nil {
		return nil
	}
	return errors.Join(r.q.Close(), r.peer.Close())
}

// register registers b until the end of the test, or until it is deregistered.
func (r *rig) register(b block) *ibv.MR {
	r.t.Helper()
	m, err := r.pd.Register(b.span(), all)
	must(r.t, err)
	r.t.Cleanup(func() {
		if m.Registered() {
			if err := r.pd.Deregister(m); err != nil {
				r.t.Error(err)
			}
		}
	})
	return m
}

// fill writes bytes that never were in any memory into the source, and returns
// the first n.
func (r *rig) fill(n int) []byte {
	for i := 0; i < n; i += 8 {
		r.word += 0x9e3779b97f4a7c15
		binary.LittleEndian.PutUint64(r.src[i:], r.word|1)
	}
	return r.src[:n]
}

// write writes new bytes by m to the device's idea of at, and returns them.
func (r *rig) write(m *ibv.MR, at mm.Range) ([]byte, error) {
	want := r.fill(int(at.Len()))
	s := r.src.span()
	s.End = s.Start + mm.Addr(at.Len())
	return want, r.q.Write(r.srcM, s, m.IOVA()+uint64(at.Start-m.Range().Start), m.RKey())
}

// read returns what the device reads by m.
func (r *rig) read(m *ibv.MR, at mm.Range) ([]byte, error) {
	clear(r.dst[:at.Len()])
	d := r.dst.span()
	d.End = d.Start + mm.Addr(at.Len())
	return r.dst[:at.Len()], r.q.Read(r.dstM, d, m.IOVA()+uint64(at.Start-m.Range().Start), m.RKey())
}

// pages says of each page whether the processor sees the bytes: "." if it does,
// "S" if it does not.
func pages(b block, want []byte) string {
	var s strings.Builder
	for i := 0; i < len(want); i += page {
		end := min(i+page, len(want))
		if bytes.Equal(b[i:end], want[i:end]) {
			s.WriteByte('.')
		} else {
			s.WriteByte('S')
		}
	}
	return s.String()
}

// block is memory that Go does not manage.
type block []byte

func ptr(a mm.Addr) unsafe.Pointer {
	u := uintptr(a)
	return *(*unsafe.Pointer)(unsafe.Pointer(&u))
}

func at(r mm.Range) block { return unsafe.Slice((*byte)(ptr(r.Start)), r.Len()) }

func (b block) span() mm.Range {
	start := mm.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	return mm.Range{Start: start, End: start + mm.Addr(len(b))}
}

// part is n pages from page first on.
func (b block) part(first, n int) block { return b[first*page : (first+n)*page] }

const readWrite = unix.PROT_READ | unix.PROT_WRITE

// arena is where the tests map memory: far from where the kernel puts what
// others map, so that nobody is given an address while it is free.
var arena = mm.Addr(64 << 30)

func mapPages(t testing.TB, n int) block { return mapShared(t, n, -1) }

// mapShared maps n pages of fd, or private ones if fd is -1.
func mapShared(t testing.TB, n, fd int) block {
	t.Helper()
	r := mm.Range{Start: arena, End: arena + mm.Addr(n*page)}
	arena = r.End + 1<<30
	must(t, mapAt(r, fd, unix.MAP_FIXED_NOREPLACE))
	t.Cleanup(func() { unix.MunmapPtr(ptr(r.Start), uintptr(r.Len())) })
	b := at(r)
	for i := 0; i < len(b); i += page {
		b[i] = 1
	}
	return b
}

func mapAt(r mm.Range, fd, how int) error {
	kind := unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	if fd >= 0 {
		kind = unix.MAP_SHARED
	}
	if _, err := unix.MmapPtr(fd, 0, ptr(r.Start), uintptr(r.Len()), readWrite, kind|how); err != nil {
		return fmt.Errorf("map %v: %w", r, err)
	}
	return nil
}

func unmap(r mm.Range) error { return unix.MunmapPtr(ptr(r.Start), uintptr(r.Len())) }

// openFeed opens a watch of this process in the tier under test.
func openFeed(t testing.TB) *feed.Watch {
	t.Helper()
	if keeper == nil {
		var err error
		keeper, err = local.Open(local.Options{Tier: tier})
		must(t, err)
	}
	w, err := local.Open(local.Options{Tier: tier})
	must(t, err)
	closing(t, "watch", w.Close)
	return w
}

func newCache(t testing.TB, w *feed.Watch, pd *ibv.PD, o regcache.Options) *regcache.Cache[*ibv.MR] {
	t.Helper()
	c, err := regcache.New(w, pd, o)
	must(t, err)
	closing(t, "cache", c.Close)
	return c
}
