// SPDX-License-Identifier: Apache-2.0

//go:build linux

package verbs

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"runtime"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/ibv"
)

// RDMA WRITE, READ and an atomic by the keys of a region, its ends included.
func TestLoopback(t *testing.T) {
	r := newRig(t)
	b := mapPages(t, 8)
	m := r.register(b)
	whole := b.span()
	for _, at := range []mm.Range{
		whole,
		{Start: whole.Start, End: whole.Start + 1},
		{Start: whole.End - 1, End: whole.End},
		{Start: whole.Start + mm.Addr(page) - 3, End: whole.Start + mm.Addr(page) + 5},
	} {
		want, err := r.write(m, at)
		must(t, err)
		i := int(at.Start - whole.Start)
		if !bytes.Equal(b[i:i+len(want)], want) {
			t.Errorf("%v: the bytes are not there", at)
		}
		got, err := r.read(m, at)
		must(t, err)
		if !bytes.Equal(got, want) {
			t.Errorf("%v: other bytes are read", at)
		}
	}
	binary.NativeEndian.PutUint64(b, 40)
	d := r.dst.span()
	d.End = d.Start + 8
	must(t, r.q.FetchAdd(r.dstM, d, m.IOVA(), m.RKey(), 2))
	if old, now := binary.NativeEndian.Uint64(r.dst), binary.NativeEndian.Uint64(b); old != 40 || now != 42 {
		t.Errorf("fetch and add: %d, then %d; want 40, 42", old, now)
	}
}

// The other direction, and a queue pair that is connected with itself.
func TestBothDirections(t *testing.T) {
	r := newRig(t)
	self, err := r.pd.NewQueue(ibv.QueueOptions{})
	must(t, err)
	closing(t, "queue pair", self.Close)
	must(t, self.Connect(self.Endpoint()))
	for _, q := range []*ibv.Queue{r.peer, r.q, self} {
		b := mapPages(t, 3)
		m := r.register(b)
		want := r.fill(len(b))
		s := r.src.span()
		s.End = s.Start + mm.Addr(len(b))
		must(t, q.Write(r.srcM, s, m.IOVA(), m.RKey()))
		if !bytes.Equal(b, want) {
			t.Error("the bytes are not there")
		}
	}
}

// A region that the device knows by other addresses.
func TestIOVA(t *testing.T) {
	r := newRig(t)
	b := mapPages(t, 2)
	const iova = 0x7000_0000_0000
	m, err := r.pd.RegisterAt(b.span(), all, iova, ibv.Options{})
	must(t, err)
	defer func() { must(t, r.pd.Deregister(m)) }()
	want := r.fill(len(b))
	s := r.src.span()
	s.End = s.Start + mm.Addr(len(b))
	must(t, r.q.Write(r.srcM, s, iova, m.RKey()))
	if !bytes.Equal(b, want) {
		t.Error("the bytes are not there")
	}
	// and as the source of a transfer
	must(t, r.q.Write(m, b.span(), r.dstM.IOVA(), r.dstM.RKey()))
	if !bytes.Equal(r.dst[:len(b)], want) {
		t.Error("the bytes did not come from there")
	}
}

// The device refuses what was not registered; the queue pair is of no use
// afterwards, and says why.
func TestRightsAreEnforced(t *testing.T) {
	r := newRig(t)
	b := mapPages(t, 1)
	for _, c := range []struct {
		name   string
		rights regcache.Access
		do     func(*ibv.MR) error
	}{
		{"write", regcache.RemoteRead, func(m *ibv.MR) error { _, err := r.write(m, b.span()); return err }},
		{"read", regcache.RemoteWrite, func(m *ibv.MR) error { _, err := r.read(m, b.span()); return err }},
		{"beyond the end", all, func(m *ibv.MR) error {
			s := r.src.span()
			s.End = s.Start + mm.Addr(page)
			return r.q.Write(r.srcM, s, m.IOVA()+8, m.RKey())
		}},
		{"deregistered", all, func(m *ibv.MR) error {
			must(t, r.pd.Deregister(m))
			_, err := r.write(m, b.span())
			return err
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.connect()
			m, err := r.pd.Register(b.span(), c.rights)
			must(t, err)
			defer r.pd.Deregister(m)
			before := bytes.Clone(b)
			err = c.do(m)
			var failed *ibv.TransferError
			// Soft-RoCE of 5.10 refuses and tells nobody.
			silent := strings.HasPrefix(release(), "5.10.") && errors.Is(err, unix.ETIMEDOUT)
			if !silent && (!errors.As(err, &failed) || failed.Status != ibv.StatusRemoteAccess) {
				t.Errorf("%v, want a remote access error", err)
			}
			if !bytes.Equal(b, before) {
				t.Error("bytes were written")
			}
			s := r.src.span()
			if again := r.q.Write(r.srcM, s, r.dstM.IOVA(), r.dstM.RKey()); again == nil || !silent && !errors.As(again, &failed) {
				t.Errorf("after that: %v, want the same error", again)
			}
		})
	}
	r.connect()
}

