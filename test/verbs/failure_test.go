// SPDX-License-Identifier: Apache-2.0

//go:build linux

package verbs

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/ibv"
)

// No device of that name, next to one that there is.
func TestNoDevice(t *testing.T) {
	r := newRig(t)
	_, err := ibv.Open("mlx5_77")
	if !errors.Is(err, ibv.ErrNoDevice) || !strings.Contains(err.Error(), "there are: ") || !strings.Contains(err.Error(), r.dev.Name()) {
		t.Error(err)
	}
}

// The order of closing is enforced, and nothing is lost by trying another one.
func TestCloseOrder(t *testing.T) {
	r := newRig(t)
	dev, err := ibv.Open(*device)
	must(t, err)
	pd, err := dev.NewPD(ibv.Options{})
	must(t, err)
	cache, err := regcache.New(openFeed(t), pd, regcache.Options{})
	must(t, err)
	q, err := pd.NewQueue(ibv.QueueOptions{})
	must(t, err)
	b := mapPages(t, 2)
	ref, err := cache.Acquire(b.span(), all)
	must(t, err)
	busy := func(what string, err error, mrs, queues int) {
		t.Helper()
		var e *ibv.BusyError
		if !errors.As(err, &e) || !errors.Is(err, unix.EBUSY) || e.MRs != mrs || e.Queues != queues {
			t.Errorf("close %s: %v", what, err)
		}
	}
	busy("device", dev.Close(), 1, 0)
	busy("protection domain", pd.Close(), 1, 1)
	if ok := ref.Handle().Registered(); !ok {
		t.Error("the region is gone")
	}
	ref.Release()
	must(t, q.Close())
	busy("protection domain", pd.Close(), 1, 0)
	again, err := cache.Acquire(b.span(), all)
	must(t, err)
	if s := cache.Stats(); s.Hits == 0 && s.Registrations < 2 {
		t.Errorf("the cache is of no use any more: %+v", s)
	}
	again.Release()
	must(t, cache.Close())
	must(t, pd.Close())
	must(t, pd.Close())
	must(t, dev.Close())
	must(t, dev.Close())
	if _, err := dev.NewPD(ibv.Options{}); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
	// the other device's handle is as it was
	if b := mapPages(t, 1); pages(b, r.through(newCache(t, nil, r.pd, regcache.Options{}), b.span())) != "." {
		t.Error("the bytes are not there")
	}
}

func tool(t *testing.T, args ...string) {
	t.Helper()
	if out, err := exec.Command(args[0], args[1:]...).CombinedOutput(); err != nil {
		t.Fatalf("%v: %v: %s", args, err, out)
	}
}

// The device is removed while a cache has registrations on it. A driver that
// can do without its users (disassociate_ucontext) takes them from under it,
// and it is told. Soft-RoCE cannot: who removes it waits until nobody has it
// open, and until then everything goes on.
func TestDeviceRemoved(t *testing.T) {
	r := newRig(t)
	tool(t, "rdma", "link", "add", "removed0", "type", "rxe", "netdev", "lo")
	there := true
	defer func() {
		if there {
			tool(t, "rdma", "link", "delete", "removed0")
		}
	}()
	dev, err := ibv.Open("removed0")
	must(t, err)
	pd, err := dev.NewPD(ibv.Options{})
	must(t, err)
	w := openFeed(t)
	cache, err := regcache.New(w, pd, regcache.Options{})
	must(t, err)
	b, other := mapPages(t, 2), mapPages(t, 2)
	ref, err := cache.Acquire(b.span(), all)
	must(t, err)
	if dev.Removed() {
		t.Error("removed before it was")
	}

	there = false
	removing := exec.Command("rdma", "link", "delete", "removed0")
	must(t, removing.Start())
	gone := make(chan error, 1)
	go func() { gone <- removing.Wait() }()
	waits := false
	for start := time.Now(); !dev.Removed() && !waits; waits = time.Since(start) > 5*time.Second {
		select {
		case err := <-gone:
			gone <- err
			if !dev.Removed() {
				t.Fatalf("it is gone (%v), and nobody says so", err)
			}
		default:
			time.Sleep(10 * time.Millisecond)
		}
	}
	more, err := cache.Acquire(other.span(), all)
	if waits {
		must(t, err) // as if nothing were
	} else if !errors.Is(err, ibv.ErrRemoved) {
		t.Errorf("a registration on a removed device: %v", err)
	}
	t.Attr("removal-waits-for-users", fmt.Sprint(waits))
	ref.Release()
	more.Release()
	for _, c := range []struct {
		what  string
		close func() error
	}{{"cache", cache.Close}, {"protection domain", pd.Close}, {"device", dev.Close}} {
		if err := c.close(); err != nil {
			t.Errorf("close %s: %v", c.what, err)
		}
	}
	if err := <-gone; err != nil {
		t.Errorf("remove: %v", err)
	}

	// The feed goes on, with another device.
	next := newCache(t, w, r.pd, regcache.Options{})
	if got := pages(other, r.through(next, other.span())); got != ".." {
		t.Errorf("the processor sees %s", got)
	}
	_, err = ibv.Open("removed0")
	if !errors.Is(err, ibv.ErrNoDevice) {
		t.Errorf("open: %v", err)
	}
}

// memlock and cgroup run in children, which have the limits.
func init() {
	children["memlock"] = memlockChild
	children["regions"] = regionsChild
}

func runChild(t *testing.T, name string, attr *syscall.SysProcAttr) {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", "-device="+*device, "-tier="+tier.String())
	cmd.Env = append(os.Environ(), childEnv+"="+name)
	cmd.SysProcAttr = attr
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Error(err)
	}
}

