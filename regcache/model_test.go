// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"errors"
	"slices"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"github.com/ummu/ummu/mm"
)

// model is the cache as one would explain it: a list of registrations in the
// order of the clock. Its steps say what the cache must do, exactly.
type model struct {
	max      int
	maxBytes uint64
	entries  []*modelEntry // in the index, not set aside
	aside    []*modelEntry // in the index, in use when a victim was looked for
}

type modelEntry struct {
	r       mm.Range
	a       Access
	handle  uint32
	refs    int
	hit     bool // since a victim was last looked for
	indexed bool
	watched bool // its holder is told of a change
	changed bool
}

func (m *model) indexed() []*modelEntry { return slices.Concat(m.entries, m.aside) }

func (m *model) find(ok func(*modelEntry) bool) *modelEntry {
	for _, e := range m.indexed() {
		if ok(e) {
			return e
		}
	}
	return nil
}

func (m *model) bytes() (n uint64) {
	for _, e := range m.indexed() {
		n += e.r.Pages().Len()
	}
	return n
}

func (m *model) drop(e *modelEntry) {
	without := func(o *modelEntry) bool { return o == e }
	m.entries = slices.DeleteFunc(m.entries, without)
	m.aside = slices.DeleteFunc(m.aside, without)
	e.indexed = false
}

// evict drops the first idle entry that was not hit since the last look.
func (m *model) evict() *modelEntry {
	for len(m.entries) > 0 {
		e := m.entries[0]
		m.entries = m.entries[1:]
		switch {
		case e.refs > 0:
			m.aside = append(m.aside, e)
		case e.hit:
			e.hit = false
			m.entries = append(m.entries, e)
		default:
			e.indexed = false
			return e
		}
	}
	return nil
}

func (m *model) room(bytes uint64) bool {
	for len(m.indexed())+1 > m.max || m.bytes()+bytes > m.maxBytes {
		if m.evict() == nil {
			return false
		}
	}
	return true
}

// makeRoom is what a limit of the device asks for.
func (m *model) makeRoom(need uint64) {
	for freed := uint64(0); freed < need; {
		e := m.evict()
		if e == nil {
			return
		}
		freed += e.r.Pages().Len()
	}
}

// invalidate drops what overlaps r, and tells all holders.
func (m *model) invalidate(r mm.Range, held []*heldRef) {
	for _, e := range m.indexed() {
		if e.r.Pages().Overlaps(r.Pages()) {
			m.drop(e)
			e.changed = e.refs > 0
		}
	}
	for _, h := range held {
		if h.e.watched && h.e.r.Pages().Overlaps(r.Pages()) {
			h.e.changed = true
		}
	}
}

type heldRef struct {
	ref Ref[uint32]
	e   *modelEntry
}

const modelSteps = 1100 // per check; rapid makes 100 checks

// The cache against a naive model: 110,000 steps, what is hit, registered,
// evicted, reported and deregistered is exact after each, and so are reference
// counts and all invariants of the index.
func TestCacheAgainstModel(t *testing.T) {
	t.Run("live", func(t *testing.T) { rapid.Check(t, func(rt *rapid.T) { modelRun(t, rt, true) }) })
	t.Run("dead", func(t *testing.T) { rapid.Check(t, func(rt *rapid.T) { modelRun(t, rt, false) }) })
}

func modelRun(t *testing.T, rt *rapid.T, live bool) {
	page := mm.PageSize()
	m := &model{max: rapid.IntRange(1, 12).Draw(rt, "max"), maxBytes: page * rapid.Uint64Range(4, 40).Draw(rt, "max bytes")}
	ok := t.Run("", func(t *testing.T) {
		f := newFixture(t, Options{MaxEntries: m.max, MaxBytes: m.maxBytes}, live)
		f.dev.limit = page * rapid.Uint64Range(10, 80).Draw(rt, "device limit")
		deregFails := false
		f.dev.onDereg = func(uint32) error {
			if deregFails {
				return syscall.EBUSY
			}
			return nil
		}
		fails := 0
		f.dev.onReg = func(mm.Range, Access) error {
			if fails > 0 {
				fails--
				return errDevice
			}
			return nil
		}
		var held []*heldRef
		span := func() mm.Range {
			if rapid.Bool().Draw(rt, "small") {
				return bytes(rapid.Uint64Range(0, 12*page).Draw(rt, "start"), rapid.Uint64Range(1, 200).Draw(rt, "length"))
			}
			first := rapid.Uint64Range(0, 12).Draw(rt, "first")
			return pages(first, first+rapid.Uint64Range(1, 5).Draw(rt, "pages"))
		}
		steps := modelSteps
		if !live {
			steps = modelSteps / 10
		}
		for range steps {
			switch op := rapid.IntRange(0, 19).Draw(rt, "op"); {
			case op < 8:
				if h := modelAcquire(t, f, m, span(), Access(rapid.IntRange(0, 3).Draw(rt, "access")), &fails); h != nil {
					held = append(held, h)
				}
			case op < 14 && len(held) > 0:
				i := rapid.IntRange(0, len(held)-1).Draw(rt, "held")
				modelRelease(t, f, m, held[i])
				held = slices.Delete(held, i, i+1)
			case op < 17:
				if live {
					r := span()
					f.p.Change(mm.Zap, r.Pages())
					m.invalidate(r, held)
				}
			case op == 17 && live && rapid.IntRange(0, 9).Draw(rt, "lose") == 0:
				f.p.Lose(1)
				m.invalidate(mm.Whole, held)
			case op == 18:
				fails = rapid.IntRange(0, 2).Draw(rt, "failures")
			case op == 19:
				deregFails = !deregFails
			}
			f.c.check(t)
			modelCompare(t, f, m, held)
		}
		for _, h := range held {
			modelRelease(t, f, m, h)
		}
	})
	if !ok {
		rt.Fatal("the cache differs from its model")
	}
}

