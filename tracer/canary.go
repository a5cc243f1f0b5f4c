// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// A function that is attached need not be called: the compiler may have put it
// into its callers. So the mm tier makes a change of each kind before it is
// handed out.

// canary is memory of this process for changes to be seen.
type canary struct {
	at   unsafe.Pointer
	page uintptr
	file int // mapped at the second half, shared
}

// The memory: canaryPages of no file, and as many of one.
const canaryPages = 4

func newCanary() (_ *canary, err error) {
	c := &canary{page: uintptr(os.Getpagesize()), file: -1}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("memory for the changes to be seen: %w", err), c.close())
		}
	}()
	if c.at, err = unix.MmapPtr(-1, 0, nil, 2*canaryPages*c.page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS); err != nil {
		return nil, err
	}
	if c.file, err = unix.MemfdCreate("canary", unix.MFD_CLOEXEC); err != nil {
		return nil, err
	}
	if err = unix.Ftruncate(c.file, int64(canaryPages*c.page)); err != nil {
		return nil, err
	}
	_, err = unix.MmapPtr(c.file, 0, c.of(canaryPages), canaryPages*c.page, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED)
	return c, err
}

func (c *canary) of(page int) unsafe.Pointer { return unsafe.Add(c.at, uintptr(page)*c.page) }

func (c *canary) span(page, n int) mm.Range {
	start := mm.Addr(uintptr(c.of(page)))
	return mm.Range{Start: start, End: start + mm.Addr(uintptr(n)*c.page)}
}

func (c *canary) bytes(page, n int) []byte {
	return unsafe.Slice((*byte)(c.of(page)), uintptr(n)*c.page)
}

// touch makes pages present.
func (c *canary) touch(page, n int) {
	b := c.bytes(page, n)
	for i := 0; i < len(b); i += int(c.page) {
		b[i] = 1
	}
}

func (c *canary) close() error {
	var errs []error
	if c.at != nil {
		errs = append(errs, unix.MunmapPtr(c.at, 2*canaryPages*c.page))
	}
	if c.file >= 0 {
		errs = append(errs, unix.Close(c.file))
	}
	return errors.Join(errs...)
}

// canaries are changes, and what has to be told of each.
var canaries = []struct {
	name string
	kind mm.Kind
	at   int // page
	do   func(c *canary) error
}{
	{"madvise(MADV_DONTNEED)", mm.Zap, 1, func(c *canary) error { return unix.Madvise(c.bytes(1, 1), unix.MADV_DONTNEED) }},
	{"mprotect", mm.Protect, 2, func(c *canary) error { return unix.Mprotect(c.bytes(2, 1), unix.PROT_READ) }},
	{"a hole in a file", mm.Zap, canaryPages + 1, func(c *canary) error {
		return unix.Fallocate(c.file, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(c.page), int64(c.page))
	}},
	{"truncation", mm.Zap, canaryPages + 3, func(c *canary) error { return unix.Ftruncate(c.file, int64(3*c.page)) }},
	{"mremap", mm.Move, 3, func(c *canary) error {
		_, err := unix.MremapPtr(c.of(3), c.page, c.of(0), c.page, unix.MREMAP_MAYMOVE|unix.MREMAP_FIXED)
		return err
	}},
	{"mmap(MAP_FIXED)", mm.Replace, 1, func(c *canary) error {
		_, err := unix.MmapPtr(-1, 0, c.of(1), c.page, unix.PROT_READ, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_FIXED)
		return err
	}},
	{"munmap", mm.Unmap, 2, func(c *canary) error { return unix.MunmapPtr(c.of(2), c.page) }},
}

// proveFires makes changes of the calling process, and fails if the begin and
// the end of one is not told with its exact range.
func (t *Tracer) proveFires() (err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c, err := newCanary()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.close()) }()
	s, err := t.Watch(Self(), WatchOptions{Kinds: []mm.Kind{mm.Unmap, mm.Replace, mm.Zap, mm.Move, mm.Protect}})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, s.Close()) }()
	var missing []string
	for _, x := range canaries {
		c.touch(canaryPages, 2)
		if x.kind == mm.Zap || x.kind == mm.Protect {
			b := c.bytes(x.at, 1)
			b[0] = 1
		}
		if err := x.do(c); err != nil {
			return fmt.Errorf("make a change by %s: %w", x.name, err)
		}
		if err := s.Flush(); err != nil {
			return err
		}
		var begin, end bool
		for {
			var rec mm.Record
			if err := s.Read(&rec); errors.Is(err, ErrFlushed) {
				break
			} else if err != nil {
				return err
			}
			if rec.Kind != x.kind || rec.Range != c.span(x.at, 1) {
				continue
			}
			begin = begin || rec.Phase == mm.PhaseBegin
			end = end || rec.Phase == mm.PhaseEnd && begin && rec.Flags&mm.Unpaired == 0
		}
		switch {
		case !begin:
			missing = append(missing, "begin of "+x.name)
		case !end:
			missing = append(missing, "end of "+x.name)
		}
	}
	if len(missing) != 0 {
		return fmt.Errorf("attached, but not called on this kernel: not seen: %s", strings.Join(missing, ", "))
	}
	return nil
}
