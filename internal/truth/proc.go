// SPDX-License-Identifier: Apache-2.0

package truth

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/ops"
)

// Impl is a way of making the calls.
type Impl struct {
	Name    string
	Preload string // LD_PRELOAD of the program, a path; empty for none
	program string
}

// Impls returns the ways: a C program by libc's functions, the same static
// and by direct system calls, a Go program, and the first of them with each
// of the allocators that hook or make memory-management calls of their own.
func Impls() []Impl {
	return []Impl{
		{Name: "libc", program: "libc"},
		{Name: "direct", program: "direct"},
		{Name: "go", program: "go"},
		{Name: "jemalloc", program: "libc", Preload: library("libjemalloc.so.2")},
		{Name: "tcmalloc", program: "libc", Preload: library("libtcmalloc.so.4")},
		{Name: "mimalloc", program: "libc", Preload: library("libmimalloc.so.*")},
	}
}

// library returns the path of an installed library, or what was looked for.
func library(pattern string) string {
	pattern = "/usr/lib/*/" + pattern
	if found, _ := filepath.Glob(pattern); len(found) > 0 {
		return found[0]
	}
	return pattern
}

// Programs are the built programs of package ops.
type Programs struct{ dir string }

// Build compiles the programs into dir, with gcc and go. The programs of a
// directory can be started any number of times. Where the environment variable
// UMMU_TEST_PROGRAMS names a directory, they are there already.
func Build(dir string) (*Programs, error) {
	if built := os.Getenv("UMMU_TEST_PROGRAMS"); built != "" {
		return &Programs{built}, nil
	}
	source := filepath.Join(dir, "ops.c")
	if err := os.WriteFile(source, ops.Source, 0o644); err != nil {
		return nil, fmt.Errorf("write program: %w", err)
	}
	cflags := []string{"-O2", "-Wall"}
	if runtime.GOARCH == "amd64" {
		cflags = append(cflags, "-mno-red-zone") // ops.c pushes in inline assembly
	}
	for _, c := range []struct {
		name string
		args []string
	}{
		{"gcc", append([]string{"-o", filepath.Join(dir, "libc"), source}, cflags...)},
		{"gcc", append([]string{"-o", filepath.Join(dir, "direct"), "-static", "-DDIRECT", source}, cflags...)},
		{"go", []string{"build", "-o", filepath.Join(dir, "go"), ops.GoProgram}},
	} {
		if out, err := exec.Command(c.name, c.args...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build program with %s: %w\n%s", c.name, err, out)
		}
	}
	return &Programs{dir}, nil
}

// Proc is a running program that makes calls on demand. It is single-threaded
// as far as its calls go, and so is this type. A failure of the program itself
// (not of a call) is sticky: see [Proc.Err].
type Proc struct {
	Impl Impl

	cmd     *exec.Cmd
	in      io.WriteCloser
	out     *bufio.Reader
	argv    []string // what Exec executes the program with
	stderr  bytes.Buffer
	err     error
	scratch mm.Addr // memory for the arguments of calls, by purpose: see below
	ring    *Ring   // made when first needed
}

// The parts of a program's scratch memory.
const (
	scratchVector = 0 // vectors, and whatever a row needs
	scratchRing   = 32 << 10
	scratchBytes  = 64 << 10
)

// Start runs the program of impl. [Proc.Close] ends it.
func (b *Programs) Start(impl Impl) (*Proc, error) {
	cmd := exec.Command(filepath.Join(b.dir, impl.program))
	if impl.Preload != "" {
		cmd.Env = append(os.Environ(), "LD_PRELOAD="+impl.Preload)
	}
	return Start(impl, cmd)
}

// Start starts cmd, which obeys as the programs of package ops do.
// [Proc.Close] ends it.
func Start(impl Impl, cmd *exec.Cmd) (*Proc, error) {
	p := &Proc{Impl: impl, cmd: cmd, argv: cmd.Args}
	p.cmd.Stderr = &p.stderr
	var err error
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		return nil, fmt.Errorf("start program %s: %w", impl.Name, err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		return nil, fmt.Errorf("start program %s: %w", impl.Name, err)
	}
	p.out = bufio.NewReader(out)
	if err := p.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start program %s: %w", impl.Name, err)
	}
	p.ready()
	if p.err == nil && impl.Preload != "" {
		// The loader only complains about an object that it cannot preload.
		maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", p.PID()))
		if stem, _, _ := strings.Cut(filepath.Base(impl.Preload), ".so"); err == nil && !bytes.Contains(maps, []byte(stem)) {
			p.err = fmt.Errorf("%s is not loaded: is it installed?", impl.Preload)
		}
	}
	if p.err != nil {
		err := p.err
		p.Close()
		return nil, fmt.Errorf("start program %s: %w", impl.Name, err)
	}
	return p, nil
}

// ready reads the line that a program prints when it starts.
func (p *Proc) ready() {
	var pid, size int
	line := p.answer()
	if p.err != nil {
		return
	}
	if _, err := fmt.Sscanf(line, "ready %d %d %d", &pid, (*uint64)(&p.scratch), &size); err != nil || pid != p.PID() || size < scratchBytes {
		p.err = fmt.Errorf("program began with %q", line)
	}
	p.ring = nil
}

// PID is the program's process.
func (p *Proc) PID() int { return p.cmd.Process.Pid }

// Err is the first failure of the program itself. After it every call returns
// an error.
func (p *Proc) Err() error { return p.err }

// Close ends the program and waits for it.
func (p *Proc) Close() error {
	p.in.Close()
	io.Copy(io.Discard, p.out)
	err := p.cmd.Wait()
	if err != nil {
		err = fmt.Errorf("end program %s: %w: %s", p.Impl.Name, err, p.stderr.Bytes())
	}
	return errors.Join(p.err, err)
}

