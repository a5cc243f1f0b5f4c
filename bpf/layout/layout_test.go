// SPDX-License-Identifier: Apache-2.0

package layout_test

import (
	"errors"
	"fmt"
	"go/ast"
	"go/constant"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/btf"
	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// structs are the structures of ummu.h, by their name in C.
var structs = map[string]reflect.Type{
	"ummu_record":   reflect.TypeFor[layout.Record](),
	"ummu_stack":    reflect.TypeFor[layout.Stack](),
	"ummu_status":   reflect.TypeFor[layout.Status](),
	"ummu_epoch":    reflect.TypeFor[layout.Epoch](),
	"ummu_interest": reflect.TypeFor[layout.Interest](),
}

// place is where a field lies, in bytes.
type place struct{ Offset, Size uint64 }

// cName is a field's name in C; cgo -godefs made its first letter upper case.
func cName(f reflect.StructField) string { return strings.ToLower(f.Name[:1]) + f.Name[1:] }

// goPlaces returns the place of every field of t as Go lays it out, and of
// the whole as "".
func goPlaces(t reflect.Type) map[string]place {
	m := map[string]place{"": {0, uint64(t.Size())}}
	for i := range t.NumField() {
		f := t.Field(i)
		m[cName(f)] = place{uint64(f.Offset), uint64(f.Type.Size())}
	}
	return m
}

// evaluate compiles a C program that prints the expressions, each with its
// label, and returns what they are.
func evaluate(t *testing.T, expressions map[string]string) map[string]uint64 {
	t.Helper()
	header, err := filepath.Abs("../ummu.h")
	if err != nil {
		t.Fatal(err)
	}
	var c strings.Builder
	fmt.Fprintf(&c, "#include <stddef.h>\n#include <stdio.h>\n#include %q\nint main(void) {\n", header)
	for label, e := range expressions {
		fmt.Fprintf(&c, "printf(\"%%s %%llu\\n\", %q, (unsigned long long)(%s));\n", label, e)
	}
	c.WriteString("}\n")
	dir := t.TempDir()
	src, bin := filepath.Join(dir, "layout.c"), filepath.Join(dir, "layout")
	if err := os.WriteFile(src, []byte(c.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("gcc", "-Wall", "-Werror", "-o", bin, src).CombinedOutput(); err != nil {
		t.Fatalf("compile a program with ummu.h: %v\n%s", err, out)
	}
	out, err := exec.Command(bin).Output()
	if err != nil {
		t.Fatal(err)
	}
	values := map[string]uint64{}
	for line := range strings.Lines(string(out)) {
		var label string
		var v uint64
		if _, err := fmt.Sscan(line, &label, &v); err != nil {
			t.Fatalf("line %q: %v", line, err)
		}
		values[label] = v
	}
	return values
}

// TestLayoutInC compares the size and offset of every field with what a C
// compiler makes of ummu.h. A field that only Go has does not compile; one
// that only C has would leave a hole, which TestNoPadding finds.
func TestLayoutInC(t *testing.T) {
	for name, typ := range structs {
		t.Run(name, func(t *testing.T) {
			want := goPlaces(typ)
			ask := map[string]string{}
			for f := range want {
				if f == "" {
					ask["size:"] = fmt.Sprintf("sizeof(struct %s)", name)
					continue
				}
				ask["offset:"+f] = fmt.Sprintf("offsetof(struct %s, %s)", name, f)
				ask["size:"+f] = fmt.Sprintf("sizeof(((struct %s *)0)->%s)", name, f)
			}
			v := evaluate(t, ask)
			got := map[string]place{}
			for f := range want {
				got[f] = place{v["offset:"+f], v["size:"+f]}
			}
			if d := cmp.Diff(want, got); d != "" {
				t.Errorf("Go (-) and C (+) differ:\n%s", d)
			}
		})
	}
}

// TestNoPadding: fields follow each other without a hole, each aligned to its
// element, so that every compiler on every architecture lays them out alike.
func TestNoPadding(t *testing.T) {
	for name, typ := range structs {
		var next uintptr
		for i := range typ.NumField() {
			f := typ.Field(i)
			element := f.Type
			for element.Kind() == reflect.Array {
				element = element.Elem()
			}
			if f.Offset != next {
				t.Errorf("%s.%s is at %d, the field before it ends at %d", name, cName(f), f.Offset, next)
			}
			if f.Offset%element.Size() != 0 {
				t.Errorf("%s.%s is at %d, not aligned to its element of %d bytes", name, cName(f), f.Offset, element.Size())
			}
			next = f.Offset + f.Type.Size()
		}
		if next != typ.Size() || next%8 != 0 {
			t.Errorf("%s: fields end at %d, the structure at %d", name, next, typ.Size())
		}
	}
}

// TestFrozenPlaces pins what programs built earlier rely on.
func TestFrozenPlaces(t *testing.T) {
	for _, c := range []struct {
		name       string
		got, bytes uintptr
	}{
		{"record", reflect.TypeFor[layout.Record]().Size(), 128},
		{"status page", reflect.TypeFor[layout.Status]().Size(), 4096},
		{"epoch page", reflect.TypeFor[layout.Epoch]().Size(), 4096},
		{"interest page", reflect.TypeFor[layout.Interest]().Size(), 4096 + 3*32768/8},
	} {
		if c.got != c.bytes {
			t.Errorf("%s has %d bytes, want %d", c.name, c.got, c.bytes)
		}
	}
	// Words that a lookup reads, and words that every change writes, do not
	// share a cache line.
	s := goPlaces(reflect.TypeFor[layout.Status]())
	for f, line := range map[string]uint64{"generation": 0, "begun": 1, "ended": 1, "records": 2} {
		if s[f].Offset/64 != line {
			t.Errorf("status.%s is in cache line %d, want %d", f, s[f].Offset/64, line)
		}
	}
}

// constants returns the constant declarations of a file: name and expression.
func constants(t *testing.T, file string) map[string]ast.Expr {
	t.Helper()
	f, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	m := map[string]ast.Expr{}
	for _, d := range f.Decls {
		g, ok := d.(*ast.GenDecl)
		if !ok || g.Tok != token.CONST {
			continue
		}
		for _, s := range g.Specs {
			v := s.(*ast.ValueSpec)
			for i, n := range v.Names {
				m[n.Name] = v.Values[i]
			}
		}
	}
	return m
}

// TestConstantsInC compares each constant of layout.go with the C constant
// that godefs.go names for it.
func TestConstantsInC(t *testing.T) {
	ask := map[string]string{}
	for name, e := range constants(t, "godefs.go") {
		ask[name] = e.(*ast.SelectorExpr).Sel.Name
	}
	want := evaluate(t, ask)
	got := map[string]uint64{}
	for name, e := range constants(t, "layout.go") {
		v, ok := constant.Uint64Val(constant.ToInt(constant.MakeFromLiteral(types.ExprString(e), token.INT, 0)))
		if !ok {
			t.Fatalf("constant %s: %s is no unsigned integer", name, types.ExprString(e))
		}
		got[name] = v
	}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("C (-) and Go (+) differ:\n%s", d)
	}
}

// TestWordsInC compares the numbers of package mm with those of ummu.h.
func TestWordsInC(t *testing.T) {
	ask, want := map[string]string{}, map[string]uint64{}
	word := func(c string, v uint64) { ask[c], want[c] = c, v }
	for _, k := range mm.Kinds() {
		word("UMMU_"+strings.ToUpper(k.String()), uint64(k))
	}
	word("UMMU_NONE", uint64(mm.KindNone))
	word("UMMU_BEGIN", uint64(mm.PhaseBegin))
	word("UMMU_END", uint64(mm.PhaseEnd))
	for i, f := range []struct {
		c string
		f mm.Flags
	}{
		{"SUPERSET", mm.Superset}, {"MAYBE", mm.Maybe}, {"UNPAIRED", mm.Unpaired},
		{"ASYNC", mm.Async}, {"LAST_TASK", mm.LastTask}, {"SPACE_DEATH", mm.SpaceDeath},
		{"NEW_PROCESS", mm.NewProcess}, {"SHARES_SPACE", mm.SharesSpace}, {"VECTOR", mm.Vector},
		{"UNKNOWN_LENGTH", mm.UnknownLength}, {"RESCUED", mm.Rescued},
	} {
		if f.f != 1<<i {
			t.Errorf("flag %s is %#x, want %#x", f.c, f.f, 1<<i)
		}
		word("UMMU_F_"+f.c, uint64(f.f))
	}
	word("UMMU_ABI_NATIVE", uint64(mm.ABINative))
	word("UMMU_ABI_COMPAT", uint64(mm.ABICompat))
	word("UMMU_ABI_X32", uint64(mm.ABIX32))
	word("UMMU_ABI_IO_URING", uint64(mm.ABIIOUring))
	word("UMMU_ABI_NONE", uint64(mm.ABINone))
	if d := cmp.Diff(want, evaluate(t, ask)); d != "" {
		t.Errorf("mm (-) and ummu.h (+) differ:\n%s", d)
	}
}

// TestLayoutInObjects compares the layout with the type information inside
// the BPF objects that are shipped, of every architecture.
func TestLayoutInObjects(t *testing.T) {
	objects, err := filepath.Glob("../*.o")
	if err != nil {
		t.Fatal(err)
	}
	if len(objects) == 0 {
		t.Fatal("no BPF object in bpf/: run make generate")
	}
	seen := map[string]bool{}
	for _, o := range objects {
		t.Run(filepath.Base(o), func(t *testing.T) {
			spec, err := ebpf.LoadCollectionSpec(o)
			if err != nil {
				t.Fatal(err)
			}
			for name, typ := range structs {
				var s *btf.Struct
				if err := spec.Types.TypeByName(name, &s); errors.Is(err, btf.ErrNotFound) {
					continue // this object does not use it
				} else if err != nil {
					t.Errorf("type %s: %v", name, err)
					continue
				}
				seen[name] = true
				got := map[string]place{"": {0, uint64(s.Size)}}
				for _, m := range s.Members {
					size, err := btf.Sizeof(m.Type)
					if err != nil {
						t.Fatalf("%s.%s: %v", name, m.Name, err)
					}
					got[m.Name] = place{uint64(m.Offset.Bytes()), uint64(size)}
				}
				if d := cmp.Diff(goPlaces(typ), got); d != "" {
					t.Errorf("%s: Go (-) and BPF (+) differ:\n%s", name, d)
				}
			}
		})
	}
	for name := range structs {
		if !seen[name] {
			t.Errorf("no BPF object has type information of %s", name)
		}
	}
}
