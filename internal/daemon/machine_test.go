// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/wire"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

func init() {
	roles["machine"] = roleMachine
}

// notifierTiers are those of this machine for which clients make virtual
// machines; none: the test needs what it does not have.
func notifierTiers(t *testing.T) []tracer.Tier {
	machine.NeedKVM(t)
	tiers := []tracer.Tier{tracer.TierNotifierTracepoint}
	if machine.HasProbes() {
		tiers = append(tiers, tracer.TierNotifierProbe)
	}
	return tiers
}

// openMachines counts the descriptors of this process that are virtual
// machines, or could make some.
func openMachines() (n int, err error) {
	entries, err := os.ReadDir("/proc/self/fd")
	for _, e := range entries {
		name, _ := os.Readlink("/proc/self/fd/" + e.Name())
		if strings.HasPrefix(name, "anon_inode:kvm") || name == "/dev/kvm" {
			n++
		}
	}
	return n, err
}

// holedPage is where clients have a page of a file: the same place in each.
const holedPage = 1 << 41

// roleMachine does what it is told, without privileges if told so first.
func roleMachine(socket string, _ []string) error {
	var w *feed.Watch
	var hole *os.File
	r := mm.Range{Start: holedPage, End: holedPage + mm.Addr(page)}
	return serveLines(func(line string) (string, error) {
		switch line {
		case "restrict":
			return "ok", restrict()
		case "dial":
			var err error
			if w, err = feed.Dial(context.Background(), feed.Options{Socket: socket}); err != nil {
				return "", err
			}
			return tracer.Tier(w.Tier()).String(), nil
		case "watched":
			return "ok", watched(w)
		case "close":
			return "ok", w.Close()
		case "machines":
			n, err := openMachines()
			return fmt.Sprint(n), err
		case "make": // a machine that no daemon has
			kvm, err := openKVM()
			if err != nil {
				return "", err
			}
			vm, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(kvm), 0xae01, 0)
			if e != 0 {
				return "", e
			}
			return fmt.Sprint(vm), nil
		case "interest": // in what others have there
			w.Begin(r)
			return "ok", nil
		case "map": // a page in which holes are punched
			fd, err := unix.MemfdCreate("holed", unix.MFD_CLOEXEC)
			if err != nil {
				return "", err
			}
			hole = os.NewFile(uintptr(fd), "holed")
			if err := hole.Truncate(int64(page)); err != nil {
				return "", err
			}
			at := unsafe.Add(unsafe.Pointer(nil), uintptr(r.Start))
			_, err = unix.MmapPtr(fd, 0, at, uintptr(page), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED_NOREPLACE)
			return "ok", err
		case "punch":
			*(*byte)(unsafe.Add(unsafe.Pointer(nil), uintptr(r.Start))) = 1
			return "ok", unix.Fallocate(int(hole.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, int64(page))
		case "told": // what it hears of that page, or of others
			var told []string
			state := w.Drain(func(rec *mm.Record) {
				switch {
				case rec.Kind == mm.Lost && rec.Range == mm.Whole && rec.PID == 0 && rec.TID == 0:
					told = append(told, "lost")
				case int(rec.PID) != os.Getpid() || rec.Touches(r):
					told = append(told, fmt.Sprintf("%v by %d", rec.Range, rec.PID))
				}
			})
			if state != feed.Fresh {
				return "", fmt.Errorf("drain: %v", state)
			}
			return strings.Join(told, ", "), nil
		case "child":
			pid, e := forkIdle()
			if e != 0 {
				return "", e
			}
			return fmt.Sprint(pid), nil
		}
		return "", errors.New("unknown order")
	})
}

// A client that may do nothing, and may not open /dev/kvm, makes the machine
// of which the tier lives, hands it over, and keeps nothing of it. The daemon
// keeps it exactly as long as the watch.
func TestClientMakesMachine(t *testing.T) {
	for _, tier := range notifierTiers(t) {
		t.Run(tier.String(), func(t *testing.T) {
			s := start(t, Config{Tiers: []tracer.Tier{tier}, AllowKVM: true})
			machines := func(n int) func() bool {
				return func() bool {
					have, err := openMachines()
					return err == nil && have == n
				}
			}
			closed := startClient(t, clientOptions{uid: nobody}, "machine", s.Addr())
			killed := startClient(t, clientOptions{uid: nobody}, "machine", s.Addr())
			for i, c := range []*client{closed, killed} {
				c.expect(t, "restrict", "ok")
				c.expect(t, "dial", tier.String())
				c.expect(t, "machines", "0")
				for range 10 {
					c.expect(t, "watched", "ok")
				}
				eventually(t, "the daemon has the machines", machines(i+1))
			}
			report, err := Status(t.Context(), s.Addr())
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range report.Entries {
				if tracer.Tier(e.Tier) != tier || e.UID != nobody || e.Deaths != 0 {
					t.Errorf("status: %+v", e)
				}
			}
			closed.expect(t, "close", "ok")
			eventually(t, "one machine is gone", machines(1))
			killed.expect(t, "watched", "ok")
			// Its child has the connection, and nothing of the watch.
			child, err := strconv.Atoi(killed.ask(t, "child"))
			if err != nil {
				t.Fatal(err)
			}
			defer unix.Kill(child, unix.SIGKILL)
			killed.Process.Signal(syscall.SIGKILL)
			eventually(t, "the other machine is gone", machines(0))
			eventually(t, "its place is free", func() bool { return s.watchCount() == 0 })
		})
	}
}

