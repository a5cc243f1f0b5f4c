// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/ummu/ummu/mm"
)

// records parses lines like
//
//	7 unmap begin 1000-3000 munmap
//	7 move end 1000-2000>5000-6000 mremap =20480 superset,maybe
//
// with the thread, kind, phase, range, name of the call ("-": none), result
// ("+N": the new task of a fork), and marks.
func records(t testing.TB, text string) []Record {
	t.Helper()
	var out []Record
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) == 0 {
			continue
		}
		r := Record{Seq: uint64(len(out) + 1), Comm: "prog"}
		var kind, phase, ranges string
		if _, err := fmt.Sscan(line, &r.TID, &kind, &phase, &ranges, &r.Call); err != nil {
			t.Fatalf("%q: %v", line, err)
		}
		var err error
		if r.Kind, err = mm.ParseKind(kind); err != nil {
			t.Fatal(err)
		}
		if r.Phase, err = mm.ParsePhase(phase); err != nil {
			t.Fatal(err)
		}
		from, to, _ := strings.Cut(ranges, ">")
		for s, p := range map[string]*mm.Range{from: &r.Range, to: &r.To} {
			if s != "" && s != "-" {
				if _, err := fmt.Sscanf(s, "%x-%x", &p.Start, &p.End); err != nil {
					t.Fatalf("%q: %v", line, err)
				}
			}
		}
		if r.Call == "-" {
			r.Call = ""
		}
		for _, s := range f[5:] {
			switch s[0] {
			case '=':
				var n int64
				fmt.Sscan(s[1:], &n)
				r.Ret = &n
			case '+':
				fmt.Sscan(s[1:], &r.Child)
			case '@':
				r.Comm = s[1:]
			default:
				r.Marks = strings.Split(s, ",")
			}
		}
		out = append(out, r)
	}
	return out
}

// base is a run in which everything fits: each kind of call, what strace
// itself does, a failure, a thread that is killed in a call.
const (
	baseStrace = `7 execve(0x1, 0x2, 0x3) = 0
7 brk(0) = 0x10000
7 brk(0x13001) = 0x13001
7 brk(0x11000) = 0x11000
7 mmap(0, 0x2800, 0x3, 0x22, 0xffffffff, 0) = 0x7000
7 mmap(0x8000, 0x1000, 0x1, 0x32, 0xffffffff, 0) = 0x8000
7 mmap(0x8000, 0x1000, 0x1, 0x100032, 0xffffffff, 0) = -1 EEXIST (File exists)
7 mprotect(0x7000, 0x1000, 0x1) = 0
7 mprotect(0x7000, 0x9000, 0x1) = -1 ENOMEM (Cannot allocate memory)
7 mprotect(0x7000, 0, 0x1) = 0
7 madvise(0x7000, 0x1, 0x4) = 0
7 madvise(0x7000, 0x1, 0x8) = 0
7 process_madvise(3, [{iov_base=0x7000, iov_len=4096}, {iov_base=0x9000, iov_len=4096}], 2, 0x4, 0) = 8192
7 mremap(0x7000, 0x3000, 0x2000, 0, 0) = 0x7000
7 mremap(0x7000, 0x2000, 0x3000, 0x1, 0) = 0x7000
7 mremap(0x7000, 0x3000, 0x4000, 0x1, 0) = 0x20000
7 mremap(0x20000, 0x4000, 0x4000, 0x3, 0x30000) = 0x30000
7 munmap(0x30001, 0x1000) = -1 EINVAL (Invalid argument)
7 munmap(0x30000, 0x1000) = -1 ENOMEM (Cannot allocate memory)
7 shmget(0, 0x2000, 0x180) = 5
7 shmat(5, 0, 0) = 0x40000
7 shmat(5, 0x40000, 0x4000) = 0x40000
7 shmdt(0x40000) = 0
7 remap_file_pages(0x30000, 0x1000, 0, 0x2, 0) = 0
7 clone(0x10f00, 0, 0, 0, 0 <unfinished ...>
8 munmap(0x30000, 0x3801 <unfinished ...>
7 <... clone resumed>) = 8
8 <... munmap resumed>) = 0
8 munmap(0x50000, 0x1000 <unfinished ...>
8 +++ killed by SIGKILL +++
7 exit_group(0) = ?
7 +++ exited with 0 +++
`
	baseRecords = `
		5 exec end - - @strace
		5 map end 1000-2000 mmap =4096 @strace
		5 fork end - - +7 @strace
		6 exit end - - @strace
		7 unmap begin 1000-2000 munmap @strace
		7 unmap end 1000-2000 munmap =0 @strace
		7 exec end - -
		7 map end 10000-14000 brk =77825
		7 unmap begin 11000-14000 brk
		5 zap begin 1000-2000 madvise @strace
		5 zap end 1000-2000 madvise =0 @strace
		7 unmap end 11000-14000 brk =69632
		7 map end 7000-a000 mmap =28672
		7 replace begin 8000-9000 mmap
		7 replace end 8000-9000 mmap =32768
		7 protect begin 7000-8000 mprotect
		7 protect end 7000-8000 mprotect =0
		7 protect begin 7000-10000 mprotect
		7 protect end 7000-10000 mprotect =-12
		7 zap begin 7000-8000 madvise
		7 zap end 7000-8000 madvise =0
		7 zap begin 7000-8000 process_madvise vector,maybe
		7 zap begin 9000-a000 process_madvise vector,maybe
		7 zap end 7000-a000 process_madvise =8192 vector,maybe
		7 unmap begin 9000-a000 mremap
		7 unmap end 9000-a000 mremap =28672
		7 move begin 7000-9000 mremap maybe
		7 map end 9000-a000 mremap =28672
		7 move begin 7000-a000 mremap maybe
		7 move end 7000-a000>20000-24000 mremap =131072
		7 move begin 20000-24000>30000-34000 mremap
		7 move end 20000-24000>30000-34000 mremap =196608
		7 unmap begin 30000-31000 munmap
		7 unmap end 30000-31000 munmap =-12
		7 map end 40000-41000 shmat =262144 unknown_length
		7 replace begin 40000-ffffffffffffffff shmat superset
		7 replace end 40000-ffffffffffffffff shmat =262144 superset
		7 unmap begin 40000-ffffffffffffffff shmdt superset
		7 unmap end 40000-ffffffffffffffff shmdt =0 superset
		7 replace begin 30000-31000 remap_file_pages
		8 unmap begin 30000-34000 munmap
		7 replace end 30000-31000 remap_file_pages =0
		7 fork end - - +8
		8 unmap end 30000-34000 munmap =0
		8 unmap begin 50000-51000 munmap
		8 exit end - -
		7 exit end - -
		9 exit end 0-ffffffffffffffff - space_death
		5 exit end - - @strace
	`
)

