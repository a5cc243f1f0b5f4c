// SPDX-License-Identifier: Apache-2.0

package main

import "time"

// suite is one package's tests, or one command, in the guest.
type suite struct {
	name    string
	pkg     string         // below the repository
	command string         // not a test: its argument
	exit    map[string]int // by kernel: the exit status that is right, if not 0
	args    []string
	only    string // tests run unless others are asked for, a regular expression
	skip    string // tests left out, as of go test
	since   string // not run on older kernels, and why
	why     string
	timeout time.Duration // 0: 8 minutes
}

const noExitMmap = "the syscall tier needs the tracepoint mmap:exit_mmap"

// In this order: what everything else stands on comes first.
var suites = []suite{
	{name: "check", pkg: "./cmd/ummufeed", command: "check", exit: map[string]int{"5.10": 3}}, // unsupported: see noExitMmap
	{name: "uring", pkg: "./regcache/uring"},
	{name: "truth", pkg: "./internal/truth", skip: "/^(jemalloc|tcmalloc|mimalloc)$", // what allocators do is not the kernel's
		since: "6.1", why: "the oracle changes single slots of a table of buffers (5.13)"},
	{name: "feed", pkg: "./feed", args: []string{"-rapid.checks=20"}, skip: "^(TestForkKinds|TestInterestHashAsInC)$"}, // they compile C
	{name: "local", pkg: "./feed/local", since: "6.1", why: noExitMmap},
	{name: "tracer", pkg: "./tracer", since: "6.1", why: noExitMmap},
	{name: "coherence", pkg: "./test/coherence", args: []string{"-rounds=300", "-changes=50000"}, since: "6.1", why: noExitMmap},
	{name: "probe", pkg: "./test/coherence", args: []string{"-tier=notifier/probe", "-rounds=300", "-changes=50000", "-load-changes=8000"}, only: "^Test(Race(SameThread|OtherThread|AddressReuse|RegisterDuringDontneed|ValidMeansDrained)|EveryChange|ChangeInUse|ForkedChild)"},
}

func (s *suite) limit() time.Duration {
	if s.timeout != 0 {
		return s.timeout
	}
	return 8 * time.Minute
}

func (s *suite) runsOn(kernel string) bool {
	return s.since == "" || kernel == s.since || newer(kernel, s.since)
}

// argv are the arguments; pattern selects tests, empty selects all.
func (s *suite) argv(pattern string) []string {
	if s.command != "" {
		return []string{s.command}
	}
	args := []string{"-test.v=test2json", "-test.short", "-test.timeout=" + (s.limit() - 10*time.Second).String()}
	if s.skip != "" {
		args = append(args, "-test.skip="+s.skip)
	}
	if pattern == "" {
		pattern = s.only
	}
	if pattern != "" {
		args = append(args, "-test.run="+pattern)
	}
	return append(args, s.args...)
}
