// SPDX-License-Identifier: Apache-2.0

package coherence

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

// changes is how often memory changes while nobody looks anything up.
var changes = flag.Int("changes", 400_000, "changes without a lookup")

// status reads figures in bytes from /proc/self/status.
func status(t testing.TB, names ...string) []int64 {
	t.Helper()
	text, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	figures := make([]int64, len(names))
	for i, name := range names {
		_, rest, ok := bytes.Cut(text, []byte("\n"+name+":"))
		if !ok {
			t.Fatalf("no %s in /proc/self/status", name)
		}
		n, err := strconv.ParseInt(string(bytes.Fields(rest)[0]), 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		figures[i] = n << 10
	}
	return figures
}

// pinAndUnmap registers 1 GiB in buffers of 256 MiB, unmaps all of it, and
// returns how long it took from the last munmap until nothing is pinned.
func pinAndUnmap(t testing.TB, r *rig) time.Duration {
	t.Helper()
	const buffers, size = 4, 256 << 20
	base := status(t, "VmPin", "VmLck")
	blocks := make([]block, buffers)
	var refs [buffers]regcache.Ref[pinned]
	for i := range blocks {
		blocks[i] = mapBlock(t, size/page)
		var err error
		if refs[i], err = r.c.Acquire(blocks[i].span(), regcache.LocalWrite); err != nil {
			t.Fatal(err)
		}
		if ok, why := refs[i].Cached(); !ok {
			t.Fatalf("not cached: %v", why)
		}
	}
	// pages of an earlier test may have been let go meanwhile
	if pinned := status(t, "VmPin")[0] - base[0]; pinned < buffers*size/2 {
		t.Fatalf("%d bytes pinned, want some %d: nothing to see", pinned, buffers*size)
	}
	for _, ref := range refs {
		ref.Release()
	}
	for _, b := range blocks {
		b.unmap(t)
	}
	begin := time.Now()
	for {
		figures := status(t, "VmPin", "VmLck")
		if took := time.Since(begin); figures[0] <= base[0] && figures[1] <= base[1] {
			return took
		} else if took > 60*time.Second {
			t.Fatalf("pinned %d, locked %d bytes a minute after munmap; before %d, %d", figures[0], figures[1], base[0], base[1])
		}
		time.Sleep(time.Millisecond)
	}
}

// Case I8: 1 GiB is registered and then unmapped, and the program does
// nothing more with the cache: nothing stays pinned.
func TestUnmappedIsNotPinned(t *testing.T) {
	r := newRig(t, local.Options{})
	r.background()
	took := pinAndUnmap(t, r)
	// the last Deregister has let the pages go, but may not have returned yet
	for begin := time.Now(); r.c.Stats().RegisteredBytes != 0 && time.Since(begin) < 10*time.Second; {
		time.Sleep(time.Millisecond)
	}
	if s := r.c.Stats(); s.Entries != 0 || s.Stale != 0 || s.RegisteredBytes != 0 {
		t.Errorf("%+v", s)
	}
	t.Logf("nothing is pinned %v after the last munmap of 1 GiB", took)
}

// The aim is 100 ms.
func BenchmarkUnpin(b *testing.B) {
	r := newRig(b, local.Options{})
	r.background()
	var sum, most time.Duration
	n := 0
	for b.Loop() {
		took := pinAndUnmap(b, r)
		sum, most, n = sum+took, max(most, took), n+1
	}
	b.ReportMetric(float64(sum.Microseconds())/1000/float64(n), "ms/GiB")
	b.ReportMetric(float64(most.Microseconds())/1000, "ms-max")
}

// changeAndWait changes memory n times, with entries in the cache that nobody
// looks up, and returns by how much the process has grown.
func changeAndWait(t testing.TB, n int, background bool) (grown int64) {
	t.Helper()
	r := newRig(t, local.Options{})
	const entries = 64
	b := mapBlock(t, entries)
	defer b.unmap(t)
	for i := range entries {
		r.acquire(b.part(i*page, page))
	}
	if background {
		// A registration under way, so that the changes stay interesting
		// when the entries are gone.
		ticket := r.w.Begin(b.span())
		defer r.w.Abandon(ticket)
		r.background()
	}
	debug.FreeOSMemory()
	before := status(t, "VmRSS")[0]
	begin := time.Now()
	for i := range n {
		b.part(i%entries*page, page).zap(t)
	}
	took := time.Since(begin)
	debug.FreeOSMemory()
	after := status(t, "VmRSS")[0]
	if r.acquire(b.part(0, page)) {
		t.Error("hit after everything changed")
	}
	s := r.w.Stats()
	if !background && s.Losses == 0 {
		t.Errorf("%+v: a full ring is a loss", s)
	}
	if background && s.Records+s.Lost < uint64(n)/2 {
		t.Errorf("%+v of %d changes: nothing came through", s, n)
	}
	t.Logf("%d changes in %v, RSS %d before, %d after, %d records, %d lost", n, took, before, after, s.Records, s.Lost)
	return after - before
}

// Case D10: a program changes its memory all the time and never calls the
// library: what the library holds does not grow, neither where the changes
// pile up nor where they are applied in the background.
func TestChangesWithoutLookup(t *testing.T) {
	for _, background := range []bool{false, true} {
		t.Run(fmt.Sprintf("background %v", background), func(t *testing.T) {
			if grown := changeAndWait(t, *changes, background); grown > 16<<20 {
				t.Errorf("RSS grew by %d bytes", grown)
			}
		})
	}
}

// Ten million changes without a lookup: the aim is a flat RSS.
func BenchmarkChangesWithoutLookup(b *testing.B) {
	const n = 10_000_000
	for _, background := range []bool{false, true} {
		b.Run(fmt.Sprintf("background %v", background), func(b *testing.B) {
			var grown int64
			for b.Loop() {
				grown = max(grown, changeAndWait(b, n, background))
			}
			b.ReportMetric(float64(grown)/(1<<20), "MiB-grown")
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/n, "ns/change")
		})
	}
}

