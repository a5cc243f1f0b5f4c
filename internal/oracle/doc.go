// SPDX-License-Identifier: Apache-2.0

// Package oracle looks for changes of an address space that a tier does not
// see. It makes sequences of operations by several threads and processes in a
// target process, which registers memory all the while, and compares what the
// feed says with what is true.
//
// The truth does not come from the feed: registered pages are pinned by
// io_uring, so their frames are not used again, and the frame numbers of
// pagemap say after each step whether an address still leads to its frame;
// whether it may still be written, the kernel is asked; transfers through the
// buffers are looked at through the CPU; and on the syscall tier KVM's
// tracepoint is a second witness of changes that undo themselves. An entry of
// the target's table of registrations that is not true any more and that a
// lookup would hit is uncovered.
//
// A [Program] is a list of [Step]; every list is a valid one, so that seeds
// and fuzzing share the language. [Target] runs programs, [Target.Shrink]
// makes the smallest one that repeats a finding.
//
// It needs the privileges to load BPF programs, pagemap with frame numbers
// (CAP_SYS_ADMIN), Linux 5.14, and /dev/kvm for the notifier tier and the
// witness.
package oracle
