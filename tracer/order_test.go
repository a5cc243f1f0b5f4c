// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// Every call of every thread has its begin and its end, in this order, under
// the thread's name.
func TestThreads(t *testing.T) {
	const threads, count = 8, 100
	p := startTracee(t)
	s := watch(t, shared, PID(p.pid), WatchOptions{Kinds: []mm.Kind{mm.Unmap}})
	bases := p.do(t, "threads %d %d", threads, count)
	records := drain(t, s)
	complete(t, records, 1)

	size := mm.PageSize()
	type call struct {
		tid   uint32
		start mm.Addr
	}
	state := map[call]mm.Phase{}
	for i := range records {
		r := &records[i]
		c := call{r.TID, r.Range.Start}
		if r.PID != uint32(p.pid) || state[c]+1 != r.Phase || r.Space != records[0].Space {
			t.Fatalf("record %s", show(records[i:i+1]))
		}
		state[c] = r.Phase
	}
	for i := 0; i < len(bases); i += 2 {
		for k := range uint64(count) {
			c := call{uint32(bases[i]), mm.Addr(bases[i+1]) + mm.Addr(k*size)}
			if state[c] != mm.PhaseEnd {
				t.Errorf("thread %d, page %v: state %v, want end", c.tid, c.start, state[c])
			}
			delete(state, c)
		}
	}
	// what is left are the stacks of the threads themselves
	for c := range state {
		if c.start >= p.area && c.start < p.page(threads*count, 0).Start {
			t.Errorf("thread %d: %v was not unmapped by it", c.tid, c.start)
		}
	}
}

// A child with another pid in the same address space: the change is the
// parent's, whoever made it.
func TestSharedSpace(t *testing.T) {
	for _, how := range []string{"vfork", "clonevm"} {
		t.Run(how, func(t *testing.T) {
			p := startTracee(t)
			s := watch(t, shared, PID(p.pid), WatchOptions{})
			p.call(t, unix.SYS_MADVISE, "A+8", mm.PageSize(), unix.MADV_DONTNEED)
			child := uint32(p.do(t, how)[0])
			records := drain(t, s)
			complete(t, records, 1)
			space := records[0].Space
			if space == 0 {
				t.Error("space is 0")
			}
			var seen []mm.Kind
			for i := range records {
				r := &records[i]
				if r.Space != space || r.Flags&mm.SpaceDeath != 0 {
					t.Errorf("not of the parent's space: %s", show(records[i:i+1]))
				}
				switch {
				case r.Kind == mm.Fork:
					if want := mm.NewProcess | mm.SharesSpace; r.ChildPID != child || r.Flags != want || r.PID != uint32(p.pid) {
						t.Errorf("fork: %s", show(records[i:i+1]))
					}
					seen = append(seen, r.Kind)
				case r.PID == child && r.Kind == mm.Unmap:
					if r.Range != p.page(0, 1) || r.TID != child {
						t.Errorf("unmap: %s", show(records[i:i+1]))
					}
					seen = append(seen, r.Kind)
				}
			}
			if len(seen) != 3 || seen[0] != mm.Fork {
				t.Errorf("saw %v, want fork and the unmap twice:%s", seen, show(records))
			}
		})
	}
}

// A thread that is not the leader executes a program: its tid becomes the
// leader's, the old space dies, the new one is followed.
func TestExecFromThread(t *testing.T) {
	for _, follow := range []bool{true, false} {
		t.Run(map[bool]string{true: "follow", false: "alone"}[follow], func(t *testing.T) {
			p := startTracee(t)
			s := watch(t, shared, PID(p.pid), WatchOptions{Follow: follow})
			p.call(t, unix.SYS_MUNMAP, "A+1", mm.PageSize())
			p.tell(t, "exec")
			p.ready(t)
			p.call(t, unix.SYS_MUNMAP, "A+2", mm.PageSize())
			records := drainDeaths(t, s, 1)
			complete(t, records, 1)
			old := records[0].Space

			execs := those(records, func(r *mm.Record) bool { return r.Kind == mm.Exec })
			deaths := those(records, isDeath)
			fresh := those(records, func(r *mm.Record) bool { return r.Kind == mm.Unmap && r.Range == p.page(2, 1) })
			if len(deaths) != 1 || deaths[0].Space != old {
				t.Fatalf("deaths, want one of space %x:%s", old, show(records))
			}
			for i := range records {
				if records[i].Seq > deaths[0].Seq && records[i].Space == old && records[i].Kind != mm.Exit {
					t.Errorf("after the death of its space:%s", show(records[i:i+1]))
				}
			}
			if !follow {
				if len(execs) != 0 || len(fresh) != 0 {
					t.Fatalf("the new program is in the stream:%s", show(records))
				}
				return
			}
			if len(execs) != 1 || len(fresh) != 2 {
				t.Fatalf("%d exec and %d unmap, want 1 and 2:%s", len(execs), len(fresh), show(records))
			}
			e := execs[0]
			if e.PID != uint32(p.pid) || e.TID != e.PID || e.ChildTID == e.TID || e.ChildTID == 0 || e.Space == old {
				t.Errorf("exec:%s", show(records))
			}
			if fresh[0].Space != e.Space || fresh[0].Seq < e.Seq {
				t.Errorf("unmap by the new program:%s", show(fresh))
			}
		})
	}
}