func TestCompareBase(t *testing.T) {
	r := Compare(parse(t, baseStrace), &Stream{Records: records(t, baseRecords), Complete: true})
	for _, p := range r.Problems {
		t.Error(p)
	}
	if want := " calls=21 records=21 missing=0 invented=0 failed=2"; r.String() != want || !r.OK() {
		t.Errorf("got %q, want %q", r, want)
	}
}

// TestCompareNotices makes every single mistake in the base, at every record:
// each must be reported.
func TestCompareNotices(t *testing.T) {
	log := parse(t, baseStrace)
	base := records(t, baseRecords)
	ours := func(i int) bool {
		return log.Threads[base[i].TID] != nil && base[i].Comm != "strace"
	}
	// Begin of a call in which the thread was killed: may be there or not,
	// with any range.
	free := func(i int) bool { return base[i].Range.Start == 0x50000 }
	// Begin of a move that turned out not to be one: nothing changed.
	inPlace := func(i int) bool { return base[i].Kind == mm.Move && base[i+1].Kind == mm.Map }
	page := mm.Addr(mm.PageSize())
	check := func(t *testing.T, i int, recs []Record) {
		t.Helper()
		if r := Compare(log, &Stream{Records: recs, Complete: true}); r.Missing+r.Invented == 0 || r.OK() {
			t.Errorf("not noticed at %v: %v", &base[i], r)
		}
	}
	change := func(i int, f func(r *Record)) []Record {
		recs := slices.Clone(base)
		f(&recs[i])
		return recs
	}
	for i := range base {
		if !ours(i) {
			continue
		}
		if !free(i) && !inPlace(i) {
			check(t, i, slices.Delete(slices.Clone(base), i, i+1))
		}
		if !free(i) {
			check(t, i, change(i, func(r *Record) { r.Kind = r.Kind%mm.Exit + 1 }))
		}
		check(t, i, slices.Insert(slices.Clone(base), i, base[i]))
		check(t, i, change(i, func(r *Record) { r.TID = 77 }))
		if base[i].Ret != nil {
			check(t, i, change(i, func(r *Record) { n := *r.Ret + 1; r.Ret = &n }))
			check(t, i, change(i, func(r *Record) { r.Ret = nil }))
		}
		if base[i].Child != 0 {
			check(t, i, change(i, func(r *Record) { r.Child++ }))
		}
		if base[i].Range.Empty() || free(i) {
			continue
		}
		vectorEnd := base[i].Has("vector") && base[i].Phase == mm.PhaseEnd // the hull may be larger
		check(t, i, change(i, func(r *Record) { r.Range.Start += page }))
		if !base[i].Has("superset") && !vectorEnd {
			check(t, i, change(i, func(r *Record) { r.Range.Start -= page }))
		}
		if !base[i].Has("superset") && !base[i].Has("unknown_length") {
			check(t, i, change(i, func(r *Record) { r.Range.End -= page }))
			if !vectorEnd {
				check(t, i, change(i, func(r *Record) { r.Range.End += page }))
			}
		}
		if !base[i].To.Empty() {
			check(t, i, change(i, func(r *Record) { r.To.Start += page }))
			check(t, i, change(i, func(r *Record) { r.To.End -= page }))
			check(t, i, change(i, func(r *Record) { r.To = mm.Range{} }))
		}
		if inPlace(i) {
			check(t, i, change(i, func(r *Record) { r.Marks = nil }))
		}
		// Order: the next record of the same thread is of this call or of
		// the next.
		for k := i + 1; k < len(base); k++ {
			if base[k].TID == base[i].TID && ours(k) && !free(k) {
				recs := slices.Clone(base)
				recs[i], recs[k] = recs[k], recs[i]
				check(t, i, recs)
				break
			}
		}
	}
}