// open is what a child has: device, protection domain, feed and cache.
func open() (*ibv.PD, *regcache.Cache[*ibv.MR], func() error, error) {
	dev, err := ibv.Open(*device)
	if err != nil {
		return nil, nil, nil, err
	}
	pd, err := dev.NewPD(ibv.Options{})
	if err != nil {
		return nil, nil, nil, err
	}
	w, err := local.Open(local.Options{Tier: tier})
	if err != nil {
		return nil, nil, nil, err
	}
	c, err := regcache.New(w, pd, regcache.Options{})
	return pd, c, func() error { return errors.Join(c.Close(), w.Close(), pd.Close(), dev.Close()) }, err
}

func childPages(n int) (block, error) {
	b, err := unix.Mmap(-1, 0, n*page, readWrite, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	return b, err
}

const memlockLimit = 64 << 10

// 64 KiB of locked memory: the error has the figures, and what is idle makes
// room.
func TestMemlock(t *testing.T) {
	newRig(t)
	runChild(t, "memlock", nil)
}

func memlockChild() error {
	runtime.LockOSThread() // capabilities and the limit's exemption are the thread's
	_, c, closeAll, err := open()
	if err != nil {
		return err
	}
	a, err := childPages(12)
	if err != nil {
		return err
	}
	b, err := childPages(8)
	if err != nil {
		return err
	}
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: memlockLimit, Max: memlockLimit}); err != nil {
		return err
	}
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var caps [2]unix.CapUserData
	if err := unix.Capget(&h, &caps[0]); err != nil {
		return err
	}
	caps[0].Effective &^= 1 << unix.CAP_IPC_LOCK
	if err := unix.Capset(&h, &caps[0]); err != nil {
		return err
	}
	held, err := c.Acquire(a.span(), all)
	if err != nil {
		return fmt.Errorf("48 KiB of 64: %w", err)
	}
	_, err = c.Acquire(b.span(), all)
	var full *regcache.LimitError
	var why *ibv.RegisterError
	if !errors.As(err, &full) || !errors.As(err, &why) || !errors.Is(err, unix.ENOMEM) {
		return fmt.Errorf("32 KiB more: %w, want a LimitError", err)
	}
	fmt.Println(err)
	if full.Limit != memlockLimit || full.Use < uint64(len(a)) || full.Need != uint64(len(b)) ||
		why.Memlock != memlockLimit || why.Pinned < uint64(len(a)) || !strings.Contains(err.Error(), "ulimit -l") {
		return fmt.Errorf("figures: %+v, %+v", full, why)
	}
	held.Release()
	ref, err := c.Acquire(b.span(), all) // the idle one makes room
	if err != nil {
		return fmt.Errorf("when nothing is in use: %w", err)
	}
	ref.Release()
	before := c.Stats().Hits
	if ref, err = c.Acquire(b.span(), all); err != nil {
		return err
	}
	ref.Release()
	if s := c.Stats(); s.Evicted == 0 {
		return fmt.Errorf("nothing was evicted: %+v", s)
	} else if s.Hits == before {
		fmt.Println("not a hit: records were lost meanwhile")
	}
	return closeAll()
}

// The limit of regions, by a control group: the devices' own are in the
// hundred thousands.
func TestRegionLimit(t *testing.T) {
	newRig(t)
	const root = "/sys/fs/cgroup"
	must(t, os.WriteFile(root+"/cgroup.subtree_control", []byte("+rdma"), 0))
	dir := filepath.Join(root, "regions")
	must(t, os.Mkdir(dir, 0o755))
	defer os.Remove(dir)
	must(t, os.WriteFile(dir+"/rdma.max", []byte(*device+" hca_object=9"), 0)) // a protection domain and eight regions
	f, err := os.Open(dir)
	must(t, err)
	defer f.Close()
	runChild(t, "regions", &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())})
}

func regionsChild() error {
	const limit = 8
	_, c, closeAll, err := open()
	if err != nil {
		return err
	}
	b, err := childPages(64)
	if err != nil {
		return err
	}
	one := func(i int) mm.Range { return b.part(i, 1).span() }
	for i := range 3 * limit { // idle ones make room
		ref, err := c.Acquire(one(i), all)
		if err != nil {
			return fmt.Errorf("region %d: %w", i, err)
		}
		ref.Release()
	}
	if s := c.Stats(); s.Evicted < limit {
		return fmt.Errorf("%d evicted", s.Evicted)
	}
	var held []regcache.Ref[*ibv.MR]
	for i := range limit {
		ref, err := c.Acquire(one(i), all)
		if err != nil {
			return fmt.Errorf("held region %d: %w", i, err)
		}
		held = append(held, ref)
	}
	_, err = c.Acquire(one(limit), all)
	if !errors.Is(err, regcache.ErrLimit) {
		return fmt.Errorf("one more than the limit: %w, want ErrLimit", err)
	}
	fmt.Println(err)
	for _, ref := range held {
		ref.Release()
	}
	ref, err := c.Acquire(one(limit), all)
	if err != nil {
		return fmt.Errorf("when nothing is in use: %w", err)
	}
	ref.Release()
	return closeAll()
}

// A feed that ends: nothing is cached any more, every transfer is right.
func TestFeedEnds(t *testing.T) {
	r := newRig(t)
	w, err := local.Open(local.Options{Tier: tier})
	must(t, err)
	c := newCache(t, w, r.pd, regcache.Options{})
	b := mapPages(t, 2)
	r.through(c, b.span())
	must(t, w.Close())
	must(t, unix.Madvise(b, unix.MADV_DONTNEED))
	want := r.through(c, b.span())
	if !bytes.Equal(b, want) {
		t.Error("the bytes are not there")
	}
	if s := c.Stats(); s.Uncached[regcache.ReasonDead] != 1 {
		t.Errorf("%+v", s)
	}
}