// modelAcquire acquires in both. nil: it failed, as it had to.
func modelAcquire(t *testing.T, f *fixture, m *model, r mm.Range, a Access, fails *int) *heldRef {
	t.Helper()
	covers := func(e *modelEntry) bool { return e.r.Contains(r) && e.a.Has(a) }
	want := m.find(covers)
	same := m.find(func(e *modelEntry) bool { return e.r == r })
	regs := f.dev.registrations()
	failing := *fails > 0
	ref, err := f.c.Acquire(r, a)
	if want != nil {
		if err != nil || f.dev.registrations() != regs {
			t.Fatalf("acquire %v with %v: no hit: %v", r, a, err)
		}
		// Any entry that covers it will do.
		want = m.find(func(e *modelEntry) bool { return covers(e) && e.handle == ref.Handle() })
		if want == nil {
			t.Fatalf("acquire %v with %v: hit %v with %v", r, a, ref.Range(), ref.Access())
		}
		want.refs++
		want.hit = true
		return &heldRef{ref, want}
	}

	// A miss. The device may have refused for want of memory at first; this
	// is how the cache saw it: it evicted.
	need := r.Pages().Len()
	var limit *LimitError
	limited := errors.As(err, &limit)
	union := a
	if same != nil {
		union |= same.a
	}
	e := &modelEntry{r: r, a: a, refs: 1, handle: ref.Handle()}
	if f.live() && (limited || f.c.Stats().Failures[syscall.ENOMEM] > f.enomem) {
		m.makeRoom(need)
	}
	f.enomem = f.c.Stats().Failures[syscall.ENOMEM]
	why := Cached
	switch {
	case !f.live():
		why = ReasonDead
	case need > m.maxBytes:
		why = ReasonTooLarge
	case failing && union != a:
		why = ReasonRights // the union failed, and *fails tells whether the rest did
	}
	if failing && (why != ReasonRights || err != nil) || limited {
		if err == nil || !limited && !errors.Is(err, errDevice) {
			t.Fatalf("acquire %v: the device fails, got %v", r, err)
		}
		return nil
	}
	if err != nil {
		t.Fatalf("acquire %v: %v", r, err)
	}
	if why == Cached {
		e.a = union
		e.watched = true
		same = m.find(func(o *modelEntry) bool { return o.r == r })
		switch {
		case same != nil:
			m.drop(same)
			same.watched = same.refs > 0
			m.entries = append(m.entries, e)
		case m.room(need):
			m.entries = append(m.entries, e)
		default:
			why = ReasonFull
		}
	}
	if why == Cached {
		e.indexed = true
	} else {
		e.a = ref.Access()
	}
	if _, got := ref.Cached(); got != why {
		t.Fatalf("acquire %v with %v: %v, want %v", r, a, got, why)
	}
	if ref.Range() != r || ref.Access() != e.a || !e.a.Has(a) {
		t.Fatalf("acquire %v with %v: got %v with %v, want %v", r, a, ref.Range(), ref.Access(), e.a)
	}
	return &heldRef{ref, e}
}

func modelRelease(t *testing.T, f *fixture, m *model, h *heldRef) {
	t.Helper()
	h.e.refs--
	if got := h.ref.Release(); got != h.e.changed {
		t.Fatalf("release %v: changed %v, want %v", h.e.r, got, h.e.changed)
	}
	if i := slices.Index(m.aside, h.e); i >= 0 && h.e.refs == 0 {
		m.aside = slices.Delete(m.aside, i, i+1)
		m.entries = append(m.entries, h.e)
	}
}

// modelCompare compares everything: the index in the clock's order, references.
func modelCompare(t *testing.T, f *fixture, m *model, held []*heldRef) {
	t.Helper()
	if f.live() && f.c.refresh() != 0 {
		t.Fatal("not fresh")
	}
	f.c.mu.Lock()
	defer f.c.mu.Unlock()
	for _, l := range []struct {
		name string
		got  *list[uint32]
		want []*modelEntry
	}{{"in the clock", &f.c.idle, m.entries}, {"set aside", &f.c.parked, m.aside}} {
		if l.got.n != len(l.want) {
			t.Fatalf("%d entries %s, want %d", l.got.n, l.name, len(l.want))
		}
		i := 0
		for e := l.got.front; e != nil; e = e.next {
			want := l.want[i]
			s := e.state.Load()
			if e.handle != want.handle || e.span() != want.r || e.access != want.a || int(s&refMask) != want.refs {
				t.Fatalf("entry %d %s is %v with %v, %d references; want %v with %v, %d",
					i, l.name, e.span(), e.access, s&refMask, want.r, want.a, want.refs)
			}
			i++
		}
	}
	refs := 0
	for e := f.c.orphans.front; e != nil; e = e.next {
		refs += int(e.state.Load() & refMask)
	}
	for _, e := range m.indexed() {
		refs += e.refs
	}
	if refs != len(held) {
		t.Fatalf("%d references, want %d", refs, len(held))
	}
}
