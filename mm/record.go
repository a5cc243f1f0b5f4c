// SPDX-License-Identifier: Apache-2.0

package mm

import (
	"bytes"
	"fmt"
	"time"
)

// Kind says what a [Record] reports. The values are part of the shared
// layout (bpf/ummu.h) and never change their meaning.
type Kind uint8

// The kinds. Unmap to Protect are changes: afterwards an address of the range
// may translate to another page, to none, or with fewer rights. The others
// are lifecycle and information.
const (
	KindNone   Kind = iota
	Unmap           // the mapping is gone
	Replace         // another mapping took its place
	Zap             // the mapping stays, its pages are dropped
	Move            // pages go from Range to To; what was at To is gone
	Protect         // access rights changed
	Map             // a new mapping where there was none (information)
	Fork            // a task was created (information)
	Exec            // the process runs another program, in a new address space
	Exit            // a task, a process or an address space ended
	Lost            // events were lost: everything before is doubtful
	Register        // memory is registered with a device; see Registration
	Deregister      // a registration ends
	numKinds
)

var kindNames = [numKinds]string{
	"none", "unmap", "replace", "zap", "move", "protect", "map", "fork",
	"exec", "exit", "lost", "register", "deregister",
}

// Kinds returns every kind but KindNone, in order.
func Kinds() []Kind {
	ks := make([]Kind, 0, numKinds-1)
	for k := Unmap; k < numKinds; k++ {
		ks = append(ks, k)
	}
	return ks
}

// String is the kind's name in lower case, as in NDJSON output.
func (k Kind) String() string {
	if k < numKinds {
		return kindNames[k]
	}
	return fmt.Sprintf("kind(%d)", uint8(k))
}

// ParseKind is the inverse of [Kind.String].
func ParseKind(s string) (Kind, error) {
	for k := Unmap; k < numKinds; k++ {
		if kindNames[k] == s {
			return k, nil
		}
	}
	return KindNone, fmt.Errorf("unknown kind %q (known: %v)", s, kindNames[1:])
}

// IsChange reports whether k is one of the kinds after which a cached
// translation may be wrong: Unmap, Replace, Zap, Move, Protect.
func (k Kind) IsChange() bool { return k >= Unmap && k <= Protect }

// Phase says on which side of the event the record was made.
type Phase uint8

const (
	// PhaseBegin: made before the page tables change. The change may still
	// fail or turn out smaller; the End record of the same task says.
	PhaseBegin Phase = 1
	// PhaseEnd: made after the change, or at the event itself where there is
	// only one record (map, fork, exec, exit, lost).
	PhaseEnd Phase = 2
)

// String is "begin" or "end".
func (p Phase) String() string {
	switch p {
	case PhaseBegin:
		return "begin"
	case PhaseEnd:
		return "end"
	}
	return fmt.Sprintf("phase(%d)", uint8(p))
}

// ParsePhase is the inverse of [Phase.String].
func ParsePhase(s string) (Phase, error) {
	switch s {
	case "begin":
		return PhaseBegin, nil
	case "end":
		return PhaseEnd, nil
	}
	return 0, fmt.Errorf("unknown phase %q (known: begin, end)", s)
}

// Flags qualify a record. The values are part of the shared layout.
type Flags uint16

const (
	// Superset: the range may be larger than what changed, never smaller.
	Superset Flags = 1 << iota
	// Maybe: whether anything changes is known only at the end, if at all
	// (a growing mremap may stay in place).
	Maybe
	// Unpaired: the end of a call whose begin was not observed, because it
	// was in flight when the watch was opened or its begin was lost.
	Unpaired
	// Async: done by an io_uring worker on behalf of the task.
	Async
	// LastTask (on Exit): the last task of its process.
	LastTask
	// SpaceDeath (on Exit): the address space itself was torn down.
	SpaceDeath
	// NewProcess (on Fork): the child is a process, not a thread.
	NewProcess
	// SharesSpace (on Fork): the child runs in the parent's address space
	// (thread, vfork or CLONE_VM).
	SharesSpace
	// Vector: one record of several that one call makes (process_madvise,
	// io_uring_register); on the end record the range is the hull of all.
	Vector
	// UnknownLength: Start is right, the length is not known to the hook
	// (information records only, never on a change).
	UnknownLength
	// Rescued (on End): the main hook was skipped by the kernel at the
	// call's entry, its partner made the begin record.
	Rescued
)

// ABI names the system-call convention of a call.
type ABI uint8

const (
	ABINative  ABI = iota // the kernel's own: x86-64, arm64
	ABICompat             // 32-bit: i386, arm
	ABIX32                // x86-64 with 32-bit pointers
	ABIIOUring            // not a system call: an io_uring request; NR is its opcode
	ABINone               // no call: lifecycle events, lost
)

// Call identifies the system call behind a record: its number within its ABI.
type Call struct {
	NR  uint32
	ABI ABI
}

// Registrar says who registers memory.
type Registrar uint8

