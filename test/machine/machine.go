// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package machine is for tests that need what some machines cannot have
// whatever is installed on them: /dev/kvm (a guest without nested
// virtualisation), kprobes, the 32-bit system calls of x86, and an RDMA device. `make
// test-vm` runs the same tests in guests that have them; its harness sets
// UMMU_TEST_MACHINE, and there a lack is a failure. BPF and io_uring are not
// among these: without them a test fails everywhere.
package machine

import (
	"errors"
	"io/fs"
	"os"
	"testing"

	"github.com/ummu/ummu/internal/truth"
)

// Full reports whether the harness says that nothing may be missing.
func Full() bool { return os.Getenv("UMMU_TEST_MACHINE") == "full" }

// HasKVM reports whether there is a /dev/kvm.
func HasKVM() bool {
	_, err := os.Stat("/dev/kvm")
	return err == nil
}

// NeedKVM skips the test where there is no /dev/kvm. What the library says
// then is tested where it says it (TestNoKVM of package tracer).
func NeedKVM(t testing.TB) {
	t.Helper()
	switch _, err := os.Stat("/dev/kvm"); {
	case err == nil:
	case Full() || !errors.Is(err, fs.ErrNotExist):
		t.Fatal(err)
	default:
		t.Skip("needs /dev/kvm; make test-vm runs this test in guests that have one")
	}
}

// HasProbes reports whether BPF programs can be attached to functions of the
// kernel; it says yes where the harness says that nothing may be missing.
// Kernels built without kprobe events register no source of them
// (kernel/events/core.c).
func HasProbes() bool {
	_, err := os.Stat("/sys/bus/event_source/devices/kprobe")
	return err == nil || Full()
}

// NeedProbes skips the test where no program can be attached to functions of
// the kernel. What the library says then is tested where it says it
// (TestNoProbes of package tracer).
func NeedProbes(t testing.TB) {
	t.Helper()
	if !HasProbes() {
		t.Skip("this kernel has no kprobes; make test-vm runs this test in guests that have them")
	}
}

// NeedCompat skips the test where the processor or the hypervisor runs 64-bit
// code only, so that nothing can make a 32-bit system call.
func NeedCompat(t testing.TB) {
	t.Helper()
	switch there, err := truth.CompatABI.Available(); {
	case err != nil:
		t.Fatal(err)
	case there:
	case Full():
		t.Fatal("int $0x80 is a fault")
	default:
		t.Skip("int $0x80 is a fault on this machine; make test-vm runs this test in guests where it is a system call")
	}
}

// NeedRDMA skips the test where there is no RDMA device. What the library says
// then is tested where it says it (TestNoSuchDevice of package ibv).
func NeedRDMA(t testing.TB) {
	t.Helper()
	devices, err := os.ReadDir("/sys/class/infiniband")
	switch {
	case len(devices) > 0:
	case Full() || err != nil && !errors.Is(err, fs.ErrNotExist):
		t.Fatalf("no RDMA device: %v", err)
	default:
		t.Skip("no RDMA device on this machine; make test-vm runs this test in guests that have one")
	}
}
