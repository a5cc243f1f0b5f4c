// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// conserved checks that records (all that was read from s so far) and the
// sending side agree: sent = received + lost, numbered without a gap.
func conserved(t *testing.T, s *Stream, records []mm.Record) (received, lost uint64) {
	t.Helper()
	var seq uint64
	for i := range records {
		r := &records[i]
		n := uint64(1)
		if r.Kind == mm.Lost {
			n = r.Lost
			lost += n
		} else {
			received++
		}
		if seq += n; r.Seq != seq || n == 0 {
			t.Fatalf("record %d has seq %d, want %d: %s", i, r.Seq, seq, show(records[i:i+1]))
		}
	}
	st := s.Stats()
	if st.Missed != 0 {
		t.Fatalf("the kernel skipped hooks %d times", st.Missed)
	}
	if received != st.Records || lost != st.Lost {
		t.Errorf("received %d, lost %d; sent %d, of them lost %d", received, lost, st.Records+st.Lost, st.Lost)
	}
	return received, lost
}

// Nobody reads while a million changes happen.
func TestLossStoppedReader(t *testing.T) {
	changes := times(1_000_000)
	for _, ring := range []int{os.Getpagesize(), 1 << 20} {
		t.Run(fmt.Sprint(ring), func(t *testing.T) {
			p := startTracee(t)
			s := watch(t, shared, PID(p.pid), WatchOptions{RingBytes: ring})
			p.do(t, "call %d %d A+3 %d %d", changes, unix.SYS_MADVISE, mm.PageSize(), unix.MADV_DONTNEED)
			records := drain(t, s)
			if n := len(records); n == 0 || records[n-1].Kind != mm.Lost {
				t.Fatalf("the loss is not the last of %d records", len(records))
			}
			p.do(t, "call 1 %d A+4 %d %d", unix.SYS_MADVISE, mm.PageSize(), unix.MADV_DONTNEED)
			records = append(records, drain(t, s)...)
			received, lost := conserved(t, s, records)
			if received+lost != uint64(2*changes+2) {
				t.Errorf("%d events, want %d", received+lost, 2*changes+2)
			}
			losses := 0
			for i := range records {
				r := &records[i]
				want := p.page(3, 1)
				if losses != 0 {
					want = p.page(4, 1)
				}
				if r.Kind == mm.Lost {
					losses++
				} else if r.Range != want || r.Kind != mm.Zap {
					t.Fatalf("after %d losses:%s", losses, show(records[i:i+1]))
				}
			}
			if losses != 1 {
				t.Errorf("%d records of loss, want 1", losses)
			}
		})
	}
}

