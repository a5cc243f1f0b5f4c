// SPDX-License-Identifier: Apache-2.0

package feed_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
)

func TestCommit(t *testing.T) {
	r := pages(10, 20)
	inside, outside := pages(12, 13), pages(40, 41)
	cases := []struct {
		name           string
		before, during func(p *feedtest.Producer, w *feed.Watch)
		want           feed.Verdict
	}{
		{"quiet", nil, nil, feed.Cacheable},
		{"change inside", nil, func(p *feedtest.Producer, w *feed.Watch) { p.Change(mm.Unmap, inside) }, feed.Changed},
		{"change outside", nil, func(p *feedtest.Producer, w *feed.Watch) { p.Change(mm.Unmap, outside) }, feed.Cacheable},
		{"change begun only", nil, func(p *feedtest.Producer, w *feed.Watch) { p.Begin(mm.Unmap, inside, mm.Range{}) }, feed.Changed},
		{"move onto it", nil, func(p *feedtest.Producer, w *feed.Watch) { p.Begin(mm.Move, outside, inside) }, feed.Changed},
		{"drained by another thread meanwhile", nil, func(p *feedtest.Producer, w *feed.Watch) {
			p.Change(mm.Unmap, inside)
			var wg sync.WaitGroup
			wg.Go(func() { w.Drain(nil) })
			wg.Wait()
		}, feed.Changed},
		{"loss", nil, func(p *feedtest.Producer, w *feed.Watch) { p.Lose(1) }, feed.LostRecords},
		{"loss drained meanwhile", nil, func(p *feedtest.Producer, w *feed.Watch) { p.Lose(1); w.Drain(nil) }, feed.LostRecords},
		{"loss everywhere", nil, func(p *feedtest.Producer, w *feed.Watch) { p.LoseAll() }, feed.LostRecords},
		{"death", nil, func(p *feedtest.Producer, w *feed.Watch) { p.Kill() }, feed.IsDead},
		{"closed", nil, func(p *feedtest.Producer, w *feed.Watch) { w.Close() }, feed.IsDead},
		{"an older change, not drained", func(p *feedtest.Producer, w *feed.Watch) { p.Change(mm.Unmap, inside) }, nil, feed.Cacheable},
		{"an older change in flight", func(p *feedtest.Producer, w *feed.Watch) { p.Begin(mm.Unmap, inside, mm.Range{}) }, nil, feed.InFlight},
		{"an older change in flight in the other bank", func(p *feedtest.Producer, w *feed.Watch) {
			c := p.Prepare(mm.Unmap, inside, mm.Range{})
			c.StartIn(1)
		}, nil, feed.InFlight},
		{"a record unfinished", nil, func(p *feedtest.Producer, w *feed.Watch) {
			p.Prepare(mm.Unmap, outside, mm.Range{}).Reserve()
		}, feed.InFlight},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			p, w := pair(t, everything)
			if c.before != nil {
				c.before(p, w)
			}
			ticket := w.Begin(r)
			if c.during != nil {
				c.during(p, w)
			}
			inserted := 0
			v := w.Commit(ticket, nil, func() { inserted++ })
			if v != c.want || (inserted == 1) != (v == feed.Cacheable) {
				t.Errorf("verdict %v, want %v; inserted %d times", v, c.want, inserted)
			}
			if got := w.Stats().Verdicts[c.want]; got != 1 {
				t.Errorf("counted %d times", got)
			}
		})
	}
}

// A change that read the bank before Begin and counts itself after it finds
// the interest, so it cannot be missed.
func TestCommitStraggler(t *testing.T) {
	for bank := range uint32(2) {
		p, w := pair(t, feedtest.Options{})
		c := p.Prepare(mm.Unmap, pages(12, 13), mm.Range{})
		ticket := w.Begin(pages(10, 20))
		c.StartIn(bank)
		if !c.Test() {
			t.Fatal("a change after Begin is not interesting")
		}
		c.Reserve()
		c.Submit()
		c.Count()
		if v := w.Commit(ticket, nil, func() {}); v != feed.Changed {
			t.Errorf("bank %d: %v", bank, v)
		}
	}
}

