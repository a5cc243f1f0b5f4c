// SPDX-License-Identifier: Apache-2.0

package truth

import (
	"log"
	"os"
	"slices"
	"testing"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

var programs *Programs

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "ummu-truth-")
	if err != nil {
		log.Fatal(err)
	}
	if programs, err = Build(dir); err != nil {
		log.Fatal(err)
	}
	code := m.Run()
	os.RemoveAll(dir)
	if err := goleak.Find(); err != nil {
		log.Print(err)
		code = 1
	}
	os.Exit(code)
}

// start starts a program that the test's end ends.
func start(t *testing.T, impl Impl) *Proc {
	t.Helper()
	p, err := programs.Start(impl)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Close(); err != nil {
			t.Error(err)
		}
	})
	return p
}

// Without a feed, exactly the pages of the table are stale: the problem is
// real, and the oracle shows it.
func TestOracleWithoutFeed(t *testing.T) {
	for _, impl := range Impls() {
		t.Run(impl.Name, func(t *testing.T) {
			p := start(t, impl)
			for i := range Rows {
				row := &Rows[i]
				if row.By(impl) {
					t.Run(row.Name, func(t *testing.T) { perform(t, p, row) })
				}
			}
		})
	}
}

func perform(t *testing.T, p *Proc, row *Row) {
	r, err := row.Setup(p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Teardown(); err != nil {
			t.Error(err)
		}
	}()
	ret, err := r.Register()
	if err != nil {
		t.Fatal(err)
	}
	if ret != -int64(row.Refused) {
		t.Fatalf("registration returned %d, want %d", ret, -int64(row.Refused))
	}
	if row.Refused != 0 {
		return
	}
	if err := r.Act(); err != nil {
		t.Fatal(err)
	}
	seen, err := r.Oracle()
	if err != nil {
		t.Fatal(err)
	}
	if seen != row.Want {
		t.Errorf("pages %s, want %s", seen, row.Want)
	}
}

// The table does not contradict itself: what is stale is reported, and what is
// reported of the buffer lies around what is stale.
func TestRows(t *testing.T) {
	names := map[string]bool{}
	for i := range Rows {
		row := &Rows[i]
		if names[row.Name] {
			t.Errorf("%s: more than once", row.Name)
		}
		names[row.Name] = true
		if row.Refused != 0 {
			if row.Want != "" || row.Records != nil {
				t.Errorf("%s: cannot be registered, and yet has pages or records", row.Name)
			}
			continue
		}
		if row.Gap != "" && !row.Changes() {
			t.Errorf("%s: a gap that nothing falls into", row.Name)
		}
		for page, c := range row.Want {
			covered := slices.ContainsFunc(row.Records, func(e Expect) bool {
				return (e.Kind == mm.Exit || e.Kind.IsChange()) && e.At.First <= page && page < e.At.End
			})
			if c != '.' && !covered {
				t.Errorf("%s: page %d is %c, and no record tells", row.Name, page, c)
			}
			if protects := slices.ContainsFunc(row.Records, func(e Expect) bool { return e.Kind == mm.Protect }); c == '.' && covered && !protects {
				t.Errorf("%s: page %d is coherent, and a record tells otherwise", row.Name, page)
			}
		}
	}
}

// A registration that nothing happens to is coherent, whatever the memory:
// the oracle does not cry wolf.
func TestOracleWithoutChange(t *testing.T) {
	p := start(t, Impls()[0])
	for _, m := range []Memory{Anon, AnonLow, MemfdShared, MemfdPrivate, Heap, SysV, Huge, NoHuge, HugetlbAnon, HugetlbShared, FilePrivate} {
		t.Run(m.String(), func(t *testing.T) {
			want := none8
			if m == HugetlbAnon || m == HugetlbShared {
				want = none8[:4]
			}
			row := &Row{Name: "nothing", Memory: m, Want: want, Act: func(*Run) int64 { return 0 }}
			if row.By(p.Impl) {
				perform(t, p, row)
			}
		})
	}
	t.Run(FileReadOnly.String(), func(t *testing.T) {
		perform(t, p, &Row{Name: "nothing", Memory: FileReadOnly, Oracle: Splice, Want: none8, Act: func(*Run) int64 { return 0 }})
	})
}

// Every slot of a ring is a registration of its own, of bytes, not pages.
func TestRingSlots(t *testing.T) {
	p := start(t, Impls()[0])
	r, err := Rows[0].Setup(p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Teardown(); err != nil {
			t.Error(err)
		}
	}()
	ring, err := p.Ring()
	if err != nil {
		t.Fatal(err)
	}
	for slot := range Slots {
		b := r.Span(Span{slot % 8, slot%8 + 1})
		if e := ring.Register(slot, b); e != 0 {
			t.Fatalf("register slot %d: %v", slot, unix.Errno(-e))
		}
		if n := ring.Write(slot, b.Start, r.Unit, 1, uint64(slot)); n != int64(r.Unit) {
			t.Fatalf("write through slot %d: %d", slot, n)
		}
		if n := ring.Write(slot, b.End, r.Unit, 1, 0); n != -int64(unix.EFAULT) {
			t.Errorf("write behind slot %d: %d, want EFAULT", slot, n)
		}
		if got := p.Look(b.Start, r.Unit, 1, uint64(slot)); got != "." {
			t.Errorf("slot %d: CPU sees %s", slot, got)
		}
	}
	if e := ring.Register(Slots, r.Buffer()); e != -int64(unix.EINVAL) {
		t.Errorf("register slot %d: %d, want EINVAL", Slots, e)
	}
	for slot := range Slots {
		if e := ring.Unregister(slot); e != 0 {
			t.Errorf("unregister slot %d: %v", slot, unix.Errno(-e))
		}
	}
}
