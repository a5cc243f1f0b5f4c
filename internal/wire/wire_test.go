// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// one of each type, with a value of its own in every field
var samples = []Message{
	&Hello{Versions{1, 2}, Versions{3, 4}, PurposeWatch, FlagNoWakeup, 5},
	&Challenge{Nonce{1, 2, 15: 16}},
	&Echo{Nonce{1, 2, 15: 16}},
	&Welcome{1 << 40, 2, 3, 4096},
	&Welcome{Watch: 1},
	&Ready{},
	&Next{ReasonNoMachine},
	&Offer{},
	&Machine{},
	&Refused{CodeLimit, "too many"},
	&Settle{7},
	&Settled{7, 1},
	&Entry{1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, [16]byte{'a', 15: 'z'}},
	&End{1 << 63, 2, 3, 4},
}

func TestEveryTypeOfMessage(t *testing.T) {
	seen := map[Type]bool{}
	for _, m := range samples {
		t.Run(TypeOf(m).String(), func(t *testing.T) {
			seen[TypeOf(m)] = true
			b := Append([]byte("before"), 1, m)
			if !bytes.HasPrefix(b, []byte("before")) {
				t.Fatal("what was there is gone")
			}
			b = b[len("before"):]
			version, got, err := Decode(b)
			if err != nil {
				t.Fatal(err)
			}
			want := uint16(1)
			if TypeOf(m).frozen() {
				want = 0
			}
			if version != want {
				t.Errorf("version %d, want %d", version, want)
			}
			if d := cmp.Diff(m, got); d != "" {
				t.Error(d)
			}
			if got := binary.LittleEndian.Uint32(b[8:]); got != uint32(len(b)) {
				t.Errorf("length %d of %d bytes", got, len(b))
			}
			for n := range b {
				if _, _, err := Decode(b[:n]); err == nil {
					t.Errorf("the first %d of %d bytes are a message", n, len(b))
				}
			}
		})
	}
	for n := range Type(100) {
		if (newMessage(n) != nil) != seen[n] {
			t.Errorf("type %d: known %v, tested %v", n, newMessage(n) != nil, seen[n])
		}
	}
}

// The bytes of docs/protocol.md: other programs rely on them.
func TestBytes(t *testing.T) {
	for _, c := range []struct {
		m    Message
		want string // hexadecimal; spaces between fields
	}{
		{&Hello{Versions{1, 1}, Versions{1, 1}, PurposeWatch, FlagMachine, 1 << 18},
			"756d6d75 0000 0100 28000000 00000000  0100 0100 0100 0100 01000000 02000000 00000400 00000000"},
		{&Echo{Nonce{0: 0xa1, 15: 0xa2}},
			"756d6d75 0100 0300 20000000 00000000  a10000000000000000000000000000a2"},
		{&Welcome{Watch: 7, Layout: 1, Tier: 1, RingBytes: 1 << 18},
			"756d6d75 0100 0400 28000000 00000000  0700000000000000 01000000 01000000 00000400 00000000"},
		{&Ready{}, "756d6d75 0100 0500 10000000 00000000"},
		{&Refused{CodeLimit, "no"}, "756d6d75 0000 0900 1a000000 00000000  04000000 02000000 6e6f"},
	} {
		got := Append(nil, 1, c.m)
		if d := cmp.Diff(strings.ReplaceAll(c.want, " ", ""), hex(got)); d != "" {
			t.Errorf("%v: %s", TypeOf(c.m), d)
		}
	}
}

// The document's own examples.
func TestBytesOfTheDocument(t *testing.T) {
	doc, err := os.ReadFile("../../docs/protocol.md")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for line := range strings.Lines(string(doc)) {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		text := strings.ReplaceAll(rest, " ", "")
		if !strings.HasPrefix(text, "756d6d75") {
			continue
		}
		b := make([]byte, len(text)/2)
		for i := range b {
			v, err := strconv.ParseUint(text[2*i:2*i+2], 16, 8)
			if err != nil {
				t.Fatalf("%s: %v", name, err)
			}
			b[i] = byte(v)
		}
		_, m, err := Decode(b)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		if got := TypeOf(m).String(); got != name {
			t.Errorf("%s is %s", name, got)
		}
		if again := Append(nil, 1, m); !bytes.Equal(again, b) {
			t.Errorf("%s: written again %x, in the document %x", name, again, b)
		}
		n++
	}
	if n < 5 {
		t.Errorf("%d examples", n)
	}
	for _, m := range samples {
		if row := fmt.Sprintf("| %d | %v |", TypeOf(m), TypeOf(m)); !strings.Contains(string(doc), row) {
			t.Errorf("no row %q", row)
		}
		if size := fmt.Sprintf("%d bytes", m.size()); m.size() > 16 && !strings.Contains(string(doc), size) {
			t.Errorf("%v: %s is not in the document", TypeOf(m), size)
		}
	}
}

