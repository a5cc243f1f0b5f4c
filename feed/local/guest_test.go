// SPDX-License-Identifier: Apache-2.0

//go:build linux && amd64

package local

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

// watchOf opens a watch of a process, as the daemon does for it; if settles, a
// registration may ask where tasks are.
func watchOf(t *testing.T, tr *tracer.Tracer, target tracer.Target, o tracer.FeedOptions, settles bool) (*tracer.Feed, *feed.Watch) {
	t.Helper()
	f, err := tr.OpenFeed(target, o)
	if err != nil {
		t.Fatal(err)
	}
	m, err := feed.Descriptors{
		Status: f.StatusFD(), Epoch: f.EpochFD(), Interest: f.InterestFD(), Ring: f.RingFD(), RingBytes: f.RingBytes(),
	}.Map()
	if err != nil {
		t.Fatal(errors.Join(err, f.Close()))
	}
	m.Release = f.Close
	if settles {
		m.Settle = f.Settled
	}
	w, err := feed.New(m)
	if err != nil {
		m.Unmap()
		t.Fatal(errors.Join(err, f.Close()))
	}
	return f, w
}

// idleProcess is another process, which changes nothing.
func idleProcess(t *testing.T) tracer.Target {
	t.Helper()
	c := exec.Command("sleep", "60")
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Process.Kill()
		c.Wait()
	})
	return tracer.PID(c.Process.Pid)
}

// sharedPages are pages of a file, in which fd can punch holes: a change of
// which the tracepoint does not tell whose it is.
func sharedPages(t *testing.T, n int) (fd int, b []byte, r mm.Range) {
	t.Helper()
	fd, err := unix.MemfdCreate("shared", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Close(fd) })
	size := n * int(mm.PageSize())
	if err := unix.Ftruncate(fd, int64(size)); err != nil {
		t.Fatal(err)
	}
	if b, err = unix.Mmap(fd, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Munmap(b) })
	start := mm.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	return fd, b, mm.Range{Start: start, End: start + mm.Addr(len(b))}
}

func punch(t *testing.T, fd int, b []byte, from, n int) {
	t.Helper()
	page := int(mm.PageSize())
	for i := from; i < from+n; i++ {
		b[i*page] = 1
	}
	if err := unix.Fallocate(fd, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(from*page), int64(n*page)); err != nil {
		t.Fatal(err)
	}
}

// A change that may be another process's makes the watch of one that may not
// know of it as invalid as any other: by a loss, in which nothing of that
// process is. Who may know gets the record.
func TestNotifierHidesOthers(t *testing.T) {
	machine.NeedKVM(t)
	k, err := acquire(tracer.TierNotifierTracepoint)
	if err != nil {
		t.Fatal(err)
	}
	defer release(tracer.TierNotifierTracepoint)
	other := idleProcess(t)
	fd, b, r := sharedPages(t, 4)
	far, farPages, _ := sharedPages(t, 64) // of which the middle is not in the same 64 KiB
	for _, guest := range []bool{false, true} {
		t.Run(fmt.Sprintf("guest %v", guest), func(t *testing.T) {
			f, w := watchOf(t, k.tracer, other, tracer.FeedOptions{Unprivileged: guest}, true)
			defer w.Close()
			cache(t, w, r)
			w.Drain(nil)
			if punch(t, far, farPages, 32, 1); !w.Valid() {
				t.Error("invalid after a change of what is not registered")
			}
			before, err := f.Stats()
			if err != nil {
				t.Fatal(err)
			}
			if punch(t, fd, b, 0, 4); w.Valid() {
				t.Fatal("valid after a change of what is registered")
			}
			var got []mm.Record
			w.Drain(func(rec *mm.Record) { got = append(got, *rec) })
			after, err := f.Stats()
			if err != nil {
				t.Fatal(err)
			}
			if len(got) == 0 {
				t.Fatal("nothing is told of the change")
			}
			for i := range got {
				rec := &got[i]
				if !guest {
					if rec.Kind != mm.Zap || !r.Contains(rec.Range) || int(rec.PID) != os.Getpid() {
						t.Errorf("%+v, want a record of the change", *rec)
					}
					continue
				}
				rec.Seq, rec.Time = 0, 0
				want := mm.Record{Kind: mm.Lost, Phase: mm.PhaseEnd, Range: mm.Whole, Lost: rec.Lost, Call: mm.Call{ABI: mm.ABINone}, Flags: mm.Superset}
				if d := cmp.Diff(want, *rec); d != "" {
					t.Errorf("a guest is told (-want +got):\n%s", d)
				}
			}
			lost, foreign := after.Lost-before.Lost, after.Foreign-before.Foreign
			if guest && (lost == 0 || foreign != lost || after.Records != before.Records) || !guest && (lost != 0 || foreign != 0) {
				t.Errorf("counted: %+v, before %+v", after, before)
			}
			if guest {
				ring := make([]byte, 2*f.RingBytes())
				for i, x := range ring[:copyRing(t, f, ring)] {
					if x != 0 {
						t.Fatalf("byte %d of the ring is %#x: a record was written", i, x)
					}
				}
			}
		})
	}
}

// copyRing copies what a client can see of a ring's data.
func copyRing(t *testing.T, f *tracer.Feed, to []byte) int {
	t.Helper()
	page := int(mm.PageSize())
	b, err := unix.Mmap(f.RingFD(), int64(page), page+2*f.RingBytes(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	return copy(to, b[page:])
}
