// SPDX-License-Identifier: Apache-2.0

// Package local is the in-process feed: a program that has the privileges
// (CAP_BPF and CAP_PERFMON, or root) loads the kernel side itself. Programs
// without privileges get the same [feed.Watch] from the daemon.
package local

import (
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/ummu/ummu/feed"
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
	// Tier is how changes are seen. 0: the syscall tier. The notifier tiers
	// are for the calling process, which they give an MMU notifier
	// ([tracer.MakeNotifier]).
	Tier tracer.Tier
}

// The kernel side is loaded once per process and tier, for all its watches.
var shared struct {
	mu    sync.Mutex // guards the map; held over loading and unloading
	tiers map[tracer.Tier]*kernelSide
}

type kernelSide struct {
	tracer   *tracer.Tracer
	notifier *tracer.Notifier // of the notifier tiers
	users    int
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
	if tier != tracer.TierSyscall && o.PID != 0 && o.PID != os.Getpid() {
		return nil, fmt.Errorf("open local feed: tier %v needs a notifier in process %d", tier, o.PID)
	}
	w, err := openTier(tier, o)
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
	w, err := open(k.tracer, tier, o)
	if err != nil {
		return nil, errors.Join(err, release(tier))
	}
	return w, nil
}

func open(t *tracer.Tracer, tier tracer.Tier, o Options) (*feed.Watch, error) {
	target, maps := tracer.Self(), "/proc/self/maps"
	if o.PID != 0 && o.PID != os.Getpid() {
		target, maps = tracer.PID(o.PID), fmt.Sprintf("/proc/%d/maps", o.PID)
	}
	f, err := t.OpenFeed(target, tracer.FeedOptions{RingBytes: o.RingBytes, NoWakeup: o.NoWakeup})
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
	if tier == tracer.TierNotifierTracepoint {
		m.Settle = f.Settled
	}
	m.Release = func() error { return errors.Join(f.Close(), release(tier)) }
	w, err := feed.New(m)
	if err != nil {
		m.Unmap()
		return nil, errors.Join(err, f.Close())
	}
	return w, nil
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
		if tier != tracer.TierSyscall {
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