// posix_spawn: a child that borrows the space and then leaves it by exec. The
// parent's space goes on; the child's new one is followed if that was asked.
func TestSpawn(t *testing.T) {
	for _, follow := range []bool{true, false} {
		t.Run(map[bool]string{true: "follow", false: "alone"}[follow], func(t *testing.T) {
			p := startTracee(t)
			s := watch(t, shared, PID(p.pid), WatchOptions{Follow: follow})
			p.call(t, unix.SYS_MUNMAP, "A+1", mm.PageSize())
			child := uint32(p.do(t, "spawn")[0])
			p.call(t, unix.SYS_MUNMAP, "A+2", mm.PageSize())
			deaths := 0
			if follow {
				deaths = 1
			}
			records := drainDeaths(t, s, deaths)
			complete(t, records, 1)
			parent := records[0].Space
			var kinds []string
			for i := range records {
				r := &records[i]
				switch {
				case r.Kind == mm.Fork:
					if r.ChildPID != child || r.Flags != mm.NewProcess|mm.SharesSpace || r.Space != parent {
						t.Errorf("fork:%s", show(records[i:i+1]))
					}
					kinds = append(kinds, "fork")
				case r.Kind == mm.Exec:
					if r.PID != child || r.Space == parent {
						t.Errorf("exec:%s", show(records[i:i+1]))
					}
					kinds = append(kinds, "exec")
				case r.Flags&mm.SpaceDeath != 0:
					if r.Space == parent {
						t.Errorf("the parent's space died:%s", show(records[i:i+1]))
					}
					kinds = append(kinds, "death")
				case r.Flags&mm.LastTask != 0:
					if r.PID != child {
						t.Errorf("exit:%s", show(records[i:i+1]))
					}
					kinds = append(kinds, "exit")
				}
			}
			slices.Sort(kinds[min(2, len(kinds)):]) // exit and death come in any order
			want := []string{"fork"}
			if follow {
				want = []string{"fork", "exec", "death", "exit"}
			}
			if !slices.Equal(kinds, want) {
				t.Errorf("saw %v, want %v:%s", kinds, want, show(records))
			}
			own := those(records, func(r *mm.Record) bool { return r.Range == p.page(2, 1) })
			if len(own) != 2 || own[0].Space != parent || own[1].Space != parent {
				t.Errorf("the parent's own change afterwards:%s", show(records))
			}
		})
	}
}

// The main thread exits first; its worker is still the process.
func TestMainThreadExitsFirst(t *testing.T) {
	for _, c := range []struct {
		name  string
		late  bool // watch only when the main thread is gone
		tasks int
	}{{"watched before", false, 2}, {"watched after", true, 1}} {
		t.Run(c.name, func(t *testing.T) {
			const count = 100
			p := startTracee(t)
			var s *Stream
			if !c.late {
				s = watch(t, shared, PID(p.pid), WatchOptions{})
			}
			p.tell(t, "mainexit")
			worker := uint32(number(t, p.answer(t, "ok", 1)[0]))
			if c.late {
				s = watch(t, shared, PID(p.pid), WatchOptions{})
			}
			for i := range count {
				p.tell(t, "call 1 %d A+%d %d", unix.SYS_MUNMAP, i, mm.PageSize())
				p.answer(t, "ok", 1)
			}
			if err := p.end(); err != nil {
				t.Fatalf("tracee: %v", err)
			}
			records := drainDeaths(t, s, 1)
			complete(t, records, 1)
			unmaps := those(records, func(r *mm.Record) bool {
				return r.Kind == mm.Unmap && r.TID == worker && r.PID == uint32(p.pid)
			})
			if len(unmaps) != 2*count {
				t.Errorf("%d records of unmap, want %d:%s", len(unmaps), 2*count, show(records))
			}
			for i := range unmaps {
				if want := p.page(i/2, 1); unmaps[i].Range != want {
					t.Errorf("unmap %d is %v, want %v", i, unmaps[i].Range, want)
				}
			}
			exits := those(records, func(r *mm.Record) bool { return r.Kind == mm.Exit && r.Flags&mm.SpaceDeath == 0 })
			last := those(exits, func(r *mm.Record) bool { return r.Flags&mm.LastTask != 0 })
			deaths := those(records, isDeath)
			if len(exits) != c.tasks || len(last) != 1 || len(deaths) != 1 {
				t.Fatalf("%d exits, %d of them the last, %d deaths; want %d, 1, 1:%s", len(exits), len(last), len(deaths), c.tasks, show(records))
			}
			if last[0].TID != worker || deaths[0].Space != records[0].Space {
				t.Errorf("last exit or death:%s", show(records))
			}
		})
	}
}

