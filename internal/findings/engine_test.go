// SPDX-License-Identifier: Apache-2.0

package findings

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

const page = 4096

func pages(from, to mm.Addr) mm.Range { return mm.Range{Start: from * page, End: to * page} }

// stream builds records as the tracer delivers them.
type stream struct {
	rs []mm.Record
	at time.Duration
}

func (s *stream) add(r mm.Record) *mm.Record {
	s.at += time.Microsecond
	r.Seq, r.Time = uint64(len(s.rs)+1), s.at
	if r.TID == 0 {
		r.PID, r.TID = 10, 10
	}
	r.Space = 7
	s.rs = append(s.rs, r)
	return &s.rs[len(s.rs)-1]
}

// Numbers of x86-64.
var (
	munmap   = mm.Call{NR: 11}
	mmap     = mm.Call{NR: 9}
	mremap   = mm.Call{NR: 25}
	madvise  = mm.Call{NR: 28}
	mprotect = mm.Call{NR: 10}
	register = mm.Call{NR: 427}
	noCall   = mm.Call{ABI: mm.ABINone}
)

func (s *stream) reg(handle uint64, r mm.Range, access uint32) {
	v := mm.Registration{Device: 1, By: mm.ByVerbs, Access: access}
	s.add(mm.Record{Kind: mm.Register, Phase: mm.PhaseBegin, Range: r, Call: noCall, Registration: v, Stack: 1})
	v.Handle, v.LKey = handle, uint32(handle)
	s.add(mm.Record{Kind: mm.Register, Phase: mm.PhaseEnd, Range: r, Call: noCall, Registration: v})
}

func (s *stream) dereg(handle uint64, ret int64) {
	v := mm.Registration{Device: 1, By: mm.ByVerbs, Handle: handle}
	s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseBegin, Call: noCall, Registration: v})
	s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseEnd, Call: noCall, Registration: v, Ret: ret})
}

// change is a whole call; f may alter both records.
func (s *stream) change(k mm.Kind, c mm.Call, r mm.Range, ret int64, f func(*mm.Record)) {
	for _, p := range []mm.Phase{mm.PhaseBegin, mm.PhaseEnd} {
		rec := mm.Record{Kind: k, Phase: p, Range: r, Call: c}
		if p == mm.PhaseEnd {
			rec.Ret = ret
		} else {
			rec.Stack = 2
		}
		if f != nil {
			f(&rec)
		}
		s.add(rec)
	}
}

func (s *stream) mapped(r mm.Range, flags uint64) {
	s.add(mm.Record{Kind: mm.Map, Phase: mm.PhaseEnd, Range: r, Call: mmap, Ret: int64(r.Start), Arg: [2]uint64{3, flags}})
}

// run feeds an engine and returns its findings in short.
func run(s *stream, o Options) (*Engine, []string) {
	t, err := calls.For("amd64")
	if err != nil {
		panic(err)
	}
	o.Calls = t
	e := New(o)
	for i := range s.rs {
		e.Add(&s.rs[i])
	}
	e.End()
	var got []string
	for _, f := range e.Findings() {
		got = append(got, short(f))
	}
	return e, got
}

func short(f *Finding) string {
	s := fmt.Sprintf("%v %d by %v, %v", f.Class, f.Registration.Registration.Handle, f.Change.Kind, f.Ended)
	if f.Reused {
		s += ", reused"
	}
	if f.RegisteredAgain {
		s += ", registered again"
	}
	if f.Repeats > 0 {
		s += fmt.Sprintf(", %d more", f.Repeats)
	}
	if !f.Certain {
		s += " (" + f.Why + ")"
	}
	return s
}

const (
	private = 0x22
	shared  = 0x01
)

