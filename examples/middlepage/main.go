// SPDX-License-Identifier: Apache-2.0

// Middlepage is the test program of ummunotify (2009), which never reached the
// kernel, over today's feed: three pages, a watch, the middle one is unmapped,
// and the program hears of exactly that page.
//
// It needs CAP_BPF and CAP_PERFMON (or root).
package main

import (
	"fmt"
	"io"
	"log"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
)

func main() {
	log.SetFlags(0)
	w, err := local.Open(local.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer w.Close()
	if err := run(w, os.Stdout); err != nil {
		log.Fatal(err)
	}
}

func run(w *feed.Watch, out io.Writer) error {
	page := uintptr(mm.PageSize())
	three, err := unix.MmapPtr(-1, 0, nil, 3*page, unix.PROT_READ|unix.PROT_WRITE,
		unix.MAP_PRIVATE|unix.MAP_ANONYMOUS|unix.MAP_POPULATE)
	if err != nil {
		return fmt.Errorf("map three pages: %w", err)
	}
	defer unix.MunmapPtr(unsafe.Add(three, 2*page), page) // the others go below
	start := mm.Addr(uintptr(three))
	all := mm.Range{Start: start, End: start + mm.Addr(3*page)}

	// Watch them, as one would before registering them with a device.
	if v := w.Commit(w.Begin(all), nil, func() {}); v != feed.Cacheable {
		return fmt.Errorf("watch %v: %v", all, v)
	}
	w.Drain(nil)
	fmt.Fprintln(out, "watching three pages, valid:", w.Valid())

	middle := unsafe.Add(three, page)
	if err := unix.MunmapPtr(middle, page); err != nil {
		return fmt.Errorf("unmap the middle page: %w", err)
	}
	fmt.Fprintln(out, "unmapped the middle one, valid:", w.Valid())
	state := w.Drain(func(r *mm.Record) {
		fmt.Fprintf(out, "%v of pages %d to %d\n", r.Kind, uintptr(r.Range.Start-start)/page, uintptr(r.Range.End-start)/page)
	})
	fmt.Fprintf(out, "drained: %v, valid: %v\n", state, w.Valid())

	// Watched no more: what happens to them now is nobody's business.
	w.Forget(all)
	if err := unix.MunmapPtr(three, page); err != nil {
		return fmt.Errorf("unmap the first page: %w", err)
	}
	fmt.Fprintln(out, "forgot them and unmapped the first, valid:", w.Valid())
	return nil
}
