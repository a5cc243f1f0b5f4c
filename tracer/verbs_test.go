// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/planted"
)

// The newest version of each function, once: the old ones call these.
func TestVerbPlaces(t *testing.T) {
	dir, err := planted.Build(context.Background(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(dir, planted.Standin))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	places, err := verbPlaces(f)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range places {
		names = append(names, p.name)
		if p.offset == 0 {
			t.Errorf("%s at 0", p.name)
		}
	}
	slices.Sort(names)
	if want := []string{"ibv_dereg_mr", "ibv_reg_mr", "ibv_reg_mr_iova", "ibv_reg_mr_iova2"}; !slices.Equal(names, want) {
		t.Errorf("%v, want %v", names, want)
	}
	tr, err := Open(Options{Registrations: true})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	link := filepath.Join(t.TempDir(), "other-name.so")
	if err := os.Symlink(f.Name(), link); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{f.Name(), f.Name(), link} { // one file
		if err := tr.ProbeVerbs(name); err != nil {
			t.Fatal(err)
		}
		if new, err := tr.VerbsUnprobed(name); new || err != nil {
			t.Errorf("%s is not probed: %v", name, err)
		}
	}
	if n := len(tr.verbs.links); n < 8 || n > 9 { // and the kernel's count, where it has one
		t.Errorf("%d links", n)
	}
	if err := tr.ProbeVerbs("/proc/self/exe"); !errors.Is(err, ErrNotVerbs) {
		t.Errorf("of this program: %v", err)
	}
	if err := tr.ProbeVerbs(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("of no file: %v", err)
	}
}

// Whoever did not ask for registrations gets none, and no stacks.
func TestRegistrationsAskedFor(t *testing.T) {
	plain, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	if _, err := plain.Watch(Self(), WatchOptions{Registrations: true}); !errors.Is(err, errNoRegistrations) {
		t.Errorf("watch: %v", err)
	}
	if err := plain.ProbeVerbs("/x"); !errors.Is(err, errNoRegistrations) {
		t.Errorf("probe: %v", err)
	}
}

// The kernel side tests ranges as they were marked here.
func TestMarkInterest(t *testing.T) {
	tr, err := Open(Options{Registrations: true})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	st, err := tr.Watch(Self(), WatchOptions{Registrations: true, StacksOf: []mm.Range{{Start: 0x7f0000012000, End: 0x7f0000013000}, {Start: 0, End: 1 << 40}}})
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	var in layout.Interest
	if err := st.slot.interest.Lookup(uint32(0), &in); err != nil {
		t.Fatal(err)
	}
	if in.Dense != [3]uint64{1, 1, 1} { // a tebibyte is 256 granules of the coarsest
		t.Errorf("dense: %v", in.Dense)
	}
	bits := 0
	for _, level := range in.Bits {
		for _, w := range level {
			for ; w != 0; w &= w - 1 {
				bits++
			}
		}
	}
	if bits != 3 { // the page, at each level
		t.Errorf("%d bits", bits)
	}
}