func (p *Proc) answer() string {
	line, err := p.out.ReadString('\n')
	if err != nil {
		p.err = fmt.Errorf("program %s went away: %w", p.Impl.Name, err)
	}
	return strings.TrimSpace(line)
}

func (p *Proc) request(verb string, args ...any) string {
	if p.err != nil {
		return ""
	}
	b := []byte(verb)
	for _, a := range args {
		b = append(b, ' ')
		switch a := a.(type) {
		case string:
			b = append(append(b, '\''), a...)
		case mm.Addr:
			b = strconv.AppendUint(b, uint64(a), 10)
		case uint64:
			b = strconv.AppendUint(b, a, 10)
		case uintptr:
			b = strconv.AppendUint(b, uint64(a), 10)
		case int:
			b = strconv.AppendUint(b, uint64(int64(a)), 10)
		case int64:
			b = strconv.AppendUint(b, uint64(a), 10)
		default:
			panic(fmt.Sprintf("argument of type %T", a))
		}
	}
	if _, err := p.in.Write(append(b, '\n')); err != nil {
		p.err = fmt.Errorf("program %s went away: %w", p.Impl.Name, err)
		return ""
	}
	return p.answer()
}

func (p *Proc) result(verb string, args ...any) int64 {
	line := p.request(verb, args...)
	if p.err != nil {
		return -int64(unix.EIO)
	}
	n, err := strconv.ParseInt(line, 10, 64)
	if err != nil {
		p.err = fmt.Errorf("program %s answered %q to %s", p.Impl.Name, line, verb)
		return -int64(unix.EIO)
	}
	return n
}

// Syscall makes a system call and returns what the kernel did: a negative
// errno, or the result. Arguments are integers, [mm.Addr], or strings, which
// the call gets as pointers; strings hold no white space.
func (p *Proc) Syscall(nr uintptr, args ...any) int64 {
	return p.result("syscall", append([]any{nr}, args...)...)
}

// Syscall32 makes a system call of the i386 ABI (numbers and arguments),
// through int $0x80. Only the C programs of x86-64 can.
func (p *Proc) Syscall32(nr uintptr, args ...any) int64 {
	return p.result("i386", append([]any{nr}, args...)...)
}

// Clone makes a child with the flags of clone(2) that makes one system call
// and exits. It returns the child's pid or a negative errno.
func (p *Proc) Clone(flags int, nr uintptr, args ...any) int64 {
	return p.result("clone", append([]any{flags, nr}, args...)...)
}

// Exec makes the program execute itself.
func (p *Proc) Exec() {
	if p.err != nil {
		return
	}
	// the vector, then the strings, 64 bytes each
	argv := p.scratch + scratchVector
	var vector []uint64
	for i, a := range p.argv {
		text := argv + 256 + 64*mm.Addr(i)
		var words [8]uint64
		if i == 0 {
			a = filepath.Base(a)
		}
		if len(a) >= 64 {
			p.err = fmt.Errorf("execute program: argument %q is too long", a)
			return
		}
		for j := range len(a) {
			words[j/8] |= uint64(a[j]) << (j % 8 * 8)
		}
		p.Poke(8, text, words[:]...)
		vector = append(vector, uint64(text))
	}
	p.Poke(8, argv, append(vector, 0)...)
	if line := p.request("syscall", uintptr(unix.SYS_EXECVE), "/proc/self/exe", argv, 0); p.err == nil {
		if !strings.HasPrefix(line, "ready ") {
			p.err = fmt.Errorf("execute program: %s", line)
			return
		}
		p.out = bufio.NewReader(io.MultiReader(strings.NewReader(line+"\n"), p.out))
		p.ready()
	}
}

// Do makes a program that has a verb of its own (ServeWith of package internal/truth/ops) do that, and
// returns its answer; arguments as of Syscall.
func (p *Proc) Do(verb string, args ...any) string { return p.request(verb, args...) }

// Poke stores values of size bytes (4 or 8), one behind the other.
func (p *Proc) Poke(size int, at mm.Addr, values ...uint64) {
	args := []any{size, at}
	for _, v := range values {
		args = append(args, v)
	}
	p.result("poke", args...)
}

// Peek returns n 64-bit words.
func (p *Proc) Peek(at mm.Addr, n int) []uint64 {
	words := make([]uint64, n)
	fields := strings.Fields(p.request("peek", at, n))
	if p.err == nil && len(fields) != n {
		p.err = fmt.Errorf("program %s answered %q to peek", p.Impl.Name, fields)
	}
	for i, f := range fields {
		words[i], _ = strconv.ParseUint(f, 10, 64)
	}
	return words
}

// Storm makes n changes of the page at one after the other (see package
// internal/truth/ops for the kinds) and returns the nanoseconds of processor
// time that they took, or a negative errno. Only Go programs can.
func (p *Proc) Storm(kind uintptr, n int, at mm.Addr, unit uint64) int64 {
	return p.result("storm", kind, n, at, unit)
}

// Fill writes n pages of unit bytes, each with its own pattern, which depends
// on seed.
func (p *Proc) Fill(at mm.Addr, unit uint64, n int, seed uint64) {
	p.result("fill", at, unit, n, seed)
}

// Look reads n pages of unit bytes with the CPU and returns a character for
// each: '.' if it holds the pattern of seed, 'S' if it holds anything else,
// 'U' if it cannot be read.
func (p *Proc) Look(at mm.Addr, unit uint64, n int, seed uint64) string {
	return p.request("look", at, unit, n, seed)
}

// Same is Look with the bytes at other in place of a pattern.
func (p *Proc) Same(at, other mm.Addr, unit uint64, n int) string {
	return p.request("same", at, other, unit, n)
}