func TestTruth(t *testing.T) {
	buf := pages(100, 108)
	for _, c := range []struct {
		name string
		do   func(*stream)
		want []string
	}{
		{"unmapped", func(s *stream) {
			s.change(mm.Unmap, munmap, pages(104, 105), 0, nil)
		}, []string{"freed-while-registered 5 by unmap, still-registered"}},
		{"unmapped, then deregistered", func(s *stream) {
			s.change(mm.Unmap, munmap, buf, 0, nil)
			s.dereg(5, 0)
		}, []string{"freed-while-registered 5 by unmap, deregistered"}},
		{"deregistered, then unmapped", func(s *stream) {
			s.dereg(5, 0)
			s.change(mm.Unmap, munmap, buf, 0, nil)
		}, nil},
		{"deregistration refused", func(s *stream) {
			s.dereg(5, int64(unix.EBUSY))
			s.change(mm.Unmap, munmap, buf, 0, nil)
		}, []string{"freed-while-registered 5 by unmap, still-registered"}},
		{"beside", func(s *stream) {
			s.change(mm.Unmap, munmap, pages(108, 109), 0, nil)
			s.change(mm.Unmap, munmap, pages(99, 100), 0, nil)
		}, nil},
		{"refused", func(s *stream) {
			s.change(mm.Unmap, munmap, buf, -int64(unix.EINVAL), nil)
		}, nil},
		{"reused", func(s *stream) {
			s.change(mm.Unmap, munmap, buf, 0, nil)
			s.mapped(pages(107, 120), private)
		}, []string{"freed-while-registered 5 by unmap, still-registered, reused"}},
		{"reused and registered again", func(s *stream) {
			s.change(mm.Unmap, munmap, buf, 0, nil)
			s.mapped(buf, private)
			s.reg(6, buf, 1)
		}, []string{"freed-while-registered 5 by unmap, still-registered, reused, registered again"}},
		{"reused before the unmapping task says so", func(s *stream) {
			s.add(mm.Record{Kind: mm.Unmap, Phase: mm.PhaseBegin, Range: buf, Call: munmap, PID: 10, TID: 11})
			s.mapped(buf, private)
			s.add(mm.Record{Kind: mm.Unmap, Phase: mm.PhaseEnd, Range: buf, Call: munmap, PID: 10, TID: 11})
		}, []string{"freed-while-registered 5 by unmap, still-registered, reused"}},
		{"replaced", func(s *stream) {
			s.change(mm.Replace, mmap, pages(103, 104), 103*page, func(r *mm.Record) { r.Arg = [2]uint64{3, private | 0x10} })
		}, []string{"freed-while-registered 5 by replace, still-registered, reused"}},
		{"replaced again and again", func(s *stream) {
			for range 5 {
				s.change(mm.Replace, mmap, pages(104, 108), 104*page, func(r *mm.Record) { r.Arg = [2]uint64{3, private | 0x10} })
			}
		}, []string{"remap-ring 5 by replace, still-registered, reused, 4 more"}},
		{"mmap failed for its file", func(s *stream) {
			s.change(mm.Replace, mmap, buf, -int64(unix.EBADF), nil)
		}, nil},
		{"mmap failed half way", func(s *stream) {
			s.change(mm.Replace, mmap, buf, -int64(unix.EINVAL), nil)
		}, []string{"freed-while-registered 5 by replace, still-registered, reused (mmap failed (invalid argument); it may have changed a part before)"}},
		{"dropped", func(s *stream) {
			s.change(mm.Zap, madvise, pages(100, 101), 0, func(r *mm.Record) { r.Arg[0] = 4 })
		}, []string{"freed-while-registered 5 by zap, still-registered, reused"}},
		{"dropped beside a hole", func(s *stream) {
			s.change(mm.Zap, madvise, buf, -int64(unix.ENOMEM), func(r *mm.Record) { r.Arg[0] = 4 })
		}, []string{"freed-while-registered 5 by zap, still-registered, reused"}},
		{"protected", func(s *stream) {
			s.change(mm.Protect, mprotect, buf, 0, nil)
			s.change(mm.Protect, mprotect, buf, 0, nil)
		}, nil},
		{"forked", func(s *stream) {
			s.add(mm.Record{Kind: mm.Fork, Phase: mm.PhaseEnd, Call: noCall, ChildPID: 20, ChildTID: 20, Flags: mm.NewProcess})
		}, nil},
		{"moved away", func(s *stream) {
			s.change(mm.Move, mremap, buf, 0x900000, func(r *mm.Record) {
				if r.Phase == mm.PhaseEnd {
					r.To = mm.Range{Start: 0x900000, End: 0x910000}
				} else {
					r.Flags = mm.Maybe
				}
			})
		}, []string{"freed-while-registered 5 by move, still-registered"}},
		{"something moved onto it", func(s *stream) {
			s.change(mm.Move, mremap, pages(200, 208), 100*page, func(r *mm.Record) { r.To = buf })
		}, []string{"freed-while-registered 5 by move, still-registered, reused"}},
		{"grown in place", func(s *stream) {
			s.add(mm.Record{Kind: mm.Move, Phase: mm.PhaseBegin, Range: buf, Call: mremap, Flags: mm.Maybe})
			s.add(mm.Record{Kind: mm.Map, Phase: mm.PhaseEnd, Range: pages(108, 112), Call: mremap, Ret: 100 * page})
		}, nil},
		{"whole space, as far as is known", func(s *stream) {
			s.change(mm.Unmap, mm.Call{NR: 67}, mm.Whole, 0, func(r *mm.Record) { r.Flags = mm.Superset })
		}, []string{"freed-while-registered 5 by unmap, still-registered (the call does not tell exactly what it changed)"}},
		{"vector", func(s *stream) {
			for _, p := range []mm.Addr{90, 101} {
				s.add(mm.Record{Kind: mm.Zap, Phase: mm.PhaseBegin, Range: pages(p, p+1), Call: mm.Call{NR: 440}, Flags: mm.Vector, Arg: [2]uint64{4}})
			}
			s.add(mm.Record{Kind: mm.Zap, Phase: mm.PhaseEnd, Range: pages(90, 102), Call: mm.Call{NR: 440}, Ret: 2 * page, Arg: [2]uint64{4}})
		}, []string{"freed-while-registered 5 by zap, still-registered, reused"}},
		{"vector around it", func(s *stream) {
			for _, p := range []mm.Addr{90, 110} {
				s.add(mm.Record{Kind: mm.Zap, Phase: mm.PhaseBegin, Range: pages(p, p+1), Call: mm.Call{NR: 440}, Flags: mm.Vector, Arg: [2]uint64{4}})
			}
			s.add(mm.Record{Kind: mm.Zap, Phase: mm.PhaseEnd, Range: pages(90, 111), Call: mm.Call{NR: 440}, Ret: 2 * page, Arg: [2]uint64{4}})
		}, nil},
		{"its end never seen", func(s *stream) {
			s.add(mm.Record{Kind: mm.Unmap, Phase: mm.PhaseBegin, Range: buf, Call: munmap})
			s.add(mm.Record{Kind: mm.Exit, Phase: mm.PhaseEnd, Call: noCall})
		}, []string{"freed-while-registered 5 by unmap, still-registered"}},
		{"exit", func(s *stream) {
			s.change(mm.Unmap, munmap, buf, 0, nil)
			s.add(mm.Record{Kind: mm.Exit, Phase: mm.PhaseEnd, Range: mm.Whole, Call: noCall, Flags: mm.SpaceDeath})
			s.change(mm.Unmap, munmap, buf, 0, nil) // of another space, at the same address of the kernel's
		}, []string{"freed-while-registered 5 by unmap, address-space-ended"}},
		{"exit alone", func(s *stream) {
			s.add(mm.Record{Kind: mm.Exit, Phase: mm.PhaseEnd, Range: mm.Whole, Call: noCall, Flags: mm.SpaceDeath})
		}, nil},
		{"device closed", func(s *stream) {
			s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseEnd, Call: noCall, Registration: mm.Registration{Device: 1, By: mm.ByVerbs, All: true}})
			s.change(mm.Unmap, munmap, buf, 0, nil)
		}, nil},
		{"another device closed", func(s *stream) {
			s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseEnd, Call: noCall, Registration: mm.Registration{Device: 2, By: mm.ByVerbs, All: true}})
			s.change(mm.Unmap, munmap, buf, 0, nil)
		}, []string{"freed-while-registered 5 by unmap, still-registered"}},
		{"registered anew under its handle", func(s *stream) {
			s.change(mm.Unmap, munmap, buf, 0, nil)
			s.reg(5, pages(300, 301), 1)
		}, []string{"freed-while-registered 5 by unmap, replaced"}},
		{"lost", func(s *stream) {
			s.add(mm.Record{Kind: mm.Lost, Phase: mm.PhaseEnd, Lost: 3, Call: noCall})
			s.change(mm.Unmap, munmap, buf, 0, nil)
		}, []string{"freed-while-registered 5 by unmap, still-registered (events were lost while it was registered)"}},
		{"while it is deregistered", func(s *stream) {
			v := mm.Registration{Device: 1, By: mm.ByVerbs, Handle: 5}
			s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseBegin, Call: noCall, Registration: v, PID: 10, TID: 11})
			s.change(mm.Unmap, munmap, buf, 0, nil)
			s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseEnd, Call: noCall, Registration: v, PID: 10, TID: 11})
		}, nil},
		{"while its deregistration is refused", func(s *stream) {
			v := mm.Registration{Device: 1, By: mm.ByVerbs, Handle: 5}
			s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseBegin, Call: noCall, Registration: v, PID: 10, TID: 11})
			s.change(mm.Unmap, munmap, buf, 0, nil)
			s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseEnd, Call: noCall, Registration: v, PID: 10, TID: 11, Ret: int64(unix.EBUSY)})
		}, []string{"freed-while-registered 5 by unmap, still-registered"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := &stream{}
			s.mapped(buf, private)
			s.reg(5, mm.Range{Start: buf.Start + 8, End: buf.End - 8}, 1) // pins whole pages
			c.do(s)
			_, got := run(s, Options{})
			if d := cmp.Diff(c.want, got); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}

