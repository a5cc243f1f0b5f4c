// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Op is what a step does.
type Op uint8

// The operations. Arg selects among the variants of each.
const (
	OpRegister  Op = iota // register the range, cache it if the feed says so
	OpMap                 // anonymous memory, fixed or at a hint, over what is there or not
	OpMapFile             // a file, shared or private
	OpUnmap               // whole pages or a byte more
	OpProtect             // NONE, READ, READ|WRITE, by either call
	OpAdvise              // madvise
	OpVector              // process_madvise of scattered pages
	OpRemap               // mremap
	OpBreak               // brk
	OpAttach              // shmat over what is there
	OpDetach              // shmdt
	OpTruncate            // of a file
	OpPunch               // a hole into a file
	OpTouch               // write to each page, or read
	OpLock                // mlock, munlock
	OpFilePages           // remap_file_pages
	numOps
)

var opNames = [numOps]string{
	"register", "mmap", "mmapfile", "munmap", "mprotect", "madvise", "vector", "mremap", "brk",
	"shmat", "shmdt", "truncate", "punch", "touch", "mlock", "filepages",
}

// weights is how often the generator takes each.
var weights = [numOps]int{
	OpRegister: 40, OpMap: 16, OpMapFile: 4, OpUnmap: 6, OpProtect: 6, OpAdvise: 14, OpVector: 4, OpRemap: 9, OpBreak: 2,
	OpAttach: 1, OpDetach: 1, OpTruncate: 2, OpPunch: 2, OpTouch: 4, OpLock: 1, OpFilePages: 1,
}

// How says who does it.
type How uint8

const (
	Direct How = iota // the thread
	Vfork             // a child of the thread, in the same address space
	Fork              // a child of the thread, in a copy
	Uring             // io_uring, where the operation is madvise; else the thread
	numHows
)

var howNames = [numHows]string{"direct", "vfork", "fork", "uring"}

// Area is a part of the address space that belongs to the steps.
type Area uint8

const (
	Small Area = iota // ordinary pages
	Heap              // below the program break
	Huge              // transparent huge pages; the unit is 256 KiB
	TLB               // hugetlb pages of 2 MiB
	numAreas
)

var areaNames = [numAreas]string{"small", "heap", "huge", "hugetlb"}

// Threads is how many threads there are.
const Threads = 3

// Step is one operation. Any values are valid: what is out of range is taken
// modulo the range.
type Step struct {
	// With: at the same time as the step after it, if that is another
	// thread's.
	With   bool
	Thread uint8
	How    How
	Op     Op
	Area   Area
	Page   uint8 // first unit in the area
	Pages  uint8 // units; 0: one ordinary page
	To     uint8 // second place: destination, page of the file, seed of the vector
	Arg    uint8 // variant of the operation
}

// Program is a list of steps; it begins with all areas mapped and empty.
type Program []Step

const stepBytes = 8

func (s Step) normal() Step {
	s.Thread %= Threads
	s.How %= numHows
	s.Op %= numOps
	s.Area %= numAreas
	if s.How == Uring && s.Op != OpAdvise || s.Op == OpRegister {
		s.How = Direct
	}
	return s
}

// Decode makes a program of any bytes, 8 for each step.
func Decode(b []byte) Program {
	p := make(Program, 0, len(b)/stepBytes)
	for c := range slices.Chunk(b, stepBytes) {
		if len(c) < stepBytes {
			break
		}
		p = append(p, Step{
			With: c[0]&1 != 0, Thread: c[0] >> 1, How: How(c[1]), Op: Op(c[2]),
			Area: Area(c[3]), Page: c[4], Pages: c[5], To: c[6], Arg: c[7],
		}.normal())
	}
	return p
}