func TestCompare(t *testing.T) {
	const exec, execRecord = "7 execve(0x1, 0x2, 0x3) = 0\n", "7 exec end - -\n"
	for _, tc := range []struct {
		name, strace, records string
		want                  string // without the exec
	}{
		{"nothing", "", "", "calls=0 records=0 missing=0 invented=0 failed=0"},
		{"larger with the mark", "7 munmap(0x3000, 0x1000) = 0\n",
			"7 unmap begin 2000-5000 munmap superset\n7 unmap end 3000-4000 munmap =0\n",
			"calls=1 records=1 missing=0 invented=0 failed=0"},
		{"smaller with the mark", "7 munmap(0x3000, 0x2000) = 0\n",
			"7 unmap begin 3000-4000 munmap superset\n7 unmap end 3000-5000 munmap =0\n",
			"calls=1 records=0 missing=1 invented=1 failed=0"},
		{"begin and end of two calls", "7 munmap(0x3000, 0x1000) = 0\n7 munmap(0x3000, 0x1000) = 0\n",
			"7 unmap begin 3000-4000 munmap\n7 unmap begin 3000-4000 munmap\n7 unmap end 3000-4000 munmap =0\n",
			"calls=2 records=1 missing=1 invented=1 failed=0"},
		{"the first of three the same", "7 munmap(0x3000, 0x1000) = 0\n7 munmap(0x5000, 0x1000) = 0\n7 munmap(0x3000, 0x1000) = 0\n",
			"7 unmap begin 5000-6000 munmap\n7 unmap end 5000-6000 munmap =0\n7 unmap begin 3000-4000 munmap\n7 unmap end 3000-4000 munmap =0\n",
			"calls=3 records=2 missing=1 invented=0 failed=0"},
		{"harmless advice", "7 madvise(0x3000, 0x1000, 0x8) = 0\n",
			"7 zap begin 3000-4000 madvise\n7 zap end 3000-4000 madvise =0\n",
			"calls=0 records=0 missing=0 invented=1 failed=0"},
		{"unknown advice", "7 madvise(0x3000, 0x1000, 0x270f) = -1 EINVAL (Invalid argument)\n",
			"7 zap begin 3000-4000 madvise\n7 zap end 3000-4000 madvise =-22\n",
			"calls=0 records=0 missing=0 invented=0 failed=1"},
		{"advice over a hole", "7 madvise(0x3000, 0x3000, 0x4) = -1 ENOMEM (Cannot allocate memory)\n", "",
			"calls=1 records=0 missing=1 invented=0 failed=0"},
		{"mapping onto a fixed address is not a new one", "7 mmap(0x3000, 0x1000, 0x3, 0x32, 0xffffffff, 0) = 0x3000\n",
			"7 map end 3000-4000 mmap =12288\n",
			"calls=1 records=0 missing=1 invented=1 failed=0"},
		{"refused fixed mapping", "7 mmap(0x3000, 0x1000, 0x3, 0x12, 0xffffffff, 0) = -1 EBADF (Bad file descriptor)\n",
			"7 replace begin 3000-4000 mmap\n7 replace end 3000-4000 mmap =-9\n",
			"calls=0 records=0 missing=0 invented=0 failed=1"},
		{"a second mapping of shared memory", "7 mremap(0x3000, 0, 0x1000, 0x3, 0x9000) = 0x9000\n",
			"7 replace begin 9000-a000 mremap\n7 replace end 9000-a000 mremap =36864\n",
			"calls=1 records=1 missing=0 invented=0 failed=0"},
		{"old mapping stays", "7 mremap(0x3000, 0x1000, 0x1000, 0x5, 0) = 0x9000\n",
			"7 move begin 3000-4000 mremap\n7 move end 3000-4000>9000-a000 mremap =36864\n",
			"calls=1 records=1 missing=0 invented=0 failed=0"},
		{"growth that may not move", "7 mremap(0x3000, 0x1000, 0x2000, 0, 0) = 0x3000\n",
			"7 move begin 3000-4000 mremap maybe\n7 map end 4000-5000 mremap =12288\n",
			"calls=1 records=0 missing=1 invented=1 failed=0"},
		{"growth without a begin", "7 mremap(0x3000, 0x1000, 0x2000, 0x1, 0) = 0x3000\n",
			"7 map end 4000-5000 mremap =12288\n",
			"calls=1 records=1 missing=0 invented=0 failed=0"},
		{"same size", "7 mremap(0x3000, 0x1000, 0x1000, 0x1, 0) = 0x3000\n", "",
			"calls=0 records=0 missing=0 invented=0 failed=0"},
		{"long vector", "7 process_madvise(3, [" + strings.Repeat("{iov_base=0x3000, iov_len=4096}, ", 17) + "], 17, 0x4, 0) = 69632\n",
			"7 zap begin 0-ffffffffffffffff process_madvise superset,maybe\n7 zap end 0-ffffffffffffffff process_madvise =69632 superset,maybe\n",
			"calls=1 records=1 missing=0 invented=0 failed=0"},
		{"short vector as a whole", "7 process_madvise(3, [{iov_base=0x3000, iov_len=4096}, {iov_base=0x9000, iov_len=4096}], 2, 0x4, 0) = 8192\n",
			"7 zap begin 0-ffffffffffffffff process_madvise superset\n7 zap end 0-ffffffffffffffff process_madvise =8192 superset\n",
			"calls=1 records=0 missing=1 invented=1 failed=0"},
		{"unpaired end", "7 munmap(0x3000, 0x1000) = 0\n", "7 unmap end 3000-4000 munmap =0 unpaired\n",
			"calls=1 records=0 missing=1 invented=1 failed=0"},
		{"killed at the entry of a call", "7 brk(0) = 0x1000\n7 +++ exited with 0 +++\n",
			"7 unmap end 3000-4000 munmap =-38 unpaired\n7 exit end - -\n",
			"calls=1 records=1 missing=0 invented=0 failed=1"},
		{"skipped call of a thread that goes on", "7 munmap(0x3000, 0x1000) = 0\n7 exit(0) = ?\n7 +++ exited with 0 +++\n",
			"7 unmap end 3000-4000 munmap =-38 unpaired\n7 unmap begin 3000-4000 munmap\n7 unmap end 3000-4000 munmap =0\n7 exit end - -\n",
			"calls=2 records=2 missing=0 invented=1 failed=0"},
		{"wrong result of a call before the end", "7 munmap(0x3000, 0x1000) = 0xb\n7 +++ exited with 0 +++\n",
			"7 unmap begin 3000-4000 munmap\n7 unmap end 3000-4000 munmap =0\n7 exit end - -\n",
			"calls=1 records=1 missing=0 invented=0 failed=1"},
		{"wrong result of a call before the thread ends itself", "7 munmap(0x3000, 0x1000) = 0xb\n7 exit(0) = ?\n7 +++ exited with 0 +++\n",
			"7 unmap begin 3000-4000 munmap\n7 unmap end 3000-4000 munmap =0\n7 exit end - -\n",
			"calls=2 records=1 missing=1 invented=1 failed=0"},
		{"missing before the end", "7 munmap(0x3000, 0x1000) = 0\n7 +++ exited with 0 +++\n",
			"7 exit end - -\n", "calls=2 records=1 missing=1 invented=0 failed=0"},
		{"call that strace could not read", "7 ???() = ?\n7 +++ exited with 0 +++\n",
			"7 unmap begin 3000-4000 munmap\n7 exit end - -\n",
			"calls=1 records=1 missing=0 invented=0 failed=1"},
		{"call that strace could not read and the kernel skipped", "7 ???() = ?\n7 +++ exited with 0 +++\n",
			"7 unmap end 3000-4000 munmap =-38 unpaired\n7 exit end - -\n",
			"calls=1 records=1 missing=0 invented=0 failed=1"},
		{"wrong call before the end", "7 execve(0x1, 0x2, 0x3 <unfinished ...>\n7 +++ exited with 0 +++\n",
			"7 unmap end 3000-4000 munmap =-38 unpaired\n7 exit end - -\n",
			"calls=1 records=1 missing=0 invented=0 failed=1"},
		{"end without a call", "7 ???() = ?\n7 +++ exited with 0 +++\n",
			"7 exit end - -\n", "calls=1 records=1 missing=0 invented=0 failed=0"},
		{"refused by seccomp", "7 munmap(0x3000, 0x1000) = -1 EPERM (Operation not permitted)\n",
			"7 unmap end 3000-4000 munmap =-1 unpaired\n",
			"calls=0 records=0 missing=0 invented=0 failed=1"},
		{"refused by seccomp, elsewhere", "7 munmap(0x3000, 0x1000) = -1 EPERM (Operation not permitted)\n",
			"7 unmap end 4000-5000 munmap =-1 unpaired\n",
			"calls=0 records=0 missing=0 invented=1 failed=0"},
		{"process that is killed before its first call", "7 clone(0, 0, 0x11, 0, 0) = 9\n", "7 fork end - - +9\n9 exit end - -\n",
			"calls=1 records=1 missing=0 invented=0 failed=0"},
		{"exit of a process that nobody made", "", "9 exit end - -\n",
			"calls=0 records=0 missing=0 invented=1 failed=0"},
		{"thread nobody has seen", "", "9 unmap begin 3000-4000 munmap\n9 unmap end 3000-4000 munmap =0\n",
			"calls=0 records=0 missing=0 invented=1 failed=0"},
		{"failed exec", "7 execve(0x1, 0x2, 0x3) = -1 ENOENT (No such file or directory)\n", "",
			"calls=0 records=0 missing=0 invented=0 failed=0"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := Compare(parse(t, exec+tc.strace), &Stream{Records: records(t, execRecord+tc.records), Complete: true})
			r.Calls--
			r.Records--
			if got := strings.TrimSpace(r.String()); got != tc.want {
				t.Errorf("got  %s\nwant %s\n%s", got, tc.want, strings.Join(r.Problems, "\n"))
			}
		})
	}
}