// Each child's change is in the child's space, and only where it was asked for.
func TestForkStorm(t *testing.T) {
	const storms, size = 10, 50
	p := startTracee(t)
	follower := watch(t, shared, PID(p.pid), WatchOptions{Follow: true, RingBytes: 16 << 20})
	alone := watch(t, shared, PID(p.pid), WatchOptions{})
	children := map[uint32]bool{}
	for range storms {
		for _, pid := range p.do(t, "fork %d", size) {
			children[uint32(pid)] = true
		}
	}

	records := drain(t, follower)
	complete(t, records, 1)
	parent := records[0].Space
	type child struct {
		forked, begun, ended, last bool
		space                      uint64
	}
	state := map[uint32]*child{}
	owner := map[uint64]uint32{parent: uint32(p.pid)} // an address of a space may be used again
	for i := range records {
		r := &records[i]
		bad := func(what string) { t.Helper(); t.Errorf("%s:%s", what, show(records[i:i+1])) }
		if r.Kind == mm.Fork {
			if state[r.ChildPID] != nil || r.Flags != mm.NewProcess || r.Space != parent || r.PID != uint32(p.pid) {
				bad("fork")
			}
			state[r.ChildPID] = &child{forked: true}
			continue
		}
		if r.Flags&mm.SpaceDeath != 0 {
			delete(owner, r.Space)
			continue
		}
		c := state[r.PID]
		if c == nil {
			if r.PID != uint32(p.pid) || r.Space != parent {
				bad("of nobody")
			}
			continue
		}
		if pid, ok := owner[r.Space]; r.Space != 0 && (ok && pid != r.PID || c.space != 0 && c.space != r.Space) {
			bad("in another's space")
		}
		if r.Space != 0 {
			owner[r.Space], c.space = r.PID, r.Space
		}
		switch {
		case r.Kind == mm.Unmap && r.Range == p.page(0, 1) && r.Phase == mm.PhaseBegin:
			c.begun = true
		case r.Kind == mm.Unmap && r.Range == p.page(0, 1):
			c.ended = c.begun
		case r.Kind == mm.Exit && r.Flags&mm.LastTask != 0:
			c.last = c.ended
		}
	}
	for pid := range children {
		if c := state[pid]; c == nil || !c.last {
			t.Errorf("child %d: %+v, want fork, unmap and exit", pid, c)
		}
	}
	if len(children) != storms*size || len(state) != len(children) {
		t.Errorf("%d children, %d in the stream", len(children), len(state))
	}

	records = drain(t, alone)
	complete(t, records, 1)
	forks := 0
	for i := range records {
		if r := &records[i]; r.PID != uint32(p.pid) || r.Space != parent {
			t.Errorf("not of the parent:%s", show(records[i:i+1]))
		}
		if records[i].Kind == mm.Fork {
			forks++
		}
	}
	if forks != storms*size {
		t.Errorf("%d forks without Follow, want %d", forks, storms*size)
	}
}

// For one address a map comes after the begin of the unmap that freed it, and
// an unmap after the map, although four threads hand pages to each other.
func TestOrderPerAddress(t *testing.T) {
	const threads = 4
	total := times(1_000_000)
	batch := min(total, 100_000)
	p := startTracee(t)
	// a batch fits with its three records a page, so nothing can be lost
	s := watch(t, shared, PID(p.pid), WatchOptions{Kinds: []mm.Kind{mm.Map, mm.Unmap}, RingBytes: 64 << 20})
	mapped := map[mm.Addr]bool{}
	var seq, maps, reused uint64
	for range total / batch {
		p.do(t, "churn %d %d", threads, batch)
		if err := s.Flush(); err != nil {
			t.Fatal(err)
		}
		for {
			var r mm.Record
			err := s.Read(&r)
			if errors.Is(err, ErrFlushed) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			if r.Seq != seq+1 || r.Kind == mm.Lost {
				t.Fatalf("after seq %d:%s", seq, show([]mm.Record{r}))
			}
			seq = r.Seq
			if r.Range.Len() != mm.PageSize() {
				continue // stacks of the threads
			}
			was, known := mapped[r.Range.Start]
			switch {
			case r.Kind == mm.Map:
				if was {
					t.Fatalf("mapped before its unmap began:%s", show([]mm.Record{r}))
				}
				mapped[r.Range.Start] = true
				maps++
				if known {
					reused++
				}
			case r.Phase == mm.PhaseBegin:
				if !was {
					t.Fatalf("unmapped before it was mapped:%s", show([]mm.Record{r}))
				}
				mapped[r.Range.Start] = false
			}
		}
	}
	if maps != uint64(total) {
		t.Errorf("%d maps, want %d", maps, total)
	}
	if reused < uint64(total)/2 {
		t.Errorf("only %d of %d maps reuse an address: the test shows nothing", reused, maps)
	}
	t.Logf("%d records, %d maps of %d addresses", seq, maps, len(mapped))
}