// A change in flight, filtered because its range was not interesting then, is
// not invisible to a registration of its range. (Nor when the watch opens.)
func TestBeginWaitsForFilteredChange(t *testing.T) {
	p, err := feedtest.New(feedtest.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	c := p.Begin(mm.Unmap, pages(12, 13), mm.Range{})
	w, err := p.Watch()
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if v := commit(w, pages(10, 20)); v != feed.InFlight {
		t.Errorf("with the change in flight: %v", v)
	}
	c.End()
	if v := commit(w, pages(10, 20)); v != feed.Cacheable {
		t.Errorf("after its end: %v", v)
	}
}

// Changes that overlap each other without a pause keep one bank busy for
// ever; Begin moves them to the other one.
func TestBeginSettlesUnderTraffic(t *testing.T) {
	p, w := pair(t, feedtest.Options{})
	c := p.Begin(mm.Zap, pages(500, 501), mm.Range{})
	var done atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !done.Load() {
			next := p.Begin(mm.Zap, pages(500, 501), mm.Range{})
			c.End()
			c = next
		}
		c.End()
	})
	cacheable := 0
	for i := 0; i < 1000 && cacheable < 20; i++ {
		if commit(w, pages(1, 2)) == feed.Cacheable {
			cacheable++
		}
	}
	done.Store(true)
	wg.Wait()
	if cacheable < 20 {
		t.Errorf("cacheable %d times, %+v", cacheable, w.Stats())
	}
}

// Begin waits for changes of nobody-knows-whose, in either bank.
func TestBeginWaitsForForeignChange(t *testing.T) {
	p, w := pair(t, feedtest.Options{})
	for bank := range p.Epoch.Begun {
		atomic.AddUint64(&p.Epoch.Begun[bank], 1)
		if v := commit(w, pages(10, 20)); v != feed.InFlight {
			t.Errorf("bank %d: with the change in flight: %v", bank, v)
		}
		atomic.AddUint64(&p.Epoch.Ended[bank], 1)
		if v := commit(w, pages(10, 20)); v != feed.Cacheable {
			t.Errorf("bank %d: after its end: %v", bank, v)
		}
	}
}

// Changes of nobody-knows-whose that overlap without a pause keep a bank busy
// for ever; the kernel side takes them in turns.
func TestBeginSettlesUnderForeignTraffic(t *testing.T) {
	p, w := pair(t, feedtest.Options{})
	start := time.Now()
	begin := func() (end func()) {
		bank := time.Since(start).Milliseconds() & 1
		atomic.AddUint64(&p.Epoch.Begun[bank], 1)
		return func() { atomic.AddUint64(&p.Epoch.Ended[bank], 1) }
	}
	end := begin()
	var done atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !done.Load() {
			next := begin()
			end()
			end = next
		}
		end()
	})
	cacheable := 0
	for i := 0; i < 1000 && cacheable < 20; i++ {
		if commit(w, pages(1, 2)) == feed.Cacheable {
			cacheable++
		}
	}
	done.Store(true)
	wg.Wait()
	if cacheable < 20 {
		t.Errorf("cacheable %d times, %+v", cacheable, w.Stats())
	}
}

// While each change begins before the one before it has ended, a bank is never
// quiet, in whatever order the two words move between our loads.
func TestQuietNeverDuringOverlappingChanges(t *testing.T) {
	p, w := pair(t, feedtest.Options{})
	c := p.Begin(mm.Zap, pages(500, 501), mm.Range{})
	var done atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !done.Load() {
			next := p.Begin(mm.Zap, pages(500, 501), mm.Range{})
			c.End()
			c = next
		}
	})
	for atomic.LoadUint64(&p.Status.Ended[0]) < 300_000 {
		if feed.Quiet(w, 0) {
			t.Error("quiet with a change in flight")
			break
		}
	}
	done.Store(true)
	wg.Wait()
	c.End()
	if !feed.Quiet(w, 0) {
		t.Error("not quiet at the end")
	}
}

