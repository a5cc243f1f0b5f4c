// SPDX-License-Identifier: Apache-2.0

// Package local is the in-process feed: a program that has the privileges
// (CAP_BPF and CAP_PERFMON, or root) loads the kernel side itself. Programs
// without privileges get the same [feed.Watch] from the daemon.
package local

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// Options configure [Open]. The zero value watches the calling process.
type Options struct {
	// PID is the process to watch; 0: the calling one. Whoever watches
	// another process registers its memory on its behalf, or knows when it
	// does: the rules of Begin and Commit are the same.
	PID int
	// RingBytes is the size of the ring: a power of two, at least the page
	// size. 0: 256 KiB.
	RingBytes int
	// NoWakeup saves the wake-up of a waiting Wait per record, which then
	// looks every 20 ms instead.
	NoWakeup bool
	// Tier is how changes are seen. 0: the syscall tier; [Choose] may know a
	// stronger one that works here. The notifier tiers
	// give the calling process an MMU notifier ([tracer.MakeNotifier]);
	// another process needs one of the two options below.
	Tier tracer.Tier
	// VM is a KVM virtual machine that process PID has made (KVM_CREATE_VM
	// binds it to the address space of the caller) and passed on, by which
	// it has a notifier. It stays the caller's; the watch keeps a duplicate,
	// so that it may be closed everywhere else.
	VM *os.File
	// Inject stops process PID by ptrace, for some milliseconds, and makes
	// it make such a machine. Only amd64; not a process under seccomp.
	Inject bool
}

// The kernel side is loaded once per process and tier, for all its watches.
var shared struct {
	mu    sync.Mutex // guards the map; held over loading and unloading
	tiers map[tracer.Tier]*kernelSide
}

type kernelSide struct {
	tracer   *tracer.Tracer
	notifier *tracer.Notifier // of the notifier tiers; guarded by shared.mu
	users    int              // likewise
}

// Open opens a watch of one address space. When it returns the kernel side
// sees every change. Close of the watch frees it, and with the last one the
// kernel side. Errors are those of [tracer.Open] and [tracer.Tracer.OpenFeed].
//
// It takes some 0.5 s for the first watch of a process (loading and
// verifying the programs) and milliseconds for each further one.
func Open(o Options) (*feed.Watch, error) {
	tier := o.Tier
	if tier == tracer.TierNone {
		tier = tracer.TierSyscall
	}
	openIt := openTier
	if needsNotifier(tier) && o.PID != 0 && o.PID != os.Getpid() {
		openIt = openOther
	}
	w, err := openIt(tier, o)
	if err != nil {
		return nil, fmt.Errorf("open local feed: tier %v: %w", tier, err)
	}
	return w, nil
}

func openTier(tier tracer.Tier, o Options) (*feed.Watch, error) {
	k, err := acquire(tier)
	if err != nil {
		return nil, err
	}
	holder := k.holder()
	free := func() error { return release(tier) }
	w, err := open(k, tier, o, holder, free)
	if errors.Is(err, errSilent) {
		// The program has unmapped the page that keeps the notifier.
		if err = k.renew(holder); err == nil {
			w, err = open(k, tier, o, k.holder(), free)
		}
	}
	if err != nil {
		return nil, errors.Join(err, release(tier))
	}
	return w, nil
}

// needsNotifier reports whether a tier sees nothing of a process that has no
// MMU notifier.
func needsNotifier(t tracer.Tier) bool {
	return t == tracer.TierNotifierProbe || t == tracer.TierNotifierTracepoint
}

