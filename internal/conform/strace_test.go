// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ummu/ummu/mm"
)

func parse(t testing.TB, text string) *Log {
	t.Helper()
	log, err := ParseStrace(strings.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return log
}

func TestParseStrace(t *testing.T) {
	for _, tc := range []struct {
		name, text string
		want       Log
	}{
		{"one line each", `7  execve(0x7ffe, 0x7fff, 0x8000) = 0
7  munmap(0x7f22cd0ab000, 0x87ab)    = 0
7  munmap(0x1, 0x3)                  = -1 EINVAL (Invalid argument)
7  mmap(0, 0x2000, 0x3, 0x22, 0xffffffff, 0) = 0x7f22cd0b2000
7  exit_group(0)                     = ?
7  +++ exited with 0 +++
`, Log{7, map[int][]*Call{7: {
			{TID: 7, Line: 1, Name: "execve", Args: []uint64{0x7ffe, 0x7fff, 0x8000}, Done: true},
			{TID: 7, Line: 2, Name: "munmap", Args: []uint64{0x7f22cd0ab000, 0x87ab}, Done: true},
			{TID: 7, Line: 3, Name: "munmap", Args: []uint64{1, 3}, Done: true, Ret: -22},
			{TID: 7, Line: 4, Name: "mmap", Args: []uint64{0, 0x2000, 3, 0x22, 0xffffffff, 0}, Done: true, Ret: 0x7f22cd0b2000},
			{TID: 7, Line: 6, Name: "exit", Done: true},
		}}}},
		{"threads interleaved", `7 clone3({flags=0x3d0f00, child_tid=0x7f, exit_signal=0, stack=0x7f00, stack_size=0x8000} <unfinished ...>
8 munmap(0x1000, 0x2000 <unfinished ...>
7 <... clone3 resumed> => {parent_tid=[8]}, 88) = 8
8 <... munmap resumed>)   = 0
8 madvise(0x1000, 0x1000, 0x4 <unfinished ...>
8 +++ killed by SIGKILL (core dumped) +++
7 --- SIGCHLD {si_signo=17, si_code=0x2} ---
`, Log{7, map[int][]*Call{
			7: {{TID: 7, Line: 1, Name: "clone3", Args: []uint64{0, 88}, CloneFlags: 0x3d0f00, Done: true, Ret: 8}},
			8: {
				{TID: 8, Line: 2, Name: "munmap", Args: []uint64{0x1000, 0x2000}, Done: true},
				{TID: 8, Line: 5, Name: "madvise", Doubtful: true},
				{TID: 8, Line: 6, Name: "exit", Done: true},
			},
		}}},
		{"exec by a thread", `7 vfork() = 9
8 execve(0x1, 0x2, 0x3 <pid changed to 7 ...>
7 +++ superseded by execve in pid 8 +++
7 <... execve resumed>)             = 0
7 brk(0) = 0x563552ad6000
`, Log{7, map[int][]*Call{
			7: {
				{TID: 7, Line: 1, Name: "vfork", CloneFlags: 0x100, Done: true, Ret: 9},
				{TID: 7, Line: 3, Name: "exit", Done: true},
				{TID: 7, Line: 2, Name: "execve", Args: []uint64{1, 2, 3}, Done: true},
				{TID: 7, Line: 5, Name: "brk", Args: []uint64{0}, Done: true, Ret: 0x563552ad6000},
			},
			8: {},
		}}},
		{"exec by a thread, cut before", `7 brk(0) = 0x1000
8 execve(0x1, 0x2, 0x3 <unfinished ...>
7 munmap(0x1000, 0x1000 <unfinished ...>
7 +++ superseded by execve in pid 8 +++
7 <... execve resumed>) = 0
`, Log{7, map[int][]*Call{
			7: {
				{TID: 7, Line: 1, Name: "brk", Args: []uint64{0}, Done: true, Ret: 0x1000},
				{TID: 7, Line: 3, Name: "munmap", Doubtful: true},
				{TID: 7, Line: 4, Name: "exit", Done: true},
				{TID: 7, Line: 2, Name: "execve", Args: []uint64{1, 2, 3}, Done: true},
			},
			8: {},
		}}},
		{"to be made again", `7 clone(0x5100, 0, 0, 0, 0) = -1 ERESTARTNOINTR (Unknown error 513)
7 clone(0x5100, 0, 0, 0, 0) = 0x8
`, Log{7, map[int][]*Call{7: {
			{TID: 7, Line: 1, Name: "clone", Args: []uint64{0x5100, 0, 0, 0, 0}, CloneFlags: 0x5100, Done: true, Ret: -513},
			{TID: 7, Line: 2, Name: "clone", Args: []uint64{0x5100, 0, 0, 0, 0}, CloneFlags: 0x5100, Done: true, Ret: 8},
		}}}},
		{"vector", `7 process_madvise(3, [{iov_base=0x1000, iov_len=4096}, {iov_base=0x5000, iov_len=1}], 2, 0x4, 0) = 4097
`, Log{7, map[int][]*Call{7: {{
			TID: 7, Line: 1, Name: "process_madvise", Args: []uint64{3, 0, 2, 4, 0},
			Iov: []mm.Range{{Start: 0x1000, End: 0x2000}, {Start: 0x5000, End: 0x5001}}, Done: true, Ret: 4097,
		}}}}},
		{"cut off by the end", `7 mmap(0, 0x1000, 0x3, 0x22, 0xffffffff, 0) = ?
7 munmap(0x1000, 0x1000) = 0xb
8 munmap(0x1000, 0x1000) = ? ERESTARTSYS (To be restarted if SA_RESTART is set)
7 +++ exited with 0 +++
8 ???( <unfinished ...>
9 munmap(0x1000, 0x1000) = 0
8 <... ??? resumed>) = ? <unavailable>
9 exit(0 <unfinished ...>
8 +++ exited with 0 +++
9 <... exit resumed>) = ?
9 +++ exited with 0 +++
`, Log{7, map[int][]*Call{
			7: {
				{TID: 7, Line: 1, Name: "mmap", Args: []uint64{0, 0x1000, 3, 0x22, 0xffffffff, 0}},
				{TID: 7, Line: 2, Name: "munmap", Args: []uint64{0x1000, 0x1000}, Done: true, Ret: 0xb, Doubtful: true},
				{TID: 7, Line: 4, Name: "exit", Done: true},
			},
			8: {
				{TID: 8, Line: 3, Name: "munmap", Args: []uint64{0x1000, 0x1000}},
				{TID: 8, Line: 5, Name: "???", Doubtful: true},
				{TID: 8, Line: 9, Name: "exit", Done: true},
			},
			9: {
				{TID: 9, Line: 6, Name: "munmap", Args: []uint64{0x1000, 0x1000}, Done: true},
				{TID: 9, Line: 11, Name: "exit", Done: true},
			},
		}}},
		{"break of parent and child", `7 brk(0) = 0x10000
7 clone(0x1200011, 0, 0, 0x7f00, 0 <unfinished ...>
8 brk(0x12000) = 0x12000
7 <... clone resumed>) = 8
7 brk(0x14000) = 0x14000
7 vfork( <unfinished ...>
9 brk(0x10000) = 0x10000
9 execve(0x1, 0x2, 0x3 <unfinished ...>
7 <... vfork resumed>) = 9
9 <... execve resumed>) = 0
9 brk(0) = 0x20000
7 brk(0x11000) = 0x11000
`, Log{7, map[int][]*Call{
			7: {
				{TID: 7, Line: 1, Name: "brk", Args: []uint64{0}, Done: true, Ret: 0x10000},
				{TID: 7, Line: 2, Name: "clone", Args: []uint64{0x1200011, 0, 0, 0x7f00, 0}, CloneFlags: 0x1200011, Done: true, Ret: 8},
				{TID: 7, Line: 5, Name: "brk", Args: []uint64{0x14000}, Done: true, Ret: 0x14000, Old: 0x10000, Known: true},
				{TID: 7, Line: 6, Name: "vfork", CloneFlags: 0x100, Done: true, Ret: 9},
				{TID: 7, Line: 12, Name: "brk", Args: []uint64{0x11000}, Done: true, Ret: 0x11000, Old: 0x10000, Known: true},
			},
			8: {{TID: 8, Line: 3, Name: "brk", Args: []uint64{0x12000}, Done: true, Ret: 0x12000, Old: 0x10000, Known: true}},
			9: {
				{TID: 9, Line: 7, Name: "brk", Args: []uint64{0x10000}, Done: true, Ret: 0x10000, Old: 0x14000, Known: true},
				{TID: 9, Line: 8, Name: "execve", Args: []uint64{1, 2, 3}, Done: true},
				{TID: 9, Line: 11, Name: "brk", Args: []uint64{0}, Done: true, Ret: 0x20000},
			},
		}}},
		{"segments", `7 shmget(0, 0x3001, 0x180) = 5
7 shmat(5, 0, 0) = 0x7f0000
7 shmdt(0x7f0000) = 0
7 shmdt(0x7f0000) = -1 EINVAL (Invalid argument)
`, Log{7, map[int][]*Call{7: {
			{TID: 7, Line: 1, Name: "shmget", Args: []uint64{0, 0x3001, 0x180}, Done: true, Ret: 5},
			{TID: 7, Line: 2, Name: "shmat", Args: []uint64{5, 0, 0}, Done: true, Ret: 0x7f0000, Old: 0x3001, Known: true},
			{TID: 7, Line: 3, Name: "shmdt", Args: []uint64{0x7f0000}, Done: true, Old: 0x3001, Known: true},
			{TID: 7, Line: 4, Name: "shmdt", Args: []uint64{0x7f0000}, Done: true, Ret: -22},
		}}}},
		{"32-bit call", "7 mmap2(0, 0x1000, 0x3, 0x22, 0xffffffff, 0) = 0xf7fc0000\n", Log{7, map[int][]*Call{7: {
			{TID: 7, Line: 1, Name: "mmap", Args: []uint64{0, 0x1000, 3, 0x22, 0xffffffff, 0}, Done: true, Ret: 0xf7fc0000},
		}}}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := parse(t, tc.text)
			if d := cmp.Diff(&tc.want, got, cmpopts.IgnoreFields(Call{}, "text")); d != "" {
				t.Errorf("-want +got:\n%s", d)
			}
		})
	}
}