// A change that was ended twice would hide the next one in flight: the watch
// ends as soon as it is seen, and stays so when the words are equal again.
func TestMoreEndsThanBegins(t *testing.T) {
	for name, ended := range map[string]func(*feedtest.Producer) *uint64{
		"bank 0":         func(p *feedtest.Producer) *uint64 { return &p.Status.Ended[0] },
		"bank 1":         func(p *feedtest.Producer) *uint64 { return &p.Status.Ended[1] },
		"foreign bank 0": func(p *feedtest.Producer) *uint64 { return &p.Epoch.Ended[0] },
		"foreign bank 1": func(p *feedtest.Producer) *uint64 { return &p.Epoch.Ended[1] },
	} {
		t.Run(name, func(t *testing.T) {
			p, w := pair(t, feedtest.Options{})
			if v := commit(w, pages(1, 2)); v != feed.Cacheable {
				t.Fatalf("before: %v", v)
			}
			n := ended(p)
			atomic.AddUint64(n, 1)
			w.Abandon(w.Begin(pages(3, 4)))
			if w.Valid() {
				t.Error("valid")
			}
			atomic.AddUint64(n, ^uint64(0)) // as with a change in flight
			if v := commit(w, pages(3, 4)); v != feed.IsDead {
				t.Errorf("commit: %v", v)
			}
			s, got := drain(w)
			if s != feed.DeadState || len(got) != 1 || got[0].Kind != mm.Exit || w.Valid() {
				t.Errorf("drain: %v, %v, valid %v", s, got, w.Valid())
			}
		})
	}
}

// A change that begins while Begin waits for an older one finds the interest,
// so that it leaves a record, or Begin waits for it too. Each round is too late
// if it takes longer than Begin waits.
func TestInterestBeforeQuiet(t *testing.T) {
	r := pages(10, 20)
	inTime := 0
	for round := 0; round < 1000 && inTime < 20; round++ {
		p, w := pair(t, feedtest.Options{})
		older := p.Begin(mm.Zap, pages(500, 501), mm.Range{})
		var ticket feed.Ticket
		var wg sync.WaitGroup
		wg.Go(func() { ticket = w.Begin(r) })
		for atomic.LoadUint32(&p.Interest.Bank) == 0 { // it waits
			runtime.Gosched()
		}
		younger := p.Begin(mm.Zap, pages(12, 13), mm.Range{}) // in the other bank
		older.End()
		wg.Wait()
		switch v := w.Commit(ticket, nil, func() {}); v {
		case feed.Cacheable:
			t.Fatal("cacheable with a change of the range in flight")
		case feed.Changed:
			inTime++
		}
		younger.End()
	}
	if inTime < 20 {
		t.Errorf("only %d rounds were in time", inTime)
	}
}

// From the drain of Commit until the entry is inserted nobody else drains:
// what changes in between is drained later, when the entry is there.
func TestInsertIsUnderTheDrainLock(t *testing.T) {
	p, w := pair(t, feedtest.Options{})
	r := pages(10, 20)
	v := w.Commit(w.Begin(r), nil, func() {
		p.Change(mm.Zap, pages(12, 13))
		var wg sync.WaitGroup
		wg.Go(func() {
			if s := w.Drain(func(*mm.Record) { t.Error("a change is gone before the entry was there") }); s != feed.Busy {
				t.Errorf("drain before the entry is there: %v", s)
			}
		})
		wg.Wait()
	})
	if v != feed.Cacheable {
		t.Fatal(v)
	}
	if w.Valid() {
		t.Error("valid with a change not drained")
	}
	if s, got := drain(w); s != feed.Fresh || len(got) != 1 {
		t.Errorf("drained %v: %v", got, s)
	}
}

