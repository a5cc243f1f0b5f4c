// SPDX-License-Identifier: Apache-2.0

// Command soak makes random changes of an address space and looks for one
// that a tier does not cover (internal/oracle). It tells each finding as the
// smallest program that repeats it, and writes the totals as JSON.
//
// Exit code 1: something was uncovered.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime/debug"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/oracle"
)

// report is soak.json.
type report struct {
	Ops                int            `json:"ops"`
	Uncovered          int            `json:"uncovered"`
	FalseInvalidations int            `json:"false_invalidations"`
	Seed               uint64         `json:"seed"`
	Tier               string         `json:"tier"`
	Kernel             string         `json:"kernel"`
	Commit             string         `json:"commit"`
	Duration           float64        `json:"duration_s"`
	OpsPerSecond       float64        `json:"ops_per_s"`
	Programs           int            `json:"programs"`
	Hugetlb            int            `json:"programs_with_hugetlb"`
	Registrations      int            `json:"registrations"`
	Refused            int            `json:"refused_by_device"`
	Hits               int            `json:"hits"`
	Changes            int            `json:"changes_of_entries"`
	Transfers          int            `json:"transfers"`
	Witness            bool           `json:"witness"`
	WitnessMissed      int            `json:"witness_missed"`
	Verdicts           map[string]int `json:"verdicts"`
	FalseBy            map[string]int `json:"false_invalidations_by"`
	Findings           []finding      `json:"findings"`
}

type finding struct {
	Seed    uint64 `json:"seed"` // of the program
	What    string `json:"what"`
	Program string `json:"program"`
}

func main() {
	oracle.Main()
	ops := flag.Int("ops", 100_000, "operations")
	tier := flag.String("tier", "syscall", "syscall, notifier/probe or notifier/tracepoint")
	seed := flag.Uint64("seed", 0, "seed; 0: from the clock")
	length := flag.Int("length", 150, "steps a program")
	out := flag.String("out", "out/soak.json", "report `file`; - is the standard output")
	limit := flag.Duration("for", 0, "stop after this time, all operations or not; 0: never")
	most := flag.Int("findings", 10, "stop after this many findings")
	replay := flag.String("replay", "", "run the program in this `file` 100 times instead")
	flag.Parse()
	if flag.NArg() > 0 || *ops < 1 || *length < 1 {
		flag.Usage()
		os.Exit(2)
	}
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	var err error
	var found bool
	if *replay != "" {
		found, err = repeat(*tier, *replay)
	} else {
		found, err = soak(*ops, *tier, *seed, *length, *most, *limit, *out)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak:", err)
	}
	if err != nil || found {
		os.Exit(1)
	}
}

func repeat(tier, file string) (found bool, err error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return false, err
	}
	p, err := oracle.ParseProgram(string(text))
	if err != nil {
		return false, err
	}
	t := &oracle.Target{Tier: tier}
	defer func() { err = errors.Join(err, t.Close()) }()
	n := 0
	for range 100 {
		r, err := t.Run(p)
		if err != nil {
			return found, err
		}
		if r.Finding != nil {
			if n++; n == 1 {
				fmt.Println(r.Finding)
			}
		}
	}
	fmt.Printf("%d of 100 runs\n", n)
	return n > 0, nil
}

// Huge pages are the machine's: a batch of programs has them for a moment.
const (
	hugetlbEvery = 400
	hugetlbBatch = 20
)

