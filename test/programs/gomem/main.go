// SPDX-License-Identifier: Apache-2.0

// Gomem makes the Go runtime map, drop and unmap memory from many threads,
// maps and unmaps by itself, and runs a child.
package main

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"runtime/debug"
	"sync"
	"syscall"
)

func main() {
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if err := churn(i); err != nil {
				fmt.Fprintln(os.Stderr, "gomem:", err)
				os.Exit(1)
			}
		})
	}
	wg.Wait()
	if len(os.Args) > 1 {
		return
	}
	child := exec.Command(os.Args[0], "child")
	child.Stderr = os.Stderr
	if err := child.Run(); err != nil {
		fmt.Fprintln(os.Stderr, "gomem: run child:", err)
		os.Exit(1)
	}
}

func churn(n int) error {
	page := os.Getpagesize()
	var keep [][]byte
	for i := range 40 {
		keep = append(keep, make([]byte, 64<<10<<(i%5)))
		if i%10 == n%10 {
			keep = nil
			debug.FreeOSMemory()
		}
		m, err := syscall.Mmap(-1, 0, 4*page, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_PRIVATE|syscall.MAP_ANON)
		if err != nil {
			return fmt.Errorf("mmap: %w", err)
		}
		m[page] = byte(i)
		if err := syscall.Madvise(m[page:2*page], syscall.MADV_DONTNEED); err != nil {
			return fmt.Errorf("madvise: %w", err)
		}
		if m[page] != 0 {
			return fmt.Errorf("dropped page holds %d", m[page])
		}
		if err := syscall.Mprotect(m[2*page:], syscall.PROT_READ); err != nil {
			return fmt.Errorf("mprotect: %w", err)
		}
		if err := syscall.Munmap(m); err != nil {
			return fmt.Errorf("munmap: %w", err)
		}
	}
	runtime.KeepAlive(keep)
	return nil
}
