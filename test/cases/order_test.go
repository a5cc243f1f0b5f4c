// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/tracer"
)

var attachments = flag.Int("attachments", 50, "watches opened in the middle of changes")

// Case C6: a thread goes to another processor between each unmap and map: the
// order of the records is the order of the calls.
func TestOrderAcrossProcessors(t *testing.T) {
	const hops = 2000
	p := start(t, "dynamic")
	s := watch(t, shared, p.pid, tracer.WatchOptions{Kinds: []mm.Kind{mm.Unmap, mm.Map}})
	if cpus := p.do("hop %d", hops)[0]; cpus < 2 {
		t.Fatalf("%d processor: nothing to go to", cpus)
	}
	records := whole(t, s)
	if len(records) != 3*hops {
		t.Fatalf("%d records, want %d", len(records), 3*hops)
	}
	for i, r := range records {
		want := mm.Record{Kind: mm.Unmap, Phase: mm.PhaseBegin}
		switch i % 3 {
		case 1:
			want.Phase = mm.PhaseEnd
		case 2:
			want.Kind, want.Phase = mm.Map, mm.PhaseEnd
		}
		if r.Kind != want.Kind || r.Phase != want.Phase || r.Range != p.pages(0, 1) || r.Seq != uint64(i)+1 {
			t.Fatalf("record %d, want %v %v:%s", i, want.Kind, want.Phase, show(records[i:i+1]))
		}
		if i > 0 && r.Time < records[i-1].Time {
			t.Errorf("time goes back at%s", show(records[i-1:i+1]))
		}
	}
}

// Case C9: a watch is opened while the program changes its memory all the
// time; then its mappings are read. Mappings read later and brought up to
// date with the records since the watch are those of the program: what was
// learned by reading is corrected by the records, wherever the two meet.
func TestAttachDuringChanges(t *testing.T) {
	p := start(t, "dynamic")
	p.do("toggle") // never answers again
	t.Cleanup(func() { p.cmd.Process.Kill() })
	lossy := 0
	for i := range *attachments {
		s, err := shared.Watch(tracer.PID(p.pid), tracer.WatchOptions{Kinds: []mm.Kind{mm.Unmap, mm.Map}})
		if err != nil {
			t.Fatal(err)
		}
		for s.Stats().Records < 10 {
			runtime.Gosched()
		}
		view := mapped(t, p)
		if err := unix.Kill(p.pid, unix.SIGSTOP); err != nil {
			t.Fatal(err)
		}
		stopped(t, p.pid)
		records, lost := drain(t, s)
		truth := mapped(t, p)
		for _, r := range records {
			for k := range view {
				if at := p.pages(k, 1); r.Kind != mm.Lost && r.Range.Overlaps(at) {
					view[k] = r.Kind == mm.Map
				}
			}
		}
		if lost != 0 {
			lossy++ // then it is known that the view is worth nothing
		} else if view != truth {
			t.Errorf("watch %d: mappings\n%v, from %d records\n%v", i, truth, len(records), view)
		}
		if len(records) == 0 {
			t.Errorf("watch %d: no records", i)
		}
		if err := errors.Join(s.Close(), unix.Kill(p.pid, unix.SIGCONT)); err != nil {
			t.Fatal(err)
		}
	}
	if lossy > *attachments/2 {
		t.Errorf("%d of %d watches lost records: little was tested", lossy, *attachments)
	}
}

const areaPages = 64 // as in target.c

// mapped reads which pages of the area are there.
func mapped(t *testing.T, p *target) (there [areaPages]bool) {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		from, to, _ := strings.Cut(strings.Fields(line)[0], "-")
		a, err1 := strconv.ParseUint(from, 16, 64)
		b, err2 := strconv.ParseUint(to, 16, 64)
		if err := errors.Join(err1, err2); err != nil {
			t.Fatal(err)
		}
		for k := range there {
			there[k] = there[k] || p.pages(k, 1).Overlaps(mm.Range{Start: mm.Addr(a), End: mm.Addr(b)})
		}
	}
	return there
}