func hex(b []byte) string {
	const digits = "0123456789abcdef"
	var s strings.Builder
	for _, c := range b {
		s.WriteByte(digits[c>>4])
		s.WriteByte(digits[c&15])
	}
	return s.String()
}

func TestDecodeRefuses(t *testing.T) {
	with := func(m Message, f func([]byte) []byte) []byte { return f(Append(nil, 1, m)) }
	poke := func(at int, v byte) func([]byte) []byte {
		return func(b []byte) []byte { b[at] = v; return b }
	}
	for _, c := range []struct {
		name string
		b    []byte
		want error
	}{
		{"nothing", nil, ErrMalformed},
		{"magic", with(&Ready{}, poke(0, 0)), ErrMalformed},
		{"length too large", with(&Ready{}, poke(8, 17)), ErrMalformed},
		{"length with high bits", with(&Ready{}, poke(11, 1)), ErrMalformed},
		{"reserved", with(&Ready{}, poke(12, 1)), ErrMalformed},
		{"type 0", with(&Ready{}, poke(6, 0)), ErrMalformed},
		{"type 255", with(&Ready{}, poke(6, 255)), ErrMalformed},
		{"version 0", with(&Ready{}, poke(4, 0)), ErrVersion},
		{"version of the future", with(&Ready{}, poke(4, 9)), ErrVersion},
		{"HELLO with a version", with(&Hello{Versions: Versions{1, 1}}, poke(4, 1)), ErrVersion},
		{"longer than the type", with(&Ready{}, func(b []byte) []byte { b[8] = 20; return append(b, 0, 0, 0, 0) }), ErrMalformed},
		{"too long", make([]byte, MaxBytes+1), ErrMalformed},
		{"HELLO of no version", Append(nil, 1, &Hello{Versions: Versions{2, 1}}), ErrMalformed},
		{"HELLO of no layout", Append(nil, 1, &Hello{Layouts: Versions{2, 1}}), ErrMalformed},
		{"WELCOME with an odd ring", Append(nil, 1, &Welcome{RingBytes: 4095}), ErrMalformed},
		{"WELCOME with a huge ring", Append(nil, 1, &Welcome{RingBytes: 1 << 31}), ErrMalformed},
		{"SETTLED maybe", Append(nil, 1, &Settled{Quiet: 2}), ErrMalformed},
		{"REFUSED with more text than there is", with(&Refused{Text: "no"}, poke(HeaderBytes+4, 3)), ErrMalformed},
		{"REFUSED with endless text", with(&Refused{Text: "no"}, poke(HeaderBytes+7, 0xff)), ErrMalformed},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, m, err := Decode(c.b); !errors.Is(err, c.want) || m != nil {
				t.Errorf("%v, %v, want %v", m, err, c.want)
			}
		})
	}
}

// A HELLO of a later version may be longer, a REFUSED too.
func TestLongerHello(t *testing.T) {
	for _, m := range []Message{
		&Hello{Versions{1, 9}, Versions{1, 1}, PurposeWatch, 0, 0},
		&Refused{CodeVersion, "no"},
	} {
		b := append(Append(nil, 1, m), 1, 2, 3, 4)
		binary.LittleEndian.PutUint32(b[8:], uint32(len(b)))
		_, got, err := Decode(b)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(m, got); d != "" {
			t.Error(d)
		}
	}
}

func TestLongTextIsCut(t *testing.T) {
	b := Append(nil, 1, &Refused{CodeInternal, strings.Repeat("x", 10_000)})
	if len(b) > MaxBytes {
		t.Fatalf("%d bytes", len(b))
	}
	_, m, err := Decode(b)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(m.(*Refused).Text); n != MaxText {
		t.Errorf("%d bytes of text, want %d", n, MaxText)
	}
}

func TestDescriptors(t *testing.T) {
	for _, m := range samples {
		want := map[Type]int{TypeWelcome: 4, TypeOffer: 1, TypeMachine: 1}[TypeOf(m)]
		if w, ok := m.(*Welcome); ok && w.RingBytes == 0 {
			want = 3
		}
		if got := Descriptors(m); got != want || got > MaxDescriptors {
			t.Errorf("%v has %d descriptors, want %d", TypeOf(m), got, want)
		}
	}
}

