// SPDX-License-Identifier: Apache-2.0

package mm

import (
	"errors"
	"math"
	"testing"

	"pgregory.net/rapid"
)

func TestMakeRange(t *testing.T) {
	for _, tt := range []struct {
		name   string
		addr   Addr
		length uint64
		want   Range
		err    error
	}{
		{"one byte", 0x1000, 1, Range{0x1000, 0x1001}, nil},
		{"from zero", 0, 1, Range{0, 1}, nil},
		{"up to the kernel", 1<<63 - 1, 1, Range{1<<63 - 1, 1 << 63}, nil},
		{"empty", 0x1000, 0, Range{}, ErrEmptyRange},
		{"wraps", math.MaxUint64, 2, Range{}, ErrWraps},
		{"kernel", 0xffffffff81000000, 1, Range{}, ErrKernelAddr},
		{"into the kernel", 1<<63 - 1, 2, Range{}, ErrKernelAddr},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := MakeRange(tt.addr, tt.length)
			if got != tt.want || !errors.Is(err, tt.err) {
				t.Errorf("MakeRange(%v, %d) = %v, %v; want %v, %v", tt.addr, tt.length, got, err, tt.want, tt.err)
			}
		})
	}
}

func drawRange(t *rapid.T, name string) Range {
	a := rapid.Uint64Range(0, 64).Draw(t, name+" start")
	n := rapid.Uint64Range(0, 16).Draw(t, name+" length")
	return Range{Addr(a), Addr(a + n)}
}

// The operations agree with sets of addresses.
func TestRangeProperties(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r, s := drawRange(t, "r"), drawRange(t, "s")
		var both, inR, inS int
		for a := Addr(0); a < 100; a++ {
			if r.Has(a) {
				inR++
			}
			if s.Has(a) {
				inS++
			}
			if r.Has(a) && s.Has(a) {
				both++
			}
			if r.Intersect(s).Has(a) != (r.Has(a) && s.Has(a)) {
				t.Fatalf("%v ∩ %v = %v at %v", r, s, r.Intersect(s), a)
			}
			if (r.Has(a) || s.Has(a)) && !r.Hull(s).Has(a) {
				t.Fatalf("hull of %v and %v = %v lacks %v", r, s, r.Hull(s), a)
			}
		}
		if r.Overlaps(s) != (both > 0) || r.Overlaps(s) != s.Overlaps(r) {
			t.Fatalf("%v overlaps %v: %v, %d addresses", r, s, r.Overlaps(s), both)
		}
		if r.Contains(s) != (both == inS) {
			t.Fatalf("%v contains %v: %v", r, s, r.Contains(s))
		}
		if r.Len() != uint64(inR) || r.Empty() != (inR == 0) {
			t.Fatalf("%v: length %d, empty %v", r, r.Len(), r.Empty())
		}
	})
}

func TestPages(t *testing.T) {
	p := Addr(PageSize())
	for _, tt := range []struct{ r, want Range }{
		{Range{0, 1}, Range{0, p}},
		{Range{p - 1, p + 1}, Range{0, 2 * p}},
		{Range{p, 2 * p}, Range{p, 2 * p}},
		{Range{}, Range{}},
		{Range{p + 1, p + 1}, Range{}},
		{Whole, Whole},
		{Range{MaxAddr - 1, MaxAddr}, Range{MaxAddr &^ (p - 1), MaxAddr}},
	} {
		if got := tt.r.Pages(); got != tt.want {
			t.Errorf("%v.Pages() = %v, want %v", tt.r, got, tt.want)
		}
	}
	if got := (Range{0x1000, 0xfff000}).String(); got != "1000-fff000" {
		t.Error(got)
	}
}

func TestWords(t *testing.T) {
	if ks := Kinds(); len(ks) != int(numKinds)-1 {
		t.Errorf("%d kinds", len(ks))
	}
	for _, k := range Kinds() {
		if got, err := ParseKind(k.String()); got != k || err != nil {
			t.Errorf("ParseKind(%q) = %v, %v", k, got, err)
		}
		change := k == Unmap || k == Replace || k == Zap || k == Move || k == Protect
		if k.IsChange() != change {
			t.Errorf("%v.IsChange() = %v", k, k.IsChange())
		}
	}
	for _, s := range []string{"", "none", "Unmap", "kind(3)"} {
		if k, err := ParseKind(s); err == nil {
			t.Errorf("ParseKind(%q) = %v", s, k)
		}
	}
	for _, p := range []Phase{PhaseBegin, PhaseEnd} {
		if got, err := ParsePhase(p.String()); got != p || err != nil {
			t.Errorf("ParsePhase(%q) = %v, %v", p, got, err)
		}
	}
	if _, err := ParsePhase("middle"); err == nil {
		t.Error("no error for a phase that does not exist")
	}
	if got := (Comm{'a', 'b', 0, 'x'}).String(); got != "ab" {
		t.Errorf("comm %q", got)
	}
	if got := (Comm{0: 'a', 15: 'z'}).String(); got != "a" {
		t.Errorf("comm %q", got)
	}
}

func TestTouches(t *testing.T) {
	r := Range{0x1000, 0x2000}
	for _, tt := range []struct {
		name string
		rec  Record
		want bool
	}{
		{"overlap", Record{Kind: Unmap, Range: Range{0x1800, 0x3000}}, true},
		{"beside", Record{Kind: Unmap, Range: Range{0x2000, 0x3000}}, false},
		{"destination", Record{Kind: Move, Range: Range{0x8000, 0x9000}, To: Range{0x1000, 0x1001}}, true},
		{"information", Record{Kind: Map, Range: Range{0x1000, 0x2000}}, false},
		{"whole", Record{Kind: Zap, Range: Whole}, true},
	} {
		if got := tt.rec.Touches(r); got != tt.want {
			t.Errorf("%s: %v", tt.name, got)
		}
	}
}
