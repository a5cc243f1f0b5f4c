// SPDX-License-Identifier: Apache-2.0

// Package ibv registers memory with RDMA devices, by libibverbs: the backend
// of regcache for InfiniBand, RoCE and iWARP. A memory region ([MR]) pins the
// physical pages that its range had when it was registered. The device goes on
// reading and writing these pages whatever the virtual addresses have come to
// mean since: keep registrations in a regcache.Cache, which drops them when
// the address space changes.
//
//	dev, err := ibv.Open("mlx5_0")
//	pd, err := dev.NewPD(ibv.Options{})
//	cache, err := regcache.New(watch, pd, regcache.Options{})
//	ref, err := cache.Acquire(buffer, regcache.LocalWrite|regcache.RemoteWrite)
//	tell(peer, ref.Handle().RKey())
//
// Close in the opposite order: cache, watch, PD, device. What is used by
// something else refuses to close, with a [*BusyError].
//
// # Building and running
//
// This is the only package of the module with cgo. Building it needs a C
// compiler and the headers of rdma-core (Debian: libibverbs-dev and
// librdmacm-dev). Without cgo it builds as well, but [Open] and the others
// return [ErrNotBuilt]. The libraries are not linked but opened when they are
// first needed: a program that has this package in it starts without them,
// and gets [ErrNoLibrary]. Each device needs its provider (Debian:
// ibverbs-providers), and the kernel ib_uverbs.
//
// # Whose memory
//
// A registration is by address, and the garbage collector knows nothing of it.
//
//   - Memory that Go does not manage (unix.Mmap, C) may be registered with
//     [PD.Register] by its range. It stays the caller's.
//   - Memory of the Go heap must be pinned, by a runtime.Pinner, from before it
//     is registered until after it is deregistered. [PD.RegisterBytes] does
//     that. With a cache, whose registrations live on after the Ref is
//     released, use memory of the first kind.
//   - Stacks of goroutines move: never.
//
// Register asks the Go runtime, which knows what is pinned, and returns
// [ErrGoMemory] for heap memory that is not. It looks at the first byte of the
// range. GODEBUG=cgocheck=0 switches this off.
//
// # Fork
//
// The package never calls ibv_fork_init, which takes registered pages away
// from children (MADV_DONTFORK, in whole pages, for all that is in them). From
// Linux 5.12 on it is not needed ([ForkUnneeded]): the kernel copies pinned
// pages for the child at once, so the parent keeps the pages that the device
// writes to. On older kernels a program that forks while memory is registered
// must call ibv_fork_init itself, before anything else, or the parent may
// lose a page to the child by writing to it: a change that no feed reports,
// as the address did not change hands. [ForkSafety] says which it is.
// Children must not use anything of this package: an MR belongs to
// the address space that registered it.
//
// # On demand
//
// With [Options].OnDemand a region follows the page tables, as the device asks
// the kernel for each page: never stale, without a feed, where the device can
// (mlx5; soft-RoCE from Linux 6.16). It costs faults of the device, and a
// transfer to what is not mapped fails and breaks the queue pair.
//
// # Queue pairs
//
// [Queue] and [Conn] are enough of a transport for examples, tests and
// `ummufeed demo`: one transfer at a time. A program that moves data for a
// living has its own.
package ibv