func soak(ops int, tier string, seed uint64, length, most int, limit time.Duration, out string) (found bool, err error) {
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, unix.SIGINT, unix.SIGTERM)
	total, rep := new(oracle.Result), report{Seed: seed, Tier: tier, Kernel: kernel(), Commit: commit(), Findings: []finding{}}
	t := &oracle.Target{Tier: tier}
	defer func() { err = errors.Join(err, t.Close()) }()
	begin := time.Now()
	var release func() error
	giveBack := func() {
		if release != nil {
			err = errors.Join(err, release())
			release = nil
		}
	}
	defer giveBack()
	said := begin
	for i := uint64(0); total.Ops < ops && len(rep.Findings) < most; i++ {
		select {
		case s := <-stop:
			fmt.Fprintln(os.Stderr, "soak: stopped by", s)
			ops = 0
			continue
		default:
		}
		if limit > 0 && time.Since(begin) > limit {
			break
		}
		if time.Since(said) > time.Minute {
			said = time.Now()
			fmt.Fprintf(os.Stderr, "soak: %d operations\n", total.Ops)
		}
		if i%hugetlbEvery == hugetlbEvery/2 {
			if release, err = oracle.ReserveHugePages(false); err != nil {
				return found, err
			}
		}
		hugetlb := release != nil
		own := seed + i
		p := oracle.Generate(rand.New(rand.NewPCG(own, 0)), length, hugetlb)
		r, err := t.Run(p)
		if err != nil {
			return found, fmt.Errorf("program of seed %d: %w", own, err)
		}
		total.Add(r)
		rep.Programs++
		if r.Hugetlb {
			rep.Hugetlb++
		}
		if r.Finding != nil {
			found = true
			f := finding{Seed: own, What: r.Finding.String()}
			small, last, err := t.Shrink(p, r.Finding)
			switch {
			case err != nil:
				return found, err
			case small == nil:
				f.Program = p.String()
				f.What += " (not repeated)"
			default:
				f.Program, f.What = small.String(), last.String()
			}
			rep.Findings = append(rep.Findings, f)
			fmt.Fprintf(os.Stderr, "seed %d: %s\n%s\n", own, f.What, f.Program)
		}
		if i%hugetlbEvery == hugetlbEvery/2+hugetlbBatch {
			giveBack()
		}
	}
	took := time.Since(begin)
	rep.Ops, rep.Uncovered = total.Ops, len(rep.Findings)
	rep.Duration, rep.OpsPerSecond = took.Seconds(), float64(total.Ops)/took.Seconds()
	rep.Registrations, rep.Refused, rep.Hits = total.Registrations, total.Refused, total.Hits
	rep.Changes, rep.Transfers = total.Changes, total.Transfers
	rep.Witness, rep.WitnessMissed = t.Witness, total.WitnessMissed
	rep.Verdicts, rep.FalseBy = total.Verdicts, total.False
	for _, n := range total.False {
		rep.FalseInvalidations += n
	}
	text, err := json.MarshalIndent(rep, "", "  ")
	if err != nil {
		return found, err
	}
	if out == "-" {
		_, err = os.Stdout.Write(append(text, '\n'))
	} else if err = os.MkdirAll(filepath.Dir(out), 0o777); err == nil {
		err = os.WriteFile(out, append(text, '\n'), 0o666)
	}
	if err != nil {
		return found, err
	}
	fmt.Fprintf(os.Stderr, "soak: tier %s: %d operations in %.0f s (%.0f/s), %d registrations, %d uncovered, %d false invalidations; seed %d, %s\n",
		tier, rep.Ops, rep.Duration, rep.OpsPerSecond, rep.Registrations, rep.Uncovered, rep.FalseInvalidations, seed, out)
	return found, nil
}

func kernel() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return "unknown"
	}
	return unix.ByteSliceToString(u.Release[:])
}

// commit is what this was built from, with + if that was changed.
func commit() string {
	if b, ok := debug.ReadBuildInfo(); ok {
		var rev, dirty string
		for _, s := range b.Settings {
			switch {
			case s.Key == "vcs.revision":
				rev = s.Value
			case s.Key == "vcs.modified" && s.Value == "true":
				dirty = "+"
			}
		}
		if rev != "" {
			return rev + dirty
		}
	}
	rev, err := exec.Command("git", "rev-parse", "HEAD").Output()
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(rev)) + "+"
}