func TestParseStraceRefuses(t *testing.T) {
	for _, tc := range []struct{ name, text string }{
		{"nothing", ""},
		{"no number", "munmap(0x1000, 0x1000) = 0\n"},
		{"no result", "7 munmap(0x1000, 0x1000)\n"},
		{"unknown error", "7 munmap(0x1000, 0x1000) = -1 EWHATEVER (?)\n"},
		{"bad result", "7 munmap(0x1000, 0x1000) = zero\n"},
		{"resumed without a beginning", "7 <... munmap resumed>) = 0\n"},
		{"resumed another call", "7 munmap(0x1000, 0x1000 <unfinished ...>\n7 <... mmap resumed>) = 0\n"},
		{"call within a call", "7 munmap(0x1000, 0x1000 <unfinished ...>\n7 brk(0) = 0x1000\n"},
		{"superseded by nobody", "7 +++ superseded by execve in pid 9 +++\n"},
		{"superseded by itself", "7 execve(0x1, 0x2, 0x3 <unfinished ...>\n7 +++ superseded by execve in pid 7 +++\n"},
		{"some message", "7 strace: something went wrong\n"},
		{"cut line", "7 munmap(0x10\n"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if log, err := ParseStrace(strings.NewReader(tc.text)); !errors.Is(err, ErrStrace) {
				t.Errorf("got %v, error %v, want %v", log, err, ErrStrace)
			}
		})
	}
}

