// SPDX-License-Identifier: Apache-2.0

package calls

import (
	"math/bits"
	"math/rand/v2"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

func TestHostNumbers(t *testing.T) {
	h := Host()
	got := map[string]uint32{}
	for nr, e := range h.native {
		got[e.name] = nr
	}
	if d := cmp.Diff(hostNumbers, got); d != "" {
		t.Errorf("numbers differ from golang.org/x/sys/unix (-x/sys +ours):\n%s", d)
	}
}

func TestTablesAgree(t *testing.T) {
	want := []string{"munmap", "mremap", "mprotect", "pkey_mprotect", "madvise", "process_madvise", "brk", "shmat", "shmdt", "remap_file_pages", "io_destroy"}
	for arch, tab := range map[string]*Table{"amd64": amd64, "arm64": arm64} {
		shapes := map[string]shape{}
		for _, m := range []map[uint32]entry{tab.native, tab.compat} {
			have := map[string]bool{}
			for _, e := range m {
				if have[e.name] {
					t.Errorf("%s: %s is there twice", arch, e.name)
				}
				have[e.name] = true
				if s, ok := shapes[e.name]; ok && s != e.args {
					t.Errorf("%s: %s decodes differently in its two ABIs", arch, e.name)
				}
				shapes[e.name] = e.args
			}
			for _, w := range want {
				if !have[w] {
					t.Errorf("%s: %s is missing", arch, w)
				}
			}
		}
	}
}

func TestNamesAndArgs(t *testing.T) {
	native := func(nr uint32) mm.Call { return mm.Call{NR: nr} }
	for _, c := range []struct {
		name  string
		tab   *Table
		call  mm.Call
		arg   [2]uint64
		want  string
		flags []string
	}{
		{"munmap", amd64, native(11), [2]uint64{}, "munmap", nil},
		{"mmap", amd64, native(9), [2]uint64{3, 0x32}, "mmap(PROT_READ|PROT_WRITE, MAP_PRIVATE|MAP_FIXED|MAP_ANONYMOUS)",
			[]string{"PROT_READ", "PROT_WRITE", "MAP_PRIVATE", "MAP_FIXED", "MAP_ANONYMOUS"}},
		{"mmap none", amd64, native(9), [2]uint64{0, 0}, "mmap(PROT_NONE, 0)", []string{"PROT_NONE"}},
		{"mmap huge", amd64, native(9), [2]uint64{1, 0x40021 | 21<<26}, "mmap(PROT_READ, MAP_SHARED|MAP_ANONYMOUS|MAP_HUGETLB|MAP_HUGE_2MB)",
			[]string{"PROT_READ", "MAP_SHARED", "MAP_ANONYMOUS", "MAP_HUGETLB", "MAP_HUGE_2MB"}},
		{"mmap huge 1G", amd64, native(9), [2]uint64{1, 0x40021 | 30<<26}, "mmap(PROT_READ, MAP_SHARED|MAP_ANONYMOUS|MAP_HUGETLB|MAP_HUGE_1GB)",
			[]string{"PROT_READ", "MAP_SHARED", "MAP_ANONYMOUS", "MAP_HUGETLB", "MAP_HUGE_1GB"}},
		{"mmap huge 64K", arm64, native(222), [2]uint64{1, 0x40021 | 16<<26}, "mmap(PROT_READ, MAP_SHARED|MAP_ANONYMOUS|MAP_HUGETLB|MAP_HUGE_64KB)",
			[]string{"PROT_READ", "MAP_SHARED", "MAP_ANONYMOUS", "MAP_HUGETLB", "MAP_HUGE_64KB"}},
		{"mmap shared validate", amd64, native(9), [2]uint64{1, 0x80003}, "mmap(PROT_READ, MAP_SHARED_VALIDATE|MAP_SYNC)",
			[]string{"PROT_READ", "MAP_SHARED_VALIDATE", "MAP_SYNC"}},
		{"mmap unknown bits", amd64, native(9), [2]uint64{0x1_00000001, 0x200002}, "mmap(PROT_READ|0x100000000, MAP_PRIVATE|0x200000)",
			[]string{"PROT_READ", "0x100000000", "MAP_PRIVATE", "0x200000"}},
		{"mmap unknown type", amd64, native(9), [2]uint64{1, 0x15}, "mmap(PROT_READ, MAP_FIXED|0x5)", []string{"PROT_READ", "MAP_FIXED", "0x5"}},
		{"mprotect none", amd64, native(10), [2]uint64{0, 0}, "mprotect(PROT_NONE)", []string{"PROT_NONE"}},
		{"mprotect stack", amd64, native(10), [2]uint64{0x01000007, 0}, "mprotect(PROT_READ|PROT_WRITE|PROT_EXEC|PROT_GROWSDOWN)",
			[]string{"PROT_READ", "PROT_WRITE", "PROT_EXEC", "PROT_GROWSDOWN"}},
		{"mprotect bti", arm64, native(226), [2]uint64{0x15, 0}, "mprotect(PROT_READ|PROT_EXEC|PROT_BTI)", []string{"PROT_READ", "PROT_EXEC", "PROT_BTI"}},
		{"bti is arm64's", amd64, native(10), [2]uint64{0x10, 0}, "mprotect(0x10)", []string{"0x10"}},
		{"pkey_mprotect", amd64, native(329), [2]uint64{1, 0xffffffff}, "pkey_mprotect(PROT_READ, -1)", []string{"PROT_READ", "pkey=-1"}},
		{"madvise normal", amd64, native(28), [2]uint64{0, 0}, "madvise(MADV_NORMAL)", []string{"MADV_NORMAL"}},
		{"madvise", amd64, native(28), [2]uint64{4, 0}, "madvise(MADV_DONTNEED)", []string{"MADV_DONTNEED"}},
		{"madvise guard", amd64, native(28), [2]uint64{102, 0}, "madvise(MADV_GUARD_INSTALL)", []string{"MADV_GUARD_INSTALL"}},
		{"madvise unknown", amd64, native(28), [2]uint64{77, 0}, "madvise(77)", []string{"77"}},
		{"process_madvise", arm64, native(440), [2]uint64{21, 0}, "process_madvise(MADV_PAGEOUT)", []string{"MADV_PAGEOUT"}},
		{"mremap", amd64, native(25), [2]uint64{7, 0}, "mremap(MREMAP_MAYMOVE|MREMAP_FIXED|MREMAP_DONTUNMAP)",
			[]string{"MREMAP_MAYMOVE", "MREMAP_FIXED", "MREMAP_DONTUNMAP"}},
		{"mremap in place", amd64, native(25), [2]uint64{0, 0}, "mremap(0)", nil},
		{"shmat", amd64, native(30), [2]uint64{0o50000, 0}, "shmat(SHM_RDONLY|SHM_REMAP)", []string{"SHM_RDONLY", "SHM_REMAP"}},
		{"i386 mmap2", amd64, mm.Call{NR: 192, ABI: mm.ABICompat}, [2]uint64{5, 0x12}, "mmap2(PROT_READ|PROT_EXEC, MAP_PRIVATE|MAP_FIXED)",
			[]string{"PROT_READ", "PROT_EXEC", "MAP_PRIVATE", "MAP_FIXED"}},
		{"i386 munmap is not shared with native", amd64, mm.Call{NR: 91, ABI: mm.ABICompat}, [2]uint64{}, "munmap", nil},
		{"x32 mmap", amd64, mm.Call{NR: 9 | x32Bit, ABI: mm.ABIX32}, [2]uint64{1, 2}, "mmap(PROT_READ, MAP_PRIVATE)", []string{"PROT_READ", "MAP_PRIVATE"}},
		{"io_uring madvise", amd64, mm.Call{NR: 25, ABI: mm.ABIIOUring}, [2]uint64{4, 0}, "IORING_OP_MADVISE(MADV_DONTNEED)", []string{"MADV_DONTNEED"}},
		{"io_uring future", amd64, mm.Call{NR: 250, ABI: mm.ABIIOUring}, [2]uint64{4, 0}, "IORING_OP_250", nil},
		{"unknown call", amd64, native(9999), [2]uint64{1, 1}, "syscall_9999", nil},
		{"no call", amd64, mm.Call{ABI: mm.ABINone}, [2]uint64{1, 1}, "", nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := []byte(c.tab.Name(c.call))
			if c.tab.HasArgs(c.call) {
				got = append(c.tab.AppendArgs(append(got, '('), c.call, c.arg), ')')
			}
			if string(got) != c.want {
				t.Errorf("got %s, want %s", got, c.want)
			}
			if d := cmp.Diff(c.flags, c.tab.Flags(nil, c.call, c.arg)); d != "" {
				t.Errorf("flags (-want +got):\n%s", d)
			}
		})
	}
}