// TestCompareLoss: a stream with losses is never a success.
func TestCompareLoss(t *testing.T) {
	log := parse(t, baseStrace)
	recs := append(records(t, baseRecords), Record{Kind: mm.Lost, Phase: mm.PhaseEnd})
	for _, s := range []Stream{{Lost: 1, Complete: true}, {Complete: false}} {
		s.Records = recs
		if r := Compare(log, &s); r.OK() || r.Missing+r.Invented > 0 || !strings.HasSuffix(r.String(), "incomplete") {
			t.Errorf("lost %d, complete %t: %v, OK %t", s.Lost, s.Complete, r, r.OK())
		}
	}
	if r := Compare(&Log{Root: 7}, &Stream{Complete: true}); r.OK() {
		t.Errorf("a comparison of nothing is OK: %v", r)
	}
}

// TestCompareFarApart: the matching ends, and counts, when nothing fits.
func TestCompareFarApart(t *testing.T) {
	var calls, recs strings.Builder
	const n = 3 * window
	for i := range n {
		fmt.Fprintf(&calls, "7 munmap(0x%x000, 0x1000) = 0\n", i+1)
		fmt.Fprintf(&recs, "7 map end %x000-%x000 mmap =%d\n", i+1, i+2, (i+1)<<12)
	}
	log := parse(t, "7 execve(0x1, 0x2, 0x3) = 0\n"+calls.String())
	r := Compare(log, &Stream{Records: records(t, "7 exec end - -\n"+recs.String()), Complete: true})
	if r.Missing != n || r.Invented != n || len(r.Problems) != maxProblems {
		t.Errorf("got %v with %d problems, want %d missing and invented", r, len(r.Problems), n)
	}
}