// A registration on demand follows the page tables.
func TestOnDemand(t *testing.T) {
	s := &stream{}
	s.reg(5, pages(100, 108), mm.AccessOnDemand|1)
	s.change(mm.Unmap, munmap, pages(100, 108), 0, nil)
	if _, got := run(s, Options{}); got != nil {
		t.Error(got)
	}
}

// DONTNEED leaves the pages of a shared mapping where they are, REMOVE does not.
func TestShared(t *testing.T) {
	for _, c := range []struct {
		name   string
		flags  uint64
		advice uint64
		zap    mm.Range
		want   int
	}{
		{"shared, dontneed", shared, 4, pages(100, 108), 0},
		{"shared, remove", shared, 9, pages(100, 108), 1},
		{"private, dontneed", private, 4, pages(100, 108), 1},
		{"in part shared", shared, 4, pages(90, 108), 0},
	} {
		s := &stream{}
		s.mapped(pages(90, 120), private)
		s.mapped(pages(100, 108), c.flags)
		s.reg(5, pages(100, 108), 1)
		s.change(mm.Zap, madvise, c.zap, 0, func(r *mm.Record) { r.Arg[0] = c.advice })
		if _, got := run(s, Options{}); len(got) != c.want {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestRacing(t *testing.T) {
	buf := pages(100, 108)
	v := mm.Registration{Device: 1, By: mm.ByVerbs}
	begin := mm.Record{Kind: mm.Register, Phase: mm.PhaseBegin, Range: buf, Call: noCall, Registration: v, PID: 10, TID: 11}
	end := begin
	end.Phase, end.Registration.Handle = mm.PhaseEnd, 5
	racing := []string{"changed-while-registering 5 by unmap, still-registered (" + whyRacing + ")"}
	unmap := func(s *stream, p mm.Phase) {
		s.add(mm.Record{Kind: mm.Unmap, Phase: p, Range: buf, Call: munmap})
	}

	s := &stream{} // between begin and end
	s.add(begin)
	s.change(mm.Unmap, munmap, buf, 0, nil)
	s.add(end)
	if _, got := run(s, Options{}); !cmp.Equal(got, racing) {
		t.Errorf("inside: %q", got)
	}
	s = &stream{} // began before, ends after
	unmap(s, mm.PhaseBegin)
	s.add(begin)
	s.add(end)
	unmap(s, mm.PhaseEnd)
	if _, got := run(s, Options{}); !cmp.Equal(got, racing) {
		t.Errorf("around: %q", got)
	}
	s = &stream{} // the registration failed
	s.add(begin)
	s.change(mm.Unmap, munmap, buf, 0, nil)
	end.Ret = -1
	s.add(end)
	if _, got := run(s, Options{}); got != nil {
		t.Errorf("failed: %q", got)
	}
}

// io_uring: several buffers by one call, slots updated, all dropped at once.
func TestFixedBuffers(t *testing.T) {
	v := func(handle uint64) mm.Registration {
		return mm.Registration{Device: 9, Handle: handle, By: mm.ByIOUring, FD: 3}
	}
	call := func(s *stream, op uint64, k mm.Kind, ret int64, rs ...mm.Range) {
		for i, r := range rs {
			kind := mm.Register
			if r.Empty() {
				kind = mm.Deregister
			}
			s.add(mm.Record{Kind: kind, Phase: mm.PhaseBegin, Range: r, Call: register, Registration: v(uint64(i)), Flags: mm.Vector, Arg: [2]uint64{op}})
		}
		s.add(mm.Record{Kind: k, Phase: mm.PhaseEnd, Call: register, Registration: v(0), Ret: ret, Flags: mm.Vector, Arg: [2]uint64{op}})
	}
	unregister := func(s *stream) {
		all := v(0)
		all.All = true
		s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseBegin, Call: register, Registration: all, Arg: [2]uint64{1}})
		s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseEnd, Call: register, Registration: all, Arg: [2]uint64{1}})
	}
	a, b, c := pages(100, 101), pages(200, 201), pages(300, 301)
	hit := func(s *stream, r mm.Range) { s.change(mm.Unmap, munmap, r, 0, nil) }
	for _, tt := range []struct {
		name string
		do   func(*stream)
		want []uint64 // slots
	}{
		{"all of one call", func(s *stream) { call(s, 0, mm.Register, 0, a, b); hit(s, a); hit(s, b) }, []uint64{0, 1}},
		{"the call failed", func(s *stream) { call(s, 0, mm.Register, -14, a, b); hit(s, a) }, nil},
		{"unregistered", func(s *stream) { call(s, 0, mm.Register, 0, a, b); unregister(s); hit(s, a); hit(s, b) }, nil},
		{"slot updated", func(s *stream) {
			call(s, 0, mm.Register, 0, a, b)
			call(s, UringUpdateBuffers, mm.Register, 1, c)
			hit(s, a)
			hit(s, c)
		}, []uint64{0}},
		{"update stopped half way", func(s *stream) {
			call(s, 0, mm.Register, 0, a, b)
			call(s, UringUpdateBuffers, mm.Register, 1, mm.Range{}, c)
			hit(s, a) // cleared
			hit(s, c) // not taken
			hit(s, b) // still there
		}, []uint64{1}},
		{"ring closed", func(s *stream) {
			call(s, 0, mm.Register, 0, a)
			all := v(0)
			all.All = true
			s.add(mm.Record{Kind: mm.Deregister, Phase: mm.PhaseEnd, Call: mm.Call{NR: 3}, Registration: all})
			hit(s, a)
		}, nil},
	} {
		s := &stream{}
		tt.do(s)
		e, _ := run(s, Options{})
		var got []uint64
		for _, f := range e.Findings() {
			got = append(got, f.Registration.Registration.Handle)
		}
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, d)
		}
	}
}

