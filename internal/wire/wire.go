// SPDX-License-Identifier: Apache-2.0

// Package wire is the protocol between a client of the feed and the daemon:
// messages of a SOCK_SEQPACKET Unix socket, little-endian, of fixed layout.
// docs/protocol.md specifies it. Nothing here trusts what it decodes, and
// nothing here makes a decision: the daemon and the client do.
package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
)

const (
	// Magic begins every message: "ummu".
	Magic = 0x756d6d75
	// HeaderBytes is the size of the header of a message.
	HeaderBytes = 16
	// MaxBytes is the most that a message may have, header included.
	MaxBytes = 1024
	// MaxText is the most bytes of text in a Refused.
	MaxText = 512
	// MaxDescriptors is the most descriptors that one message carries.
	MaxDescriptors = 4
)

// Versions is a range of protocol versions, both ends included.
type Versions struct{ Min, Max uint16 }

// Supported are the versions that this package speaks: the current one and
// the one before it, of which version 1 has none.
var Supported = Versions{1, 1}

// Choose returns the highest version that both speak; false: none.
func (v Versions) Choose(peer Versions) (uint16, bool) {
	n := min(v.Max, peer.Max)
	return n, v.Min <= v.Max && peer.Min <= peer.Max && n >= v.Min && n >= peer.Min && n > 0
}

// String is "1" or "1 to 2".
func (v Versions) String() string {
	if v.Min == v.Max {
		return fmt.Sprint(v.Min)
	}
	return fmt.Sprintf("%d to %d", v.Min, v.Max)
}

// Errors of [Decode].
var (
	// ErrMalformed: the bytes are no message of this protocol.
	ErrMalformed = errors.New("malformed message")
	// ErrVersion: a message of a version that is not spoken here.
	ErrVersion = errors.New("unknown protocol version")
)

// Type of a message. The numbers are never used again for another meaning.
type Type uint16

// The types. Direction: C the client, D the daemon.
const (
	TypeHello     Type = 1  // C to D
	TypeChallenge Type = 2  // D to C
	TypeEcho      Type = 3  // C to D
	TypeWelcome   Type = 4  // D to C, 4 descriptors, or 3
	TypeReady     Type = 5  // C to D
	TypeNext      Type = 6  // C to D
	TypeOffer     Type = 7  // D to C, 1 descriptor
	TypeMachine   Type = 8  // C to D, 1 descriptor
	TypeRefused   Type = 9  // D to C
	TypeSettle    Type = 10 // C to D
	TypeSettled   Type = 11 // D to C
	TypeEntry     Type = 12 // D to C
	TypeEnd       Type = 13 // D to C
)

// Purpose is what a connection is for.
type Purpose uint32

// The purposes.
const (
	PurposeWatch  Purpose = 1
	PurposeStatus Purpose = 2
)

// Flags of a Hello.
const (
	// FlagNoWakeup: nobody will wait for the ring's descriptor.
	FlagNoWakeup = 1 << 0
	// FlagMachine: the client can answer an Offer.
	FlagMachine = 1 << 1
)

// Code says why a client was refused.
type Code uint32

// The codes. A client treats one that it does not know as CodeInternal.
const (
	CodeVersion     Code = 1 // no protocol or layout version in common
	CodeProtocol    Code = 2 // a message that does not belong there
	CodeIdentity    Code = 3 // who asks cannot be known for certain
	CodeLimit       Code = 4 // a limit of the daemon
	CodeUnavailable Code = 5 // no tier that may be used sees this process
	CodeStopping    Code = 6 // the daemon ends
	CodeInternal    Code = 7 // the daemon failed
)

// Reason of a Next.
type Reason uint32

// The reasons.
const (
	ReasonSilent    Reason = 1 // a change was made and not seen
	ReasonNoMachine Reason = 2 // no virtual machine could be made
)

// Nonce is a challenge.
type Nonce [16]byte