// open opens a watch whose Close calls free last; an error does not. holder is
// the page of this process that keeps the notifier, 0 if something else does.
func open(k *kernelSide, tier tracer.Tier, o Options, holder mm.Addr, free func() error) (*feed.Watch, error) {
	target, maps := tracer.Self(), "/proc/self/maps"
	if o.PID != 0 && o.PID != os.Getpid() {
		target, maps = tracer.PID(o.PID), fmt.Sprintf("/proc/%d/maps", o.PID)
	}
	f, err := k.tracer.OpenFeed(target, tracer.FeedOptions{RingBytes: o.RingBytes, NoWakeup: o.NoWakeup, Witness: true})
	if err != nil {
		return nil, err
	}
	m, err := feed.Descriptors{
		Status: f.StatusFD(), Epoch: f.EpochFD(), Interest: f.InterestFD(), Ring: f.RingFD(),
		RingBytes: f.RingBytes(),
	}.Map()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	m.Maps = maps
	if tier != tracer.TierSyscall {
		m.Settle = f.Settled
		m.Holder = holder
	}
	opened := false
	m.Release = func() error {
		err := f.Close()
		if opened {
			err = errors.Join(err, free())
		}
		return err
	}
	w, err := feed.New(m)
	if err != nil {
		m.Unmap()
		return nil, errors.Join(err, f.Close())
	}
	if holder != 0 {
		// From New on a change of the holder ends the watch, where nothing would
		// be seen without it. Was it there?
		err := k.isHeld(holder)
		if err == nil && tier == tracer.TierNotifierTracepoint {
			err = prove(w)
		}
		if err != nil {
			return nil, errors.Join(err, w.Close())
		}
	}
	opened = true
	return w, nil
}

// errSilent says that a change was not seen.
var errSilent = errors.New("the kernel tells nobody of changes")

// prove makes a change and fails with errSilent if the watch does not see it.
func prove(w *feed.Watch) error {
	b, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("map a page: %w", err)
	}
	defer unix.Munmap(b)
	start := mm.Addr(uintptr(unsafe.Pointer(unsafe.SliceData(b))))
	r := mm.Range{Start: start, End: start + mm.Addr(len(b))}
	ticket := w.Begin(r)
	defer w.Abandon(ticket)
	if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
		return fmt.Errorf("drop a page: %w", err)
	}
	seen := false
	w.Drain(func(rec *mm.Record) { seen = seen || rec.Touches(r) })
	if !seen {
		return errSilent
	}
	return nil
}

func acquire(tier tracer.Tier) (*kernelSide, error) {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	k := shared.tiers[tier]
	if k == nil {
		k = new(kernelSide)
		var err error
		if k.tracer, err = tracer.Open(tracer.Options{Tier: tier}); err != nil {
			return nil, err
		}
		if weak := k.tracer.Coverage().Weak; len(weak) != 0 {
			return nil, errors.Join(fmt.Errorf("unfit: %s", strings.Join(weak, "; ")), k.tracer.Close())
		}
		if needsNotifier(tier) {
			if k.notifier, err = tracer.MakeNotifier(); err != nil {
				return nil, errors.Join(err, k.tracer.Close())
			}
		}
		if shared.tiers == nil {
			shared.tiers = make(map[tracer.Tier]*kernelSide)
		}
		shared.tiers[tier] = k
	}
	k.users++
	return k, nil
}

// renew registers another notifier instead of a silent one.
func (k *kernelSide) renew(silent mm.Addr) error {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if k.notifier.Holder() != silent {
		return nil // somebody has
	}
	n, err := tracer.MakeNotifier()
	if err != nil {
		return err
	}
	old := k.notifier
	k.notifier = n
	return old.Close()
}

// isHeld fails with errSilent if the notifier at holder is gone.
func (k *kernelSide) isHeld(holder mm.Addr) error {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if k.notifier.Holder() != holder {
		return nil // it has just been made
	}
	alive, err := k.notifier.Alive()
	if err == nil && !alive {
		err = errSilent
	}
	return err
}

func (k *kernelSide) holder() mm.Addr {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if k.notifier == nil {
		return 0
	}
	return k.notifier.Holder()
}

func release(tier tracer.Tier) error {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	k := shared.tiers[tier]
	if k.users--; k.users > 0 {
		return nil
	}
	delete(shared.tiers, tier)
	err := k.tracer.Close()
	if k.notifier != nil {
		err = errors.Join(err, k.notifier.Close())
	}
	return err
}
