// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"errors"
	"math/rand/v2"
	"os"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/truth"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache/uring"
	"github.com/ummu/ummu/test/extras"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

func TestMain(m *testing.M) {
	Main() // a target is this binary, too
	goleak.VerifyTestMain(m)
}

// Seeds and lengths of the programs that every run of the tests does.
const (
	seed   = 20_000
	length = 150
)

func program(i uint64) Program {
	return Generate(rand.New(rand.NewPCG(seed+i, 0)), length, false)
}

// A short soak of each tier: nothing is uncovered.
func TestNothingUncovered(t *testing.T) {
	tiers := []string{"syscall", "notifier/tracepoint"}
	if machine.HasProbes() {
		tiers = append(tiers, "notifier/probe", "mm")
	}
	for _, tier := range tiers {
		t.Run(tier, func(t *testing.T) {
			if strings.HasPrefix(tier, "notifier/") {
				machine.NeedKVM(t)
			}
			target := &Target{Tier: tier}
			total := new(Result)
			// 20,000 operations, or what a busy machine does in 10 s, and some
			// programs in any case.
			for i, end := uint64(0), time.Now().Add(10*time.Second); total.Ops < 20_000 && (i < 10 || time.Now().Before(end)); i++ {
				p := program(i)
				r, err := target.Run(p)
				if err != nil {
					t.Fatalf("program %d: %v", i, err)
				}
				total.Add(r)
				if r.Finding == nil {
					continue
				}
				small, f, err := target.Shrink(p, r.Finding)
				if err != nil || small == nil {
					t.Fatalf("program %d: %v\n(not repeated, %v)\n%v", i, r.Finding, err, p)
				}
				t.Fatalf("program %d: %v\n%v", i, f, small)
			}
			if err := target.Close(); err != nil {
				t.Error(err)
			}
			if total.Ops < 500 || total.Hits < total.Ops || total.Changes < total.Ops/50 || total.Transfers < total.Ops/50 {
				t.Errorf("%+v: that is no test", total)
			}
			if tier == "syscall" && (target.Witness != machine.HasKVM() || total.WitnessMissed > 0 || total.Verdicts["file-backed"] == 0) {
				t.Errorf("witness %v: %+v", target.Witness, total)
			}
			t.Logf("%+v", total)
		})
	}
}

// Every guard that the steps can notice is noticed, in a binary that can do
// without it, by a program that is small in the end.
func TestFindsWhatIsMissing(t *testing.T) {
	bin, err := extras.Build(t.Context(), t.TempDir(), "soak-guards")
	if err != nil {
		t.Fatal(err)
	}
	type missing struct{ guard, tier string }
	var all []missing
	for _, guard := range []string{"replace-seen", "round-outward", "destination", "uring-madvise", "file-refused"} {
		all = append(all, missing{guard, "syscall"})
	}
	if ok, err := truth.ProcessDiscard.Available(); err != nil {
		t.Fatal(err)
	} else if ok {
		all = append(all, missing{"vector-limit", "syscall"})
	}
	for _, fault := range []string{"hook-there", "range-place", "range-whole", "args-order", "never-missed"} {
		all = append(all, missing{fault, "syscall"}, missing{fault, "notifier/tracepoint"})
		if machine.HasProbes() {
			all = append(all, missing{fault, "mm"})
			// on preemptible kernels KVM's tracepoint is behind the probes, and
			// has the right range
			if fault != "args-order" || !tracer.Preemptible() {
				all = append(all, missing{fault, "notifier/probe"})
			}
		}
	}
	for _, m := range all {
		guard := m.guard
		t.Run(guard+"/"+m.tier, func(t *testing.T) {
			if strings.HasPrefix(m.tier, "notifier/") {
				machine.NeedKVM(t)
			}
			// the witness would be as blind
			target := &Target{Tier: m.tier, Command: bin, Alone: true, Env: []string{"UMMU_GUARD_OFF=" + guard}}
			ops := 0
			for i := uint64(0); ops < 20_000; i++ {
				p := program(i)
				r, err := target.Run(p)
				if err != nil && i == 0 && (m.tier == "notifier/tracepoint" && strings.Contains(err.Error(), "the kernel tells nobody of changes") ||
					m.tier == "mm" && strings.Contains(err.Error(), "attached, but not called")) {
					return // tried its hooks, and did not open
				}
				if err != nil {
					t.Fatalf("program %d: %v", i, err)
				}
				ops += r.Ops
				if r.Finding == nil {
					continue
				}
				if guard == "never-missed" { // found again by chance only
					target.Close()
					return
				}
				small, f, err := target.Shrink(p, r.Finding)
				if err != nil || small == nil {
					t.Fatalf("%v is not repeated: %v", r.Finding, err)
				}
				t.Logf("after %d operations: %v\n%v", ops, f, small)
				// one that needs two threads at once may keep a few steps more
				if f.Kind == Died || len(small) > 12 {
					t.Errorf("%v, %d steps", f, len(small))
				}
				if err := target.Close(); err != nil {
					t.Error(err)
				}
				return
			}
			target.Close()
			t.Errorf("nothing found in %d operations", ops)
		})
	}
}

