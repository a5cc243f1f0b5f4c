// SPDX-License-Identifier: Apache-2.0

package findings

import (
	"fmt"
	"time"

	"github.com/ummu/ummu/mm"
)

// Class says what kind of mistake a finding is.
type Class uint8

const (
	// Freed: the program unmapped, replaced, dropped or moved memory that was
	// registered.
	Freed Class = iota + 1
	// Trim: an allocator did, inside a call of free and the like: the program
	// freed the memory, and the allocator gave it back to the kernel.
	Trim
	// Ring: the same range is replaced over and over under one registration:
	// a ring that remaps its blocks by design. It is as stale as any other.
	Ring
	// Racing: the change came while the memory was being registered.
	Racing
	numClasses
)

var classNames = [numClasses]string{"", "freed-while-registered", "allocator-trim", "remap-ring", "changed-while-registering"}

// String is the name of the class as in NDJSON output.
func (c Class) String() string {
	if c < numClasses {
		return classNames[c]
	}
	return fmt.Sprintf("class(%d)", uint8(c))
}

// MarshalText makes the class its name in JSON.
func (c Class) MarshalText() ([]byte, error) { return []byte(c.String()), nil }

// EndedBy says how a stale registration ended.
type EndedBy uint8

const (
	// StillRegistered: it had not ended when the stream did.
	StillRegistered EndedBy = iota
	// Deregistered: by the program, or because its device was closed.
	Deregistered
	// Replaced: its slot or handle was registered anew.
	Replaced
	// SpaceEnded: with the address space: exit, or exec.
	SpaceEnded
	numEnds
)

var endNames = [numEnds]string{"still-registered", "deregistered", "replaced", "address-space-ended"}

// String is the name of the end as in NDJSON output.
func (b EndedBy) String() string {
	if b < numEnds {
		return endNames[b]
	}
	return fmt.Sprintf("end(%d)", uint8(b))
}

// MarshalText makes it its name in JSON.
func (b EndedBy) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

// Finding is one registration that went stale, by one change or by several.
type Finding struct {
	// ID counts the findings of an engine from 1.
	ID int
	// Registration is the record that tells most of it: its range is exact, its time is when
	// the call began, its stack is that of the call.
	Registration mm.Record
	// Change is the first change that hit it, as known at its end; time and
	// stack are those of its begin.
	Change mm.Record
	// Stale is what of the registration leads elsewhere since, in whole pages.
	Stale mm.Range
	Class Class
	// Certain: it is stale beyond doubt. If not, Why says what is not known.
	Certain bool
	Why     string
	// Repeats is the number of further changes that hit the registration.
	Repeats int
	// Reused: something else is, or was, mapped at an address of Stale while
	// the registration lived; by Reuse, a map, replace or move, or by the
	// change itself (a zapped page is filled anew).
	Reused   bool
	ReusedAt time.Duration
	// RegisteredAgain: the address was registered again meanwhile, so that the
	// program may believe it uses the new registration.
	RegisteredAgain bool
	// Ended says how the registration ended, at EndedAt, the last time known
	// if it did not.
	Ended   EndedBy
	EndedAt time.Duration

	replaced int // changes that put something in the place of the pages
}

// Stayed is how long the registration stayed after the change.
func (f *Finding) Stayed() time.Duration { return f.EndedAt - f.Change.Time }

// String is one line for logs.
func (f *Finding) String() string {
	return fmt.Sprintf("%v: %v registration %v, %v of %v", f.Class, f.Registration.Registration.By, f.Registration.Range,
		f.Change.Kind, f.Change.Range)
}
