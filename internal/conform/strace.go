// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"maps"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// traced are the calls that strace is asked to show: those that change page
// tables or create address spaces, shmget for the size of a segment, and the
// calls that tell a thread which ends from one that is killed. A leading "?" makes strace accept a name that its architecture does not have.
const traced = "?munmap,?mmap,?mmap2,?mremap,?mprotect,?pkey_mprotect,?madvise,?process_madvise,?brk," +
	"?shmat,?shmdt,?shmget,?remap_file_pages,?clone,?clone3,?fork,?vfork,?execve,?execveat,?exit,?exit_group"

// undecoded are the calls whose arguments are wanted as plain numbers.
const undecoded = "?munmap,?mmap,?mmap2,?mremap,?mprotect,?pkey_mprotect,?madvise,?brk," +
	"?shmat,?shmdt,?shmget,?remap_file_pages,?clone,?fork,?vfork,?execve,?execveat"

// straceArgs are the options under which [ParseStrace] understands the
// output. strace's --seccomp-bpf is left out on purpose: with it, strace 6.1
// takes the first call after an exec by a thread for the end of that exec.
func straceArgs(out string) []string {
	return []string{"-f", "-o", out, "-X", "raw", "-e", "abbrev=none",
		"-e", "signal=none", "-e", "raw=" + undecoded, "-e", "trace=" + traced}
}

// exitCall is the name under which the end of a thread stands in a [Log];
// the calls exit and exit_group themselves are not in it. unknownCall is what
// strace shows where it came too late to read the number of the call.
const (
	exitCall    = "exit"
	unknownCall = "???"
)

// A Call is one system call of one thread as strace shows it, or, with the
// name "exit", the end of the thread.
type Call struct {
	TID  int
	Line int // of its beginning, from 1
	Name string
	Args []uint64 // those that are plain numbers; 0 elsewhere
	Iov  []mm.Range
	// CloneFlags are those of clone, clone3, fork and vfork.
	CloneFlags uint64
	// Done: it returned Ret (a negative errno on failure). Else the thread
	// was killed in it.
	Done bool
	Ret  int64
	// Doubtful: the thread was killed in it, or after it and Ret is none
	// that the call can have. strace 6.1 reads such ends too late: it shows
	// 0xb as the result, or the call of another thread.
	Doubtful bool
	// Old is what an address-space wide value was before the call: the
	// program break (brk), or the size of the segment (shmat, shmdt). Only
	// if Known.
	Old   uint64
	Known bool

	text string // arguments while unfinished
}

func (c *Call) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s(", c.Name)
	for i, a := range c.Args {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, "%#x", a)
	}
	switch {
	case !c.Done:
		b.WriteString(") = ?")
	case c.Ret < 0:
		fmt.Fprintf(&b, ") = %d", c.Ret)
	default:
		fmt.Fprintf(&b, ") = %#x", c.Ret)
	}
	return b.String()
}

func (c *Call) arg(i int) uint64 {
	if i < len(c.Args) {
		return c.Args[i]
	}
	return 0
}

// A Log is the parsed output of one strace.
type Log struct {
	Root    int             // the thread that strace started
	Threads map[int][]*Call // by tid, in order
}

// ErrStrace is what every error of [ParseStrace] about the text wraps.
var ErrStrace = errors.New("not understood as strace output")

// event is one line: a call begins, ends, or both.
type event struct {
	c          *Call
	begin, end bool
}

// ParseStrace reads the output of strace under the options that Run uses
// (-f, raw arguments). Lines of signals are passed over; a line of a shape it
// does not know is an error, because a call may hide behind it.
func ParseStrace(r io.Reader) (*Log, error) {
	p := parser{log: &Log{Threads: map[int][]*Call{}}, open: map[int]*Call{}, ending: map[int]bool{}}
	sc := bufio.NewScanner(r)
	sc.Buffer(nil, 1<<20)
	for sc.Scan() {
		p.line++
		if err := p.parse(sc.Text()); err != nil {
			return nil, fmt.Errorf("parse strace line %d %.120q: %w", p.line, sc.Text(), err)
		}
	}
	if err := sc.Err(); err != nil {
		return nil, fmt.Errorf("read strace output: %w", err)
	}
	if p.log.Root == 0 {
		return nil, fmt.Errorf("parse strace output: no line: %w", ErrStrace)
	}
	follow(p.events, p.log.Root)
	return p.log, nil
}

type parser struct {
	log    *Log
	open   map[int]*Call // unfinished call of each thread
	ending map[int]bool  // threads that called exit or exit_group
	events []event
	line   int
}

const (
	unfinished = "<unfinished ...>"
	pidChanged = "<pid changed to "
	superseded = "+++ superseded by execve in pid "
)

