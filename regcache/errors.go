// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/ummu/ummu/mm"
)

// Errors.
var (
	// ErrClosed is returned by Acquire and Run once the cache is closed.
	ErrClosed = errors.New("registration cache is closed")
	// ErrAccess is returned by Acquire for a right this package does not know.
	ErrAccess = errors.New("unknown access right")
	// ErrLimit is what a [Registrar] wraps when a registration would exceed
	// a limit of the device or of locked memory and the kernel's word for it is
	// not ENOMEM, which means the same to the cache.
	ErrLimit = errors.New("registration limit reached")
)

func isLimit(err error) bool {
	return errors.Is(err, syscall.ENOMEM) || errors.Is(err, ErrLimit)
}

// LimitError is returned by Acquire when the [Registrar] was out of locked
// memory or of keys, everything idle that could help was deregistered, and
// the second attempt failed as well. It answers errors.Is for [ErrLimit] and
// for what the Registrar returned.
type LimitError struct {
	Range mm.Range
	Limit uint64 // bytes that may be registered; 0 if the Registrar does not say
	Use   uint64 // bytes in use, by the Registrar's count if it has one, else by the cache's
	Need  uint64 // bytes of this registration, whole pages
	Err   error  // what the Registrar returned
}

func (e *LimitError) Error() string {
	limit := "unknown"
	if e.Limit > 0 {
		limit = fmt.Sprintf("%d bytes", e.Limit)
	}
	return fmt.Sprintf("register %v: limit %s, in use %d bytes, need %d bytes: %v", e.Range, limit, e.Use, e.Need, e.Err)
}

// Unwrap returns what the Registrar returned.
func (e *LimitError) Unwrap() error { return e.Err }

// Is answers [ErrLimit].
func (e *LimitError) Is(target error) bool { return target == ErrLimit }

// Use is one registration that is still referenced.
type Use struct {
	Range  mm.Range
	Access Access
	Refs   int
}

// InUseError is returned by Close while registrations are referenced, being
// made, or could not be deregistered.
type InUseError struct {
	Uses    []Use   // deregistered at their last Release
	Pending int     // calls of the Registrar in flight; what Acquire registers now is deregistered at once
	Zombies []error // what Deregister returned, one per registration it failed for
}

func (e *InUseError) Error() string {
	var s strings.Builder
	fmt.Fprintf(&s, "close registration cache: %d registrations in use", len(e.Uses))
	for i, u := range e.Uses {
		if i == 8 {
			fmt.Fprintf(&s, ", and %d more", len(e.Uses)-i)
			break
		}
		sep := ", "
		if i == 0 {
			sep = ": "
		}
		fmt.Fprintf(&s, "%s%v (%v, %d references)", sep, u.Range, u.Access, u.Refs)
	}
	if e.Pending > 0 {
		fmt.Fprintf(&s, "; %d being made or ended", e.Pending)
	}
	if n := len(e.Zombies); n > 0 {
		fmt.Fprintf(&s, "; %d not deregistered, last: %v", n, e.Zombies[n-1])
	}
	return s.String()
}

// Unwrap returns what Deregister returned for each zombie.
func (e *InUseError) Unwrap() []error { return e.Zombies }
