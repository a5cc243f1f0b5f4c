// SPDX-License-Identifier: Apache-2.0

// Package conform compares what ummufeed recorded of a program with what
// strace saw of the same run: every call that changed page tables must have
// its records with the right range, and there must be no record that no call
// explains.
//
// The two are matched thread by thread: the calls of one thread have the same
// order in both. strace itself runs in the watched tree; its threads are not
// in its own output and are left out, as is what its child does before the
// exec. Kernel: whatever runs strace and the tracer. What strace cannot show
// as a call on the address space (a truncated file, an io_uring request, what
// another process does to shared memory) is not compared.
package conform

import (
	"fmt"
	"maps"
	"slices"
	"syscall"

	"github.com/ummu/ummu/mm"
)

// maxProblems bounds Result.Problems: enough to find the cause, not a second log.
const maxProblems = 50

// Result is the outcome for one program.
type Result struct {
	Program string `json:"program"`
	// Calls is the number of calls, exits of threads included, that must
	// have records; Records is the number of those that have the right
	// ones. Missing is the difference.
	Calls   int `json:"calls"`
	Records int `json:"records"`
	Missing int `json:"missing"`
	// Invented is the number of groups of records (begin and end of one
	// call are one group) that no call explains.
	Invented int `json:"invented"`
	// Failed is the number of groups that belong to a call which failed or
	// was cut off by the thread's end, and so may have them.
	Failed int `json:"failed"`
	// Lost and Complete are the summary's: a stream with losses proves nothing.
	Lost     uint64 `json:"lost"`
	Complete bool   `json:"complete"`
	// Threads is the number of threads compared.
	Threads int `json:"threads"`
	// ByCall is Calls by name.
	ByCall map[string]int `json:"by_call"`
	// Problems describe the first missing and invented ones.
	Problems []string `json:"problems"`
	Seconds  float64  `json:"seconds"`
}

// OK reports whether nothing is missing, invented or lost, and that there was
// something to compare.
func (r *Result) OK() bool {
	return r.Missing == 0 && r.Invented == 0 && r.Lost == 0 && r.Complete && r.Calls > 0 && r.Records == r.Calls
}

func (r *Result) String() string {
	s := fmt.Sprintf("%s calls=%d records=%d missing=%d invented=%d failed=%d", r.Program, r.Calls, r.Records, r.Missing, r.Invented, r.Failed)
	if r.Lost > 0 || !r.Complete {
		s += fmt.Sprintf(" lost=%d incomplete", r.Lost)
	}
	return s
}

func (r *Result) problem(format string, args ...any) {
	if len(r.Problems) < maxProblems {
		r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
	}
}

// Compare matches the records of a run with the calls strace saw in it.
func Compare(log *Log, s *Stream) *Result {
	r := &Result{Lost: s.Lost, Complete: s.Complete, ByCall: map[string]int{}, Problems: []string{}}
	groups := groupRecords(log, s.Records)
	tids := slices.Collect(maps.Keys(log.Threads))
	for tid := range groups {
		if log.Threads[tid] == nil {
			tids = append(tids, tid)
		}
	}
	slices.Sort(tids)
	r.Threads = len(log.Threads)
	for _, tid := range tids {
		r.thread(tid, log.Threads[tid], groups[tid])
	}
	return r
}

// groupRecords sorts the records by thread and joins those of one call. It
// leaves out what is not of the traced program.
func groupRecords(log *Log, recs []Record) map[int][]*group {
	groups := map[int][]*group{}
	open := map[int]*group{} // begun and not ended
	started := false         // strace's child has executed the program
	born := map[int]bool{}   // new tasks that strace has not shown
	for i := range recs {
		rec := &recs[i]
		switch {
		case rec.Kind == mm.Lost, rec.Kind == mm.Register, rec.Kind == mm.Deregister:
			continue
		case rec.Has("space_death"):
			continue // by whichever task had the last hold on it
		case log.Threads[rec.TID] == nil && rec.Comm == straceComm:
			continue
		case log.Threads[rec.TID] == nil && rec.Kind == mm.Exit && born[rec.TID]:
			// Killed before its first call: strace shows nothing of it.
			delete(born, rec.TID)
			continue
		case rec.TID == log.Root && !started:
			if started = rec.Kind == mm.Exec; !started {
				continue
			}
		}
		if rec.Kind == mm.Fork {
			born[rec.Child] = true
		}
		g := open[rec.TID]
		if g != nil && g.first().Call != rec.Call {
			g = nil
		}
		if g == nil || rec.Phase == mm.PhaseBegin && !rec.Has("vector") {
			g = &group{}
			groups[rec.TID] = append(groups[rec.TID], g)
		}
		if rec.Phase == mm.PhaseBegin {
			g.begins = append(g.begins, rec)
			open[rec.TID] = g
		} else {
			g.end = rec
			delete(open, rec.TID)
		}
	}
	return groups
}