const (
	// ByNobody: the record is not about a registration.
	ByNobody Registrar = iota
	// ByIOUring: io_uring_register(2), fixed buffers.
	ByIOUring
	// ByVerbs: libibverbs, a memory region.
	ByVerbs
	numRegistrars
)

var registrarNames = [numRegistrars]string{"", "io_uring", "verbs"}

// String is "io_uring" or "verbs", as in NDJSON output; empty for ByNobody.
func (b Registrar) String() string {
	if b < numRegistrars {
		return registrarNames[b]
	}
	return fmt.Sprintf("registrar(%d)", uint8(b))
}

// ParseRegistrar is the inverse of [Registrar.String].
func ParseRegistrar(s string) (Registrar, error) {
	for b := ByIOUring; b < numRegistrars; b++ {
		if registrarNames[b] == s {
			return b, nil
		}
	}
	return ByNobody, fmt.Errorf("unknown registrar %q (known: %v)", s, registrarNames[1:])
}

// Access flags of memory regions that say how a registration behaves
// (infiniband/verbs.h; the kernel's ABI).
const (
	// AccessOnDemand: the device follows the page tables; nothing goes stale.
	AccessOnDemand = 1 << 6
)

// Registration says, on Register and Deregister records, what is registered.
// The range of such a record is exact in bytes, not rounded to pages.
//
// One call may register several buffers: each has a begin record (with the
// flag [Vector] if there may be more), and one end record tells the result of
// all. It has no Handle then. A memory region has its Handle and keys from the end record on, which has
// its range as well.
type Registration struct {
	// Device tells devices of one address space apart: the ring, or the
	// ibv_context. Opaque.
	Device uint64
	// Handle names the registration within its device: the index of a fixed
	// buffer, the address of the struct ibv_mr.
	Handle uint64
	// LKey and RKey are those of a memory region.
	LKey, RKey uint32
	// Access is what was passed: flags of ibv_reg_mr. 0 for io_uring, whose
	// buffers are always for reading and writing.
	Access uint32
	// FD is the descriptor of the ring, as passed; -1 if there is none.
	FD int32
	By Registrar
	// All (on Deregister): everything of the device, because it was closed, or
	// IORING_UNREGISTER_BUFFERS.
	All bool
}

// Stack is what a task's user stack looked like at an event: the registers
// that an unwinder needs, and the memory above the stack pointer.
type Stack struct {
	// PC, SP and FP are the program counter, the stack pointer and the frame
	// pointer; LR is the link register, 0 where there is none.
	PC, SP, FP, LR Addr
	// Memory is what was at SP; it may be cut short.
	Memory []byte
}

// Hook numbers the BPF attachment that made a record; names are in
// tracer.HookName. The values are part of the shared layout.
type Hook uint8

// Comm is a task's name as the kernel keeps it: NUL-terminated, at most 15 bytes.
type Comm [16]byte

// String returns the name up to the first NUL.
func (c Comm) String() string {
	if i := bytes.IndexByte(c[:], 0); i >= 0 {
		return string(c[:i])
	}
	return string(c[:])
}

// Record is one observed event. It holds no pointers, so that it can be
// decoded into and copied without allocation.
type Record struct {
	// Seq counts the events of one stream from 1, lost ones included: a
	// Lost record of n events has the number of the last of them.
	Seq uint64
	// Time is CLOCK_MONOTONIC at the event.
	Time time.Duration
	// Range is what changed; for Move the old range. Page-rounded.
	Range Range
	// To is the new range of a Move; empty when it is not known yet.
	To Range
	// Space tells address spaces of one stream apart. It is 0 in streams of
	// a single address space, and carries no other meaning.
	Space uint64
	// Lost (on kind Lost) is the number of events lost.
	Lost uint64
	// Arg are the call's arguments that hold flags, by call: mmap {prot,
	// flags}; mprotect, pkey_mprotect {prot, pkey}; madvise,
	// process_madvise {advice}; mremap {flags}; shmat {flags};
	// remap_file_pages {prot, flags}; clone is not recorded.
	Arg [2]uint64
	// Ret is what the call returned (a negative errno on failure), on End
	// records of calls; else 0.
	Ret int64
	// PID and TID are the task's in the initial pid namespace. PID is the
	// thread group's, as getpid returns it.
	PID, TID uint32
	// ChildPID and ChildTID (on Fork) are the new task's; on Exec ChildTID
	// is the former tid of the task.
	ChildPID, ChildTID uint32
	// Stack numbers the user stack of the record within its stream, from 1; 0
	// if there is none. What it stands for comes with the stream.
	Stack        uint32
	Registration Registration // of Register and Deregister
	Call         Call
	Flags        Flags
	Kind         Kind
	Phase        Phase
	Hook         Hook
	Comm         Comm
}

// Touches reports whether the record is a change of an address in r: its
// range, or for Move its destination, overlaps r.
func (r *Record) Touches(s Range) bool {
	return r.Kind.IsChange() && (r.Range.Overlaps(s) || r.To.Overlaps(s))
}
