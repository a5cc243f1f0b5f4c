// SPDX-License-Identifier: Apache-2.0

// Package vfork makes children that share the caller's address space and
// stack, for tests of what such a child does to a watch.
package vfork

// Clone is clone(2) with CLONE_VM|CLONE_VFORK and the given signal at exit: 0
// in the child, the pid or a negative errno in the parent, which runs on when
// the child has ended. The child must not return from the caller of Clone,
// and must do nothing that the Go runtime has a part in.
//
//go:noescape
func Clone(signal uintptr) (pid int)
