// SPDX-License-Identifier: Apache-2.0

// Package feed tells a program whether what it cached about its own virtual
// memory (registrations, translations) is still true.
//
// A [Watch] is one consumer of one address space. The kernel side writes to
// memory that it shares with the watch (bpf/ummu.h): a generation word that
// moves with every change of an interesting range, a ring of records that say
// what changed, and counters of changes in flight. No system call is made
// and no lock is taken to ask [Watch.Valid]: it compares two words.
//
// # Use
//
// A cache does this, in any number of threads:
//
//	lookup:  if !w.Valid() { if w.Drain(apply) != Fresh { miss } }
//	         look into the index             (in this order, see Valid)
//	insert:  t := w.Begin(r)
//	         register the memory with the device
//	         w.Commit(t, apply, insert)      (insert runs only if cacheable)
//	drop:    w.Forget(r)                     (once per Begin that was cacheable)
//
// where apply removes what a record touches from the index, and everything on
// a record of kind [mm.Lost] or [mm.Exit]. apply and insert run under the
// drain lock of the watch. They must not block; they may call every method of
// the watch without hanging, but calls that need the lock say Busy or refuse.
//
// # Why a hit is never stale
//
// The kernel side does for each change, in this order:
//
//	begun[bank]++    bank = interest.bank; a full barrier follows
//	interest test    not interesting: nothing more until the end
//	record committed to the ring (or status.lost++ if it is full)
//	generation moves
//	... the page tables change, the call returns ...
//	ended[bank]++    the same bank
//
// Counters (lost, unpaired, deaths, untracked) move before the generation.
//
// Drain loads the generation g first, then the counters, then the producer
// position p, and reads the ring up to p. Each record counted in g was
// committed before g was loaded, so it lies before p: it was applied, or the
// drain stopped before it and publishes nothing. Each loss counted in g is in
// the counters loaded after g, so it was applied as well. Only then is g
// published as the generation seen. A thread that finds the word equal to the
// one seen therefore looks into an index in which every change counted up to
// its load of the word was applied; a change that anybody can know to have
// happened was counted before.
//
// Begin sets the interest, makes it visible, then waits until each bank was
// seen without a change in flight. A change counted in begun after that
// sight tests the interest later than it was set and leaves a record; one
// counted before has ended, so the registration that follows sees its effect.
// Commit finds the records of the former, in its own drain or because an
// earlier drain marked the ticket, and refuses.
//
// # Fork
//
// The generation seen lies in memory that the kernel wipes in a forked child
// (MADV_WIPEONFORK, Linux 4.14): there the watch is dead without a system
// call, and no method writes to the memory shared with the parent. Children
// that share the address space (vfork, CLONE_VM) share the watch.
package feed
