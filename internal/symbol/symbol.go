// SPDX-License-Identifier: Apache-2.0

// Package symbol turns user stacks into functions, files and lines.
//
// A [Resolver] knows the executable mappings of processes from snapshots of
// /proc/PID/maps and opens the files behind them while the process lives, so
// that stacks of a process that has ended, or of a file that was replaced, can
// still be read. It unwinds with the call frame information of the files
// (.eh_frame, .debug_frame), and where a file has none by frame pointers.
//
// Names come from .symtab and .dynsym, files, lines and inlined functions from
// DWARF, of the file itself or of its debug file: by build-id below
// /usr/lib/debug/.build-id, or by .gnu_debuglink. C++ and Rust names are
// demangled.
//
// What it cannot do: frames beyond the memory that came with the stack
// ([mm.Stack]), signal frames, code without a file (JIT), DWARF that is split
// into .dwo files, and .gnu_debugdata. A stack then ends early, or a frame has
// no name; it is never guessed.
package symbol

import (
	"fmt"
	"strings"

	"github.com/ummu/ummu/mm"
)

// Frame is one function of a stack, innermost first.
type Frame struct {
	// Addr is the program counter: of the event in the first frame, else where
	// the called function returns to. Inlined functions share it.
	Addr mm.Addr
	// Func is the demangled name, empty if there is none.
	Func string
	// File and Line are of the instruction, or of the call; empty and 0
	// without debug information.
	File string
	Line int
	// Module is the file that is mapped there, "[vdso]", or empty.
	Module string
	// Offset is the address within Module as `addr2line -e Module` takes it.
	Offset uint64
	// BuildID of Module, in hexadecimal; empty if it has none.
	BuildID string
	// Inlined: the compiler put this function into the next frame's.
	Inlined bool
}

// String is "free_buffer (app.c:12)", or as much of it as is known:
// "/usr/lib/libc.so.6+0x9a1f0", "0x7f0012345678".
func (f Frame) String() string {
	where := ""
	if f.File != "" {
		where = fmt.Sprintf("%s:%d", f.File, f.Line)
	} else if f.Module != "" {
		where = fmt.Sprintf("%s+0x%x", f.Module, f.Offset)
	}
	switch {
	case f.Func != "" && where != "":
		return f.Func + " (" + where + ")"
	case f.Func != "":
		return f.Func
	case where != "":
		return where
	}
	return f.Addr.String()
}

// Base is the name of the function without namespace, arguments and template
// arguments, as a person would look for it: "push_back" for
// "std::vector<int>::push_back(int const&)".
func (f Frame) Base() string {
	s := f.Func
	depth, end := 0, len(s)
	for i := 0; i < len(s); i++ { // up to the arguments
		switch s[i] {
		case '<':
			depth++
		case '>':
			depth--
		case '(':
			if depth == 0 && i > 0 && s[i-1] != '.' && end == len(s) { // not Go's (*T).method
				end = i
			}
		}
	}
	s = s[:end]
	if i := strings.LastIndex(s, "::"); i >= 0 {
		s = s[i+2:]
	}
	return s
}