const straceComm = "strace"

// explains reports whether the call, of which x is expected, can have made the
// records.
func explains(c *Call, x expectation, g *group) bool {
	if x.need == never {
		return false
	}
	name := g.first().Call
	switch {
	case name == "":
		if c.Name != exitCall && !isExec(c.Name) && !isFork(c.Name) {
			return false
		}
	case c.Doubtful && !c.Done: // whatever call it was
		return true
	case name != c.Name && !(name == "mmap2" && c.Name == "mmap"):
		return false
	case c.Done && !c.Doubtful && (g.end == nil || g.end.Ret == nil || *g.end.Ret != c.Ret):
		return false
	}
	if c.Done && c.Ret < 0 && x.need == may && len(g.begins) == 0 && g.end.Has("unpaired") {
		// A call that seccomp refuses is skipped before the tracepoint of
		// its entry; that of its exit fires (syscall_trace_enter()).
		paired := *g
		paired.begins = []*Record{g.end}
		g = &paired
	}
	return x.match(g)
}

// window is how many calls or groups the matching looks ahead to find where
// the two sequences agree again.
const window = 200

// thread matches the calls of one thread with its groups of records.
func (r *Result) thread(tid int, calls []*Call, groups []*group) {
	// What can have no record plays no part.
	var xs []expectation
	var cs []*Call
	for _, c := range calls {
		if x := expect(c); x.need != never {
			cs, xs = append(cs, c), append(xs, x)
			if x.need == must {
				r.Calls++
				r.ByCall[c.Name]++
			}
		}
	}
	match := func(i, j int) bool {
		return i < len(cs) && j < len(groups) && explains(cs[i], xs[i], groups[j])
	}
	i, j := 0, 0
	for i < len(cs) || j < len(groups) {
		if match(i, j) {
			if xs[i].need == must {
				r.Records++
			} else {
				r.Failed++
			}
			i, j = i+1, j+1
			continue
		}
		if cutAtEntry(groups[j:]) {
			r.Failed++
			j++
			continue
		}
		di, dj := resync(i, j, len(cs), len(groups), xs, match)
		for range di {
			if xs[i].need == must {
				r.Missing++
				r.problem("missing: thread %d, strace line %d: %v", tid, cs[i].Line, cs[i])
			}
			i++
		}
		for range dj {
			r.Invented++
			r.problem("invented: thread %d: %s", tid, describe(groups[j]))
			j++
		}
	}
}

// cutAtEntry reports whether the first group is what a thread leaves that is
// killed while strace holds it at the entry of a call: strace shows nothing,
// the call is skipped with ENOSYS before the tracepoint of the entry, and that
// of the exit fires (syscall_trace_enter() and syscall_exit_work()).
func cutAtEntry(groups []*group) bool {
	if len(groups) != 2 {
		return false
	}
	g, last := groups[0], groups[1].end
	return len(g.begins) == 0 && g.end.Has("unpaired") && g.end.Ret != nil && *g.end.Ret == -int64(syscall.ENOSYS) &&
		last != nil && last.Kind == mm.Exit
}

// resync returns how many calls and groups to pass over until the two agree
// again: the way that gives up the fewest groups and calls with need must,
// and of those the one after which they agree for longest.
func resync(i, j, n, m int, xs []expectation, match func(i, j int) bool) (di, dj int) {
	best, bestRun := -1, 0
	cost := 0 // of the calls passed over
	for a := 0; a <= window && i+a <= n; a++ {
		if a > 0 && xs[i+a-1].need == must {
			cost++
		}
		for b := 0; b <= window && j+b <= m && (best < 0 || cost+b <= best); b++ {
			end := i+a == n && j+b == m
			if !end && !match(i+a, j+b) {
				continue
			}
			run := 1
			for run < maxRun && match(i+a+run, j+b+run) {
				run++
			}
			if best < 0 || cost+b < best || run > bestRun {
				best, bestRun, di, dj = cost+b, run, a, b
			}
		}
	}
	if best < 0 { // far apart
		di, dj = min(1, n-i), min(1, m-j)
	}
	return di, dj
}

// maxRun bounds how far resync compares two ways of the same cost.
const maxRun = 16

func describe(g *group) string {
	s := ""
	for _, b := range g.begins {
		s += b.String() + "; "
	}
	if g.end == nil {
		return s + "no end"
	}
	return s + g.end.String()
}
