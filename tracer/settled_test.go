// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"runtime"
	"runtime/debug"
	"sync/atomic"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/machine"
)

// Who asks where tasks are ends nobody's change: the task may be ending it at
// that moment, and twice ended it would hide the next one. A change whose end
// all probes missed is over for who asks, and stays counted until the task makes
// another.
func TestSettledEndsNothing(t *testing.T) {
	machine.NeedKVM(t)
	machine.NeedProbes(t)
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // it changes the address space
	vm, err := MakeNotifier()
	if err != nil {
		t.Fatal(err)
	}
	defer vm.Close()
	tr, err := Open(Options{Tier: TierNotifierProbe, alone: true})
	if err != nil {
		t.Fatal(err)
	}
	defer tr.Close()
	for _, hook := range []string{"fentry", "fentry2", "kprobe"} {
		tr.detach(t, hook+"/__mmu_notifier_invalidate_range_end")
	}
	f, err := tr.OpenFeed(Self(), FeedOptions{Witness: true})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	st := statusOf(t, f)
	page, err := unix.Mmap(-1, 0, int(mm.PageSize()), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Munmap(page)
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	zap := func() {
		page[0] = 1
		if err := unix.Madvise(page, unix.MADV_DONTNEED); err != nil {
			t.Error(err)
		}
	}
	before := begun(st)
	made, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread()
		zap()
		close(made)
		var b [1]byte
		unix.Syscall(unix.SYS_READ, uintptr(pipe[0]), uintptr(unsafe.Pointer(&b)), 1)
	}()
	<-made
	if begun(st) == before || inFlight(st) == 0 {
		t.Fatalf("%d begun, %d in flight: the change was not seen, or its end was", begun(st)-before, inFlight(st))
	}
	ended := func() uint64 { return atomic.LoadUint64(&st.Ended[0]) + atomic.LoadUint64(&st.Ended[1]) }
	settled := 0
	for range 100 {
		b, e := begun(st), ended()
		if f.Settled() {
			settled++
		}
		// only another change of its task ends one, and that begins first
		if n := ended(); n != e && begun(st) == b {
			t.Fatalf("asking ended %d changes", n-e)
		}
		if settled >= 10 {
			break
		}
	}
	if settled == 0 {
		t.Error("never settled, though no task is inside a change")
	}
	unix.Write(pipe[1], []byte{0})
	<-done
	unix.Close(pipe[0])
	unix.Close(pipe[1])
}
