// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/truth"
	"github.com/ummu/ummu/internal/truth/ops"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

var contractTier = flag.String("contract-tier", "", "`tier` in which the truth table is performed; all that the machine has, if it is not given")

// contractTiers are those in which the table is performed.
func contractTiers() []tracer.Tier {
	tiers := []tracer.Tier{tracer.TierSyscall}
	if machine.HasProbes() {
		tiers = append(tiers, tracer.TierMM)
	}
	if machine.HasKVM() {
		tiers = append(tiers, tracer.TierNotifierTracepoint)
		if machine.HasProbes() {
			tiers = append(tiers, tracer.TierNotifierProbe)
		}
	}
	if *contractTier != "" {
		tiers = slices.DeleteFunc(tiers, func(t tracer.Tier) bool { return t.String() != *contractTier })
	}
	return tiers
}

// contractClient is the first argument of a client that performs the table. It
// must survive exec, of which the environment is not kept.
const contractClient = "contract-client"

// ringDevice registers memory in the slots of an io_uring from 1 on, as a
// network card's memory regions.
type ringDevice struct {
	mu    sync.Mutex // guards what follows
	ring  uintptr
	taken [truth.Slots]bool
	made  int // registrations so far
}

type registered struct{ slot, number int }

// update replaces the buffer of a slot.
func (d *ringDevice) update(slot int, r mm.Range) error {
	const registerBuffersUpdate = 16
	iov := &[2]uint64{uint64(r.Start), r.Len()}
	var pin runtime.Pinner
	pin.Pin(iov)
	defer pin.Unpin()
	// struct io_uring_rsrc_update2 {u32 offset, resv; u64 data, tags; u32 nr, resv2}
	update := [4]uint64{uint64(slot), uint64(uintptr(unsafe.Pointer(iov))), 0, 1}
	n, _, e := unix.Syscall6(unix.SYS_IO_URING_REGISTER, d.ring, registerBuffersUpdate, uintptr(unsafe.Pointer(&update)), unsafe.Sizeof(update), 0, 0)
	switch {
	case e != 0:
		return e
	case n != 1:
		return unix.EINVAL
	}
	return nil
}

func (d *ringDevice) Register(r mm.Range, _ regcache.Access) (registered, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	slot := slices.Index(d.taken[1:], false) + 1
	if slot == 0 {
		return registered{}, errors.New("no free slot")
	}
	if err := d.update(slot, r); err != nil {
		return registered{}, err
	}
	d.taken[slot] = true
	d.made++
	return registered{slot, d.made}, nil
}

func (d *ringDevice) Deregister(reg registered) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.taken[reg.slot] = false
	return d.update(reg.slot, mm.Range{})
}

// found is what one lookup of the client found.
type found struct {
	slot, number int
	cached       bool
	reason       uint8 // regcache.Reason
	errno        uint  // if not 0, of the refusal, and nothing else
}

// runContract is the client: it makes the calls that it is told to make, as
// the programs of the truth table do, and has a cache over the daemon's feed.
func runContract(socket string) error {
	var w *feed.Watch
	var c *regcache.Cache[registered]
	var refs []regcache.Ref[registered]
	failed := func(err error) string {
		if err != nil {
			return "error: " + strings.ReplaceAll(err.Error(), "\n", "; ")
		}
		return "ok"
	}
	return ops.ServeWith(os.Stdin, os.Stdout, map[string]ops.Verb{
		"restrict": func([]uintptr) string { return failed(restrict()) },
		"dial": func(a []uintptr) string { // with the ring's descriptor
			var err error
			if w, err = feed.Dial(context.Background(), feed.Options{Socket: socket}); err != nil {
				return failed(err)
			}
			c, err = regcache.New(w, &ringDevice{ring: a[0]}, regcache.Options{})
			if err != nil {
				return failed(err)
			}
			return tracer.Tier(w.Tier()).String()
		},
		"acquire": func(a []uintptr) string { // in so many threads at once, from an address to another
			r := mm.Range{Start: mm.Addr(a[1]), End: mm.Addr(a[2])}
			got, errs := make([]regcache.Ref[registered], a[0]), make([]error, a[0])
			var wg sync.WaitGroup
			for i := range got {
				wg.Go(func() { got[i], errs[i] = c.Acquire(r, regcache.LocalWrite) })
			}
			wg.Wait()
			var b strings.Builder
			for i, ref := range got {
				var e unix.Errno
				if errs[i] != nil && !errors.As(errs[i], &e) {
					return failed(errs[i])
				}
				if errs[i] != nil {
					fmt.Fprintf(&b, "0 0 false 0 %d ", int(e))
					continue
				}
				cached, why := ref.Cached()
				fmt.Fprintf(&b, "%d %d %v %d 0 ", ref.Handle().slot, ref.Handle().number, cached, why)
				refs = append(refs, ref)
			}
			return b.String()
		},
		"release": func([]uintptr) string {
			for i := range refs {
				refs[i].Release()
			}
			refs = nil
			return "ok"
		},
		"losses": func([]uintptr) string { return strconv.FormatUint(w.Stats().Losses, 10) },
	})
}