// stopped waits until a process that was told to stop has.
func stopped(t *testing.T, pid int) {
	t.Helper()
	for {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			t.Fatal(err)
		}
		if state := text[bytes.LastIndexByte(text, ')')+2]; state == 'T' {
			return
		}
		runtime.Gosched()
	}
}

// Case D3: more threads than any pool of return probes has places are in
// large unmaps at once: each begin has its end.
func TestManyThreadsInOneCall(t *testing.T) {
	const threads, mib = 256, 4
	p := start(t, "dynamic")
	s := watch(t, shared, p.pid, tracer.WatchOptions{Kinds: []mm.Kind{mm.Unmap}})
	open := map[mm.Range]mm.Phase{}
	for _, at := range p.do("big %d %d", threads, mib) {
		open[mm.Range{Start: mm.Addr(at), End: mm.Addr(at) + mib<<20}] = 0
	}
	if len(open) != threads {
		t.Fatalf("%d blocks", len(open))
	}
	inside, most := 0, 0
	for _, r := range whole(t, s) {
		if _, ok := open[r.Range]; !ok {
			continue // the threads' stacks
		}
		if open[r.Range]+1 != r.Phase {
			t.Errorf("after phase %v:%s", open[r.Range], show([]mm.Record{r}))
		}
		open[r.Range] = r.Phase
		if r.Phase == mm.PhaseBegin {
			inside++
		} else {
			inside--
		}
		most = max(most, inside)
	}
	for r, phase := range open {
		if phase != mm.PhaseEnd {
			t.Errorf("%v: phase %v", r, phase)
		}
	}
	if n := s.Stats().Unpaired; n != 0 {
		t.Errorf("%d unpaired", n)
	}
	t.Logf("up to %d threads in the call at once", most)
}

// Case D4: another tracer is on the same tracepoints, and others are busy in
// bpf(2) on every processor, which makes the kernel skip programs. What is
// missing from the records of the calls is reported as lost.
func TestSecondTracer(t *testing.T) {
	const changes = 50_000
	second, err := tracer.Open(tracer.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	all, err := second.Watch(tracer.All(), tracer.WatchOptions{RingBytes: os.Getpagesize()})
	if err != nil {
		t.Fatal(err)
	}
	defer all.Close()

	var stop atomic.Bool
	var g sync.WaitGroup
	defer g.Wait()
	defer stop.Store(true)
	hash, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 4, MaxEntries: 16})
	if err != nil {
		t.Fatal(err)
	}
	defer hash.Close()
	var updates atomic.Uint64
	for range runtime.NumCPU() {
		g.Go(func() {
			for !stop.Load() {
				if err := hash.Put(uint32(1), uint32(2)); err != nil {
					t.Error(err)
					return
				}
				updates.Add(1)
			}
		})
	}

	p := start(t, "dynamic")
	s := watch(t, shared, p.pid, tracer.WatchOptions{Kinds: []mm.Kind{mm.Unmap}, RingBytes: 32 << 20})
	p.do("random %d 5", changes)
	var received, lost uint64
	// What the kernel skipped is found out by looking at its counters, later.
	for begin := now(); received+lost < 2*changes && now()-begin < 20*time.Second; {
		records, n := drain(t, s)
		lost += n
		for _, r := range records {
			if r.Kind != mm.Lost {
				received++
			}
		}
	}
	if st := s.Stats(); received != st.Records || lost < st.Lost {
		t.Errorf("received %d, told of %d lost; %+v", received, lost, st)
	}
	if received > 2*changes || received+lost < 2*changes {
		t.Errorf("%d records, %d lost, of %d", received, lost, 2*changes)
	}
	stop.Store(true)
	g.Wait()
	if all.Stats().Lost == 0 || updates.Load() == 0 {
		t.Error("the others were not busy")
	}
	t.Logf("%d records, %d lost, of %d; meanwhile %d updates, and the other tracer %+v", received, lost, 2*changes, updates.Load(), all.Stats())
}

