// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/wire"
)

func init() {
	roles["crowd"] = roleCrowd
	roles["vandal"] = roleVandal
}

// bystander is a client that hostile ones must not disturb: it goes on seeing
// its changes, and another one can still connect.
func bystander(t *testing.T, s *Server) (check func()) {
	t.Helper()
	w := dial(t, s)
	return func() {
		t.Helper()
		for range 10 {
			if err := watched(w); err != nil {
				t.Error(err)
				return
			}
		}
		again, err := feed.Dial(t.Context(), feed.Options{Socket: s.Addr()})
		if err != nil {
			t.Error(err)
			return
		}
		if err := errors.Join(watched(again), again.Close()); err != nil {
			t.Error(err)
		}
	}
}

// slack is what the daemon may still have been opening when the descriptors
// were counted: a proof of life for the bystander, and its ready slots, with a
// status page, an interest page and a ring each.
const slack = 2 + 3*ready

func openDescriptors(t testing.TB) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// Messages that are none, or not now: refused, the connection closed, nothing
// kept.
func TestGarbage(t *testing.T) {
	s := shared(t)
	check := bystander(t, s)
	before := openDescriptors(t)
	random := rand.New(rand.NewPCG(1, 2))
	noise := func(n int) []byte {
		b := make([]byte, n)
		for i := range b {
			b[i] = byte(random.Uint32())
		}
		return b
	}
	valid := wire.Append(nil, 1, hello)
	var cases [][]byte
	for range 100 {
		cases = append(cases, noise(1+random.IntN(2*wire.MaxBytes)))
		b := bytes.Clone(valid)
		b[random.IntN(len(b))] ^= byte(1 + random.IntN(255))
		if _, _, err := wire.Decode(b); err != nil { // else it is a HELLO
			cases = append(cases, b)
		}
	}
	for _, m := range []wire.Message{
		&wire.Echo{}, &wire.Ready{}, &wire.Next{}, &wire.Machine{}, &wire.Settle{}, &wire.Challenge{}, &wire.Refused{}, &wire.End{},
		&wire.Hello{Versions: wire.Supported, Layouts: layouts, Purpose: 77},
	} {
		cases = append(cases, wire.Append(nil, 1, m))
	}
	cases = append(cases, nil, make([]byte, 60_000))
	for i, b := range cases {
		r, err := connectRaw(s.Addr())
		if err != nil {
			t.Fatal(err)
		}
		if err := r.bytes(b); err != nil {
			t.Fatal(err)
		}
		m, fds, err := r.receive()
		if _, refused := m.(*wire.Refused); !refused && !errors.Is(err, io.EOF) || len(fds) != 0 {
			t.Errorf("case %d (%x): %v, %v", i, b[:min(len(b), 40)], m, err)
		}
		unix.Close(r.fd)
	}
	// the right messages at the wrong time
	for _, m := range []wire.Message{hello, &wire.Ready{}, &wire.Settle{}, &wire.Welcome{RingBytes: 4096}} {
		r := dialRaw(t, s)
		if err := r.send(hello); err != nil {
			t.Fatal(err)
		}
		r.challenge(t)
		var fds []int
		for range wire.Descriptors(m) {
			fds = append(fds, 0)
		}
		if err := r.send(m, fds...); err != nil {
			t.Fatal(err)
		}
		r.refusedWith(t, wire.CodeProtocol)
		unix.Close(r.fd)
		r.fd = -1
	}
	check()
	eventually(t, "all are gone", func() bool { return s.connCount() == 1 })
	eventually(t, "no descriptor is left", func() bool { return openDescriptors(t) <= before+slack })
}

// Who stops in the middle is dropped; who is slow at each step is not served
// for ever; others do not wait for them.
func TestHalfHandshakes(t *testing.T) {
	s := start(t, Config{Patience: 300 * time.Millisecond})
	check := bystander(t, s)
	for _, steps := range []int{0, 1, 2} {
		t.Run(fmt.Sprint(steps, " steps"), func(t *testing.T) {
			r := dialRaw(t, s)
			if steps > 0 {
				if err := r.send(hello); err != nil {
					t.Fatal(err)
				}
				c := r.challenge(t)
				if steps > 1 {
					if err := r.send(&wire.Echo{Nonce: c.Nonce}); err != nil {
						t.Fatal(err)
					}
					m, fds, err := r.receive()
					if _, ok := m.(*wire.Welcome); !ok || err != nil {
						t.Fatal(m, err)
					}
					for _, fd := range fds {
						unix.Close(fd)
					}
				}
			}
			check()
			r.refusedWith(t, wire.CodeProtocol)
		})
	}
	check()
	eventually(t, "their watches are closed", func() bool { return s.watchCount() == 1 })
}

