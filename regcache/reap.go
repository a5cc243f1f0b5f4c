// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"context"
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/mm"
)

// deregister ends the registration of e, which the caller owns: it is in no
// list and has no references. It is called without a lock.
func (c *Cache[H]) deregister(e *entry[H]) {
	if e.interest {
		e.interest = false
		c.w.Forget(e.span())
	}
	err := c.reg.Deregister(e.handle)
	c.mu.Lock()
	if err == nil || guard.Off(guard.ZombieKept) {
		c.count.deregistrations++
		c.registered -= e.size()
	} else {
		c.count.fail(err)
		e.failure = err
		if !guard.Off(guard.ZombieKept) {
			c.zombies.push(e)
		}
	}
	c.mu.Unlock()
	if err != nil {
		c.wake()
	}
}

func (c *Cache[H]) fail(err error) {
	c.mu.Lock()
	c.count.fail(err)
	c.mu.Unlock()
}

// next takes an entry out of l for the caller to deregister.
func (c *Cache[H]) next(l *list[H]) *entry[H] {
	c.mu.Lock()
	defer c.mu.Unlock()
	return l.pop()
}

// reapSome is a miss's share of the deregistrations: a few of the dead and one
// of the zombies. One miss at a time does it, so that a Registrar that
// acquires in Deregister does not recurse.
func (c *Cache[H]) reapSome() {
	if !c.reaping.CompareAndSwap(false, true) {
		return
	}
	defer c.reaping.Store(false)
	for range reapBatch {
		e := c.next(&c.dead)
		if e == nil {
			break
		}
		c.deregister(e)
	}
	if e := c.next(&c.zombies); e != nil {
		c.deregister(e)
	}
}

// reapDead deregisters everything that is dead.
func (c *Cache[H]) reapDead() {
	for e := c.next(&c.dead); e != nil; e = c.next(&c.dead) {
		c.deregister(e)
	}
}

// reapZombies tries each zombie once more.
func (c *Cache[H]) reapZombies() {
	c.mu.Lock()
	n := c.zombies.n
	c.mu.Unlock()
	for range n {
		e := c.next(&c.zombies)
		if e == nil {
			return
		}
		c.deregister(e)
	}
}

// makeRoom deregisters everything stale, and idle entries that pin at least
// need bytes, one at least if there is one.
func (c *Cache[H]) makeRoom(need uint64) {
	c.mu.Lock()
	for freed := uint64(0); freed < need; {
		e := c.evict()
		if e == nil {
			break
		}
		freed += e.size()
	}
	c.mu.Unlock()
	c.reapDead()
	c.reapZombies()
}

// wake makes Run look at what is to be deregistered.
func (c *Cache[H]) wake() {
	select {
	case c.kick <- struct{}{}:
	default:
	}
}

const (
	zombieFirst = 50 * time.Millisecond // until Run first retries a zombie
	zombieLast  = 10 * time.Second      // and at most
	unfinished  = time.Millisecond      // until Run looks again at a record that is being written
)

// Run deregisters what became stale, also while nobody looks anything up, and
// retries failed deregistrations. It returns ctx's error when ctx is done, and
// nil when the cache is closed. Without Run the memory of stale registrations
// stays pinned until misses come to it.
func (c *Cache[H]) Run(ctx context.Context) error {
	ctx, cancel := context.WithCancel(ctx)
	drained := make(chan struct{})
	go func() {
		defer close(drained)
		c.drainLoop(ctx)
	}()
	defer func() {
		cancel()
		<-drained
	}()

	retry := time.NewTimer(zombieLast)
	defer retry.Stop()
	pause := zombieFirst
	armed := false
	for {
		c.reapDead()
		c.mu.Lock()
		zombies := c.zombies.n
		c.mu.Unlock()
		switch {
		case zombies == 0:
			pause, armed = zombieFirst, false
		case !armed:
			retry.Reset(pause)
			pause, armed = min(2*pause, zombieLast), true
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-c.done:
			return nil
		case <-c.kick:
		case <-retry.C:
			armed = false
			c.reapZombies()
		}
	}
}

// drainLoop drops what changes make stale, as they happen, until ctx is done or
// the feed is dead.
func (c *Cache[H]) drainLoop(ctx context.Context) {
	pause := time.NewTimer(unfinished)
	defer pause.Stop()
	for c.w.Wait(ctx) == nil && !guard.Off(guard.StaleReaped) {
		switch c.refreshIn(1) { // nobody waits for it; it comes back after a pause
		case feed.Fresh:
		case feed.Busy:
			pause.Reset(unfinished)
			select {
			case <-ctx.Done():
			case <-pause.C:
			}
		default:
			return
		}
	}
}

// Close empties the cache and deregisters what is idle. If something is still
// in use it returns an [*InUseError] that lists it; that is deregistered at
// its last Release, and deregistrations that failed can be retried by calling
// Close again. Close does not wait for calls of the Registrar that other threads
// are in, Run for one: stop those first, or see them in the error. Acquire
// fails from now on. Close may be called more than once.
func (c *Cache[H]) Close() error {
	c.mu.Lock()
	if !c.closed {
		c.closed = true
		close(c.done)
	}
	for _, l := range []*list[H]{&c.idle, &c.parked} {
		for l.front != nil {
			e := l.front
			c.drop(e, 0)
			if e.in == &c.orphans {
				c.ix.link(e, watchOnly)
			}
		}
	}
	c.mu.Unlock()
	c.reapDead()
	c.reapZombies()

	c.mu.Lock()
	defer c.mu.Unlock()
	live := int(c.count.registrations - c.count.deregistrations)
	left := &InUseError{Pending: max(c.pending, live-c.orphans.n-c.zombies.n)}
	for e := c.orphans.front; e != nil; e = e.next {
		left.Uses = append(left.Uses, Use{e.span(), e.access, int(e.state.Load() & refMask)})
	}
	for e := c.zombies.front; e != nil; e = e.next {
		left.Zombies = append(left.Zombies, fmt.Errorf("deregister %v: %w", e.span(), e.failure))
	}
	if len(left.Uses) == 0 && left.Pending == 0 && len(left.Zombies) == 0 {
		return nil
	}
	return left
}

// counters are the cache's own; the index lock guards them. Hits are those of
// entries that left the index, see entry.state.
type counters struct {
	hits, misses, evicted, replaced uint64
	registrations, deregistrations  uint64
	invalidated                     [16]uint64 // by mm.Kind
	doubtful                        [numCauses]uint64
	uncached                        [numReasons]uint64
	failures                        map[syscall.Errno]uint64
}

func (n *counters) fail(err error) {
	var errno syscall.Errno
	errors.As(err, &errno)
	n.failures[errno]++
}

func (n *counters) invalidate(entries uint64, why *mm.Record) {
	if entries == 0 {
		return
	}
	n.invalidated[why.Kind&15] += entries
	if cause := causeOf(why); cause < numCauses {
		n.doubtful[cause] += entries
	}
}