func TestChoose(t *testing.T) {
	for _, c := range []struct {
		ours, peer Versions
		want       uint16 // 0: none
	}{
		{Versions{1, 1}, Versions{1, 1}, 1},
		{Versions{1, 2}, Versions{1, 1}, 1},
		{Versions{1, 1}, Versions{1, 2}, 1},
		{Versions{1, 2}, Versions{1, 2}, 2},
		{Versions{2, 3}, Versions{1, 2}, 2},
		{Versions{2, 3}, Versions{1, 1}, 0},
		{Versions{1, 1}, Versions{2, 3}, 0},
		{Versions{1, 1}, Versions{0, 0}, 0},
		{Versions{1, 1}, Versions{0, 65535}, 1},
		{Versions{0, 0}, Versions{0, 0}, 0},
		{Versions{1, 1}, Versions{3, 1}, 0},
		{Versions{3, 1}, Versions{1, 3}, 0},
	} {
		n, ok := c.ours.Choose(c.peer)
		if ok != (c.want != 0) || ok && n != c.want {
			t.Errorf("%v with %v: %d, %v, want %d", c.ours, c.peer, n, ok, c.want)
		}
	}
}

// Descriptors beyond the room for them are closed by the kernel; those that
// came with a truncated message by Attached.
func TestNoDescriptorStays(t *testing.T) {
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pair[0])
	defer unix.Close(pair[1])
	if err := unix.SetsockoptInt(pair[1], unix.SOL_SOCKET, unix.SO_PASSCRED, 1); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name      string
		fds, room int
		length    int
		want      int // descriptors; -1: refused
	}{
		{"none", 0, 1, 16, 0},
		{"one", 1, 1, 16, 1},
		{"four", 4, 4, 16, 4},
		{"two where one is expected", 2, 1, 16, -1},
		{"a flood", 200, 1, 16, -1},
		{"one where none is expected", 1, 0, 16, -1},
		{"one with too long a message", 1, 1, MaxBytes + 1, -1},
	} {
		t.Run(c.name, func(t *testing.T) {
			before := descriptors(t)
			var fds []int
			for range c.fds {
				fds = append(fds, 0)
			}
			var rights []byte
			if len(fds) > 0 {
				rights = unix.UnixRights(fds...)
			}
			if err := unix.Sendmsg(pair[0], make([]byte, c.length), rights, nil, 0); err != nil {
				t.Fatal(err)
			}
			buf, oob := make([]byte, MaxBytes), make([]byte, ControlBytes(c.room))
			_, n, flags, _, err := unix.Recvmsg(pair[1], buf, oob, unix.MSG_CMSG_CLOEXEC)
			if err != nil {
				t.Fatal(err)
			}
			a, err := Attached(oob[:n], flags)
			if c.want < 0 {
				if !errors.Is(err, ErrMalformed) {
					t.Errorf("%v, want ErrMalformed", err)
				}
			} else {
				if err != nil {
					t.Fatal(err)
				}
				if len(a.FDs) != c.want {
					t.Errorf("%d descriptors, want %d", len(a.FDs), c.want)
				}
				if a.Cred == nil || int(a.Cred.Pid) != os.Getpid() {
					t.Errorf("credentials %+v", a.Cred)
				}
			}
			a.Close()
			if after := descriptors(t); after != before {
				t.Errorf("%d descriptors are open, %d before", after, before)
			}
		})
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	names, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(names)
}

// Whatever Decode accepts means the same when it is written again.
func FuzzDecode(f *testing.F) {
	for _, m := range samples {
		f.Add(Append(nil, 1, m))
	}
	f.Add([]byte{})
	f.Add(Append(nil, 7, &Ready{}))
	f.Fuzz(func(t *testing.T, b []byte) {
		version, m, err := Decode(b)
		if err != nil {
			if m != nil || !errors.Is(err, ErrMalformed) && !errors.Is(err, ErrVersion) {
				t.Fatalf("%v, %v", m, err)
			}
			return
		}
		_, again, err := Decode(Append(nil, version, m))
		if err != nil {
			t.Fatalf("%+v: %v", m, err)
		}
		if d := cmp.Diff(m, again); d != "" {
			t.Fatal(d)
		}
	})
}

// Control messages come from the kernel, but cost nothing to distrust.
func FuzzAttached(f *testing.F) {
	f.Add(unix.UnixCredentials(&unix.Ucred{Pid: 1}), 0)
	f.Add([]byte{1, 2, 3}, unix.MSG_CTRUNC)
	f.Fuzz(func(t *testing.T, oob []byte, flags int) {
		messages, err := unix.ParseSocketControlMessage(oob)
		for i := range messages {
			if messages[i].Header.Type == unix.SCM_RIGHTS {
				return // the numbers could be this process's own
			}
		}
		a, got := Attached(oob, flags)
		if (err != nil || flags&(unix.MSG_CTRUNC|unix.MSG_TRUNC) != 0) && got == nil {
			t.Fatalf("accepted: %+v", a)
		}
	})
}
