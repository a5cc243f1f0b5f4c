// SPDX-License-Identifier: Apache-2.0

package kill

import (
	"bufio"
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/test/extras"
)

var (
	kills = flag.Int("kills", 5, "times that something is done to the daemon")
	crowd = flag.Int("crowd", 128, "programs at once")
	full  = flag.Duration("full", 3*time.Second, "how long they all run")
	seed  = flag.Uint64("seed", 0, "seed; 0: from the clock")
)

const (
	// restart is how long a daemon that has ended stays away: longer than
	// the time in which the programs' rate is looked at, as with the service's
	// RestartSec=1s.
	restart = 120 * time.Millisecond
	window  = 100 * time.Millisecond
	// patience bounds each wait. Loading the kernel side takes a second on a
	// busy machine.
	patience = 60 * time.Second
)

const targetEnv = "UMMU_TEST_TARGET"

func TestMain(m *testing.M) {
	if run := map[string]func(string, int) error{"target": Target, "member": Member}[os.Getenv(targetEnv)]; run != nil {
		fmt.Fprintln(os.Stderr, "target:", run(os.Args[1], 3))
		os.Exit(1)
	}
	flag.Parse()
	os.Exit(m.Run())
}

// daemon is ummufeed serve, started again and again.
type daemon struct {
	t              *testing.T
	binary, socket string
	env            []string
	c              *exec.Cmd
	log            io.ReadCloser
	refused        atomic.Uint64 // clients, by what it logs
}

func (d *daemon) start() {
	d.t.Helper()
	d.c = exec.Command(d.binary, "serve", "--socket", d.socket, "--tier", "syscall")
	d.c.Env = append(os.Environ(), d.env...)
	d.c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	var err error
	if d.log, err = d.c.StderrPipe(); err != nil {
		d.t.Fatal(err)
	}
	if err := d.c.Start(); err != nil {
		d.t.Fatal(err)
	}
	for lines := bufio.NewScanner(d.log); lines.Scan(); {
		if strings.Contains(lines.Text(), "msg=serving") {
			go func() {
				for lines.Scan() {
					if strings.Contains(lines.Text(), "client refused") || strings.Contains(lines.Text(), "does not speak") {
						d.refused.Add(1)
					}
				}
			}()
			return
		}
		d.t.Log(lines.Text())
	}
	d.t.Fatal("the daemon does not start")
}

func (d *daemon) signal(s syscall.Signal) {
	d.t.Helper()
	if err := d.c.Process.Signal(s); err != nil {
		d.t.Fatal(err)
	}
}

// end waits for the daemon's end, after a signal.
func (d *daemon) end() { d.c.Wait() }

// program is a target process and its board.
type program struct {
	*exec.Cmd
	board *board
}

func startProgram(t *testing.T, role, socket string) *program {
	t.Helper()
	return startProgramOf(t, "/proc/self/exe", role, socket)
}

func startProgramOf(t *testing.T, binary, role, socket string) *program {
	t.Helper()
	fd, err := unix.MemfdCreate("board", unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	file := os.NewFile(uintptr(fd), "board")
	defer file.Close()
	if err := unix.Ftruncate(fd, int64(boardBytes)); err != nil {
		t.Fatal(err)
	}
	p := &program{Cmd: exec.Command(binary, socket)}
	if p.board, err = mapBoard(fd); err != nil {
		t.Fatal(err)
	}
	p.Env = append(os.Environ(), targetEnv+"="+role)
	p.Stderr = os.Stderr
	p.ExtraFiles = []*os.File{file}
	p.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Process.Kill()
		p.Wait()
	})
	return p
}

// back is when the program's first hit of a new watch was, after since; 0: not yet.
func (p *program) back(since uint64) uint64 {
	n := atomic.LoadUint64(&p.board.Events)
	for i := n - min(n, events); i < n; i++ {
		if at := atomic.LoadUint64(&p.board.Back[i%events]); at > since {
			return at
		}
	}
	return 0
}