// contractor is such a client.
type contractor struct {
	*truth.Proc
	t testing.TB
}

func startContractor(t testing.TB, uid int, socket string) *contractor {
	t.Helper()
	cmd := exec.Command(binary, contractClient, socket)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if uid != 0 {
		cmd.SysProcAttr.Credential = &syscall.Credential{Uid: uint32(uid), Gid: uint32(uid)}
	}
	p, err := truth.Start(truth.Impl{Name: "client"}, cmd)
	if err != nil {
		t.Fatal(err)
	}
	return &contractor{p, t}
}

// lockAll lets a program lock as much memory as it likes, as sites with RDMA
// do; false: this process may not (CAP_SYS_RESOURCE).
func (c *contractor) lockAll() bool {
	c.t.Helper()
	err := unix.Prlimit(c.PID(), unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}, nil)
	if err != nil && err != unix.EPERM {
		c.t.Fatal(err)
	}
	return err == nil
}

// order makes the client do something that has one right answer.
func (c *contractor) order(want, verb string, args ...any) {
	c.t.Helper()
	if got := c.Do(verb, args...); got != want {
		c.t.Fatalf("%s: %s (%v), want %s", verb, got, c.Err(), want)
	}
}

func (c *contractor) dial(tier tracer.Tier) {
	c.t.Helper()
	ring, err := c.Ring()
	if err != nil {
		c.t.Fatal(err)
	}
	c.order(tier.String(), "dial", ring.FD())
}

func (c *contractor) acquire(t testing.TB, threads int, r mm.Range) []found {
	t.Helper()
	words := strings.Fields(c.Do("acquire", threads, r.Start, r.End))
	fs := make([]found, threads)
	if len(words) != 5*threads {
		t.Fatalf("acquire: %s (%v)", strings.Join(words, " "), c.Err())
	}
	for i := range fs {
		f := &fs[i]
		if _, err := fmt.Sscan(strings.Join(words[5*i:][:5], " "), &f.slot, &f.number, &f.cached, &f.reason, &f.errno); err != nil {
			t.Fatal(err)
		}
	}
	return fs
}

// forbidden are the rows that need calls which the filter forbids.
var forbidden = []string{
	"mmap-fixed-refused-by-driver", "register-driver-mapping", // perf_event_open
	"mremap-away-in-part", "uffd-move-pinned", "uffd-writeprotect", // userfaultfd
}

// The whole truth table through the socket: a client as uid 65534, without
// capabilities, with a filter that kills it at bpf, perf_event_open and
// userfaultfd, never finds a registration that misses pages, whatever happened
// to them, in whatever tier; and what happens to other memory, or cannot move a
// pinned page, costs no hit. The few rows that need a forbidden call are
// performed by a client without filter; those of huge pages, where the limit of
// locked memory cannot be raised, by one of root with the filter.
func TestContract(t *testing.T) {
	for _, tier := range contractTiers() {
		t.Run(tier.String(), func(t *testing.T) {
			s := start(t, Config{Tiers: []tracer.Tier{tier}, AllowKVM: true})
			restricted, root, free := startContractor(t, nobody, s.Addr()), startContractor(t, 0, s.Addr()), startContractor(t, 0, s.Addr())
			restricted.order("ok", "restrict")
			root.order("ok", "restrict")
			locks := restricted.lockAll()
			for _, c := range []*contractor{restricted, root, free} {
				defer func() {
					if err := c.Close(); err != nil {
						t.Error(err)
					}
				}()
				c.dial(tier)
			}
			done := 0
			for i := range truth.Rows {
				row := &truth.Rows[i]
				c := restricted
				switch {
				case slices.Contains(forbidden, row.Name):
					c = free
				case !locks && (row.Memory == truth.HugetlbAnon || row.Memory == truth.HugetlbShared):
					c = root
				}
				if !row.By(c.Impl) {
					continue
				}
				done++
				t.Run(row.Name, func(t *testing.T) { contractRow(t, c, tier, row) })
				if row.Oracle == truth.CPUOnly { // the address space is another one
					c.dial(tier)
				}
			}
			t.Logf("%d of %d rows", done, len(truth.Rows))
		})
	}
}

