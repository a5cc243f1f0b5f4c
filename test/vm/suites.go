// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"slices"
	"strings"
	"time"
)

// suite is one package's tests, or one command, in the guest.
type suite struct {
	name    string
	tier    string         // tested, if only one is
	pkg     string         // its tests, below the repository
	command string         // no tests, but a program of test/extras with these arguments
	data    bool           // of a command: writes JSON to its standard output
	asked   bool           // not run unless it is asked for
	calm    bool           // -quick runs it with one preemption model only
	long    bool           // -quick leaves it out
	brief   string         // tests that -quick runs of it, where there are more
	rdma    bool           // built with cgo; run only with -rdma
	exit    map[string]int // of a command, by kernel: the exit status that is right, if not 0
	args    []string
	only    string // tests run unless others are asked for, a regular expression
	skip    string // tests left out, as of go test
	since   string // not run on older kernels, and why
	why     string
	timeout time.Duration // set by the command line
}

const (
	noExitMmap   = "the syscall tier needs the tracepoint mmap:exit_mmap"
	noTracepoint = "the notifier/tracepoint tier needs the tracepoint kvm:kvm_unmap_hva_range (5.13)"
	noGather     = "the mm tier needs mprotect_fixup with a struct mmu_gather (6.0)"
	noSingleSlot = "the oracle changes single slots of a table of buffers (5.13)"
)

// The rounds of a tier's races.
const races = "^Test(Race(SameThread|OtherThread|AddressReuse|RegisterDuringDontneed|ValidMeansDrained)|EveryChange|ChangeInUse|ForkedChild)"

// It needs a larger ring than the daemon gives.
const largeRing = "^TestRaceValidMeansDrained$"

// Planted faults that only a machine with KVM and 32-bit calls can show; the
// others are found anywhere.
const notOnHosts = "^TestFaultsAreNoticed$/^notifier$|^TestGuards$/^compat-abi$|^TestGuards$/^$/^notifier$"