// Case H1: the callback of a drain maps, unmaps, drops, drains, looks up, and
// ends its own watch; nobody waits for it.
func TestCallbackDoesAnything(t *testing.T) {
	watchdog(t)
	w, err := open(local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r := rigOver(t, w)
	const blocks = 1000
	held := make([]block, blocks)
	for i := range held {
		held[i] = mapBlock(t, 256)
		held[i][0] = 1
	}
	b := mapBlock(t, 1)
	defer b.unmap(t)
	r.acquire(b)
	other := mapBlock(t, 1)
	defer other.unmap(t)
	b.zap(t)
	calls := 0
	state := w.Drain(func(*mm.Record) {
		calls++
		for _, h := range held {
			h.unmap(t)
		}
		held = nil
		b.zap(t)
		if s := w.Drain(nil); s != feed.Busy {
			t.Errorf("drain within: %v", s)
		}
		ref, err := r.c.Acquire(other.span(), regcache.LocalWrite)
		if err != nil {
			t.Errorf("acquire within: %v", err)
		} else if ok, _ := ref.Cached(); ok {
			t.Error("cached within a drain")
		}
		ref.Release()
		if err := w.Close(); err != nil {
			t.Errorf("close within: %v", err)
		}
	})
	if calls == 0 || state == feed.Fresh || w.Valid() {
		t.Errorf("%d calls, %v, valid %v", calls, state, w.Valid())
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
	if r.acquire(b) {
		t.Error("hit of a closed watch")
	}
}

// A device whose calls make and unmake mappings, also of what is being
// registered, and come back to the cache.
type reentrant struct {
	r     *rig
	other block
	depth atomic.Int32
	calls atomic.Int64
}

func (d *reentrant) mess(victim mm.Range) error {
	d.calls.Add(1)
	if d.depth.Add(1) > 2 {
		d.depth.Add(-1)
		return nil
	}
	defer d.depth.Add(-1)
	b := mapBlock(d.r.t, 8<<20/page)
	for i := 0; i < len(b); i += 16 * page {
		b[i] = 1
	}
	b.zap(d.r.t)
	b.unmap(d.r.t)
	if victim.Len() != 0 {
		if _, _, e := unix.Syscall(unix.SYS_MADVISE, uintptr(victim.Start), uintptr(victim.Pages().Len()), unix.MADV_DONTNEED); e != 0 {
			return e
		}
	}
	ref, err := d.r.c.Acquire(d.other.span(), regcache.LocalWrite)
	ref.Release()
	if errors.Is(err, regcache.ErrClosed) {
		return nil
	}
	return err
}

func (d *reentrant) Register(r mm.Range, a regcache.Access) (pinned, error) {
	if err := d.mess(r); err != nil {
		return pinned{}, err
	}
	return d.r.Register(r, a)
}

func (d *reentrant) Deregister(p pinned) error {
	if err := d.mess(mm.Range{}); err != nil {
		d.r.t.Error(err)
	}
	return d.r.Deregister(p)
}

// Cases H2, H3, H4 within one program: see also test/cases. 60 s watchdog.
func TestRegistrarDoesAnything(t *testing.T) {
	watchdog(t)
	other := mapBlock(t, 1)
	t.Cleanup(func() { other.unmap(t) }) // last: Run and Close acquire it
	r := newRig(t, local.Options{})
	d := &reentrant{r: r, other: other}
	c, err := regcache.New(r.w, d, regcache.Options{MaxEntries: 2})
	if err != nil {
		t.Fatal(err)
	}
	r.c.Close()
	r.c = c // the rig closes it
	r.background()
	b := mapBlock(t, 8)
	defer b.unmap(t)
	for i := range 100 {
		r.acquire(b.part(i%8*page, page))
		if t.Failed() {
			t.Fatalf("round %d", i)
		}
	}
	if n := d.calls.Load(); n < 100 {
		t.Errorf("%d calls", n)
	}
}

// telling is the rig's device, and says when memory was pinned.
type telling struct {
	*rig
	pinned func(mm.Range)
}

func (d telling) Register(r mm.Range, a regcache.Access) (pinned, error) {
	p, err := d.rig.Register(r, a)
	d.pinned(r)
	return p, err
}

// Case B6: one thread replaces a neighbour while another registers across
// both, which had been registered each: nothing is kept of the dead one.
func TestRaceNeighbour(t *testing.T) {
	r := newRig(t, local.Options{})
	b := mapBlock(t, 4)
	defer b.unmap(t)
	dying, next := b.part(0, 2*page), b.part(2*page, 2*page)
	var turn, done, round atomic.Int64
	c, err := regcache.New(r.w, telling{r, func(m mm.Range) {
		if m == b.span() { // pinned, and not yet in the cache
			turn.Store(round.Load())
		}
	}}, regcache.Options{})
	if err != nil {
		t.Fatal(err)
	}
	r.c.Close()
	r.c = c // the rig closes it
	n := int64(*rounds / 10)
	var g sync.WaitGroup
	g.Go(func() {
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		for i := range n {
			for turn.Load() != i+1 {
				runtime.Gosched()
			}
			for range i / 2 % 64 { // another phase each time
				runtime.KeepAlive(i)
			}
			dying.remap(t)
			done.Store(i + 1)
		}
	})
	hits := 0
	for i := range n {
		dying.zap(t) // so that what is across both has to be registered
		if !t.Failed() {
			r.acquire(next)
			r.acquire(dying)
		}
		round.Store(i + 1)
		if i%2 == 0 {
			turn.Store(i + 1) // from the start, not only when it is pinned
		}
		ref, err := r.c.Acquire(b.span(), regcache.LocalWrite)
		if err != nil {
			t.Error(err)
		} else {
			ref.Release()
		}
		turn.Store(i + 1) // if it was a hit
		for done.Load() != i+1 {
			runtime.Gosched()
		}
		if !t.Failed() && r.acquire(b) { // checks the first page, the dead one's
			hits++
		}
	}
	g.Wait()
	t.Logf("%d rounds, %d times the one across both was right and kept", n, hits)
}

// Case I4: memory that may not be written cannot be registered for writing;
// when it may, the same range can: the failure is not remembered.
func TestReadOnlyThenWritable(t *testing.T) {
	r := newRig(t, local.Options{})
	b := mapBlock(t, 1)
	defer b.unmap(t)
	for i := range 3 {
		if err := unix.Mprotect(b, unix.PROT_READ); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, err := r.c.Acquire(b.span(), regcache.LocalWrite); !errors.Is(err, unix.EFAULT) {
				t.Fatalf("round %d, read-only: %v, want EFAULT", i, err)
			}
		}
		if err := unix.Mprotect(b, unix.PROT_READ|unix.PROT_WRITE); err != nil {
			t.Fatal(err)
		}
		if r.acquire(b) {
			t.Error("hit of what was refused")
		}
		if !r.acquire(b) {
			t.Error("not cached when it could be")
		}
	}
	if got := r.c.Stats().Failures[unix.EFAULT]; got != 6 {
		t.Errorf("%d failures counted, want 6", got)
	}
}

// Case I3: an entry that is held when its pages go is not found again by
// anybody, and is deregistered when its holder lets go.
func TestHeldWhenPagesGo(t *testing.T) {
	r := newRig(t, local.Options{})
	b := mapBlock(t, 1)
	defer b.unmap(t)
	old, err := r.c.Acquire(b.span(), regcache.LocalWrite)
	if err != nil {
		t.Fatal(err)
	}
	b.zap(t)
	if r.acquire(b) {
		t.Error("a hit of pages that have gone")
	}
	for try := 0; !r.acquire(b); try++ { // one may meet a change in flight
		if try == 10 {
			t.Error("no hit of the registration anew")
			break
		}
	}
	if n := r.ring.Stats().Registered; n != 2 {
		t.Errorf("%d buffers registered while the old one is held, want 2", n)
	}
	if !old.Release() {
		t.Error("not told that it changed while held")
	}
	if n := r.ring.Stats().Registered; n != 1 {
		t.Errorf("%d buffers registered afterwards, want 1", n)
	}
	if !r.acquire(b) {
		t.Error("the new one went with the old one")
	}
}