// Message is one of the message types of this package.
type Message interface {
	kind() Type
	size() int
	put([]byte)
	get([]byte) error
}

// Hello opens a connection. Its layout is the same in every version, and it
// may become longer: what follows the known part is ignored.
type Hello struct {
	Versions  Versions // protocol
	Layouts   Versions // of the shared memory
	Purpose   Purpose
	Flags     uint32
	RingBytes uint32 // 0: the daemon's default
}

// Challenge asks who is there now. What is chosen is the version of all
// messages that follow, which is in its header.
type Challenge struct{ Nonce Nonce }

// Echo is the answer to a Challenge.
type Echo struct{ Nonce Nonce }

// Welcome hands out a watch; status, epoch, interest and ring go with it. No
// ring (0 bytes, 3 descriptors) where the kernel's rings are not safe in
// foreign hands: each change is a loss then.
type Welcome struct {
	Watch     uint64 // its number, as status shows it
	Layout    uint32
	Tier      uint32 // enum ummu_tier
	RingBytes uint32
}

// Ready says that the client has seen the watch work.
type Ready struct{}

// Next asks for the next best way to see changes.
type Next struct{ Reason Reason }

// Offer hands out /dev/kvm, for the client to make a virtual machine of.
type Offer struct{}

// Machine hands over the virtual machine.
type Machine struct{}

// Refused ends a connection. Its layout is the same in every version.
type Refused struct {
	Code Code
	Text string // for people
}

// Settle asks whether any change that began before is still in flight.
type Settle struct{ Seq uint32 }

// Settled is the answer: Quiet 1: none is; 0: not known.
type Settled struct{ Seq, Quiet uint32 }

// Entry is one watch in a status.
type Entry struct {
	Watch       uint64
	OpenedNanos uint64 // CLOCK_MONOTONIC
	Records     uint64
	Lost        uint64
	Filtered    uint64
	Unpaired    uint64
	Deaths      uint64
	Untracked   uint64
	PID, UID    uint32
	Tier        uint32
	RingBytes   uint32
	MemoryBytes uint32 // of the kernel's, for this watch
	Comm        [16]byte
}

// End ends a status.
type End struct {
	NowNanos     uint64 // CLOCK_MONOTONIC
	StartedNanos uint64 // likewise, of the daemon
	Misses       uint64 // calls that hooks are known to have missed
	Entries      uint32
}

func (*Hello) kind() Type     { return TypeHello }
func (*Challenge) kind() Type { return TypeChallenge }
func (*Echo) kind() Type      { return TypeEcho }
func (*Welcome) kind() Type   { return TypeWelcome }
func (*Ready) kind() Type     { return TypeReady }
func (*Next) kind() Type      { return TypeNext }
func (*Offer) kind() Type     { return TypeOffer }
func (*Machine) kind() Type   { return TypeMachine }
func (*Refused) kind() Type   { return TypeRefused }
func (*Settle) kind() Type    { return TypeSettle }
func (*Settled) kind() Type   { return TypeSettled }
func (*Entry) kind() Type     { return TypeEntry }
func (*End) kind() Type       { return TypeEnd }

func newMessage(t Type) Message {
	switch t {
	case TypeHello:
		return new(Hello)
	case TypeChallenge:
		return new(Challenge)
	case TypeEcho:
		return new(Echo)
	case TypeWelcome:
		return new(Welcome)
	case TypeReady:
		return new(Ready)
	case TypeNext:
		return new(Next)
	case TypeOffer:
		return new(Offer)
	case TypeMachine:
		return new(Machine)
	case TypeRefused:
		return new(Refused)
	case TypeSettle:
		return new(Settle)
	case TypeSettled:
		return new(Settled)
	case TypeEntry:
		return new(Entry)
	case TypeEnd:
		return new(End)
	}
	return nil
}

// frozen reports whether messages of a type are the same in all versions,
// with 0 in their header.
func (t Type) frozen() bool { return t == TypeHello || t == TypeRefused }

