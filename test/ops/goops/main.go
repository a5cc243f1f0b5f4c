// SPDX-License-Identifier: Apache-2.0

// Command goops is ops.c in Go: it makes the calls it is told to make, one
// line of standard input each. See ops.c for the lines.
package main

import (
	"bufio"
	"fmt"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"syscall"
	"unsafe"
)

const scratchBytes = 64 << 10

// cloneCall makes a child with clone(2); the child makes the call and exits,
// without touching memory. It returns the child's pid or a negative errno.
//
//go:noescape
func cloneCall(flags, nr, a0, a1, a2, a3, a4, a5 uintptr) int64

func main() {
	runtime.LockOSThread()
	debug.SetPanicOnFault(true)
	scratch, err := syscall.Mmap(-1, 0, scratchBytes, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
	if err != nil {
		fmt.Fprintln(os.Stderr, "goops: map scratch memory:", err)
		os.Exit(1)
	}
	fmt.Printf("ready %d %d %d\n", os.Getpid(), uintptr(unsafe.Pointer(unsafe.SliceData(scratch))), len(scratch))
	in := bufio.NewReaderSize(os.Stdin, 128<<10)
	for {
		line, err := in.ReadString('\n')
		if err != nil {
			return
		}
		words := strings.Fields(line)
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
				fmt.Printf("argument %q: %v\n", w, err)
				return
			}
			args = append(args, uintptr(n))
		}
		n := len(args)
		for len(args) < 16 {
			args = append(args, 0)
		}
		fmt.Println(execute(words[0], args, n))
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
	defer func() {
		if recover() != nil {
			c = 'U'
		}
	}()
	for w, got := range p {
		if got != want(w) {
			return 'S'
		}
	}
	return '.'
}