// Encode is the reverse of Decode.
func (p Program) Encode() []byte {
	b := make([]byte, 0, len(p)*stepBytes)
	for _, s := range p {
		s = s.normal()
		first := s.Thread << 1
		if s.With {
			first |= 1
		}
		b = append(b, first, byte(s.How), byte(s.Op), byte(s.Area), s.Page, s.Pages, s.To, s.Arg)
	}
	return b
}

// Generate makes a program of n steps. With hugetlb it is mainly about the
// area of that name, else never.
func Generate(rng *rand.Rand, n int, hugetlb bool) Program {
	main := Small
	switch k := rng.IntN(100); {
	case hugetlb:
		main = TLB
	case k < 12:
		main = Heap
	case k < 24:
		main = Huge
	}
	sum := 0
	for _, w := range weights {
		sum += w
	}
	// some programs are crowded, so that steps meet
	span := 1 << (2 + rng.IntN(5))
	alone := 8 // steps, for each that runs with another one
	if rng.IntN(3) == 0 {
		alone = 2
	}
	p := make(Program, n)
	for i := range p {
		s := &p[i]
		k := rng.IntN(sum)
		for k >= weights[s.Op] {
			k -= weights[s.Op]
			s.Op++
		}
		if s.Op == OpBreak {
			s.Area = Heap
		} else if rng.IntN(10) < 8 {
			s.Area = main
		}
		s.Thread = uint8(rng.IntN(Threads))
		switch k := rng.IntN(100); {
		case k < 5:
			s.How = Vfork
		case k < 9:
			s.How = Fork
		case k < 25:
			s.How = Uring
		}
		s.With = rng.IntN(alone) == 0
		s.Page = uint8(rng.IntN(span))
		s.Pages = uint8(1 + rng.IntN(4))
		switch rng.IntN(8) {
		case 0:
			s.Pages = uint8(rng.IntN(32))
		case 1:
			s.Pages = 0
		}
		s.To = uint8(rng.IntN(64))
		s.Arg = uint8(rng.IntN(256))
		*s = s.normal()
	}
	return p
}

// String is the step in the form that ParseProgram reads, with a comment for
// people.
func (s Step) String() string {
	s = s.normal()
	with := " "
	if s.With {
		with = "&"
	}
	line := fmt.Sprintf("%s t%d %-6s %-9s %-7s %2d +%-2d to %2d arg %3d", with, s.Thread, howNames[s.How], opNames[s.Op],
		areaNames[s.Area], s.Page, s.Pages, s.To, s.Arg)
	if c := s.comment(); c != "" {
		line += "  # " + c
	}
	return line
}

// String has one step a line; & before one means: at the same time as the next.
func (p Program) String() string {
	var b strings.Builder
	for _, s := range p {
		b.WriteString(s.String())
		b.WriteByte('\n')
	}
	return b.String()
}

var errProgram = errors.New("malformed program")

// ParseProgram reads what [Program.String] wrote.
func ParseProgram(text string) (Program, error) {
	var p Program
	n := 0
	for line := range strings.Lines(text) {
		n++
		line, _, _ = strings.Cut(line, "#")
		line = strings.TrimSpace(line)
		if line == "" {
			continue
		}
		var s Step
		var how, op, area string
		line, s.With = strings.CutPrefix(line, "&")
		if _, err := fmt.Sscanf(strings.Join(strings.Fields(line), " "), "t%d %s %s %s %d +%d to %d arg %d",
			&s.Thread, &how, &op, &area, &s.Page, &s.Pages, &s.To, &s.Arg); err != nil {
			return nil, fmt.Errorf("line %d: %w: %w", n, errProgram, err)
		}
		h, o, a := slices.Index(howNames[:], how), slices.Index(opNames[:], op), slices.Index(areaNames[:], area)
		if h < 0 || o < 0 || a < 0 {
			return nil, fmt.Errorf("line %d: %w: unknown word", n, errProgram)
		}
		s.How, s.Op, s.Area = How(h), Op(o), Area(a)
		p = append(p, s.normal())
	}
	return p, nil
}
