// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"encoding/json"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

func TestCoverage(t *testing.T) {
	for name, c := range map[string]Coverage{"open": shared.Coverage(), "probe": Probe()} {
		if c.Tier != TierSyscall {
			t.Errorf("%s: tier %v", name, c.Tier)
		}
		seen := map[string]bool{}
		for _, h := range c.Hooks {
			if h.Name == "" || h.Sees == "" || seen[h.Name] || HookName(h.Hook) != h.Name {
				t.Errorf("%s: hook %+v", name, h)
			}
			seen[h.Name] = true
			if (h.Err == nil) != h.Attached || h.Required && !h.Attached {
				t.Errorf("%s: %s attached %v, error %v", name, h.Name, h.Attached, h.Err)
			}
		}
		for _, call := range []string{"munmap", "mremap", "mprotect"} {
			for _, side := range []string{"enter", "exit"} {
				if n := "tracepoint/syscalls/sys_" + side + "_" + call; !seen[n] {
					t.Errorf("%s: %s is not in the coverage", name, n)
				}
			}
		}
		gaps := map[string]bool{}
		for _, g := range c.Gaps {
			if g.What == "" || gaps[g.Name] || strings.ContainsRune(g.Name, ' ') {
				t.Errorf("%s: gap %+v", name, g)
			}
			gaps[g.Name] = true
		}
		for _, g := range []string{"file-truncate", "file-direct-write", "driver-mapping"} {
			if !gaps[g] {
				t.Errorf("%s: gap %s is hidden", name, g)
			}
		}
	}
	if b, err := json.Marshal(TierSyscall); err != nil || string(b) != `"syscall"` {
		t.Errorf("tier in JSON: %s, %v", b, err)
	}
	if HookName(0) != "none" || HookName(200) != "hook(200)" || Tier(99).String() != "tier(99)" {
		t.Error("names of what does not exist")
	}
}

// All sees every process, new ones too, and keeps their spaces apart.
func TestAll(t *testing.T) {
	p := startTracee(t)
	s := watch(t, shared, All(), WatchOptions{Kinds: []mm.Kind{mm.Unmap, mm.Exit}, RingBytes: 64 << 20})
	q := startTracee(t)
	p.call(t, unix.SYS_MUNMAP, "A+1", mm.PageSize())
	q.call(t, unix.SYS_MUNMAP, "A+2", mm.PageSize())
	child := p.do(t, "fork 1")[0]
	if err := q.end(); err != nil {
		t.Fatal(err)
	}
	records := drain(t, s)
	ofQ := func(x *mm.Record) bool { return x.PID == uint32(q.pid) }
	if seen := those(records, ofQ); len(seen) != 0 {
		space := seen[0].Space
		died := func(x *mm.Record) bool { return isDeath(x) && x.Space == space }
		for start := time.Now(); len(those(records, died)) == 0 && time.Since(start) < 20*time.Second; {
			records = append(records, drain(t, s)...)
		}
	}
	of := func(pid int, r mm.Range) []mm.Record {
		return those(records, func(x *mm.Record) bool { return x.PID == uint32(pid) && x.Kind == mm.Unmap && x.Range == r })
	}
	a, b, c := of(p.pid, p.page(1, 1)), of(q.pid, q.page(2, 1)), of(int(child), p.page(0, 1))
	if len(a) != 2 || len(b) != 2 || len(c) != 2 {
		t.Fatalf("%d %d %d records of three unmaps, want 2 of each", len(a), len(b), len(c))
	}
	if a[0].Space == b[0].Space || a[0].Space == c[0].Space || b[0].Space == c[0].Space || a[0].Space != a[1].Space {
		t.Errorf("spaces:%s", show(append(append(a, b...), c...)))
	}
	deaths := those(records, func(x *mm.Record) bool { return isDeath(x) && x.Space == b[0].Space })
	if len(deaths) == 0 { // more, if others got its address after it
		t.Error("no death of a space that died")
	}
	for i := range records {
		if k := records[i].Kind; k != mm.Unmap && k != mm.Exit && k != mm.Lost {
			t.Fatalf("kind %v was not asked for", k)
		}
	}
}

// When everything that was watched is dead, the kernel side remembers nothing.
func TestNothingIsKept(t *testing.T) {
	tr, err := Open(Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	entries := func(m *ebpf.Map) (n int) {
		t.Helper()
		key, value := make([]byte, m.KeySize()), make([]byte, m.ValueSize())
		it := m.Iterate()
		for it.Next(&key, &value) {
			n++
		}
		if err := it.Err(); err != nil {
			t.Fatal(err)
		}
		return n
	}
	maps := map[string]*ebpf.Map{"spaces": tr.objs.Spaces, "procs": tr.objs.Procs, "tasks": tr.objs.Tasks, "requests": tr.objs.Requests}

	p := startTracee(t)
	s := watch(t, tr, PID(p.pid), WatchOptions{Follow: true})
	p.do(t, "threads 8 10")
	p.do(t, "reset")
	p.do(t, "vfork")
	p.do(t, "clonevm")
	p.do(t, "spawn")
	p.do(t, "fork 20")
	for _, mode := range []string{"inline", "async", "sqpoll", "linked"} {
		p.tell(t, "uring %s", mode)
		p.answer(t, "ok", 4)
	}
	p.tell(t, "exec")
	p.ready(t)
	p.call(t, unix.SYS_MUNMAP, "A", mm.PageSize())
	for name, m := range maps {
		if n, want := entries(m), name != "requests"; (n > 0) != want {
			t.Errorf("%d entries in %s while it lives", n, name)
		}
	}
	p.tell(t, "mainexit")
	p.answer(t, "ok", 1)
	if err := p.end(); err != nil {
		t.Fatal(err)
	}
	for name, m := range maps {
		n := entries(m)
		for start := time.Now(); n != 0 && time.Since(start) < 20*time.Second; n = entries(m) {
			runtime.Gosched() // a space may die a little after its last task
		}
		if n != 0 {
			t.Errorf("%d entries are left in %s", n, name)
		}
	}
	complete(t, drain(t, s), 1)
}
