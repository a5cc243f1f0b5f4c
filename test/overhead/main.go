// SPDX-License-Identifier: Apache-2.0

// Command overhead measures what a loaded tracer costs: the processor time of
// a call, in pairs with and without a tracer. Unwatched, the measured process
// is not the one that the tracer watches, which is idle; the call is getppid,
// the cheapest there is, or munmap (with the mmap and the touch of the page).
// Watched, it is the process itself, with a feed that is interested in nothing,
// or in everything (-records).
//
// It needs the privileges to load BPF programs. With another tracer of system
// calls on the machine the difference comes out too small: what all of them
// share, the kernel's slow way into a call, is then paid without ours, too.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

func main() {
	pairs := flag.Int("pairs", 30, "`number` of pairs, 6 to 1000")
	calls := flag.Int("calls", 1_000_000, "system calls a measurement, at least 1")
	asJSON := flag.Bool("json", false, "print JSON")
	tier := flag.String("tier", tracer.TierSyscall.String(), "`tier` to load: "+tracer.TierSyscall.String()+", "+tracer.TierMM.String()+", "+tracer.TierNotifierTracepoint.String()+" or "+tracer.TierNotifierProbe.String())
	call := flag.String("call", "getppid", "`call` to measure: getppid or munmap")
	var s setting
	flag.BoolVar(&s.watched, "watched", false, "measure the watched process")
	flag.BoolVar(&s.records, "records", false, "with -watched: each change makes a record")
	flag.Parse()
	if flag.Arg(0) == "worker" {
		if err := work(*calls, *call, flag.Arg(1) == "notifier"); err != nil {
			fmt.Fprintln(os.Stderr, "overhead:", err)
			os.Exit(1)
		}
		return
	}
	for _, t := range []tracer.Tier{tracer.TierSyscall, tracer.TierMM, tracer.TierNotifierTracepoint, tracer.TierNotifierProbe} {
		if t.String() == *tier {
			s.tier = t
		}
	}
	s.calls, s.call = *calls, *call
	if *pairs < 6 || *pairs > 1000 || *calls < 1 || flag.NArg() > 0 || s.tier == tracer.TierNone ||
		*call != "getppid" && *call != "munmap" || s.records && !s.watched {
		flag.Usage()
		os.Exit(2)
	}
	r, err := measure(*pairs, s)
	if err != nil {
		fmt.Fprintln(os.Stderr, "overhead:", err)
		os.Exit(1)
	}
	if *asJSON {
		if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
			fmt.Fprintln(os.Stderr, "overhead:", err)
			os.Exit(1)
		}
		return
	}
	who := "an unwatched process"
	if s.watched {
		who = "a watched process"
	}
	if s.records {
		who += ", a record each"
	}
	fmt.Printf("%s of %s, tier %v, ns a call, medians of %d pairs of %d calls:\n", s.call, who, s.tier, r.Pairs, r.Calls)
	fmt.Printf("without %.1f, with %.1f, difference %.1f (95 %% interval %.1f to %.1f)\n",
		r.Without, r.With, r.Difference, r.Low, r.High)
}

// result is in nanoseconds a call. Low and High bound the median difference.
type result struct {
	Pairs      int     `json:"pairs"`
	Calls      int     `json:"calls"`
	Without    float64 `json:"without_ns"`
	With       float64 `json:"with_ns"`
	Difference float64 `json:"difference_ns"`
	Low        float64 `json:"difference_low_ns"`
	High       float64 `json:"difference_high_ns"`
}

// setting is what is measured.
type setting struct {
	tier             tracer.Tier
	call             string
	calls            int
	watched, records bool
}

// work measures once for each line on standard input, and ends with it.
func work(calls int, call string, notifier bool) error {
	runtime.LockOSThread()
	if notifier {
		n, err := tracer.MakeNotifier()
		if err != nil {
			return err
		}
		defer n.Close()
	}
	size := uintptr(os.Getpagesize())
	fmt.Println("ready")
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		start := cpuTime()
		for range calls {
			if call == "getppid" {
				unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0)
				continue
			}
			p, _, e := unix.RawSyscall6(unix.SYS_MMAP, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uintptr(0), 0)
			if e != 0 {
				return e
			}
			**(**byte)(unsafe.Pointer(&p)) = 1
			if _, _, e := unix.RawSyscall(unix.SYS_MUNMAP, p, size, 0); e != 0 {
				return e
			}
		}
		fmt.Println(cpuTime() - start)
	}
	return in.Err()
}

// cpuTime is what this thread has used of the processors, in nanoseconds:
// other load on the machine is not in it.
func cpuTime() int64 {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &t); err != nil {
		panic(err) // every Linux has this clock
	}
	return t.Nano()
}

// worker is a process of this program that runs [work].
type worker struct {
	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
}