func TestTrim(t *testing.T) {
	for _, c := range []struct {
		name  string
		stack []string
		want  Class
	}{
		{"by the program", []string{"munmap", "drop_buffer", "main"}, Freed},
		{"by free", []string{"munmap", "free", "drop_buffer", "main"}, Trim},
		{"by delete", []string{"madvise", "", "operator delete(void*)", "Pool::~Pool()"}, Trim},
		{"by jemalloc", []string{"madvise", "je_pages_purge_forced", "main"}, Trim},
		{"by Go's scavenger", []string{"runtime.madvise", "runtime.sysUnusedOS"}, Trim},
		{"a function of the program's", []string{"munmap", "my_free", "Buffer::free_all()"}, Freed},
		{"a method of the program's", []string{"munmap", "app::Buffer::drop(std::vector<int>)"}, Freed},
		{"none", nil, Freed},
	} {
		s := &stream{}
		s.reg(5, pages(100, 108), 1)
		s.change(mm.Unmap, munmap, pages(100, 108), 0, nil)
		e, _ := run(s, Options{Frames: func(id uint32) []symbol.Frame {
			if id != 2 {
				return nil
			}
			var fs []symbol.Frame
			for _, n := range c.stack {
				fs = append(fs, symbol.Frame{Func: n})
			}
			return fs
		}})
		if fs := e.Findings(); len(fs) != 1 || fs[0].Class != c.want {
			t.Errorf("%s: %v", c.name, fs)
		}
	}
}