// String is the type's name in docs/protocol.md.
func (t Type) String() string {
	switch t {
	case TypeHello:
		return "HELLO"
	case TypeChallenge:
		return "CHALLENGE"
	case TypeEcho:
		return "ECHO"
	case TypeWelcome:
		return "WELCOME"
	case TypeReady:
		return "READY"
	case TypeNext:
		return "NEXT"
	case TypeOffer:
		return "OFFER"
	case TypeMachine:
		return "MACHINE"
	case TypeRefused:
		return "REFUSED"
	case TypeSettle:
		return "SETTLE"
	case TypeSettled:
		return "SETTLED"
	case TypeEntry:
		return "ENTRY"
	case TypeEnd:
		return "END"
	}
	return fmt.Sprintf("type %d", uint16(t))
}

// TypeOf is the type of a message.
func TypeOf(m Message) Type { return m.kind() }

// Descriptors is how many descriptors a message carries.
func Descriptors(m Message) int {
	switch m := m.(type) {
	case *Welcome:
		if m.RingBytes == 0 {
			return 3
		}
		return 4
	case *Offer, *Machine:
		return 1
	}
	return 0
}

// Append appends m, in a version of the protocol that both sides speak, to b.
func Append(b []byte, version uint16, m Message) []byte {
	if m.kind().frozen() {
		version = 0
	}
	start, n := len(b), HeaderBytes+m.size()
	b = append(b, make([]byte, n)...)
	p := b[start:]
	binary.LittleEndian.PutUint32(p[0:], Magic)
	binary.LittleEndian.PutUint16(p[4:], version)
	binary.LittleEndian.PutUint16(p[6:], uint16(m.kind()))
	binary.LittleEndian.PutUint32(p[8:], uint32(n))
	m.put(p[HeaderBytes:])
	return b
}

// Decode takes a whole message apart. version is that of its header: 0 for
// messages that are the same in all versions. An error is [ErrMalformed] or
// [ErrVersion], with what is wrong.
func Decode(b []byte) (version uint16, m Message, err error) {
	switch {
	case len(b) < HeaderBytes:
		return 0, nil, fmt.Errorf("%w: %d bytes", ErrMalformed, len(b))
	case len(b) > MaxBytes:
		return 0, nil, fmt.Errorf("%w: %d bytes are too many", ErrMalformed, len(b))
	case binary.LittleEndian.Uint32(b[0:]) != Magic:
		return 0, nil, fmt.Errorf("%w: no magic number", ErrMalformed)
	case binary.LittleEndian.Uint32(b[8:]) != uint32(len(b)):
		return 0, nil, fmt.Errorf("%w: length %d of %d bytes", ErrMalformed, binary.LittleEndian.Uint32(b[8:]), len(b))
	case binary.LittleEndian.Uint32(b[12:]) != 0:
		return 0, nil, fmt.Errorf("%w: reserved bits of the header", ErrMalformed)
	}
	version = binary.LittleEndian.Uint16(b[4:])
	t := Type(binary.LittleEndian.Uint16(b[6:]))
	if m = newMessage(t); m == nil {
		return 0, nil, fmt.Errorf("%w: %v", ErrMalformed, t)
	}
	body := b[HeaderBytes:]
	switch {
	case t.frozen() && version != 0, !t.frozen() && (version < Supported.Min || version > Supported.Max):
		return 0, nil, fmt.Errorf("%w %d in %v", ErrVersion, version, t)
	case len(body) < m.size(), len(body) > m.size() && t != TypeHello && t != TypeRefused:
		return 0, nil, fmt.Errorf("%w: %v of %d bytes", ErrMalformed, t, len(b))
	}
	if err := m.get(body); err != nil {
		return 0, nil, err
	}
	return version, m, nil
}

// Printable keeps text of the other side from doing anything to a terminal.
func Printable(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r >= 0x7f && r < 0xa0 {
			return '?'
		}
		return r
	}, strings.ToValidUTF8(s, "?"))
}
