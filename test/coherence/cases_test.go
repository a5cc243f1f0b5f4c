// SPDX-License-Identifier: Apache-2.0

package coherence

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/uring"
)

// Cases of docs/cases.md, seen from within the program whose memory changes.

// watchdog ends the test binary with all stacks if the test hangs.
func watchdog(t testing.TB) {
	timer := time.AfterFunc(60*time.Second, func() {
		buf := make([]byte, 1<<20)
		fmt.Fprintf(os.Stderr, "%s hangs:\n%s\n", t.Name(), buf[:runtime.Stack(buf, true)])
		os.Exit(2)
	})
	t.Cleanup(func() { timer.Stop() })
}

// background runs the cache's Run until the test's end or the call of stop.
func (r *rig) background() (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.c.Run(ctx) }()
	stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			r.t.Errorf("run: %v", err)
		}
	})
	r.t.Cleanup(stop)
	return stop
}

// part is n bytes of b from byte i.
func (b block) part(i, n int) block { return b[i : i+n : i+n] }

// Case A7: map, register, transfer, unmap, map again at the same address,
// with other bytes each round: without the feed every transfer but the first
// goes to pages of the past, with it none.
func TestSameAddressAgain(t *testing.T) {
	const times, patterns = 10_000, 64
	r := newRig(t, local.Options{})
	fd, err := unix.MemfdCreate("patterns", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "patterns")
	defer file.Close()
	for i := range patterns {
		p := make([]byte, page)
		for k := range p {
			p[k] = byte(i + 1)
		}
		if _, err := file.WriteAt(p, int64(i*page)); err != nil {
			t.Fatal(err)
		}
	}
	// Where nobody else maps anything meanwhile.
	at := block(unsafe.Slice((*byte)(unsafe.Add(unsafe.Pointer(nil), 1<<40)), page))
	var toy uring.Buf // the cache of somebody who hears of no change
	stale := map[bool]int{}
	hits := 0
	for i := range times {
		_, err := unix.MmapPtr(-1, 0, ptr(at), uintptr(page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED_NOREPLACE)
		if err != nil {
			t.Fatal(err)
		}
		ref, err := r.c.Acquire(at.span(), regcache.LocalWrite)
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 {
			if toy, err = r.ring.Register(at.span(), regcache.LocalWrite); err != nil {
				t.Fatal(err)
			}
		}
		for fed, buf := range map[bool]uring.Buf{true: ref.Handle().buf, false: toy} {
			at[0], at[page-1] = 0, 0
			if n, err := r.ring.ReadFixed(fd, int64(i%patterns*page), buf, at.span()); n != page || err != nil {
				t.Fatalf("round %d: %d, %v", i, n, err)
			}
			if want := byte(i%patterns + 1); at[0] != want || at[page-1] != want {
				stale[fed]++
			}
		}
		ref.Release()
		// Not each time: another thread may be in the middle of a change of
		// its own, and then nothing is put into the cache.
		if r.acquire(at) {
			hits++
		}
		at.unmap(t)
	}
	if err := r.ring.Deregister(toy); err != nil {
		t.Error(err)
	}
	if stale[true] != 0 || stale[false] != times-1 {
		t.Errorf("%d stale transfers with the feed, %d without, want 0 and %d", stale[true], stale[false], times-1)
	}
	if hits < times*9/10 {
		t.Errorf("%d hits in %d rounds though nothing changed", hits, times)
	}
}

// Case A4: three consumers in one process, each with its own watch: all have
// the same, and one that leaves takes nothing from the others.
func TestThreeWatchesOfOneProcess(t *testing.T) {
	const changes = 1000
	b := mapBlock(t, 8)
	defer b.unmap(t)
	b.touch()
	var ws [3]*feed.Watch
	for i := range ws {
		w, err := open(local.Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		if v := w.Commit(w.Begin(b.span()), nil, func() {}); v != feed.Cacheable {
			t.Fatal(v)
		}
		ws[i] = w
	}
	type event struct {
		kind mm.Kind
		r    mm.Range
	}
	var logs [3][]event
	for i := range changes {
		part := b.part(i*7%8*page, page)
		part.zap(t)
		if i == changes/2 {
			if err := ws[1].Close(); err != nil {
				t.Fatal(err)
			}
		}
		for k, w := range ws {
			if w.Valid() {
				t.Fatalf("change %d: watch %d is valid", i, k)
			}
			state := w.Drain(func(rec *mm.Record) {
				if rec.Range.Overlaps(b.span()) {
					logs[k] = append(logs[k], event{rec.Kind, rec.Range})
				}
			})
			if want := map[bool]feed.State{true: feed.DeadState}[k == 1 && i >= changes/2]; state != want {
				t.Fatalf("change %d: watch %d: %v", i, k, state)
			}
		}
		for _, k := range []int{0, 2} {
			if want := (event{mm.Zap, part.span()}); len(logs[k]) != i+1 || logs[k][i] != want {
				t.Fatalf("change %d: watch %d has %d records, the last %+v, want %+v", i, k, len(logs[k]), logs[k][len(logs[k])-1], want)
			}
		}
	}
	if n := len(logs[1]); n != changes/2 {
		t.Errorf("the one that left has %d records, want %d", n, changes/2)
	}
}

// Case A13: memory that is no host memory, or none at all, is named so, and
// never cached: nobody would tell of its changes.
func TestNotHostMemory(t *testing.T) {
	r := newRig(t, local.Options{})
	mapFD := func(fd, n, prot int) block {
		p, err := unix.MmapPtr(fd, 0, nil, uintptr(n), prot, unix.MAP_SHARED)
		if err != nil {
			t.Fatal(err)
		}
		b := block(unsafe.Slice((*byte)(p), n))
		t.Cleanup(func() { b.unmap(t) })
		return b
	}
	perf, err := unix.PerfEventOpen(&unix.PerfEventAttr{
		Type: unix.PERF_TYPE_SOFTWARE, Config: unix.PERF_COUNT_SW_DUMMY, Size: uint32(unsafe.Sizeof(unix.PerfEventAttr{})),
	}, 0, -1, -1, unix.PERF_FLAG_FD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(perf)
	var params [120]byte // struct io_uring_params
	rings, _, e := unix.Syscall(unix.SYS_IO_URING_SETUP, 4, uintptr(unsafe.Pointer(&params)), 0)
	if e != 0 {
		t.Fatal(e)
	}
	defer unix.Close(int(rings))
	memfd, err := unix.MemfdCreate("file", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(memfd)
	if err := unix.Ftruncate(memfd, int64(page)); err != nil {
		t.Fatal(err)
	}
	const rw = unix.PROT_READ | unix.PROT_WRITE
	nothing := mm.Range{Start: 1<<40 + 1<<37, End: 1<<40 + 1<<37 + mm.Addr(page)}
	host := mapBlock(t, 1)
	defer host.unmap(t)
	for _, c := range []struct {
		name string
		r    mm.Range
		want feed.Verdict
	}{
		{"host memory", host.span(), feed.Cacheable},
		{"no mapping", nothing, feed.NoMapping},
		{"perf buffer", mapFD(perf, 2*page, rw).span(), feed.DriverMapping},
		{"io_uring queue", mapFD(int(rings), page, rw).span(), feed.DriverMapping},
		{"file", mapFD(memfd, page, rw).span(), feed.FileBacked},
	} {
		t.Run(c.name, func(t *testing.T) {
			inserted := false
			v := r.w.Commit(r.w.Begin(c.r), nil, func() { inserted = true })
			if v != c.want || inserted != (c.want == feed.Cacheable) {
				t.Errorf("%v, want %v; inserted: %v", v, c.want, inserted)
			}
		})
	}
	// Through the cache: the device says no, or it is used once.
	if _, err := r.c.Acquire(nothing, regcache.LocalWrite); !errors.Is(err, unix.EFAULT) {
		t.Errorf("register nothing: %v, want EFAULT", err)
	}
	ref, err := r.c.Acquire(mapFD(memfd, page, rw).span(), regcache.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	if ok, why := ref.Cached(); ok || why != regcache.ReasonFileBacked {
		t.Errorf("memfd: cached %v, %v", ok, why)
	}
	ref.Release()
}

// Cases B1, B3, B4, B5: of several entries exactly those whose pages change
// are dropped, whatever their bytes.
func TestWhichEntriesDie(t *testing.T) {
	w, err := open(local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	type bytes struct{ from, n int }
	unmap := func(t testing.TB, b block) { b.unmap(t) }
	zap := func(t testing.TB, b block) { b.zap(t) }
	for _, c := range []struct {
		name    string
		entries []bytes
		do      func(testing.TB, block)
		change  bytes
		dead    []bool
	}{
		{"overlapping, B1", []bytes{{0, 4 * page}, {2 * page, 6 * page}, {6 * page, 6 * page}}, unmap, bytes{3 * page, 2 * page}, []bool{true, true, false}},
		{"of one page, B3", []bytes{{100, 100}, {2000, 100}, {page + 50, 100}}, zap, bytes{0, page}, []bool{true, true, false}},
		{"three of one page, B5", []bytes{{0, 256}, {256, 256}, {512, 256}}, zap, bytes{0, page}, []bool{true, true, true}},
		{"over the page's end", []bytes{{page - 1, 2}, {2*page - 1, 1}, {2 * page, 1}}, zap, bytes{page, page}, []bool{true, true, false}},
		{"start, B4", []bytes{{0, 8 * page}, {8 * page, page}}, unmap, bytes{0, page}, []bool{true, false}},
		{"middle, B4", []bytes{{0, 8 * page}, {8 * page, page}}, unmap, bytes{4 * page, page}, []bool{true, false}},
		{"end, B4", []bytes{{0, 8 * page}, {8 * page, page}}, unmap, bytes{7 * page, page}, []bool{true, false}},
		{"overhang, B4", []bytes{{0, 8 * page}, {9 * page, page}}, unmap, bytes{7 * page, 2 * page}, []bool{true, false}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := rigOver(t, w)
			b := mapBlock(t, 16)
			b.touch()
			var refs []regcache.Ref[pinned]
			for i, e := range c.entries {
				ref, err := r.c.Acquire(b.part(e.from, e.n).span(), regcache.LocalWrite)
				if err != nil {
					t.Fatal(err)
				}
				if ok, why := ref.Cached(); !ok || ref.Range() != b.part(e.from, e.n).span() {
					t.Fatalf("entry %d: %v, cached %v (%v)", i, ref.Range(), ok, why)
				}
				refs = append(refs, ref)
			}
			c.do(t, b.part(c.change.from, c.change.n))
			for i := range refs {
				if got := refs[i].Release(); got != c.dead[i] {
					t.Errorf("entry %d: changed %v, want %v", i, got, c.dead[i])
				}
			}
		})
	}
}
