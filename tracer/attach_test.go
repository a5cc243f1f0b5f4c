// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"reflect"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// objects are kernel objects by their ids, which the kernel gives out in a
// circle: an id that is gone was freed.
type objects struct {
	maps     map[ebpf.MapID]bool
	programs map[ebpf.ProgramID]bool
	links    map[link.ID]bool
}

func newObjects() *objects {
	return &objects{map[ebpf.MapID]bool{}, map[ebpf.ProgramID]bool{}, map[link.ID]bool{}}
}

func (o *objects) addMap(t *testing.T, m *ebpf.Map) {
	t.Helper()
	if m == nil {
		return
	}
	info, err := m.Info()
	if err != nil {
		t.Fatal(err)
	}
	id, ok := info.ID()
	if !ok {
		t.Fatal("map has no id")
	}
	o.maps[id] = true
}

func (o *objects) addSlot(t *testing.T, sl *slot) {
	t.Helper()
	o.addMap(t, sl.status)
	o.addMap(t, sl.ring)
	o.addMap(t, sl.interest)
}

// addTracer adds everything that tr loaded and attached.
func (o *objects) addTracer(t *testing.T, tr *Tracer) {
	t.Helper()
	fields := func(v reflect.Value) {
		for i := range v.NumField() {
			switch x := v.Field(i).Interface().(type) {
			case *ebpf.Map:
				o.addMap(t, x)
			case *ebpf.Program:
				info, err := x.Info()
				if err != nil {
					t.Fatal(err)
				}
				id, ok := info.ID()
				if !ok {
					t.Fatal("program has no id")
				}
				o.programs[id] = true
			default:
				t.Fatalf("field %d is a %T", i, x)
			}
		}
	}
	for _, p := range append(slices.Collect(maps.Values(tr.objs.programs)), tr.objs.Control, tr.objs.ListTasks) {
		info, err := p.Info()
		if err != nil {
			t.Fatal(err)
		}
		id, ok := info.ID()
		if !ok {
			t.Fatal("program has no id")
		}
		o.programs[id] = true
	}
	fields(reflect.ValueOf(tr.objs.SyscallMaps))
	for _, l := range tr.links {
		info, err := l.Info()
		if err != nil {
			t.Fatal(err)
		}
		o.links[info.ID] = true
	}
	info, err := tr.tasks.Info()
	if err != nil {
		t.Fatal(err)
	}
	o.links[info.ID] = true
}

// gone forgets the objects that were freed and says how many are left.
func (o *objects) gone(t *testing.T) int {
	t.Helper()
	check := func(err error, c interface{ Close() error }) bool {
		switch {
		case err == nil:
			c.Close()
			return false
		case errors.Is(err, os.ErrNotExist):
			return true
		}
		t.Fatal(err)
		return false
	}
	for id := range o.maps {
		if m, err := ebpf.NewMapFromID(id); check(err, m) {
			delete(o.maps, id)
		}
	}
	for id := range o.programs {
		if p, err := ebpf.NewProgramFromID(id); check(err, p) {
			delete(o.programs, id)
		}
	}
	for id := range o.links {
		if l, err := link.NewFromID(id); check(err, l) {
			delete(o.links, id)
		}
	}
	return len(o.maps) + len(o.programs) + len(o.links)
}

// expectGone waits until the kernel has freed all of them, which it does in
// its own time, after the last running program.
func (o *objects) expectGone(t *testing.T) {
	t.Helper()
	for start := time.Now(); o.gone(t) != 0; runtime.Gosched() {
		if time.Since(start) > 20*time.Second {
			t.Fatalf("left in the kernel: %d maps, %d programs, %d links", len(o.maps), len(o.programs), len(o.links))
		}
	}
}

// descriptors counts the open files of this process.
func descriptors(t *testing.T) int {
	t.Helper()
	dir, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(dir)
}

// busy is a process with threads that fill, check and free memory, with
// everything that others leave of the processors.
func busy(t *testing.T, threads int) (p *tracee, stop func()) {
	t.Helper()
	p = startTracee(t)
	if err := unix.Setpriority(unix.PRIO_PROCESS, p.pid, 19); err != nil {
		t.Fatal(err)
	}
	p.do(t, "sum %d", threads)
	return p, func() {
		t.Helper()
		w := p.do(t, "stop")
		if w[0] < int64(threads) || w[1] != 0 {
			t.Errorf("%d rounds, %d wrong words", w[0], w[1])
		}
		t.Logf("%d rounds, every word right", w[0])
	}
}

func TestWatchCloseAgainAndAgain(t *testing.T) {
	const threads = 8
	p, stop := busy(t, threads)
	w := watch(t, shared, PID(p.pid), WatchOptions{RingBytes: os.Getpagesize()})
	w.Close()                            // what is made once is made
	goroutines := goleak.IgnoreCurrent() // the miss poller
	fds, made := descriptors(t), newObjects()
	var seen uint64
	for i := range times(300) {
		o := WatchOptions{RingBytes: os.Getpagesize(), Follow: i%2 == 0}
		target := PID(p.pid)
		if i%10 == 9 {
			target = All()
		}
		s, err := shared.Watch(target, o)
		if err != nil {
			t.Fatalf("watch %d: %v", i, err)
		}
		made.addSlot(t, s.slot)
		var r mm.Record
		if err := s.Read(&r); err != nil { // it works each time
			t.Fatalf("read of watch %d: %v", i, err)
		}
		seen += s.Stats().Records
		if err := s.Close(); err != nil {
			t.Fatalf("close %d: %v", i, err)
		}
	}
	stop()
	made.expectGone(t)
	if n := descriptors(t); n != fds {
		t.Errorf("%d descriptors, %d before", n, fds)
	}
	if err := goleak.Find(goroutines); err != nil {
		t.Error(err)
	}
	if n := shared.streamCount(); n != 0 {
		t.Errorf("%d streams are left", n)
	}
	t.Logf("%d records", seen)
}

func TestOpenCloseUnderLoad(t *testing.T) {
	const threads = 8
	p, stop := busy(t, threads)
	goroutines := goleak.IgnoreCurrent()
	var fds int
	made := newObjects()
	opens := max(times(10), 3)
	for i := range opens {
		tr, err := Open(Options{})
		if err != nil {
			t.Fatalf("open %d: %v", i, err)
		}
		s, err := tr.Watch(PID(p.pid), WatchOptions{RingBytes: os.Getpagesize()})
		if err != nil {
			t.Fatalf("watch %d: %v", i, err)
		}
		made.addTracer(t, tr)
		made.addSlot(t, s.slot)
		var r mm.Record
		if err := s.Read(&r); err != nil {
			t.Fatalf("read of %d: %v", i, err)
		}
		if err := tr.Close(); err != nil {
			t.Fatalf("close %d: %v", i, err)
		}
		if i == 0 { // the library keeps some files of its own
			fds = descriptors(t)
		} else if n := descriptors(t); n != fds {
			t.Fatalf("%d descriptors after %d times, %d after one", n, i+1, fds)
		}
	}
	stop()
	all := fmt.Sprintf("%d maps, %d programs, %d links", len(made.maps), len(made.programs), len(made.links))
	if len(made.programs) < opens*10 || len(made.links) < opens*10 || len(made.maps) < opens*10 {
		t.Errorf("only %s were made: the test shows nothing", all)
	}
	made.expectGone(t)
	if err := goleak.Find(goroutines); err != nil {
		t.Error(err)
	}
	t.Log(all + " made and gone")
}