// What one client changes another one is not told of, though the hook cannot
// tell whose change it is: only that it must drop what it has.
func TestOthersChangesAreHidden(t *testing.T) {
	for _, tier := range notifierTiers(t) {
		t.Run(tier.String(), func(t *testing.T) {
			s := start(t, Config{Tiers: []tracer.Tier{tier}, AllowKVM: true})
			victim := startClient(t, clientOptions{uid: nobody}, "machine", s.Addr())
			victim.expect(t, "dial", tier.String())
			victim.expect(t, "map", "ok")
			spy := startClient(t, clientOptions{uid: nobody - 1}, "machine", s.Addr())
			spy.expect(t, "dial", tier.String())
			spy.expect(t, "interest", "ok")
			spy.ask(t, "told")
			heard := 0
			for range 10 {
				victim.expect(t, "punch", "ok")
				switch told := spy.ask(t, "told"); told {
				case "lost":
					heard++
				case "":
				default:
					t.Errorf("told of the victim's change: %s", told)
				}
			}
			// It has the same address; who knows the address space knows better.
			if want := map[tracer.Tier]int{tracer.TierNotifierTracepoint: 10}[tier]; heard < want || want == 0 && heard != 0 {
				t.Errorf("%d losses by 10 changes, want %d", heard, want)
			}
		})
	}
}

// Who has no machine, or offers something else, gets no watch of a tier that
// needs one: it is refused, or gets the next tier.
func TestMachineIsChecked(t *testing.T) {
	tier := notifierTiers(t)[0]
	s := start(t, Config{Tiers: []tracer.Tier{tier, tracer.TierSyscall}, AllowKVM: true})
	kvm, err := openKVM()
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(kvm)
	vm, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(kvm), 0xae01, 0)
	if e != 0 {
		t.Fatal(e)
	}
	defer unix.Close(int(vm))
	third := startClient(t, clientOptions{}, "machine", s.Addr())
	fd := 0
	if _, err := fmt.Sscan(third.ask(t, "make"), &fd); err != nil {
		t.Fatal(err)
	}
	pidfd, err := unix.PidfdOpen(third.Process.Pid, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(pidfd)
	theirs, err := unix.PidfdGetfd(pidfd, fd, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(theirs)

	// offered goes on until the daemon offers /dev/kvm.
	offered := func(t *testing.T) *raw {
		t.Helper()
		r := dialRaw(t, s)
		h := *hello
		h.Flags = wire.FlagMachine
		if err := r.send(&h); err != nil {
			t.Fatal(err)
		}
		if err := r.send(&wire.Echo{Nonce: r.challenge(t).Nonce}); err != nil {
			t.Fatal(err)
		}
		m, fds, err := r.receive()
		if err != nil {
			t.Fatal(err)
		}
		if _, ok := m.(*wire.Offer); !ok || len(fds) != 1 {
			t.Fatalf("%v with %d descriptors", wire.TypeOf(m), len(fds))
		}
		defer unix.Close(fds[0])
		const getAPIVersion = 0xae00
		if v, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fds[0]), getAPIVersion, 0); e != 0 || v != 12 {
			t.Errorf("what is offered is no /dev/kvm: version %d, %v", v, e)
		}
		return r
	}
	syscallTier := func(t *testing.T, r *raw) {
		t.Helper()
		w, fds, err := r.finish()
		for _, fd := range fds {
			unix.Close(fd)
		}
		if err != nil || tracer.Tier(w.Tier) != tracer.TierSyscall {
			t.Errorf("%+v, %v", w, err)
		}
	}
	for _, c := range []struct {
		name string
		fd   int
	}{
		{"not a machine", 0},
		{"not a machine but /dev/kvm", kvm},
		{"the daemon's own machine", int(vm)},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := offered(t)
			if err := r.send(&wire.Machine{}, c.fd); err != nil {
				t.Fatal(err)
			}
			r.refusedWith(t, wire.CodeProtocol)
		})
	}
	t.Run("none", func(t *testing.T) {
		r := offered(t)
		if err := r.send(&wire.Next{Reason: wire.ReasonNoMachine}); err != nil {
			t.Fatal(err)
		}
		syscallTier(t, r)
	})
	t.Run("a third's, by which the client hears nothing", func(t *testing.T) {
		r := offered(t)
		if err := r.send(&wire.Machine{}, theirs); err != nil {
			t.Fatal(err)
		}
		w, fds, err := r.finish()
		if err != nil || tracer.Tier(w.Tier) != tier {
			t.Fatalf("%+v, %v", w, err)
		}
		for _, fd := range fds {
			unix.Close(fd)
		}
		if err := r.send(&wire.Next{Reason: wire.ReasonSilent}); err != nil {
			t.Fatal(err)
		}
		syscallTier(t, r)
	})
	t.Run("cannot make one", func(t *testing.T) {
		r := dialRaw(t, s)
		if err := r.send(hello); err != nil {
			t.Fatal(err)
		}
		syscallTier(t, r)
	})
}

// Without --allow-kvm nobody is offered a machine, and who needs one is told
// which option it is.
func TestMachineIsAllowed(t *testing.T) {
	tier := notifierTiers(t)[0]
	_, err := New(Config{Socket: socketDir(t) + "/feed.sock", Tiers: []tracer.Tier{tier}})
	if err == nil || !strings.Contains(err.Error(), "--allow-kvm") {
		t.Errorf("%v", err)
	}
	s := start(t, Config{Tiers: []tracer.Tier{tier, tracer.TierSyscall}})
	c := startClient(t, clientOptions{uid: nobody}, "machine", s.Addr())
	c.expect(t, "dial", tracer.TierSyscall.String())
	c.expect(t, "watched", "ok")
}