// worked is what the program's worker did from one time to another.
func (p *program) worked(from, to uint64) (n uint64) {
	for i := from / bucketNanos; i < to/bucketNanos; i++ {
		n += atomic.LoadUint64(&p.board.Work[i%buckets])
	}
	return n
}

func wait(t *testing.T, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !f(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("waited %v: %s", patience, what)
		}
	}
}

func buildAll(t *testing.T, name string) (binary, socket string) {
	t.Helper()
	dir := t.TempDir()
	binary, err := extras.Build(context.Background(), dir, name)
	if err != nil {
		t.Fatal(err)
	}
	return binary, filepath.Join(dir, "feed.sock")
}

// The daemon is killed, ended, and stopped at random moments, and the next one
// is of this version of the protocol or of the next, as chance will have it. No
// program, of which one is of each version, ever has a transfer that went to
// other pages than it sees; each goes on working, and caches again when there is
// a daemon again, whatever its version.
func TestKill(t *testing.T) {
	if *seed == 0 {
		*seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", *seed)
	random := rand.New(rand.NewPCG(*seed, 0))
	binary, socket := buildAll(t, "ummufeed")
	next, _ := buildAll(t, "ummufeed-next")
	clientNext, _ := buildAll(t, "kill-next")
	d := &daemon{t: t, binary: binary, socket: socket}
	ps := []*program{startProgram(t, "target", d.socket), startProgramOf(t, clientNext, "target", d.socket)}
	d.start()
	defer func() {
		d.signal(syscall.SIGKILL)
		d.end()
	}()
	began := nanos()
	for _, p := range ps {
		wait(t, "a program caches", func() bool { return p.back(0) != 0 })
	}
	t.Logf("first hits %v after the daemon was ready", time.Duration(nanos()-began))

	var returns, ratios []float64
	counts := map[string]int{}
	for n := range *kills {
		time.Sleep(window + time.Duration(random.IntN(50_000))*time.Microsecond)
		before := nanos()
		how := []string{"kill -9", "kill -9", "kill -9", "SIGTERM", "SIGSTOP, SIGCONT", "SIGSTOP, kill -9"}[random.IntN(6)]
		counts[how]++
		lives := false
		switch how {
		case "kill -9":
			d.signal(syscall.SIGKILL)
		case "SIGTERM":
			d.signal(syscall.SIGTERM)
		case "SIGSTOP, SIGCONT":
			lives = true
			d.signal(syscall.SIGSTOP)
			time.Sleep(window + 2*bucketNanos)
			d.signal(syscall.SIGCONT)
		case "SIGSTOP, kill -9":
			d.signal(syscall.SIGSTOP)
			time.Sleep(time.Duration(random.IntN(20_000)) * time.Microsecond)
			d.signal(syscall.SIGKILL)
		}
		if !lives {
			d.end()
			time.Sleep(restart)
		}
		for _, p := range ps {
			was, is := p.worked(before-uint64(window), before), p.worked(before+bucketNanos, before+bucketNanos+uint64(window))
			if was > 0 {
				ratios = append(ratios, float64(is)/float64(was))
			}
		}
		if !lives {
			was := d.binary
			d.binary = []string{binary, next}[random.IntN(2)]
			switch {
			case was == d.binary:
			case d.binary == next:
				counts["upgrade"]++
			default:
				counts["downgrade"]++
			}
			d.start()
			ready := nanos()
			for _, p := range ps {
				wait(t, "a program caches again", func() bool { return p.back(before) != 0 })
				returns = append(returns, float64(max(p.back(before), ready)-ready)/1e6)
			}
		}
		for i, p := range ps {
			if stale := atomic.LoadUint64(&p.board.Stale); stale != 0 {
				t.Fatalf("after %d times, the last %s: program %d has %d stale transfers of %d", n+1, how, i, stale, atomic.LoadUint64(&p.board.Lookups))
			}
			if err := p.Process.Signal(syscall.Signal(0)); err != nil {
				t.Fatalf("program %d: %v", i, err)
			}
		}
	}
	var lookups, hits, uncached, dials uint64
	for _, p := range ps {
		lookups += p.board.Lookups
		hits += p.board.Hits
		uncached += p.board.Uncached
		dials += p.board.Dials
	}
	t.Logf("%v: stale 0 of %d transfers, %d by hits, %d uncached, %d watches", counts, lookups, hits, uncached, dials)
	t.Logf("ms from the daemon's readiness to the first hit: %s", spread(returns))
	t.Logf("the program's rate in the %v afterwards, to that before: %s", window, spread(ratios))
	if hits == 0 {
		t.Error("no hit: what was tested?")
	}
	if n := d.refused.Load(); n != 0 {
		t.Errorf("%d clients were refused", n)
	}
}

func spread(x []float64) string {
	if len(x) == 0 {
		return "none"
	}
	slices.Sort(x)
	at := func(q float64) float64 { return x[int(q*float64(len(x)-1))] }
	return fmt.Sprintf("median %.3g, from %.3g (5 %%: %.3g) to %.3g (95 %%: %.3g), %d times", at(0.5), x[0], at(0.05), x[len(x)-1], at(0.95), len(x))
}

// Without the mark that the kernel side makes when its owner ends, the same
// programs have stale transfers: the test above would notice. Not at every
// kill: a change that is between its two hooks when they go stays in flight for
// ever, and then nothing is cached any more.
func TestKillIsNoticed(t *testing.T) {
	binary, socket := buildAll(t, "ummufeed-guards")
	d := &daemon{t: t, binary: binary, socket: socket, env: []string{"UMMU_GUARD_OFF=owner-death"}}
	const tries = 20
	for range tries {
		p := startProgram(t, "target", d.socket)
		d.start()
		wait(t, "the program caches", func() bool { return p.back(0) != 0 })
		d.signal(syscall.SIGKILL)
		d.end()
		gone := atomic.LoadUint64(&p.board.Lookups)
		wait(t, "the program goes on", func() bool { return atomic.LoadUint64(&p.board.Lookups) > gone+500 })
		p.Process.Kill()
		p.Wait()
		if atomic.LoadUint64(&p.board.Stale) != 0 {
			return
		}
	}
	t.Errorf("no stale transfer after %d kills", tries)
}

// Many programs at full speed, on few processors: none has a stale transfer,
// and none hears of another.
func TestCrowd(t *testing.T) {
	binary, socket := buildAll(t, "ummufeed")
	d := &daemon{t: t, binary: binary, socket: socket}
	d.start()
	defer func() {
		d.signal(syscall.SIGTERM)
		d.end()
	}()
	var ps []*program
	for range *crowd {
		ps = append(ps, startProgram(t, "member", d.socket))
	}
	began := time.Now()
	for _, p := range ps {
		wait(t, "a program has its watches", func() bool {
			return atomic.LoadUint64(&p.board.Dials) != 0 && atomic.LoadUint64(&p.board.Watching) != 0
		})
	}
	t.Logf("all have two watches after %v", time.Since(began))
	for _, p := range ps {
		atomic.StoreUint64(&p.board.Go, 1)
	}
	time.Sleep(*full)
	var lookups, hits, uncached, records, losses uint64
	for i, p := range ps {
		if err := p.Process.Signal(syscall.SIGSTOP); err != nil {
			t.Fatalf("program %d: %v", i, err)
		}
		if p.board.Stale != 0 || p.board.Foreign != 0 {
			t.Errorf("program %d: %d stale transfers of %d, %d records of others among %d", i, p.board.Stale, p.board.Lookups, p.board.Foreign, p.board.Records)
		}
		if p.board.Hits == 0 {
			t.Errorf("program %d had no hit", i)
		}
		lookups += p.board.Lookups
		hits += p.board.Hits
		uncached += p.board.Uncached
		records += p.board.Records
		losses += p.board.Losses
	}
	t.Logf("%d programs, %v: stale 0 of %d transfers, %d by hits, %d uncached; %d records, %d losses, none of others",
		len(ps), *full, lookups, hits, uncached, records, losses)
}