// Case D8: a process exits while nobody reads, and its pid comes back:
// nothing of the new process is in the stream of the old one, and a watch of
// the old one is dead.
func TestPIDComesBack(t *testing.T) {
	for {
		old := start(t, "dynamic")
		s := watch(t, shared, old.pid, tracer.WatchOptions{Follow: true, RingBytes: os.Getpagesize()})
		w, err := local.Open(local.Options{PID: old.pid})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		old.do("random 100 3")
		old.end()
		dead := s.Stats()
		if dead.Lost == 0 {
			t.Fatalf("%+v, want a loss", dead)
		}
		if st := w.Drain(nil); st != feed.DeadState || w.Valid() {
			t.Errorf("watch of a process that is gone: %v, valid %v", st, w.Valid())
		}

		again := start(t, "dynamic")
		fresh := watch(t, shared, again.pid, tracer.WatchOptions{Follow: true})
		n, err := again.ask("reuse %d", old.pid)
		if err != nil {
			t.Logf("pid %d was taken by somebody else: %v", old.pid, err)
			again.cmd.Process.Kill()
			continue
		}
		if int(n[0]) != old.pid {
			t.Fatalf("child %d, want %d", n[0], old.pid)
		}
		if now := s.Stats(); now.Records != dead.Records || now.Lost != dead.Lost {
			t.Errorf("the stream of the old process: %+v, at its death %+v", now, dead)
		}
		v := w.Commit(w.Begin(again.pages(0, 1)), nil, func() {})
		if st := w.Drain(nil); st != feed.DeadState || w.Valid() || v == feed.Cacheable {
			t.Errorf("the old process's watch came to life again: %v, %v", st, v)
		}
		found := 0
		for _, r := range whole(t, fresh) {
			if r.Kind == mm.Unmap && r.PID == uint32(old.pid) && r.Range == again.pages(0, 1) {
				found++
			}
		}
		if found != 2 {
			t.Errorf("%d records of the new process with the old pid, want 2", found)
		}
		return
	}
}

// Case D9: a record stays unfinished. Nobody waits for it, and nobody spins:
// the background thread sleeps between its looks. What comes later is late,
// not lost.
func TestUnfinishedRecordDoesNotSpin(t *testing.T) {
	watchdog(t)
	p, err := feedtest.New(feedtest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	w, err := p.Watch()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	c, err := regcache.New[int](w, nowhere{}, regcache.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r := mm.Range{Start: 0x10000000, End: 0x10000000 + page}
	later := mm.Range{Start: r.End, End: r.End + page}
	for _, x := range []mm.Range{r, later} {
		ref, err := c.Acquire(x, 0)
		if err != nil {
			t.Fatal(err)
		}
		ref.Release()
	}

	first := p.Prepare(mm.Zap, r, mm.Range{})
	first.Start()
	if !first.Test() || !first.Reserve() {
		t.Fatal("no record")
	}
	p.Change(mm.Zap, later)
	ctx, cancel := withCancel(t)
	ended := make(chan error, 1)
	go func() { ended <- c.Run(ctx) }()

	// One thread that spins takes a whole processor, if there is one. On a
	// machine under load it gets less, so this can pass wrongly, not fail.
	const looks = 8192
	begin, used := now(), cpu()
	for w.Stats().Busy < looks {
		time.Sleep(time.Millisecond)
	}
	took, u := now()-begin, cpu()-used
	t.Logf("%d looks in %v, processor time %v", w.Stats().Busy, took, u)
	if u > took*3/4 {
		t.Errorf("%d looks in %v took %v of a processor: it spins", looks, took, u)
	}
	if s := c.Stats(); s.Entries != 2 {
		t.Errorf("%d entries while the record is unfinished", s.Entries)
	}
	first.Submit()
	first.Count()
	first.End()
	for c.Stats().Entries != 0 { // both come through
		runtime.Gosched()
	}
	cancel()
	<-ended
}