func TestTicketMisuse(t *testing.T) {
	p, w := pair(t, feedtest.Options{})
	ticket := w.Begin(pages(1, 2))
	if v := w.Commit(ticket, nil, func() {}); v != feed.Cacheable {
		t.Fatal(v)
	}
	other := w.Begin(pages(5, 6)) // may use the same memory
	for _, tk := range []feed.Ticket{ticket, {}, w.Begin(mm.Range{})} {
		if v := w.Commit(tk, nil, func() { t.Error("inserted") }); v != feed.Unclassified {
			t.Error(v)
		}
		w.Abandon(tk)
	}
	if !p.Interesting(pages(1, 2), mm.Range{}) {
		t.Error("a second Commit took the interest of the first")
	}
	w.Abandon(other)
	w.Forget(pages(1, 2))
	w.Forget(pages(1, 2)) // one too many
	if p.Interesting(pages(1, 6), mm.Range{}) {
		t.Error("interest is left")
	}
}

func TestCommitPanic(t *testing.T) {
	p, w := pair(t, feedtest.Options{})
	func() {
		defer func() { recover() }()
		w.Commit(w.Begin(pages(1, 2)), nil, func() { panic("insert") })
	}()
	if p.Interesting(pages(1, 2), mm.Range{}) {
		t.Error("interest is left")
	}
	if v := commit(w, pages(1, 2)); v != feed.Cacheable {
		t.Errorf("after it: %v", v)
	}
}

// The filter against the naive answer: no false negative ever, nothing left
// when all ranges are gone.
func TestInterest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
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
		ranges := rapid.Custom(func(t *rapid.T) mm.Range {
			bits := rapid.IntRange(0, 46).Draw(t, "bits")
			size := rapid.Uint64Range(1, 1<<bits).Draw(t, "size")
			start := rapid.Uint64Range(0, 1<<47-1-size).Draw(t, "start")
			return mm.Range{Start: mm.Addr(start), End: mm.Addr(start + size)}
		})
		var have []mm.Range
		t.Repeat(map[string]func(*rapid.T){
			"begin": func(t *rapid.T) {
				r := ranges.Draw(t, "r")
				tk := w.Begin(r)
				if rapid.Bool().Draw(t, "keep") && w.Commit(tk, nil, func() {}) == feed.Cacheable {
					have = append(have, r)
				} else {
					w.Abandon(tk)
				}
			},
			"forget": func(t *rapid.T) {
				if len(have) > 0 {
					i := rapid.IntRange(0, len(have)-1).Draw(t, "i")
					w.Forget(have[i])
					have = append(have[:i], have[i+1:]...)
				}
			},
			"change": func(t *rapid.T) {
				r := ranges.Draw(t, "r")
				if n := len(have); n > 0 && rapid.Bool().Draw(t, "near") {
					h := have[rapid.IntRange(0, n-1).Draw(t, "i")]
					r = mm.Range{Start: h.Start, End: h.Start + 1}
					if rapid.Bool().Draw(t, "end") {
						r = mm.Range{Start: h.End - 1, End: h.End}
					}
				}
				r = r.Pages()
				for _, h := range have {
					if h.Pages().Overlaps(r) && !p.Interesting(r, mm.Range{}) {
						t.Fatalf("change of %v is not interesting, %v is registered", r, h)
					}
				}
			},
		})
		for _, h := range have {
			w.Forget(h)
		}
		for _, n := range p.Interest.Dense {
			if n != 0 {
				t.Fatal("dense count is left")
			}
		}
		for level := range p.Interest.Bits {
			for _, b := range p.Interest.Bits[level] {
				if b != 0 {
					t.Fatal("bits are left")
				}
			}
		}
	})
}