// In this order: what everything else stands on comes first.
var suites = []suite{
	{name: "check", command: "ummufeed check", exit: map[string]int{"5.10": 3}}, // unsupported: see noExitMmap
	{name: "uring", calm: true, pkg: "./regcache/uring"},
	{name: "truth", calm: true, brief: "^TestCacheWithFeed$/^libc$", pkg: "./internal/truth", skip: "/^(jemalloc|tcmalloc|mimalloc|direct)$", // who makes the calls is not the kernel's
		since: "6.1", why: noSingleSlot},
	{name: "feed", long: true, pkg: "./feed", args: []string{"-rapid.checks=20"}, skip: "^(TestForkKinds|TestInterestHashAsInC)$"}, // they compile C
	{name: "local", calm: true, brief: "^Test(OtherProcess|Twins|NotifierMarker|ProbesNeedWitness|NotifierPageUnmapped)$", pkg: "./feed/local", since: "6.1", why: noExitMmap},
	{name: "inject", calm: true, brief: "^TestEveryChange$", pkg: "./internal/inject", since: "6.1", why: noTracepoint},
	{name: "tracer", calm: true, brief: "^Test(Truth|OwnerEnds|IdentityDuringExec|SettledEndsNothing|NoProbes|PollerCannotRead)$", pkg: "./tracer", skip: "/^direct$", since: "6.1", why: noExitMmap},
	{name: "ummufeed", calm: true, brief: "^TestNotifier(Trace|Table|AsStrace|Gap)$", pkg: "./cmd/ummufeed", only: "^Test(Notifier|Tier|SelfTestUsage)", // the other tests are about the command, not the kernel
		since: "6.1", why: noExitMmap},
	{name: "selftest", long: true, pkg: "./internal/selftest", only: notOnHosts, since: "6.1", why: noExitMmap},
	{name: "selftest-syscall", tier: "syscall", command: "ummufeed check --self-test --tier syscall -o json", data: true,
		since: "6.1", why: noExitMmap},
	{name: "selftest-tracepoint", tier: "notifier/tracepoint", command: "ummufeed check --self-test --tier notifier/tracepoint -o json", data: true,
		since: "6.1", why: noTracepoint},
	{name: "selftest-probe", tier: "notifier/probe", command: "ummufeed check --self-test --tier notifier/probe -o json", data: true,
		since: "6.1", why: noSingleSlot},
	{name: "selftest-mm", tier: "mm", command: "ummufeed check --self-test --tier mm -o json", data: true, since: "6.1", why: noGather},
	{name: "oracle", calm: true, brief: "^TestNothingUncovered$", pkg: "./internal/oracle", only: "^Test(NothingUncovered|FoundBefore)$", since: "6.1", why: noExitMmap},
	{name: "coherence", tier: "syscall", pkg: "./test/coherence", skip: "^TestSameAddressAgain$", // as TestRaceSameThread, 10,000 times
		args: []string{"-keep", "-rounds=100", "-changes=2000", "-load-changes=4000"}, since: "6.1", why: noExitMmap},
	{name: "tracepoint", tier: "notifier/tracepoint", pkg: "./test/coherence", only: races,
		args:  []string{"-tier=notifier/tracepoint", "-keep", "-rounds=100", "-changes=2000", "-load-changes=4000"},
		since: "6.1", why: noTracepoint},
	{name: "probe", tier: "notifier/probe", pkg: "./test/coherence", only: races,
		args: []string{"-tier=notifier/probe", "-keep", "-rounds=100", "-changes=2000", "-load-changes=4000"}},
	// The same contract through the socket of the daemon: the truth table by a
	// client that may do nothing, and the races.
	{name: "contract-socket", long: true, tier: "syscall", pkg: "./internal/daemon", only: "^TestContract", args: []string{"-contract-tier=syscall"},
		since: "6.1", why: noExitMmap},
	{name: "contract-socket-tracepoint", long: true, tier: "notifier/tracepoint", pkg: "./internal/daemon", only: "^TestContract$",
		args: []string{"-contract-tier=notifier/tracepoint"}, since: "6.1", why: noExitMmap},
	{name: "contract-socket-probe", long: true, tier: "notifier/probe", pkg: "./internal/daemon", only: "^TestContract$",
		args: []string{"-contract-tier=notifier/probe"}, since: "6.1", why: noSingleSlot},
	{name: "contract-socket-mm", long: true, tier: "mm", pkg: "./internal/daemon", only: "^TestContract$",
		args: []string{"-contract-tier=mm"}, since: "6.1", why: noGather},
	{name: "races-socket", long: true, tier: "syscall", pkg: "./test/coherence", only: races, skip: largeRing,
		args: []string{"-daemon", "-rounds=100", "-changes=2000", "-load-changes=4000"}, since: "6.1", why: noExitMmap},
	{name: "races-socket-tracepoint", long: true, tier: "notifier/tracepoint", pkg: "./test/coherence", only: races, skip: largeRing,
		args:  []string{"-daemon", "-tier=notifier/tracepoint", "-rounds=100", "-changes=2000", "-load-changes=4000"},
		since: "6.1", why: noTracepoint},
	{name: "rdma", tier: "syscall", pkg: "./test/verbs", rdma: true, since: "6.1", why: noExitMmap},
	{name: "rdma-probe", tier: "notifier/probe", pkg: "./test/verbs", args: []string{"-tier=notifier/probe"}, rdma: true},
	{name: "rdma-long", tier: "syscall", pkg: "./test/verbs", args: []string{"-rounds=100000"}, only: "^TestRandomChanges$",
		asked: true, rdma: true, since: "6.1", why: noExitMmap},
	{name: "remapring", tier: "syscall", pkg: "./examples/remapring", rdma: true, since: "6.1", why: noExitMmap},
	{name: "detector", long: true, pkg: "./test/detector", since: "6.1", why: noExitMmap},
	{name: "detector-rdma", tier: "syscall", pkg: "./test/detector", args: []string{"-real"}, only: "^Test(Mistakes|Correct|Many)$",
		rdma: true, since: "6.1", why: noExitMmap},
	{name: "guards", pkg: "./internal/guard/cmd/guards", only: "^TestKVMRows$", asked: true, since: "6.1", why: noTracepoint},
	{name: "mm", tier: "mm", pkg: "./test/coherence", only: races,
		args: []string{"-tier=mm", "-keep", "-rounds=100", "-changes=2000", "-load-changes=4000"}, since: "6.1", why: noGather},
	{name: "soak-syscall", tier: "syscall", command: "soak -out - -tier syscall", data: true, asked: true, since: "6.1", why: noSingleSlot},
	{name: "soak-tracepoint", tier: "notifier/tracepoint", command: "soak -out - -tier notifier/tracepoint", data: true, asked: true, since: "6.1", why: noSingleSlot},
	{name: "soak-mm", tier: "mm", command: "soak -out - -tier mm", data: true, asked: true, since: "6.1", why: noSingleSlot},
	{name: "soak-probe", tier: "notifier/probe", command: "soak -out - -tier notifier/probe", data: true, asked: true, since: "6.1", why: noSingleSlot},
}

// has reports whether the machine is to run the suite, where it can.
func (m *machine) has(s *suite) bool { return !s.calm || m.model == m.kernel.models[0] }

func (s *suite) runsOn(kernel string) bool {
	return s.since == "" || kernel == s.since || newer(kernel, s.since)
}

// argv is the program and its arguments; pattern selects tests, empty selects
// all.
func (s *suite) argv(pattern string) []string {
	if s.command != "" {
		argv := strings.Fields(s.command)
		return append([]string{"/programs/" + argv[0]}, argv[1:]...)
	}
	args := []string{"/suites/" + s.name, "-test.v=test2json", "-test.short", "-test.timeout=" + (s.timeout - 10*time.Second).String()}
	if s.skip != "" {
		args = append(args, "-test.skip="+s.skip)
	}
	if pattern == "" {
		pattern = cmp.Or(s.brief, s.only)
	}
	if pattern != "" {
		args = append(args, "-test.run="+pattern)
	}
	return slices.Concat(args, s.args)
}
