// SPDX-License-Identifier: Apache-2.0

// Package findings looks for stale registrations in a stream of records: a
// change that takes pages away from under a live registration of a program
// that does not notice. It is pure: records in, findings out, no kernel.
//
// # What counts
//
// What goes stale is what the truth table (docs/truth.md) shows to go stale:
//
//   - unmap, replace and move of any page of a registration
//   - zap (MADV_DONTNEED and the like), unless the mapping is known to be
//     shared: its pages stay in the file or shared object. MADV_REMOVE takes
//     them there too.
//   - not protect: a pinned page stays where it is
//   - not fork: the parent keeps its pinned pages
//   - nothing at all of a memory region on demand, which follows the page tables
//
// A change is judged when its end is known. One that failed without having
// changed anything is none; of one that failed half way it is not known, and
// the finding says so ([Finding.Certain]).
//
// # Order
//
// Records of one stream are in the order of the kernel side's ring. A register
// record before the call and one after it enclose the moment at which pages
// are pinned; a change between them is [Racing]. A change between the begin and
// the end of a deregistration is none, if the deregistration succeeds.
//
// # Loss
//
// After a lost record nothing that is known is certain: the registration may
// have ended, or a change may be missing. [Engine.Incomplete] says so, and
// findings about what was registered before are not certain.
package findings
