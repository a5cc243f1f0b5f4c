// SPDX-License-Identifier: Apache-2.0

// Package ops is test/ops/ops.c in Go: it makes the memory-management calls
// it is told to make, one line of input each. See ops.c for the lines; one
// more makes many calls:
//
//	storm KIND COUNT ADDR UNIT    COUNT changes of the page of UNIT bytes; the
//	                              nanoseconds of processor time that they took
package ops

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

const scratchBytes = 64 << 10

// The kinds of a storm. Before each change the page is written to.
const (
	StormZap     = iota // madvise(MADV_DONTNEED)
	StormReplace        // mmap(MAP_FIXED)
	StormProtect        // mprotect to read-only and back: two changes a time
	StormUnmap          // of a page mapped elsewhere: ADDR is not used
)

// cloneCall makes a child with clone(2); the child makes the call and exits,
// without touching memory. It returns the child's pid or a negative errno.
//
//go:noescape
func cloneCall(flags, nr, a0, a1, a2, a3, a4, a5 uintptr) int64

// Verb is something else that a program can do: it has the arguments, and
// answers with a line.
type Verb func(args []uintptr) string

// Serve makes the calls until in ends. All are made by one thread.
func Serve(in io.Reader, out io.Writer) error { return ServeWith(in, out, nil) }

// ServeWith is Serve with verbs of one's own, by name.
func ServeWith(in io.Reader, out io.Writer, more map[string]Verb) error {
	runtime.LockOSThread()
	scratch, err := syscall.Mmap(-1, 0, scratchBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		return fmt.Errorf("map scratch memory: %w", err)
	}
	if _, err := fmt.Fprintf(out, "ready %d %d %d\n", os.Getpid(), uintptr(unsafe.Pointer(unsafe.SliceData(scratch))), len(scratch)); err != nil {
		return err
	}
	lines := bufio.NewReaderSize(in, 128<<10)
	for {
		line, err := lines.ReadString('\n')
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		words := strings.Fields(line)
		if len(words) == 0 {
			return fmt.Errorf("empty line")
		}
		var keep [][]byte // strings that arguments point to
		args := make([]uintptr, 0, 16)
		for _, w := range words[1:] {
			if text, ok := strings.CutPrefix(w, "'"); ok {
				b := append([]byte(text), 0)
				keep = append(keep, b)
				args = append(args, uintptr(unsafe.Pointer(unsafe.SliceData(b))))
				continue
			}
			n, err := strconv.ParseUint(w, 0, 64)
			if err != nil {
				return fmt.Errorf("argument %q: %w", w, err)
			}
			args = append(args, uintptr(n))
		}
		n := len(args)
		for len(args) < 16 {
			args = append(args, 0)
		}
		answer := ""
		if verb, ok := more[words[0]]; ok {
			answer = verb(args[:n])
		} else {
			answer = execute(words[0], args, n)
		}
		if _, err := fmt.Fprintln(out, answer); err != nil {
			return err
		}
		runtime.KeepAlive(keep)
	}
}

func execute(verb string, a []uintptr, n int) string {
	switch verb {
	case "syscall":
		r, _, errno := syscall.Syscall6(a[0], a[1], a[2], a[3], a[4], a[5], a[6])
		if errno != 0 {
			return strconv.FormatInt(-int64(errno), 10)
		}
		return strconv.FormatInt(int64(r), 10)
	case "i386":
		return strconv.FormatInt(I386(a[0], [6]uintptr(a[1:7])), 10)
	case "storm":
		return strconv.FormatInt(storm(a[0], a[1], a[2], a[3]), 10)
	case "clone":
		return strconv.FormatInt(cloneCall(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]), 10)
	case "poke":
		p := a[1]
		for _, v := range a[2:n] {
			switch a[0] {
			case 4:
				*(*uint32)(pointer(p)) = uint32(v)
			case 8:
				*(*uint64)(pointer(p)) = uint64(v)
			default:
				return fmt.Sprintf("poke of %d bytes", a[0])
			}
			p += a[0]
		}
		return "0"
	case "peek":
		var b strings.Builder
		for i := range a[1] {
			fmt.Fprintf(&b, "%d ", *(*uint64)(pointer(a[0] + 8*i)))
		}
		return b.String()
	case "fill":
		for i := range a[2] {
			p := page(a[0]+i*a[1], a[1])
			for w := range p {
				p[w] = pattern(a[3], i, w)
			}
		}
		return "0"
	case "look":
		var b strings.Builder
		for i := range a[2] {
			b.WriteByte(look(page(a[0]+i*a[1], a[1]), func(w int) uint64 { return pattern(a[3], i, w) }))
		}
		return b.String()
	case "same":
		var b strings.Builder
		for i := range a[3] {
			other := page(a[1]+i*a[2], a[2])
			b.WriteByte(look(page(a[0]+i*a[2], a[2]), func(w int) uint64 { return other[w] }))
		}
		return b.String()
	}
	return "unknown verb " + verb
}

// pointer makes a pointer of the address of memory that Go did not allocate.
func pointer(addr uintptr) unsafe.Pointer { return *(*unsafe.Pointer)(unsafe.Pointer(&addr)) }

func page(addr, bytes uintptr) []uint64 { return unsafe.Slice((*uint64)(pointer(addr)), bytes/8) }

func pattern(seed, page uintptr, word int) uint64 {
	return uint64(seed*4096+page+1)*0x9E3779B97F4A7C15 + uint64(word)
}

func look(p []uint64, want func(int) uint64) (c byte) {
	defer catch(func() { c = 'U' })()
	for w, got := range p {
		if got != want(w) {
			return 'S'
		}
	}
	return '.'
}

// catch makes a fault call then; what it returns is to be deferred.
func catch(then func()) func() {
	old := debug.SetPanicOnFault(true)
	return func() {
		debug.SetPanicOnFault(old)
		if recover() != nil {
			then()
		}
	}
}

// storm returns the processor time of this thread, or a negative errno.
func storm(kind, count, at, unit uintptr) int64 {
	const rw, anon = unix.PROT_READ | unix.PROT_WRITE, unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	call := func(nr, a0, a1, a2, a3 uintptr) uintptr {
		r, _, e := unix.RawSyscall6(nr, a0, a1, a2, a3, ^uintptr(0), 0)
		if e != 0 {
			return -uintptr(e)
		}
		return r
	}
	start := cpuTime()
	for range count {
		var r uintptr
		if kind == StormUnmap {
			if r = call(unix.SYS_MMAP, 0, unit, rw, anon); r > ^uintptr(4095) {
				return int64(r)
			}
			at = r
		}
		*(*uint64)(pointer(at)) = 1
		switch kind {
		case StormZap:
			r = call(unix.SYS_MADVISE, at, unit, unix.MADV_DONTNEED, 0)
		case StormReplace:
			if r = call(unix.SYS_MMAP, at, unit, rw, anon|unix.MAP_FIXED); r == at {
				r = 0
			}
		case StormProtect:
			r = call(unix.SYS_MPROTECT, at, unit, unix.PROT_READ, 0)
			if r == 0 {
				r = call(unix.SYS_MPROTECT, at, unit, rw, 0)
			}
		case StormUnmap:
			r = call(unix.SYS_MUNMAP, at, unit, 0, 0)
		default:
			return -int64(unix.EINVAL)
		}
		if r != 0 {
			return int64(r)
		}
	}
	return cpuTime() - start
}

// cpuTime is what this thread has used of the processors, in nanoseconds.
func cpuTime() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err) // every Linux has this clock
	}
	return t.Nano()
}