// No bit may vanish: the values of the names printed add up to the argument.
func TestFlagsHideNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, f := range []field{protField, arm64ProtField, mmapField, mremapField, shmatField} {
		values := map[string]uint64{}
		for _, n := range f.names {
			values[n.text] = n.value
		}
		for range 5000 {
			v := rng.Uint64() & rng.Uint64() >> rng.IntN(60)
			var sum uint64
			for _, s := range f.append(nil, v) {
				switch x, ok := values[s]; {
				case ok:
					sum |= x
				case s == f.zero:
				case strings.HasPrefix(s, "0x"):
					n, err := strconv.ParseUint(s[2:], 16, 64)
					if err != nil {
						t.Fatal(err)
					}
					sum |= n
				case strings.HasPrefix(s, "MAP_HUGE_"):
					n, err := strconv.ParseUint(strings.Trim(s, "MAP_HUGEKB"), 10, 64)
					if err != nil {
						t.Fatal(s, err)
					}
					log := uint64(bits.TrailingZeros64(n))
					switch s[len(s)-2] {
					case 'K':
						log += 10
					case 'M':
						log += 20
					case 'G':
						log += 30
					}
					sum |= log << hugeShift
				case strings.HasSuffix(s, "<<MAP_HUGE_SHIFT"):
					n, err := strconv.ParseUint(strings.TrimSuffix(s, "<<MAP_HUGE_SHIFT"), 10, 64)
					if err != nil {
						t.Fatal(err)
					}
					sum |= n << hugeShift
				default:
					t.Fatalf("unknown name %q", s)
				}
			}
			if sum != v {
				t.Fatalf("%#x became %q, which is %#x", v, f.append(nil, v), sum)
			}
		}
	}
}