func (s *setting) startWorker(notifier bool) (*worker, error) {
	args := []string{"-calls", fmt.Sprint(s.calls), "-call", s.call, "worker"}
	if notifier {
		args = append(args, "notifier")
	}
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	w := &worker{cmd, in, bufio.NewReader(out)}
	if line, err := w.out.ReadString('\n'); err != nil || line != "ready\n" {
		return nil, errors.Join(fmt.Errorf("worker began with %q: %w", line, err), w.stop())
	}
	return w, nil
}

// once returns the nanoseconds a call of one measurement.
func (w *worker) once(calls int) (float64, error) {
	if _, err := io.WriteString(w.in, "\n"); err != nil {
		return 0, err
	}
	line, err := w.out.ReadString('\n')
	if err != nil {
		return 0, err
	}
	var ns float64
	if _, err := fmt.Sscan(strings.TrimSpace(line), &ns); err != nil {
		return 0, err
	}
	return ns / float64(calls), nil
}

func (w *worker) stop() error { return errors.Join(w.in.Close(), w.cmd.Wait()) }

// traced measures w while a tracer watches the process with a feed.
func (s *setting) traced(w *worker, watched int) (ns float64, err error) {
	t, err := tracer.Open(tracer.Options{Tier: s.tier})
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, t.Close()) }()
	f, err := t.OpenFeed(tracer.PID(watched), tracer.FeedOptions{RingBytes: 8 << 20, NoWakeup: true, Witness: true})
	if err != nil {
		return 0, err
	}
	if s.records {
		m, err := feed.Descriptors{
			Status: f.StatusFD(), Epoch: f.EpochFD(), Interest: f.InterestFD(), Ring: f.RingFD(), RingBytes: f.RingBytes(),
		}.Map()
		if err != nil {
			return 0, err
		}
		m.Maps = fmt.Sprintf("/proc/%d/maps", watched)
		watch, err := feed.New(m)
		if err != nil {
			m.Unmap()
			return 0, err
		}
		// as large as all: each change is of interest
		ticket := watch.Begin(mm.Range{Start: 0, End: 1 << 47})
		done, stopped := make(chan struct{}), make(chan struct{})
		go func() {
			defer close(stopped)
			tick := time.NewTicker(2 * time.Millisecond)
			defer tick.Stop()
			for {
				select {
				case <-done:
					return
				case <-tick.C:
					watch.Drain(func(*mm.Record) {})
				}
			}
		}()
		defer func() {
			close(done)
			<-stopped
			if lost := watch.Stats(); lost.Losses != 0 {
				err = errors.Join(err, fmt.Errorf("%d losses: not each change made a record", lost.Losses))
			}
			watch.Abandon(ticket)
			err = errors.Join(err, watch.Close())
		}()
	}
	return w.once(s.calls)
}

func measure(pairs int, s setting) (r result, err error) {
	calls := s.calls
	busy, err := s.startWorker(false)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, busy.stop()) }()
	// the one that is watched, with a notifier if the tier needs it
	other, err := s.startWorker(s.tier != tracer.TierSyscall)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, other.stop()) }()

	traced := func() (float64, error) {
		if s.watched {
			return s.traced(other, other.cmd.Process.Pid)
		}
		return s.traced(busy, other.cmd.Process.Pid)
	}
	if _, err := other.once(calls); err != nil { // warm
		return r, err
	}
	if _, err := busy.once(calls); err != nil { // warm
		return r, err
	}
	var without, with, difference []float64
	for i := range pairs {
		var a, b float64
		var err error
		if i%2 == 0 { // a drift of the machine must not favour one side
			a, err = busy.once(calls)
			if err == nil {
				b, err = traced()
			}
		} else {
			b, err = traced()
			if err == nil {
				a, err = busy.once(calls)
			}
		}
		if err != nil {
			return r, err
		}
		without, with, difference = append(without, a), append(with, b), append(difference, b-a)
	}
	low, high := interval(difference)
	return result{pairs, calls, median(without), median(with), median(difference), low, high}, nil
}

// median sorts x.
func median(x []float64) float64 {
	slices.Sort(x)
	return (x[(len(x)-1)/2] + x[len(x)/2]) / 2
}

// interval bounds the median of what x (at least 6) is a sample of, with 95 %
// confidence and no assumption about its distribution: the order statistics
// between which at least 95 % of a binomial(n, 1/2) lies. It sorts x.
func interval(x []float64) (low, high float64) {
	slices.Sort(x)
	n := len(x)
	k, tail, p := 0, 0.0, math.Pow(0.5, float64(n))
	for tail+p <= 0.025 {
		tail += p
		p *= float64(n-k) / float64(k+1)
		k++
	}
	return x[k-1], x[n-k]
}
