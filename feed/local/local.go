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
}

// The kernel side is loaded once per process, for all its watches.
var shared struct {
	mu     sync.Mutex // guards the fields; held over loading and unloading
	tracer *tracer.Tracer
	users  int
}

// Open opens a watch of one address space. When it returns the kernel side
// sees every change. Close of the watch frees it, and with the last one the
// kernel side. Errors are those of [tracer.Open] and [tracer.Tracer.OpenFeed].
//
// It takes some 0.5 s for the first watch of a process (loading and
// verifying the programs) and milliseconds for each further one.
func Open(o Options) (*feed.Watch, error) {
	t, err := acquire()
	if err != nil {
		return nil, fmt.Errorf("open local feed: %w", err)
	}
	w, err := open(t, o)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open local feed: %w", err), release())
	}
	return w, nil
}

func open(t *tracer.Tracer, o Options) (*feed.Watch, error) {
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
	m.Release = func() error { return errors.Join(f.Close(), release()) }
	w, err := feed.New(m)
	if err != nil {
		m.Unmap()
		return nil, errors.Join(err, f.Close())
	}
	return w, nil
}

func acquire() (*tracer.Tracer, error) {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.tracer == nil {
		t, err := tracer.Open(tracer.Options{})
		if err != nil {
			return nil, err
		}
		shared.tracer = t
	}
	shared.users++
	return shared.tracer, nil
}

func release() error {
	shared.mu.Lock()
	defer shared.mu.Unlock()
	if shared.users--; shared.users > 0 {
		return nil
	}
	t := shared.tracer
	shared.tracer = nil
	return t.Close()
}