// Descriptors that belong to no message are closed at once.
func TestDescriptorFlood(t *testing.T) {
	s := shared(t)
	check := bystander(t, s)
	before := openDescriptors(t)
	fds := make([]int, 250)
	for range 50 {
		r := dialRaw(t, s)
		if err := r.send(hello, fds...); err != nil {
			t.Fatal(err)
		}
		r.refusedWith(t, wire.CodeProtocol)
		unix.Close(r.fd)
		r.fd = -1
	}
	// one that looks like a machine, to a daemon that asked for none
	r := dialRaw(t, s)
	if err := r.send(hello); err != nil {
		t.Fatal(err)
	}
	r.challenge(t)
	if err := r.send(&wire.Machine{}, 0); err != nil {
		t.Fatal(err)
	}
	r.refusedWith(t, wire.CodeProtocol)
	unix.Close(r.fd)
	r.fd = -1
	check()
	eventually(t, "no descriptor is left", func() bool { return openDescriptors(t) <= before+slack })
}

// roleCrowd connects as often as it can, and keeps everything open.
func roleCrowd(socket string, _ []string) error {
	for range 3000 {
		r, err := connectRaw(socket)
		if err != nil {
			break
		}
		r.send(hello)
	}
	fmt.Println("ready")
	select {}
}

// Thousands of connections of one user: others get theirs, and what is told
// about it is bounded.
func TestThousandsOfConnections(t *testing.T) {
	var log countingWriter
	s := start(t, Config{
		Log: slog.New(slog.NewTextHandler(&log, nil)), MaxWatchesPerUID: 64, MaxWatchesPerProcess: 4,
		Patience: 20 * time.Second, // nobody is dropped for being slow
	})
	check := bystander(t, s)
	before := openDescriptors(t)
	c := startClient(t, clientOptions{uid: nobody}, "crowd", s.Addr())
	began := time.Now()
	if line, err := c.out.ReadString('\n'); err != nil {
		t.Fatal(line, err)
	}
	check()
	if n := s.connCount(); n > 1+64+sparePerUser+2 {
		t.Errorf("%d connections", n)
	}
	c.Process.Kill()
	c.Wait()
	eventually(t, "they are gone", func() bool { return s.connCount() == 1 && s.watchCount() == 1 })
	eventually(t, "no descriptor is left", func() bool {
		s.clients.mu.Lock()
		s.clients.tidy() // as for the next user: of processes that ended
		s.clients.mu.Unlock()
		return openDescriptors(t) <= before+slack
	})
	most := int64(logBurst+time.Since(began)/logInterval+1) * 10 // texts
	if n := log.lines.Load(); n > most {
		t.Errorf("%d lines of log, want %d at most", n, most)
	}
	check()
}

type countingWriter struct{ lines atomic.Int64 }

func (w *countingWriter) Write(b []byte) (int, error) {
	w.lines.Add(int64(bytes.Count(b, []byte("\n"))))
	return len(b), nil
}

// bpfAttr is what the map commands of bpf(2) need of union bpf_attr.
type bpfAttr struct {
	fd    uint32
	_     uint32
	key   uint64
	value uint64
	flags uint64
}

// Commands of bpf(2).
const (
	bpfMapLookup = 1
	bpfMapUpdate = 2
	bpfMapDelete = 3
	bpfMapFreeze = 22
)

func bpfMap(cmd int, fd int, value []byte) error {
	key := uint32(0)
	a := bpfAttr{fd: uint32(fd), key: uint64(uintptr(unsafe.Pointer(&key)))}
	if value != nil {
		a.value = uint64(uintptr(unsafe.Pointer(&value[0])))
	}
	_, _, e := unix.Syscall(unix.SYS_BPF, uintptr(cmd), uintptr(unsafe.Pointer(&a)), unsafe.Sizeof(a))
	if e != 0 {
		return e
	}
	return nil
}

