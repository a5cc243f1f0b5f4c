// SPDX-License-Identifier: Apache-2.0

// Package regcache is a cache of memory registrations that is never stale.
//
// Registering memory with a device (an RDMA memory region, an io_uring fixed
// buffer) pins its pages and is slow. A [Cache] keeps registrations, keyed by
// address range and access rights, and asks a [feed.Watch] before each hit
// whether the address space changed. A registration whose memory was unmapped,
// replaced, moved, protected or dropped leaves the cache before any thread can
// find it again.
//
// # What a hit means
//
// Every change that completed before [Cache.Acquire] was called has left the
// cache before Acquire returns a registration: validity is checked first, what
// changed is dropped, then the lookup is made, and the reference is taken by a
// compare-and-swap that fails on a dropped registration. A change that is
// concurrent with a held [Ref] is reported by [Ref.Release].
//
// Whatever cannot be kept coherent is still registered, for one operation:
// [Ref.Cached] says why it is not in the cache. With a dead feed
// ([feed.Dead]) this is every registration.
//
// # Locks
//
// There are two: the feed's drain lock and, inside it, the cache's index lock
// ([Cache] field mu). Order: drain lock, then index lock. The index lock is
// held for bounded work on memory of the cache only; no call to the feed, to
// the [Registrar] or to anything else is made under it. No lock is held over
// a call to the Registrar, which may therefore allocate, unmap, and call
// the cache again. A hit of an exact range takes no lock.
//
// Two threads that miss the same range at once both register it, and one of
// them finds the other's registration when it wants to enter the index, uses
// that, and deregisters its own. They do not wait for each other: a Registrar
// that acquires the range it is registering would wait for itself.
//
// # Eviction
//
// Second chance over the idle registrations in the order they came (CLOCK): a
// hit only counts itself in the word that also counts references, and the one
// who looks for a victim spares each registration that was hit since it
// last looked. Registrations found in use are set aside until their last
// release, so that the search never meets them twice.
package regcache
