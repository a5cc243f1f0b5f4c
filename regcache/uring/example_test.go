// SPDX-License-Identifier: Apache-2.0

package uring_test

import (
	"fmt"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/uring"
)

// Read a file into a registered buffer.
func Example() {
	if err := example(); err != nil {
		fmt.Println(err)
	}
	// Output: read 14 bytes: pinned, sealed
}

func example() error {
	ring, err := uring.Open(uring.Options{})
	if err != nil {
		return err
	}
	defer ring.Close()

	f, err := os.CreateTemp("", "example")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if _, err := f.WriteString("pinned, sealed"); err != nil {
		return err
	}

	memory, err := unix.Mmap(-1, 0, 64<<10, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer unix.Munmap(memory)
	where, err := mm.MakeRange(mm.Addr(uintptr(unsafe.Pointer(&memory[0]))), uint64(len(memory)))
	if err != nil {
		return err
	}

	buf, err := ring.Register(where, regcache.LocalWrite)
	if err != nil {
		return err
	}
	defer ring.Deregister(buf)
	n, err := ring.ReadFixed(int(f.Fd()), 0, buf, where)
	if err != nil {
		return err
	}
	fmt.Printf("read %d bytes: %s\n", n, memory[:n])
	return nil
}
