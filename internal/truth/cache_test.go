// SPDX-License-Identifier: Apache-2.0

package truth

import (
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

// device registers memory of a program with the program's ring, in slots from
// 1 on.
type device struct {
	mu    sync.Mutex // guards everything: a program makes one call at a time
	p     *Proc
	taken [Slots]bool
	made  int // registrations so far
}

type registration struct{ slot, number int }

func (d *device) Register(r mm.Range, _ regcache.Access) (registration, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	ring, err := d.p.Ring()
	if err != nil {
		return registration{}, err
	}
	slot := slices.Index(d.taken[1:], false) + 1
	if slot == 0 {
		return registration{}, errors.New("no free slot")
	}
	if e := ring.Register(slot, r); e != 0 {
		return registration{}, unix.Errno(-e)
	}
	d.taken[slot] = true
	d.made++
	return registration{slot, d.made}, nil
}

func (d *device) Deregister(reg registration) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	ring, err := d.p.Ring()
	if err != nil {
		return err
	}
	d.taken[reg.slot] = false
	if e := ring.Unregister(reg.slot); e != 0 {
		return unix.Errno(-e)
	}
	return nil
}

// With the feed no lookup ever finds a registration that misses pages,
// whatever happened to them and by whatever way; and what happens to other
// memory, or cannot move a pinned page, costs no hit.
func TestCacheWithFeed(t *testing.T) {
	for _, impl := range Impls() {
		t.Run(impl.Name, func(t *testing.T) {
			p := start(t, impl)
			d := &device{p: p}
			c := openCache(t, d)
			for i := range Rows {
				row := &Rows[i]
				if !row.By(impl) {
					continue
				}
				t.Run(row.Name, func(t *testing.T) { cacheRow(t, c, d, row) })
				if row.Oracle == CPUOnly { // the address space is another one
					d.taken = [Slots]bool{}
					c = openCache(t, d)
				}
			}
		})
	}
}

func openCache(t *testing.T, d *device) *regcache.Cache[registration] {
	t.Helper()
	w, err := local.Open(local.Options{PID: d.p.PID()})
	if err != nil {
		t.Fatal(err)
	}
	c, err := regcache.New(w, d, regcache.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := errors.Join(c.Close(), w.Close()); err != nil {
			t.Error(err)
		}
	})
	return c
}

func cacheRow(t *testing.T, c *regcache.Cache[registration], d *device, row *Row) {
	const threads = 8
	r, err := row.Setup(d.p)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := r.Teardown(); err != nil {
			t.Error(err)
		}
	}()
	first, err := c.Acquire(r.Buffer(), regcache.LocalWrite)
	if row.Refused != 0 || row.Oracle == Splice {
		if !errors.Is(err, unix.EFAULT) {
			t.Fatalf("acquire: %v, want EFAULT", err)
		}
		return
	}
	if err != nil {
		t.Fatal(err)
	}
	cached, reason := first.Cached()
	// Anonymous memory of hugetlb has a file in /proc/PID/maps.
	if file := row.Memory.File() || row.Memory == HugetlbAnon; cached == file {
		t.Errorf("cached %v (%v) of %v", cached, reason, row.Memory)
	}
	old := first.Handle()
	first.Release()

	if err := r.Act(); err != nil {
		t.Fatal(err)
	}

	refs := make([]regcache.Ref[registration], threads)
	errs := make([]error, threads)
	var wg sync.WaitGroup
	for i := range threads {
		wg.Go(func() { refs[i], errs[i] = c.Acquire(r.Buffer(), regcache.LocalWrite) })
	}
	wg.Wait()
	for i := range threads {
		if errs[i] != nil {
			if !refusesMemory(errs[i]) {
				t.Errorf("acquire: %v, want success or a refusal of the memory that is there now", errs[i])
			}
			continue
		}
		defer refs[i].Release()
		hit := refs[i].Handle() == old
		if hit && row.Name == "mprotect-read" {
			t.Error("a hit with a right that the memory no longer has")
		}
		if row.Oracle == CPUOnly {
			if hit {
				t.Error("a hit of memory that is gone")
			}
			continue
		}
		// A lookup while another thread drains may give up and register.
		_, why := refs[i].Cached()
		if !hit && cached && !row.Changes() && row.May == nil && why != regcache.ReasonBusy {
			t.Errorf("registered again, though nothing happened (%v)", c.Stats())
		}
		d.mu.Lock()
		seen, err := r.OracleThrough(refs[i].Handle().slot)
		d.mu.Unlock()
		if err != nil {
			t.Error(err)
		}
		if strings.Trim(seen, ".") != "" {
			t.Errorf("thread %d has pages %s; a hit: %v", i, seen, hit)
		}
	}
}

// refusesMemory reports whether a registration failed because of the memory:
// none or no right to it, and on kernels that do not register mappings of
// files those, and buffers that are part of one.
func refusesMemory(err error) bool {
	files, _ := RegisterFile.Available()
	return errors.Is(err, unix.EFAULT) || !files && (errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL))
}