// Ten thousand registrations and one fault are one finding, told at once, with
// both times and both stacks.
func TestOneFaultOfMany(t *testing.T) {
	s := &stream{}
	for i := range mm.Addr(10000) {
		s.reg(uint64(i+1), pages(1000+2*i, 1001+2*i), 1)
	}
	s.change(mm.Unmap, munmap, pages(1000+2*4711, 1001+2*4711), 0, nil)
	at := s.rs[len(s.rs)-2].Time
	for i := range mm.Addr(10000) {
		s.dereg(uint64(i+1), 0)
	}
	var found, ended []int
	e, got := run(s, Options{Found: func(f *Finding) { found = append(found, f.ID) }, Ended: func(f *Finding) { ended = append(ended, f.ID) }})
	if d := cmp.Diff([]string{"freed-while-registered 4712 by unmap, deregistered"}, got); d != "" {
		t.Fatalf("(-want +got):\n%s", d)
	}
	f := e.Findings()[0]
	if f.Registration.Stack != 1 || f.Change.Stack != 2 || f.Change.Time != at || f.Stayed() <= 0 || f.Registration.Registration.LKey != 4712 {
		t.Errorf("%+v", f)
	}
	if !cmp.Equal(found, []int{1}) || !cmp.Equal(ended, []int{1}) {
		t.Errorf("told %v and %v", found, ended)
	}
	want := Stats{Registrations: 10000, Deregistrations: 10000}
	if d := cmp.Diff(want, e.Stats()); d != "" || e.Incomplete() != "" {
		t.Errorf("%s %q", d, e.Incomplete())
	}
}

func TestIncomplete(t *testing.T) {
	s := &stream{}
	s.add(mm.Record{Kind: mm.Lost, Phase: mm.PhaseEnd, Lost: 3, Call: noCall})
	s.add(mm.Record{Kind: mm.Register, Phase: mm.PhaseBegin, Call: register, Flags: mm.Vector | mm.UnknownLength, Registration: mm.Registration{By: mm.ByIOUring}})
	s.add(mm.Record{Kind: mm.Register, Phase: mm.PhaseEnd, Call: register, Registration: mm.Registration{By: mm.ByIOUring}})
	e, _ := run(s, Options{})
	if why := e.Incomplete(); !strings.Contains(why, "3 events lost") || !strings.Contains(why, "1 registrations") {
		t.Error(why)
	}
}

func TestBeginsOnly(t *testing.T) {
	s := &stream{}
	s.reg(5, pages(100, 108), 1)
	s.add(mm.Record{Kind: mm.Unmap, Phase: mm.PhaseBegin, Range: pages(100, 101), Call: munmap})
	if _, got := run(s, Options{BeginsOnly: true}); !cmp.Equal(got, []string{"freed-while-registered 5 by unmap, still-registered"}) {
		t.Error(got)
	}
}