func (p *parser) parse(line string) error {
	num, rest, ok := strings.Cut(line, " ")
	tid, err := strconv.Atoi(num)
	if !ok || err != nil || tid <= 0 {
		return ErrStrace
	}
	rest = strings.TrimSpace(rest)
	if p.log.Root == 0 {
		p.log.Root = tid
	}
	switch {
	case strings.HasPrefix(rest, "--- "):
		return nil
	case strings.HasPrefix(rest, "+++ exited"), strings.HasPrefix(rest, "+++ killed"):
		p.exit(tid)
		return nil
	case strings.HasPrefix(rest, superseded):
		p.exit(tid)
		old, err := strconv.Atoi(strings.TrimSuffix(rest[len(superseded):], " +++"))
		if err != nil {
			return ErrStrace
		}
		return p.rename(old, tid)
	case strings.HasPrefix(rest, "<... "):
		c := p.open[tid]
		name, tail, ok := strings.Cut(rest[len("<... "):], " resumed>")
		if p.ending[tid] {
			return nil
		}
		if !ok || c == nil || c.Name != name {
			return ErrStrace
		}
		// A call that a signal interrupted may be unfinished twice.
		if t, ok := strings.CutSuffix(tail, unfinished); ok {
			c.text += t
			return nil
		}
		delete(p.open, tid)
		if err := c.finish(c.text + tail); err != nil {
			return err
		}
		p.events = append(p.events, event{c: c, end: true})
		return nil
	}

	name, text, ok := strings.Cut(rest, "(")
	if !ok || name == "" || name != unknownCall && strings.ContainsFunc(name, notName) || p.open[tid] != nil {
		return ErrStrace
	}
	if name == "exit" || name == "exit_group" {
		p.ending[tid] = true
		return nil
	}
	c := &Call{TID: tid, Line: p.line, Name: name}
	t, cut := strings.CutSuffix(text, unfinished)
	if i := strings.LastIndex(text, pidChanged); i >= 0 {
		// exec by a thread; the line that it supersedes another one follows
		t, cut = text[:i], true
	}
	if cut {
		c.text = t
		p.open[tid] = c
		p.add(c, false)
		return nil
	}
	if err := c.finish(text); err != nil {
		return err
	}
	p.add(c, true)
	return nil
}

func (p *parser) add(c *Call, end bool) {
	p.log.Threads[c.TID] = append(p.log.Threads[c.TID], c)
	p.events = append(p.events, event{c: c, begin: true, end: end})
}

func (p *parser) exit(tid int) {
	if calls := p.log.Threads[tid]; !p.ending[tid] && len(calls) > 0 {
		last := calls[len(calls)-1]
		last.Doubtful = !last.Done || !last.possible()
	}
	delete(p.ending, tid) // the number may live on, by exec
	delete(p.open, tid)
	p.add(&Call{TID: tid, Line: p.line, Name: exitCall, Done: true}, true)
}

// possible reports whether the call can return what it did.
func (c *Call) possible() bool {
	switch c.Name {
	case "munmap", "mprotect", "pkey_mprotect", "madvise", "shmdt", "remap_file_pages", "execve", "execveat":
		return c.Ret <= 0
	case "mmap", "mremap", "shmat":
		return c.Ret < 0 || uint64(c.Ret)%mm.PageSize() == 0
	case "brk":
		return c.Ret < 0 || uint64(c.Ret) >= mm.PageSize()
	}
	return true
}

// rename moves the exec that thread old is in to thread tid, the leader,
// whose number it has from now on.
func (p *parser) rename(old, tid int) error {
	c, calls := p.open[old], p.log.Threads[old]
	if c == nil || old == tid || !isExec(c.Name) || calls[len(calls)-1] != c {
		return ErrStrace
	}
	delete(p.open, old)
	p.log.Threads[old] = calls[:len(calls)-1]
	c.TID = tid
	p.open[tid] = c
	p.log.Threads[tid] = append(p.log.Threads[tid], c)
	return nil
}

func notName(r rune) bool {
	return (r < 'a' || r > 'z') && (r < '0' || r > '9') && r != '_'
}

func isExec(name string) bool { return name == "execve" || name == "execveat" }

func isFork(name string) bool {
	return name == "clone" || name == "clone3" || name == "fork" || name == "vfork"
}

// finish takes everything behind the opening parenthesis: arguments,
// ")", "=", result.
func (c *Call) finish(text string) error {
	c.text = ""
	i := strings.LastIndex(text, "= ")
	if i < 0 {
		return ErrStrace
	}
	args, ok := strings.CutSuffix(strings.TrimRight(text[:i], " "), ")")
	if !ok {
		return ErrStrace
	}
	if err := c.result(text[i+len("= "):]); err != nil {
		return err
	}
	c.Iov = iovecs(args)
	for _, a := range splitArgs(args) {
		n, err := strconv.ParseUint(a, 0, 64)
		if err != nil {
			n = 0
		}
		c.Args = append(c.Args, n)
	}
	switch c.Name {
	case "mmap2":
		c.Name = "mmap"
	case "clone":
		c.CloneFlags = c.arg(0)
	case "clone3":
		c.CloneFlags = field(args, "flags=")
	case "vfork":
		c.CloneFlags = cloneVM
	}
	return nil
}