// A few programs that no planted fault lets pass (see internal/guard).
func TestPlanted(t *testing.T) {
	tiers := []string{"syscall", "notifier/tracepoint"}
	if machine.HasProbes() {
		tiers = append(tiers, "notifier/probe", "mm")
	}
	for _, tier := range tiers {
		t.Run(tier, func(t *testing.T) {
			if strings.HasPrefix(tier, "notifier/") {
				machine.NeedKVM(t)
			}
			target := &Target{Tier: tier}
			defer target.Close()
			for i := range uint64(60) {
				r, err := target.Run(program(i))
				if err != nil {
					t.Fatalf("program %d: %v", i, err)
				}
				if r.Finding != nil {
					t.Fatalf("program %d: %v", i, r.Finding)
				}
			}
		})
	}
}

// Somebody switches all kprobes off: the other programs see what there is.
func TestKprobesOff(t *testing.T) {
	machine.NeedKVM(t)
	machine.NeedProbes(t)
	const file = "/sys/kernel/debug/kprobes/enabled"
	if _, err := os.Stat(file); err != nil {
		t.Fatal(err)
	}
	target := &Target{Tier: "notifier/probe"}
	defer target.Close()
	total := new(Result)
	run := func(from, to uint64) {
		t.Helper()
		for i := from; i < to; i++ {
			r, err := target.Run(program(i))
			if err != nil {
				t.Fatalf("program %d: %v", i, err)
			}
			if total.Add(r); r.Finding != nil {
				t.Fatalf("program %d: %v", i, r.Finding)
			}
		}
	}
	run(0, 2)
	if err := os.WriteFile(file, []byte("0"), 0); err != nil {
		t.Fatal(err)
	}
	defer os.WriteFile(file, []byte("1"), 0)
	run(2, 8)
	if err := os.WriteFile(file, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	run(8, 10)
	if total.Hits == 0 || total.Changes == 0 {
		t.Errorf("%+v: that is no test", total)
	}
}

// The target dies of its program: that is a finding, and the next one has a
// new target.
func TestTargetDies(t *testing.T) {
	target := &Target{Tier: "syscall", Command: "/bin/false"}
	if _, err := target.Run(nil); !errors.Is(err, errDied) {
		t.Errorf("%v", err)
	}
	target.Command = ""
	defer target.Close()
	if r, err := target.Run(program(0)); err != nil || r.Ops == 0 {
		t.Fatalf("%+v, %v", r, err)
	}
	target.cmd.Process.Kill()
	r, err := target.Run(program(0))
	if err == nil && (r.Finding == nil || r.Finding.Kind != Died) {
		t.Errorf("%+v", r)
	}
	if r, err := target.Run(program(0)); err != nil || r.Finding != nil {
		t.Errorf("%+v, %v", r, err)
	}
}

func TestUnknownTier(t *testing.T) {
	target := &Target{Tier: "best"}
	if _, err := target.Run(nil); err == nil || !strings.Contains(err.Error(), `"best"`) {
		t.Errorf("%v", err)
	}
}

// Text and bytes hold the same program.
func TestLanguage(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, hugetlb := range []bool{false, true} {
		p := Generate(rng, 1000, hugetlb)
		if d := cmp.Diff(p, Decode(p.Encode())); d != "" {
			t.Error(d)
		}
		q, err := ParseProgram(p.String())
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(p, q); d != "" {
			t.Error(d)
		}
		for _, s := range p {
			if s.Area == TLB && !hugetlb {
				t.Fatalf("%v", s)
			}
		}
	}
	for _, bad := range []string{"t0", "t0 direct dance small 1 +1 to 0 arg 0", "t0 direct mmap small 1 +1 to 0 arg 256"} {
		if _, err := ParseProgram(bad); !errors.Is(err, errProgram) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// What matters is found among steps that do not, also if it is there only
// every other time.
func TestShrink(t *testing.T) {
	p := Generate(rand.New(rand.NewPCG(3, 4)), 100, false)
	p[17] = Step{Op: OpBreak, Thread: 1, How: Vfork, With: true, Area: Heap, Page: 9, Pages: 7, To: 99}
	p[80] = Step{Op: OpDetach, To: 98}
	runs := 0
	got, f := shrink(p, nil, func(q Program) *Finding {
		runs++
		seen := 0
		for _, s := range q {
			if s.Op == OpBreak && s.To == 99 && seen == 0 || s.Op == OpDetach && s.To == 98 && seen == 1 {
				seen++
			}
		}
		if seen < 2 {
			return nil
		}
		return &Finding{Step: len(q) - 1}
	})
	want := Program{{Op: OpBreak, Page: 9, Pages: 1, To: 99}, {Op: OpDetach, Pages: 1, To: 98}}
	if d := cmp.Diff(want, got); d != "" {
		t.Error(d)
	}
	if f == nil || f.Step != 1 {
		t.Errorf("%+v", f)
	}
	t.Logf("%d runs", runs)
}

// FuzzSequence runs any program on both tiers.
func FuzzSequence(f *testing.F) {
	for i := range uint64(4) {
		p := program(i)
		f.Add(p[:20].Encode())
	}
	targets := []*Target{{Tier: "syscall"}}
	if machine.HasKVM() {
		targets = append(targets, &Target{Tier: "notifier/tracepoint"})
	}
	f.Cleanup(func() {
		for _, t := range targets {
			t.Close()
		}
	})
	f.Fuzz(func(t *testing.T, b []byte) {
		p := Decode(b)
		if len(p) > 300 {
			p = p[:300]
		}
		for _, target := range targets {
			r, err := target.Run(p)
			if err != nil {
				t.Fatal(err)
			}
			if r.Finding != nil {
				t.Fatalf("tier %s: %v\n%v", target.Tier, r.Finding, p)
			}
		}
	})
}

// Programs of which something was found once, rightly or not.
func TestFoundBefore(t *testing.T) {
	release, err := ReserveHugePages(true)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := release(); err != nil {
			t.Error(err)
		}
	}()
	for _, c := range []struct {
		name, tier, program string
		hugetlb             bool
	}{
		{"mremap that grows within what would be one huge page", "syscall", `
			t0 direct register small   14 +1 to 25 arg 162
			t0 direct touch    hugetlb 0  +1 to  0 arg   1
			t0 direct register hugetlb 0  +1 to  0 arg   0
			t0 direct mremap   small   14 +1 to 34 arg  81 # grow`, true},
		{"the place that mremap moves to", "notifier/tracepoint", `
			t2 direct register small   60 +1  to 18 arg 248
			t0 direct mremap   small    4 +23 to 50 arg 103 # move onto`, false},
		{"the same page at two addresses, no change at all", "notifier/tracepoint", `
			t0 direct shmat    small    2 +1  to 49 arg 122
			t0 direct shmat    small    0 +1  to 59 arg 124
			t0 direct register small    2 +11 to  7 arg 212`, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			if c.tier != "syscall" {
				machine.NeedKVM(t)
			}
			p, err := ParseProgram(c.program)
			if err != nil {
				t.Fatal(err)
			}
			target := &Target{Tier: c.tier}
			defer target.Close()
			r := new(Result)
			for range 20 { // a registration may be refused for a change in flight
				if r, err = target.Run(p); err != nil {
					t.Fatal(err)
				}
				if r.Finding != nil || r.Registrations > 0 {
					break
				}
			}
			if r.Finding != nil || r.Registrations == 0 {
				t.Errorf("%+v, %v", r, r.Finding)
			}
			if r.Hugetlb != c.hugetlb {
				t.Error("no huge pages: is there memory for 8 of them?")
			}
		})
	}
}

// Found by a soak of notifier/tracepoint: a guard over a shared page that
// reclaim has unmapped takes rights away, tells no notifier, and the page that
// is registered goes on being the object's. A guard over a page that is mapped
// drops it, which is told.
func TestGuardOverUnmapped(t *testing.T) {
	ring, err := uring.Open(uring.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer ring.Close()
	fd, err := unix.MemfdCreate("shared", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(fd)
	if err := unix.Ftruncate(fd, int64(2*page)); err != nil {
		t.Fatal(err)
	}
	pagemap, err := os.Open("/proc/self/pagemap")
	if err != nil {
		t.Fatal(err)
	}
	defer pagemap.Close()
	b, err := unix.Mmap(fd, 0, int(2*page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(b)
	advise := func(b []byte, advice int) {
		t.Helper()
		if err := unix.Madvise(b, advice); err == unix.EINVAL && advice == advGuardInstall {
			t.Skip("no guards over files before Linux 6.15")
		} else if err != nil {
			t.Fatal(err)
		}
	}
	start := mm.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	tab := &table{pagemap: pagemap}
	for i, mapped := range []bool{false, true} {
		p := b[i*int(page):][:page]
		e := &entry{r: mm.Range{Start: start + mm.Addr(i)*mm.Addr(page), End: start + mm.Addr(i+1)*mm.Addr(page)}}
		buf, err := ring.Register(e.r, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer ring.Deregister(buf)
		v, err := tab.look(e.r)
		if err != nil {
			t.Fatal(err)
		}
		e.frames = []uint64{frame(v[0])}
		if mapped {
			// the page is dropped, and another takes its place
			if err := unix.Fallocate(fd, fallocPunchQuiet, int64(page), int64(page)); err != nil {
				t.Fatal(err)
			}
		} else {
			for begin := time.Now(); frame(v[0]) != 0; { // it may wait to get on the list that reclaim looks at
				advise(p, unix.MADV_PAGEOUT)
				if v, err = tab.look(e.r); err != nil {
					t.Fatal(err)
				}
				if time.Since(begin) > 20*time.Second {
					t.Fatal("reclaim does not unmap the page")
				}
			}
		}
		advise(p, advGuardInstall)
		for _, tab.unseenGuards = range []bool{false, true} {
			how, err := tab.changed(e)
			if err != nil {
				t.Fatal(err)
			}
			if want := mapped || !tab.unseenGuards; (how != "") != want {
				t.Errorf("page %d, guards are unseen: %v: %q", i, tab.unseenGuards, how)
			}
		}
	}
}
