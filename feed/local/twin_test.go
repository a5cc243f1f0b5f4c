// SPDX-License-Identifier: Apache-2.0

//go:build linux && amd64

package local

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/test/child"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

// twinRole makes this test binary one of two processes with the same layout:
// address randomisation off. Each maps the file at descriptor 3 and changes
// that at descriptor 4, which is the other's.
const (
	twinRole  = "UMMU_LOCAL_TWIN"
	twinPages = 8
	twinBase  = 0x3000_0000_0000
)

func init() {
	switch os.Getenv(twinRole) {
	case "start":
		const addrNoRandomize = 0x0040000 // linux/personality.h
		runtime.LockOSThread()
		if _, _, e := unix.Syscall(unix.SYS_PERSONALITY, addrNoRandomize, 0, 0); e != 0 {
			fmt.Fprintln(os.Stderr, "personality:", e)
			os.Exit(1)
		}
		os.Setenv(twinRole, "play")
		fmt.Fprintln(os.Stderr, unix.Exec("/proc/self/exe", os.Args, os.Environ()))
		os.Exit(1)
	case "play":
		if err := playTwin(); err != nil {
			fmt.Fprintln(os.Stderr, "twin:", err)
			os.Exit(1)
		}
		os.Exit(0)
	}
}

func playTwin() error {
	size := os.Getpagesize()
	p, err := unix.MmapPtr(3, 0, unsafe.Add(nil, uintptr(twinBase)), uintptr(twinPages*size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_FIXED_NOREPLACE)
	if err != nil {
		return err
	}
	mine := unsafe.Slice((*byte)(p), twinPages*size)
	for i := range twinPages {
		mine[i*size] = 1
	}
	fmt.Println("ready")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		switch in.Text() {
		case "punch":
			err = unix.Fallocate(4, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, int64(size), int64(size))
		case "truncate":
			err = errors.Join(unix.Ftruncate(4, int64(4*size)), unix.Ftruncate(4, int64(twinPages*size)))
		case "touch":
			for i := range twinPages {
				mine[i*size] = 1
			}
		}
		if err != nil {
			return err
		}
		fmt.Println(in.Text())
	}
	return nil
}

type twin struct {
	t   *testing.T
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	w   *feed.Watch
}

func startTwin(t *testing.T, mine, theirs int) *twin {
	t.Helper()
	x := &twin{t: t, cmd: exec.Command("/proc/self/exe")}
	x.cmd.Env = append(os.Environ(), twinRole+"=start")
	x.cmd.Stderr = os.Stderr
	for _, fd := range []int{mine, theirs} {
		d, err := unix.Dup(fd)
		if err != nil {
			t.Fatal(err)
		}
		f := os.NewFile(uintptr(d), "memfd")
		defer f.Close()
		x.cmd.ExtraFiles = append(x.cmd.ExtraFiles, f)
	}
	x.in, x.out = child.Start(t, x.cmd)
	x.expect("ready")
	return x
}

func (x *twin) expect(word string) {
	x.t.Helper()
	if line, err := x.out.ReadString('\n'); err != nil || strings.TrimSpace(line) != word {
		x.t.Fatalf("%q, %v", line, err)
	}
}

func (x *twin) do(word string) {
	x.t.Helper()
	if _, err := io.WriteString(x.in, word+"\n"); err != nil {
		x.t.Fatal(err)
	}
	x.expect(word)
}

// Two processes with the same addresses, each of which punches and truncates
// the file that the other has mapped: each watch gets what happened to its own
// process. Where the tier knows whose a change is, it gets nothing else.
func TestTwins(t *testing.T) {
	machine.NeedKVM(t)
	size := mm.Addr(os.Getpagesize())
	all := mm.Range{Start: twinBase, End: twinBase + twinPages*size}
	for _, tier := range notifierTiers() {
		t.Run(tier.String(), func(t *testing.T) {
			var files [2]int
			for i := range files {
				fd, err := unix.MemfdCreate("twin", unix.MFD_CLOEXEC)
				if err != nil {
					t.Fatal(err)
				}
				defer unix.Close(fd)
				if err := unix.Ftruncate(fd, twinPages*int64(size)); err != nil {
					t.Fatal(err)
				}
				files[i] = fd
			}
			twins := [2]*twin{startTwin(t, files[0], files[1]), startTwin(t, files[1], files[0])}
			for _, x := range twins {
				x.w = openOn(t, Options{PID: x.cmd.Process.Pid, Tier: tier, Inject: true})
			}
			for round := range 6 {
				who, victim := twins[round%2], twins[1-round%2]
				change := []string{"punch", "truncate"}[round/2%2]
				want := mm.Range{Start: twinBase + size, End: twinBase + 2*size}
				if change == "truncate" {
					want = mm.Range{Start: twinBase + 4*size, End: all.End}
				}
				for _, x := range twins {
					x.do("touch")
					cache(t, x.w, all)
				}
				who.do(change)
				var covered pageSet
				if victim.w.Valid() {
					t.Errorf("round %d: %s: the victim's watch is valid", round, change)
				}
				if s := victim.w.Drain(func(r *mm.Record) { covered.add(r, all) }); s != feed.Fresh || !covered.has(want, all) {
					t.Errorf("round %d: %s: drain %v, pages %b of %v", round, change, s, covered, want)
				}
				if tier == tracer.TierNotifierProbe && !who.w.Valid() {
					t.Errorf("round %d: %s: the other process's watch got what is not its own", round, change)
				}
				who.w.Drain(func(*mm.Record) {})
				for _, x := range twins {
					x.w.Forget(all)
				}
			}
		})
	}
}

// pageSet is a set of pages of a range, the first in bit 0.
type pageSet uint64

func (p *pageSet) add(r *mm.Record, all mm.Range) {
	for i := range twinPages {
		at := all.Start + mm.Addr(i)*mm.Addr(mm.PageSize())
		if r.Touches(mm.Range{Start: at, End: at + 1}) {
			*p |= 1 << i
		}
	}
}

func (p pageSet) has(r, all mm.Range) bool {
	for i := range twinPages {
		at := all.Start + mm.Addr(i)*mm.Addr(mm.PageSize())
		if r.Contains(mm.Range{Start: at, End: at + 1}) && p&(1<<i) == 0 {
			return false
		}
	}
	return true
}