const cloneVM = 0x100 // CLONE_VM

func (c *Call) result(s string) error {
	val, rest, _ := strings.Cut(s, " ")
	switch val {
	case "?":
		return nil
	case "-1":
		name, tail, _ := strings.Cut(rest, " ")
		if name == "(errno" { // a number that is no error, of a thread that is killed
			n, err := strconv.ParseUint(strings.TrimSuffix(tail, ")"), 10, 64)
			if err != nil {
				return ErrStrace
			}
			c.Ret = -int64(n)
			break
		}
		n, ok := errnos[name]
		if !ok {
			return ErrStrace
		}
		c.Ret = -int64(n)
	default:
		n, err := strconv.ParseUint(val, 0, 64)
		if err != nil {
			return ErrStrace
		}
		c.Ret = int64(n)
	}
	c.Done = true
	return nil
}

var errnos = func() map[string]syscall.Errno {
	// Not errors but the kernel's word to itself to make the call again
	// (include/linux/errno.h).
	m := map[string]syscall.Errno{"ERESTARTSYS": 512, "ERESTARTNOINTR": 513, "ERESTARTNOHAND": 514, "ERESTART_RESTARTBLOCK": 516}
	for e := syscall.Errno(1); e < 256; e++ {
		if n := unix.ErrnoName(e); n != "" {
			m[n] = e
		}
	}
	return m
}()

// splitArgs cuts at the commas that are in no bracket.
func splitArgs(s string) []string {
	var out []string
	depth, from := 0, 0
	for i := 0; i < len(s); i++ {
		switch s[i] {
		case '[', '{', '(':
			depth++
		case ']', '}', ')':
			depth--
		case ',':
			if depth == 0 {
				out = append(out, strings.TrimSpace(s[from:i]))
				from = i + 1
			}
		}
	}
	if last := strings.TrimSpace(s[from:]); last != "" {
		out = append(out, last)
	}
	return out
}

// iovecs finds the elements of a decoded vector.
func iovecs(s string) []mm.Range {
	var out []mm.Range
	for {
		_, after, ok := strings.Cut(s, "{iov_base=")
		if !ok {
			return out
		}
		base, n := number(after), field(after, "iov_len=")
		out = append(out, mm.Range{Start: mm.Addr(base), End: mm.Addr(base + n)})
		s = after
	}
}

// field is the number behind the first name in s, or 0.
func field(s, name string) uint64 {
	_, after, _ := strings.Cut(s, name)
	return number(after)
}

// number is the number at the beginning of s, or 0.
func number(s string) uint64 {
	if i := strings.IndexFunc(s, notName); i >= 0 {
		s = s[:i]
	}
	n, err := strconv.ParseUint(s, 0, 64)
	if err != nil {
		return 0
	}
	return n
}

// space is what follow remembers of an address space.
type space struct {
	brk   uint64
	known bool
	shm   map[uint64]uint64 // attached segments: size by address
}

// follow goes through the lines in order and notes in each call what only
// earlier calls tell: the program break and the size of a segment.
func follow(events []event, root int) {
	spaces := map[int]*space{root: {}}
	segments := map[uint64]uint64{}
	of := func(tid int) *space {
		if spaces[tid] == nil {
			spaces[tid] = &space{}
		}
		return spaces[tid]
	}
	for _, e := range events {
		c := e.c
		// The child may be seen before the call returns in the parent.
		if e.begin && isFork(c.Name) && c.Done && c.Ret > 0 {
			s := of(c.TID)
			if c.CloneFlags&cloneVM == 0 {
				s = &space{brk: s.brk, known: s.known, shm: maps.Clone(s.shm)}
			}
			spaces[int(c.Ret)] = s
		}
		if !e.end || !c.Done || c.Ret < 0 {
			continue
		}
		s := of(c.TID)
		switch c.Name {
		case "execve", "execveat":
			spaces[c.TID] = &space{}
		case "brk":
			c.Old, c.Known = s.brk, s.known
			s.brk, s.known = uint64(c.Ret), true
		case "shmget":
			segments[uint64(c.Ret)] = c.arg(1)
		case "shmat":
			c.Old, c.Known = segments[c.arg(0)], segments[c.arg(0)] != 0
			if s.shm == nil {
				s.shm = map[uint64]uint64{}
			}
			s.shm[uint64(c.Ret)] = c.Old
		case "shmdt":
			c.Old, c.Known = s.shm[c.arg(0)], s.shm[c.arg(0)] != 0
			delete(s.shm, c.arg(0))
		}
	}
}
