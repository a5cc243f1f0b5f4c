// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/wire"
)

// controlPrograms are the descriptors of this process that are the program by
// which a tracer marks watches dead.
func controlPrograms(t *testing.T) (fds []int) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if name, _ := os.Readlink("/proc/self/fd/" + e.Name()); name != "anon_inode:bpf-prog" {
			continue
		}
		fd, err := strconv.Atoi(e.Name())
		if err != nil {
			t.Fatal(err)
		}
		dup, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, 0)
		if err != nil {
			t.Fatal(err)
		}
		p, err := ebpf.NewProgramFromFD(dup)
		if err != nil {
			t.Fatal(err)
		}
		info, err := p.Info()
		p.Close()
		if err != nil {
			t.Fatal(err)
		}
		if info.Name == "control" {
			fds = append(fds, fd)
		}
	}
	return fds
}

// A watch that cannot be marked dead, when its client has hung up, is not given
// up: the client may look at it as long as it likes, and hears of each change.
// It keeps its place, and shows in the status, until the daemon ends.
func TestUnmarkedKeepsItsPlace(t *testing.T) {
	others := controlPrograms(t) // of a server that other tests use
	s := start(t, Config{MaxWatchesPerProcess: 1})
	i := slices.IndexFunc(controlPrograms(t), func(fd int) bool { return !slices.Contains(others, fd) })
	if i < 0 {
		t.Fatal("the daemon has no control program")
	}
	control := controlPrograms(t)[i]

	r := dialRaw(t, s)
	welcome, fds, err := r.handshake(hello)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.send(&wire.Ready{}); err != nil {
		t.Fatal(err)
	}
	m, err := feed.Descriptors{Status: fds[0], Epoch: fds[1], Interest: fds[2], Ring: fds[3], RingBytes: int(welcome.RingBytes)}.Map()
	for _, fd := range fds {
		unix.Close(fd)
	}
	if err != nil {
		t.Fatal(err)
	}
	m.RingFD = -1
	w, err := feed.New(m)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()

	works, err := unix.FcntlInt(uintptr(control), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(works)
	null, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(null)
	repaired := false
	repair := func() {
		if !repaired {
			repaired = true
			unix.Dup3(works, control, unix.O_CLOEXEC)
		}
	}
	defer repair()
	if err := unix.Dup3(null, control, unix.O_CLOEXEC); err != nil {
		t.Fatal(err)
	}
	unix.Shutdown(r.fd, unix.SHUT_RDWR)
	eventually(t, "the daemon has tried", func() bool { return s.connCount() == 0 })

	for range 3 {
		if err := watched(w); err != nil {
			t.Fatalf("alive, and %v", err)
		}
	}
	report, err := Status(t.Context(), s.Addr())
	if err != nil {
		t.Fatal(err)
	}
	if len(report.Entries) != 1 || report.Entries[0].Deaths != 0 {
		t.Errorf("status: %+v", report.Entries)
	}
	if _, err := feed.Dial(t.Context(), feed.Options{Socket: s.Addr()}); err == nil || !strings.Contains(err.Error(), "--max-watches-per-process") {
		t.Errorf("its place is free: %v", err)
	}
	repair()
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if w.Valid() || w.Drain(nil) != feed.DeadState {
		t.Error("alive after the daemon's end")
	}
}
