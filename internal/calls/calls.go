// SPDX-License-Identifier: Apache-2.0

// Package calls names the system calls and io_uring requests behind records
// and decodes their flag arguments ([mm.Record].Arg) into the names of the
// kernel's headers. The tables hold the calls that change address spaces, for
// every ABI of an architecture, on every architecture: a recording of an
// arm64 machine reads the same on x86-64.
package calls

import (
	"fmt"
	"runtime"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// Table holds the calls of one architecture. It is immutable.
type Table struct {
	native, compat map[uint32]entry
	prot, mmap     field
}

// entry is one call: its name, how its Arg reads, whether it returns an address.
type entry struct {
	name    string
	args    shape
	address bool
}

// shape says what mm.Record.Arg holds for a call.
type shape uint8

const (
	noArgs        shape = iota
	protMap             // {prot, flags of mmap}
	protPkey            // {prot, pkey}
	protOnly            // {prot}
	advice              // {advice}
	mremap              // {flags of mremap}
	shmat               // {flags of shmat}
	uringRegister       // {opcode of io_uring_register}
)

// Host is the table of the architecture this program was built for.
func Host() *Table {
	t, err := For(runtime.GOARCH)
	if err != nil {
		return &Table{prot: protField, mmap: mmapField}
	}
	return t
}

// For returns the table of an architecture by its Go name, "amd64" or "arm64".
func For(arch string) (*Table, error) {
	switch arch {
	case "amd64":
		return amd64, nil
	case "arm64":
		return arm64, nil
	}
	return nil, fmt.Errorf("no table of calls for architecture %q (known: amd64, arm64)", arch)
}

func (t *Table) lookup(c mm.Call) entry {
	switch c.ABI {
	case mm.ABINative:
		return t.native[c.NR]
	case mm.ABIX32:
		return t.native[c.NR&^x32Bit]
	case mm.ABICompat:
		return t.compat[c.NR]
	case mm.ABIIOUring:
		if int(c.NR) < len(uringOps) {
			e := entry{name: uringOps[c.NR]}
			if c.NR == uringMadvise {
				e.args = advice
			}
			return e
		}
	}
	return entry{}
}

// Name is the call's name as in its manual page ("munmap"), the opcode's name
// for an io_uring request ("IORING_OP_MADVISE"), and empty where there was no
// call. Numbers without a name become "syscall_N" and "IORING_OP_N".
func (t *Table) Name(c mm.Call) string {
	if e := t.lookup(c); e.name != "" {
		return e.name
	}
	switch c.ABI {
	case mm.ABINone:
		return ""
	case mm.ABIIOUring:
		return "IORING_OP_" + strconv.FormatUint(uint64(c.NR), 10)
	}
	return "syscall_" + strconv.FormatUint(uint64(c.NR), 10)
}

// Flags appends the names of the call's flags to dst. Bits without a name are
// appended together as one hexadecimal number, so that nothing is hidden. It
// does not allocate as long as every bit has a name and dst has room.
func (t *Table) Flags(dst []string, c mm.Call, arg [2]uint64) []string {
	switch t.lookup(c).args {
	case protMap:
		dst = t.mmap.append(t.prot.append(dst, arg[0]), arg[1])
	case protPkey:
		dst = append(t.prot.append(dst, arg[0]), "pkey="+strconv.Itoa(int(int32(arg[1]))))
	case protOnly:
		dst = t.prot.append(dst, arg[0])
	case advice:
		dst = adviceField.append(dst, arg[0])
	case mremap:
		dst = mremapField.append(dst, arg[0])
	case shmat:
		dst = shmatField.append(dst, arg[0])
	case uringRegister:
		dst = uringRegisterField.append(dst, arg[0])
	}
	return dst
}

// AppendArgs appends the call's flag arguments as C source would have them:
// "PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_FIXED".
func (t *Table) AppendArgs(dst []byte, c mm.Call, arg [2]uint64) []byte {
	var buf [24]string
	s := t.lookup(c).args
	switch s {
	case protMap, protPkey:
		dst = appendJoined(dst, t.prot.append(buf[:0], arg[0]))
		dst = append(dst, ", "...)
		if s == protPkey {
			return strconv.AppendInt(dst, int64(int32(arg[1])), 10)
		}
		return appendJoined(dst, t.mmap.append(buf[:0], arg[1]))
	}
	return appendJoined(dst, t.Flags(buf[:0], c, arg))
}

func appendJoined(dst []byte, names []string) []byte {
	if len(names) == 0 {
		return append(dst, '0')
	}
	for i, n := range names {
		if i > 0 {
			dst = append(dst, '|')
		}
		dst = append(dst, n...)
	}
	return dst
}

// HasArgs reports whether the call has flag arguments that mm.Record.Arg holds.
func (t *Table) HasArgs(c mm.Call) bool { return t.lookup(c).args != noArgs }

// AppendResult appends what the call returned as strace writes it: "0",
// "-1 EINVAL", and an address in hexadecimal for calls that return one.
func (t *Table) AppendResult(dst []byte, c mm.Call, ret int64) []byte {
	switch {
	case ret < 0 && ret >= -4095:
		dst = append(dst, "-1 "...)
		if n := unix.ErrnoName(unix.Errno(-ret)); n != "" {
			return append(dst, n...)
		}
		return strconv.AppendInt(append(dst, "errno "...), -ret, 10)
	case t.lookup(c).address:
		return strconv.AppendUint(append(dst, "0x"...), uint64(ret), 16)
	}
	return strconv.AppendInt(dst, ret, 10)
}

// name is one flag: value is what v&mask must be. A mask of several bits is a
// number inside the flags, as the type of a mapping is.
type name struct {
	mask, value uint64
	text        string
}

// field is the names of one flag argument. The kernel's flag arguments of
// these calls are 32-bit numbers or use no bit above the 32nd.
type field struct {
	names []name
	zero  string // the name of 0, if it has one
	enum  bool   // one number, not bits
	huge  bool   // bits 26-31 are the logarithm of a page size, as in MAP_HUGE_2MB
}

func (f *field) append(dst []string, v uint64) []string {
	if v == 0 {
		if f.zero != "" {
			dst = append(dst, f.zero)
		}
		return dst
	}
	rest := v
	for i := range f.names {
		n := &f.names[i]
		if f.enum {
			if n.value == v {
				return append(dst, n.text)
			}
		} else if v&n.mask == n.value {
			dst = append(dst, n.text)
			rest &^= n.mask
		}
	}
	if f.enum {
		return append(dst, strconv.FormatUint(v, 10))
	}
	if h := rest >> hugeShift & hugeMask; f.huge && h != 0 {
		dst = append(dst, hugeName(h))
		rest &^= hugeMask << hugeShift
	}
	if rest != 0 {
		dst = append(dst, "0x"+strconv.FormatUint(rest, 16))
	}
	return dst
}

// The size of huge pages in the flags of mmap, linux/mman.h.
const (
	hugeShift = 26
	hugeMask  = 0x3f
)

func hugeName(log uint64) string {
	switch {
	case log >= 10 && log < 20:
		return "MAP_HUGE_" + strconv.Itoa(1<<(log-10)) + "KB"
	case log >= 20 && log < 30:
		return "MAP_HUGE_" + strconv.Itoa(1<<(log-20)) + "MB"
	case log >= 30 && log < 40:
		return "MAP_HUGE_" + strconv.Itoa(1<<(log-30)) + "GB"
	}
	return strconv.FormatUint(log, 10) + "<<MAP_HUGE_SHIFT"
}