func release() string {
	var u unix.Utsname
	unix.Uname(&u)
	return unix.ByteSliceToString(u.Release[:])
}

// Memory of the Go heap, pinned, while the collector runs.
func TestGoMemory(t *testing.T) {
	r := newRig(t)
	b := make([]byte, 3*page+100)
	m, err := r.pd.RegisterBytes(b, all)
	must(t, err)
	for range 20 {
		garbage := make([][]byte, 100)
		for i := range garbage {
			garbage[i] = make([]byte, page)
		}
		runtime.GC()
		want, err := r.write(m, m.Range())
		must(t, err)
		if !bytes.Equal(b, want) {
			t.Fatal("the bytes are not there")
		}
		runtime.KeepAlive(garbage)
	}
	must(t, r.pd.Deregister(m))
	if _, err := r.pd.Register(m.Range(), all); !errors.Is(err, ibv.ErrGoMemory) {
		t.Errorf("registered when it is not pinned any more: %v", err)
	}
	runtime.KeepAlive(b)
}

// What the kernel and this package refuse, and that it goes on afterwards.
func TestRefused(t *testing.T) {
	r := newRig(t)
	b := mapPages(t, 4)
	hole := mapPages(t, 4)
	must(t, unmap(hole.part(2, 1).span()))
	readOnly := mapPages(t, 1)
	must(t, unix.Mprotect(readOnly, unix.PROT_READ))
	for _, c := range []struct {
		name string
		r    mm.Range
		want error
	}{
		{"a hole", hole.span(), unix.EFAULT},
		{"not mapped", hole.part(2, 1).span(), unix.EFAULT},
		{"read-only", readOnly.span(), unix.EFAULT},
		{"empty", mm.Range{}, mm.ErrEmptyRange},
	} {
		_, err := r.pd.Register(c.r, all)
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
		t.Log(err)
	}
	m := r.register(b)
	if err := r.q.Write(m, mm.Range{Start: m.Range().Start, End: m.Range().End + 1}, 0, 0); !errors.Is(err, ibv.ErrOutside) {
		t.Errorf("beyond the region: %v", err)
	}
	if err := r.q.Write(nil, m.Range(), 0, 0); !errors.Is(err, ibv.ErrNotRegistered) {
		t.Errorf("without a region: %v", err)
	}
	must(t, r.pd.Deregister(m))
	if err := r.pd.Deregister(m); !errors.Is(err, ibv.ErrNotRegistered) {
		t.Errorf("twice: %v", err)
	}
	if err := r.q.Write(m, m.Range(), 0, 0); !errors.Is(err, ibv.ErrNotRegistered) {
		t.Errorf("from a region that is gone: %v", err)
	}
	again := r.register(b)
	want, err := r.write(again, b.span())
	must(t, err)
	if !bytes.Equal(b, want) {
		t.Error("the bytes are not there")
	}
	must(t, r.q.Close())
	if err := r.q.Write(again, b.span(), 0, 0); !errors.Is(err, os.ErrClosed) {
		t.Errorf("closed queue pair: %v", err)
	}
}

// Regions follow the page tables where the device can do that, or it says that
// it cannot.
func TestOnDemandLimits(t *testing.T) {
	r := newRig(t)
	b := mapPages(t, 1)
	m, err := r.pd.RegisterAt(b.span(), odpRights, uint64(b.span().Start), ibv.Options{OnDemand: true})
	t.Logf("%+v: %v", r.dev.Limits(), err)
	switch can := r.dev.Limits().OnDemand; {
	case can && err != nil:
		t.Error(err)
	case can:
		defer func() { must(t, r.pd.Deregister(m)) }()
		// See chunk: somebody may have repaired it.
		inside := b[2*chunk : 3*chunk]
		want, err := r.write(m, inside.span())
		must(t, err)
		switch {
		case bytes.Equal(inside, want):
			t.Attr("on-demand-inside-pages", "right")
		case bytes.Equal(b[:chunk], want):
			t.Attr("on-demand-inside-pages", "at the start of the page")
		default:
			t.Error("bytes for the middle of a page of an on-demand region are nowhere")
		}
	case !errors.Is(err, unix.EOPNOTSUPP):
		t.Errorf("%v, want EOPNOTSUPP", err)
	}
}