// A reader too slow for its ring of 30 records, while changes happen: every
// run of lost events is in its place, and the sum is exact.
func TestLossSlowReader(t *testing.T) {
	const pages = 20_000
	p := startTracee(t)
	s := watch(t, shared, PID(p.pid), WatchOptions{RingBytes: os.Getpagesize(), Kinds: []mm.Kind{mm.Unmap}})
	p.tell(t, "sweep %d", pages)
	done := make(chan error, 1)
	go func() {
		_, err := p.out.ReadString('\n')
		done <- errors.Join(err, s.Flush())
	}()
	var records []mm.Record
	for {
		var r mm.Record
		err := s.Read(&r)
		if errors.Is(err, ErrFlushed) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		records = append(records, r)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	received, lost := conserved(t, s, records)
	if received+lost != 2*pages || lost == 0 {
		t.Fatalf("%d events, %d lost; want %d, more than 0", received+lost, lost, 2*pages)
	}
	// the sweep goes downwards, so an address says which event it is
	losses := 0
	top := records[0].Range.End // the ring was empty: the first event is there
	for i := range records {
		r := &records[i]
		if r.Kind == mm.Lost {
			losses++
			continue
		}
		event := 2*uint64(top-r.Range.End)/mm.PageSize() + uint64(r.Phase)
		if r.Seq != event {
			t.Fatalf("record %d is event %d of the program, its seq is %d:%s", i, event, r.Seq, show(records[max(0, i-2):i+1]))
		}
	}
	t.Logf("%d received, %d lost in %d runs", received, lost, losses)
}

// Close may come while Read looks for a loss.
func TestCloseDuringLoss(t *testing.T) {
	p := startTracee(t)
	for range 20 {
		s := watch(t, shared, PID(p.pid), WatchOptions{RingBytes: os.Getpagesize()})
		p.do(t, "call 100 %d A %d %d", unix.SYS_MADVISE, mm.PageSize(), unix.MADV_DONTNEED)
		done, first := make(chan error), make(chan struct{})
		go func() {
			var r mm.Record
			err := s.Read(&r)
			close(first)
			for err == nil {
				err = s.Read(&r)
			}
			done <- err
		}()
		<-first
		if err := s.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-done; !errors.Is(err, os.ErrClosed) {
			t.Fatalf("read: %v", err)
		}
	}
}

// Whatever kind of record finds the ring full, the loss is told once, with
// the right number, before the first record after it.
func TestLossOfEachKind(t *testing.T) {
	page := mm.PageSize()
	ringful := os.Getpagesize() / (recordSize + 8) // records behind their headers
	cases := []struct {
		kind mm.Kind
		n    uint64 // records that the operation makes
		do   func(*testing.T, *tracee)
	}{
		{mm.Unmap, 2, func(t *testing.T, p *tracee) { p.call(t, unix.SYS_MUNMAP, "A+9", page) }},
		{mm.Replace, 2, func(t *testing.T, p *tracee) {
			p.call(t, unix.SYS_MMAP, "A+9", page, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED, -1, 0)
		}},
		{mm.Zap, 2, func(t *testing.T, p *tracee) { p.call(t, unix.SYS_MADVISE, "A+9", page, unix.MADV_DONTNEED) }},
		{mm.Move, 2, func(t *testing.T, p *tracee) {
			p.call(t, unix.SYS_MREMAP, "A+9", page, page, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED, "A+11")
		}},
		{mm.Protect, 2, func(t *testing.T, p *tracee) { p.call(t, unix.SYS_MPROTECT, "A+9", page, unix.PROT_READ) }},
		{mm.Map, 1, func(t *testing.T, p *tracee) {
			p.call(t, unix.SYS_MMAP, 0, page, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, -1, 0)
		}},
		{mm.Fork, 1, func(t *testing.T, p *tracee) { p.do(t, "fork 1") }},
		{mm.Exec, 1, func(t *testing.T, p *tracee) { p.tell(t, "exec"); p.ready(t) }},
		// the child's task and its space
		{mm.Exit, 2, func(t *testing.T, p *tracee) { p.do(t, "fork 1") }},
	}
	for _, c := range cases {
		for _, room := range []bool{false, true} {
			name := c.kind.String() + map[bool]string{false: "/then idle", true: "/then another"}[room]
			t.Run(name, func(t *testing.T) {
				p := startTracee(t)
				s := watch(t, shared, PID(p.pid), WatchOptions{
					Kinds: []mm.Kind{mm.Zap, c.kind}, Follow: true, RingBytes: os.Getpagesize(),
				})
				zap := func(n int) {
					p.do(t, "call %d %d A+1 %d %d", n, unix.SYS_MADVISE, page, unix.MADV_DONTNEED)
				}
				zap(ringful / 2)
				if st := s.Stats(); st.Records != uint64(ringful) || st.Lost != 0 {
					t.Fatalf("the ring should be just full: %+v", st)
				}
				c.do(t, p)
				st := s.Stats()
				for start := time.Now(); st.Lost < c.n && time.Since(start) < 20*time.Second; st = s.Stats() {
					runtime.Gosched() // a space may die a little after its last task
				}
				if st.Lost != c.n {
					t.Fatalf("%+v, want %d lost", st, c.n)
				}
				var records []mm.Record
				at := ringful // where the loss must be
				if room {
					for range 2 {
						var r mm.Record
						if err := s.Read(&r); err != nil {
							t.Fatal(err)
						}
						records = append(records, r)
					}
				} else {
					records = drain(t, s)
				}
				zap(1)
				records = append(records, drain(t, s)...)
				conserved(t, s, records)
				if len(records) != ringful+3 || records[at].Kind != mm.Lost || records[at].Lost != c.n || records[at].Range != mm.Whole {
					t.Fatalf("want %d records, a loss of %d, 2 records:%s", ringful, c.n, show(records))
				}
				for i := range records {
					if i != at && records[i].Kind != mm.Zap {
						t.Errorf("want a zap:%s", show(records[i:i+1]))
					}
				}
			})
		}
	}
	covered := map[mm.Kind]bool{
		mm.Lost: true, mm.Register: true, mm.Deregister: true, // not of the kernel side
	}
	for _, c := range cases {
		covered[c.kind] = true
	}
	for _, k := range mm.Kinds() {
		if !covered[k] {
			t.Errorf("kind %v has no case", k)
		}
	}
}

// A hook that the kernel skipped is a loss, in the place where it was noticed.
func TestLossOfHookRuns(t *testing.T) {
	p := startTracee(t)
	s := watch(t, shared, PID(p.pid), WatchOptions{})
	p.call(t, unix.SYS_MUNMAP, "A", mm.PageSize())
	if n := len(drain(t, s)); n != 2 {
		t.Fatalf("%d records, want 2", n)
	}
	s.missed.Add(7)
	p.call(t, unix.SYS_MUNMAP, "A+1", mm.PageSize())
	records := drain(t, s)
	if len(records) != 3 || records[0].Kind != mm.Lost || records[0].Lost != 7 || records[0].Seq != 9 ||
		records[1].Kind != mm.Unmap || records[1].Seq != 10 || records[2].Seq != 11 {
		t.Errorf("want a loss of 7 before the records:%s", show(records))
	}
	s.missed.Add(1)
	records = drain(t, s)
	if len(records) != 1 || records[0].Kind != mm.Lost || records[0].Lost != 1 || records[0].Call.ABI != mm.ABINone {
		t.Errorf("want a loss of 1 without a record behind it:%s", show(records))
	}
}