// The filter is one: each row that is left to the other client ends this one.
func TestContractForbids(t *testing.T) {
	for _, name := range forbidden {
		i := slices.IndexFunc(truth.Rows, func(r truth.Row) bool { return r.Name == name })
		if i < 0 {
			t.Errorf("no row is named %s", name)
			continue
		}
		row := &truth.Rows[i]
		t.Run(name, func(t *testing.T) {
			c := startContractor(t, nobody, "")
			if !row.By(c.Impl) {
				c.Close()
				return
			}
			c.order("ok", "restrict")
			if r, err := row.Setup(c.Proc); err == nil && row.Act != nil {
				row.Act(r)
			}
			var ended *exec.ExitError
			if err := c.Close(); !errors.As(err, &ended) || ended.Sys().(syscall.WaitStatus).Signal() != syscall.SIGSYS {
				t.Errorf("the row is not forbidden: %v", err)
			}
		})
	}
}

func contractRow(t *testing.T, c *contractor, tier tracer.Tier, row *truth.Row) {
	const threads = 8
	r, err := row.Setup(c.Proc)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		c.order("ok", "release")
		if err := r.Teardown(); err != nil {
			t.Error(err)
		}
	}()
	first := c.acquire(t, 1, r.Buffer())[0]
	if row.Refused != 0 || row.Oracle == truth.Splice {
		if first.errno != uint(unix.EFAULT) {
			t.Fatalf("acquire: %+v, want EFAULT", first)
		}
		return
	}
	// Something else may be in flight, or lost: that passes.
	for deadline := time.Now().Add(20 * time.Second); !first.cached && first.errno == 0 && passes(regcache.Reason(first.reason)); first = c.acquire(t, 1, r.Buffer())[0] {
		if time.Now().After(deadline) {
			t.Fatalf("not cached for 20 s: %v", regcache.Reason(first.reason))
		}
		c.order("ok", "release")
	}
	if first.errno != 0 {
		t.Fatalf("acquire: %v", unix.Errno(first.errno))
	}
	// Anonymous memory of hugetlb has a file in /proc/PID/maps.
	file := row.Memory.File() || row.Memory == truth.HugetlbAnon
	if want := tier != tracer.TierSyscall || !file; first.cached != want {
		t.Errorf("cached %v (%v) of %v", first.cached, regcache.Reason(first.reason), row.Memory)
	}
	c.order("ok", "release")
	losses := c.Do("losses")

	if err := r.Act(); err != nil {
		t.Fatal(err)
	}
	if row.Oracle == truth.CPUOnly {
		return // nothing of the client is left that could look anything up
	}
	for i, f := range c.acquire(t, threads, r.Buffer()) {
		if f.errno != 0 {
			if !refusesMemory(unix.Errno(f.errno)) {
				t.Errorf("acquire: %v, want success or a refusal of the memory that is there now", unix.Errno(f.errno))
			}
			continue
		}
		hit := f.number == first.number
		if hit && row.Name == "mprotect-read" {
			t.Error("a hit with a right that the memory no longer has")
		}
		// A lookup while another thread drains may give up and register. Of
		// what the hook cannot tell whose it is the client drops everything.
		if !hit && first.cached && !row.Changes() && row.May == nil && regcache.Reason(f.reason) != regcache.ReasonBusy && c.Do("losses") == losses {
			t.Errorf("registered again (%v), though nothing happened", regcache.Reason(f.reason))
		}
		seen, err := r.OracleThrough(f.slot)
		if err != nil {
			t.Error(err)
		}
		if strings.Trim(seen, ".") != "" {
			t.Errorf("thread %d has pages %s; a hit: %v", i, seen, hit)
		}
	}
}

// passes reports whether what was not cached for a reason may be later.
func passes(r regcache.Reason) bool {
	switch r {
	case regcache.ReasonBusy, regcache.ReasonChanged, regcache.ReasonInFlight, regcache.ReasonLost:
		return true
	}
	return false
}

// refusesMemory reports whether a registration failed because of the memory:
// none or no right to it, and on kernels that do not register mappings of
// files those, and buffers that are part of one.
func refusesMemory(e unix.Errno) bool {
	files, _ := truth.RegisterFile.Available()
	return e == unix.EFAULT || !files && (e == unix.EOPNOTSUPP || e == unix.EINVAL)
}