func FuzzParseStrace(f *testing.F) {
	f.Add("7 clone3({flags=0x3d0f00} <unfinished ...>\n8 munmap(0x1000, 0x2000) = 0\n7 <... clone3 resumed> => {parent_tid=[8]}, 88) = 8\n")
	f.Add("8 execve(0x1, 0x2, 0x3 <pid changed to 7 ...>\n7 +++ superseded by execve in pid 8 +++\n7 <... execve resumed>) = 0\n")
	f.Add("7 process_madvise(3, [{iov_base=0x1000, iov_len=4096}], 1, 0x4, 0) = 4096\n")
	f.Add("7 shmat(5, 0, 0) = 0x7f0000\n7 brk(0x1) = 0x1\n7 +++ killed by SIGKILL +++\n")
	f.Fuzz(func(t *testing.T, text string) {
		log, err := ParseStrace(strings.NewReader(text))
		if err != nil {
			return
		}
		for tid, calls := range log.Threads {
			for _, c := range calls {
				if c.TID != tid || tid <= 0 || c.Name == "" || c.Line <= 0 {
					t.Errorf("thread %d has call %+v", tid, c)
				}
			}
		}
		// Whatever was parsed can be compared.
		Compare(log, &Stream{})
	})
}

// TestStraceItself parses what the installed strace prints of a program that
// makes every call, from threads and children.
func TestStraceItself(t *testing.T) {
	dir := t.TempDir()
	source, err := filepath.Abs("../../test/programs/direct.c")
	if err != nil {
		t.Fatal(err)
	}
	ctx := context.Background()
	if err := build(ctx, dir, "cc", "-O2", "-static", "-pthread", "-o", "prog", source); err != nil {
		t.Fatal(err)
	}
	out := filepath.Join(dir, "out")
	args := append(straceArgs(out), "--", filepath.Join(dir, "prog"))
	if text, err := exec.CommandContext(ctx, "strace", args...).CombinedOutput(); err != nil {
		t.Fatalf("strace (package strace must be installed): %v: %s", err, text)
	}
	f, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	log, err := ParseStrace(f)
	if err != nil {
		t.Fatal(err)
	}
	r := Compare(log, &Stream{Complete: true})
	if r.Missing != r.Calls || r.Records != 0 || r.Invented != 0 {
		t.Errorf("without any record: %v", r)
	}
	for _, name := range strings.Split("munmap mmap mremap mprotect pkey_mprotect madvise process_madvise brk shmat shmdt remap_file_pages execve exit", " ") {
		if r.ByCall[name] == 0 {
			t.Errorf("no call of %s among %v", name, r.ByCall)
		}
	}
	for _, calls := range log.Threads {
		for _, c := range calls {
			if c.Name == "brk" && c.arg(0) != 0 && !c.Known {
				t.Errorf("break before line %d is not known", c.Line)
			}
		}
	}
}