// The hash of the header, as C computes it.
func TestInterestHashAsInC(t *testing.T) {
	dir := t.TempDir()
	header, err := filepath.Abs("../bpf/ummu.h")
	if err != nil {
		t.Fatal(err)
	}
	const n = 2000
	var src strings.Builder
	src.WriteString("#include <stdio.h>\n#include \"" + header + "\"\nint main(void) {\n\tstatic const __u64 g[] = {\n")
	granules := []uint64{0, 1, 1<<32 - 1, 1<<47 - 1, 1<<63 - 1, 1<<64 - 1}
	for len(granules) < n {
		granules = append(granules, rand.Uint64()>>rand.IntN(64))
	}
	for _, g := range granules {
		src.WriteString(strconv.FormatUint(g, 10) + "ULL,\n")
	}
	src.WriteString("\t};\n\tfor (unsigned i = 0; i < sizeof(g) / sizeof(g[0]); i++)\n\t\tprintf(\"%llu\\n\", (unsigned long long)UMMU_INTEREST_HASH(g[i]));\n}\n")
	file, prog := filepath.Join(dir, "hash.c"), filepath.Join(dir, "hash")
	if err := os.WriteFile(file, []byte(src.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-Wall", "-Werror", "-o", prog, file).CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v\n%s", err, out)
	}
	out, err := exec.Command(prog).Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Fields(string(out))
	if len(lines) != n {
		t.Fatalf("%d lines", len(lines))
	}
	for i, g := range granules {
		if want := strconv.FormatUint(feed.InterestHash(g), 10); lines[i] != want {
			t.Fatalf("granule %#x: C says %s, Go %s", g, lines[i], want)
		}
	}
}

func TestWait(t *testing.T) {
	for name, do := range map[string]func(p *feedtest.Producer){
		"change": func(p *feedtest.Producer) { p.Change(mm.Zap, pages(1, 2)) },
		"loss":   func(p *feedtest.Producer) { p.Lose(1) },
		"epoch":  func(p *feedtest.Producer) { p.LoseAll() },
		"death":  func(p *feedtest.Producer) { p.Kill() },
	} {
		t.Run(name, func(t *testing.T) {
			p, w := pair(t, everything)
			got := make(chan error)
			go func() { got <- w.Wait(t.Context()) }()
			do(p)
			if err := <-got; err != nil || w.Valid() {
				t.Errorf("Wait: %v, valid %v", err, w.Valid())
			}
		})
	}
	t.Run("descriptor", func(t *testing.T) {
		p, err := feedtest.New(everything)
		if err != nil {
			t.Fatal(err)
		}
		defer p.Close()
		m, err := p.Memory()
		if err != nil {
			t.Fatal(err)
		}
		if m.RingFD, err = unix.Eventfd(0, unix.EFD_CLOEXEC); err != nil {
			t.Fatal(err)
		}
		fd := m.RingFD
		m.Release = func() error { return unix.Close(fd) }
		w, err := feed.New(m)
		if err != nil {
			t.Fatal(err)
		}
		defer w.Close()
		got := make(chan error)
		go func() { got <- w.Wait(t.Context()) }()
		one := [8]byte{1}
		if _, err := unix.Write(fd, one[:]); err != nil { // readable, and still valid
			t.Fatal(err)
		}
		p.Change(mm.Zap, pages(1, 2))
		if err := <-got; err != nil || w.Valid() {
			t.Errorf("Wait: %v, valid %v", err, w.Valid())
		}
	})
	t.Run("close", func(t *testing.T) {
		_, w := pair(t, everything)
		got := make(chan error)
		go func() { got <- w.Wait(t.Context()) }()
		w.Close()
		if err := <-got; err != nil {
			t.Error(err)
		}
	})
	t.Run("cancel", func(t *testing.T) {
		_, w := pair(t, everything)
		ctx, cancel := context.WithCancel(t.Context())
		got := make(chan error)
		go func() { got <- w.Wait(ctx) }()
		cancel()
		if err := <-got; !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
}
