// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/tracer"
)

// candidate is one way to see the changes of a client.
type candidate struct {
	tracer  *tracer.Tracer
	tier    tracer.Tier
	machine bool // the client must make a virtual machine first
}

// loadTiers loads what may be used, best first: the notifier of a process that
// has one, the kernel's functions, a notifier made by KVM, and system calls
// last. A client tries one after the other until it sees its own change. why
// has a sentence for each that is not among them.
func loadTiers(c *Config) (tiers []candidate, why []string, err error) {
	safe, err := tracer.RingsSafe()
	if err != nil {
		return nil, nil, err
	}
	var errs []error
	missing := func(tier tracer.Tier, reason string) {
		why = append(why, fmt.Sprintf("%v: %s", tier, reason))
	}
	wanted := func(tier tracer.Tier) bool { return len(c.Tiers) == 0 || slices.Contains(c.Tiers, tier) }
	load := func(tier tracer.Tier) *tracer.Tracer {
		if !wanted(tier) {
			return nil
		}
		t, err := tracer.Open(tracer.Options{
			Tier: tier, MaxWatches: c.MaxClients,
			Ready: min(ready, c.MaxClients), ReadyFeed: tracer.FeedOptions{RingBytes: defaultRingBytes, NoRing: !safe},
		})
		if err != nil {
			errs = append(errs, fmt.Errorf("tier %v: %w", tier, err))
			missing(tier, err.Error())
			return nil
		}
		if weak := t.Coverage().Weak; len(weak) != 0 {
			missing(tier, strings.Join(weak, "; "))
			errs = append(errs, t.Close())
			return nil
		}
		return t
	}
	probe := load(tracer.TierNotifierProbe)
	switch {
	case probe == nil:
	case tracer.Preemptible():
		missing(tracer.TierNotifierProbe, tracer.ErrNoWitness.Error())
	default:
		tiers = append(tiers, candidate{probe, tracer.TierNotifierProbe, false})
	}
	if t := load(tracer.TierMM); t != nil {
		tiers = append(tiers, candidate{t, tracer.TierMM, false})
	}
	switch {
	case !wanted(tracer.TierNotifierProbe) && !wanted(tracer.TierNotifierTracepoint):
	case !c.AllowKVM:
		missing(tracer.TierNotifierTracepoint, "KVM is not allowed (--allow-kvm)")
	default:
		if err := haveKVM(); err != nil {
			errs = append(errs, err)
			missing(tracer.TierNotifierTracepoint, err.Error())
		} else if probe != nil {
			tiers = append(tiers, candidate{probe, tracer.TierNotifierProbe, true})
		} else if t := load(tracer.TierNotifierTracepoint); t != nil {
			tiers = append(tiers, candidate{t, tracer.TierNotifierTracepoint, true})
		}
	}
	switch {
	case !wanted(tracer.TierSyscall):
	case len(c.Tiers) == 0 && !c.AllowSyscallTier:
		missing(tracer.TierSyscall, "not allowed (--allow-syscall-tier)")
	default:
		if t := load(tracer.TierSyscall); t != nil {
			tiers = append(tiers, candidate{t, tracer.TierSyscall, false})
		}
	}
	if probe != nil && !slices.ContainsFunc(tiers, func(c candidate) bool { return c.tracer == probe }) {
		errs = append(errs, probe.Close())
	}
	if len(tiers) == 0 {
		if errors.Join(errs...) == nil {
			errs = append(errs, tracer.ErrNotSupported)
		}
		return nil, why, &noTier{"no tier can be used: " + strings.Join(why, "; "), errors.Join(errs...)}
	}
	return tiers, why, nil
}

// noTier says in its text what its causes say.
type noTier struct {
	text string
	err  error
}

func (e *noTier) Error() string { return e.text }
func (e *noTier) Unwrap() error { return e.err }

// eachTracer calls f for each tracer once.
func eachTracer(tiers []candidate, f func(*tracer.Tracer) error) error {
	var errs []error
	done := make(map[*tracer.Tracer]bool)
	for _, t := range tiers {
		if !done[t.tracer] {
			done[t.tracer] = true
			errs = append(errs, f(t.tracer))
		}
	}
	return errors.Join(errs...)
}

// misses is how often the kernel skipped a program.
func misses(tiers []candidate) (sum uint64, err error) {
	seen := make(map[*tracer.Tracer]bool)
	for _, t := range tiers {
		if seen[t.tracer] {
			continue
		}
		seen[t.tracer] = true
		hooks, err := t.tracer.Misses()
		if err != nil {
			return 0, err
		}
		for _, m := range hooks {
			sum += m.Skipped
		}
	}
	return sum, nil
}

// openKVM opens /dev/kvm for a client, which need not have the right to.
func openKVM() (int, error) {
	fd, err := unix.Open("/dev/kvm", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open /dev/kvm: %w", err)
	}
	return fd, nil
}

func haveKVM() error {
	fd, err := openKVM()
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// isMachine checks that a descriptor is a virtual machine of another address
// space than this one: the kernel refuses all calls from others
// (kvm_vm_ioctl(), virt/kvm/kvm_main.c). Whose it is the client proves.
func isMachine(fd int) error {
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	if err != nil {
		return err
	}
	if name != "anon_inode:kvm-vm" {
		return errors.New("the descriptor is not a virtual machine")
	}
	const checkExtension, userMemory = 0xae03, 3 // KVM_CHECK_EXTENSION, linux/kvm.h
	if _, _, e := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), checkExtension, userMemory); e != unix.EIO {
		return errors.New("the virtual machine is not another process's")
	}
	return nil
}