// roleVandal does what it can with what it was given.
func roleVandal(socket string, _ []string) error {
	r, err := connectRaw(socket)
	if err != nil {
		return err
	}
	m, fds, err := r.handshake(hello)
	if err != nil {
		return err
	}
	if err := r.send(&wire.Ready{}); err != nil {
		return err
	}
	var errs []error
	for i, what := range []string{"status", "epoch"} {
		fd, size := fds[i], page
		must := func(route string, err error) {
			if err == nil {
				errs = append(errs, fmt.Errorf("%s page can be written by %s", what, route))
			}
		}
		_, err := unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
		must("mmap", err)
		b, err := unix.Mmap(fd, 0, size, unix.PROT_READ, unix.MAP_SHARED)
		if err != nil {
			return err
		}
		must("mprotect", unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE))
		junk := bytes.Repeat([]byte{0xff}, size)
		must("update", bpfMap(bpfMapUpdate, fd, junk))
		must("delete", bpfMap(bpfMapDelete, fd, nil))
		_, err = unix.Pwrite(fd, junk, 0)
		must("pwrite", err)
		must("ftruncate", unix.Ftruncate(fd, 0))
		must("fallocate", unix.Fallocate(fd, 0, 0, int64(size)))
		if mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0); err == nil {
			_, err = mem.WriteAt(junk[:8], int64(uintptr(unsafe.Pointer(&b[0]))))
			must("/proc/self/mem", err)
			mem.Close()
		}
		local := []unix.Iovec{{Base: &junk[0], Len: 8}}
		remote := []unix.RemoteIovec{{Base: uintptr(unsafe.Pointer(&b[0])), Len: 8}}
		_, err = unix.ProcessVMWritev(os.Getpid(), local, remote, 0)
		must("process_vm_writev", err)
		// as the target of a read
		zero, err := os.Open("/dev/zero")
		if err != nil {
			return err
		}
		_, _, e := unix.Syscall(unix.SYS_READ, zero.Fd(), uintptr(unsafe.Pointer(&b[0])), 8)
		zero.Close()
		if e == 0 {
			must("read", nil)
		}
		if word := *(*uint64)(unsafe.Pointer(&b[0])); word == 0 || word == ^uint64(0) {
			errs = append(errs, fmt.Errorf("%s page: word %#x", what, word))
		}
	}
	// Its own: whatever it writes, it harms itself. Freezing what is mapped
	// for writing is refused, updating the interest is allowed.
	mem, err := feed.Descriptors{Status: fds[0], Epoch: fds[1], Interest: fds[2], Ring: fds[3], RingBytes: int(m.RingBytes)}.Map()
	if err != nil {
		return err
	}
	bpfMap(bpfMapUpdate, fds[2], bytes.Repeat([]byte{0xff}, int(unsafe.Sizeof(layout.Interest{}))))
	bpfMap(bpfMapFreeze, fds[2], nil)
	bpfMap(bpfMapFreeze, fds[3], nil)
	bpfMap(bpfMapUpdate, fds[3], []byte{1, 2, 3, 4, 5, 6, 7, 8})
	in := (*layout.Interest)(unsafe.Pointer(&mem.Interest[0]))
	atomic.StoreUint32(&in.All, 1)
	consumer := (*uint64)(unsafe.Pointer(&mem.RingConsumer[0]))
	random := rand.New(rand.NewPCG(3, 4))
	b, _, unmap, err := mapPages(4)
	if err != nil {
		return err
	}
	defer unmap()
	for i := range 20_000 {
		switch i % 4 {
		case 0:
			atomic.StoreUint64(consumer, random.Uint64())
		case 1:
			atomic.StoreUint64(consumer, uint64(1)<<random.IntN(64)-1)
		case 2:
			atomic.StoreUint64(consumer, 0)
		case 3:
			atomic.StoreUint32(&in.Bank, random.Uint32())
			atomic.StoreUint64(&in.Dense[random.IntN(3)], random.Uint64())
			atomic.StoreUint64(&in.Marker, random.Uint64())
			atomic.StoreUint64(&in.Holder, random.Uint64())
		}
		unix.Madvise(b, unix.MADV_DONTNEED)
	}
	if err := errors.Join(errs...); err != nil {
		fmt.Println(strings.ReplaceAll(err.Error(), "\n", "; "))
	} else {
		fmt.Println("ok")
	}
	return nil
}

// Neither nobody nor root can write what it may only read; what a client
// writes into its own pages does not reach others.
func TestVandals(t *testing.T) {
	s := shared(t)
	check := bystander(t, s)
	for _, uid := range []int{nobody, 0} {
		t.Run(fmt.Sprint("uid ", uid), func(t *testing.T) {
			var stop atomic.Bool
			var g sync.WaitGroup
			g.Go(func() {
				for !stop.Load() {
					check()
				}
			})
			c := startClient(t, clientOptions{uid: uid}, "vandal", s.Addr())
			answer, err := c.out.ReadString('\n')
			stop.Store(true)
			g.Wait()
			if answer != "ok\n" {
				t.Errorf("%s, %v", answer, err)
			}
		})
	}
	check()
}

// A client that reads nothing of its status is dropped.
func TestStatusThatNobodyReads(t *testing.T) {
	s := start(t, Config{Patience: 300 * time.Millisecond})
	check := bystander(t, s)
	r := dialRaw(t, s)
	if err := r.send(&wire.Hello{Versions: wire.Supported, Layouts: layouts, Purpose: wire.PurposeStatus}); err != nil {
		t.Fatal(err)
	}
	c := r.challenge(t)
	if err := r.send(&wire.Echo{Nonce: c.Nonce}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is dropped", func() bool { return s.connCount() == 1 })
	check()
}