func TestAppendResult(t *testing.T) {
	for _, c := range []struct {
		call mm.Call
		ret  int64
		want string
	}{
		{mm.Call{NR: 11}, 0, "0"},
		{mm.Call{NR: 11}, -int64(unix.EINVAL), "-1 EINVAL"},
		{mm.Call{NR: 9}, 0x7f0000001000, "0x7f0000001000"},
		{mm.Call{NR: 9}, -int64(unix.ENOMEM), "-1 ENOMEM"},
		{mm.Call{NR: 9}, -4000, "-1 errno 4000"},
		{mm.Call{NR: 440}, 4096, "4096"},
	} {
		if got := string(amd64.AppendResult(nil, c.call, c.ret)); got != c.want {
			t.Errorf("%v %d: got %q, want %q", c.call, c.ret, got, c.want)
		}
	}
}

func TestFor(t *testing.T) {
	if _, err := For("mips"); err == nil {
		t.Error("mips has a table")
	}
}

func TestFlagsAllocations(t *testing.T) {
	buf := make([]string, 0, 24)
	if n := testing.AllocsPerRun(100, func() { buf = amd64.Flags(buf[:0], mm.Call{NR: 9}, [2]uint64{3, 0x32}) }); n != 0 {
		t.Errorf("%v allocations", n)
	}
}
