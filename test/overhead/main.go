// SPDX-License-Identifier: Apache-2.0

// Command overhead measures what a loaded tracer costs a process that nobody
// watches: the processor time of getppid, the cheapest system call, in pairs
// with and without a tracer that watches another, idle process.
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

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/tracer"
)

func main() {
	pairs := flag.Int("pairs", 30, "`number` of pairs, 6 to 1000")
	calls := flag.Int("calls", 1_000_000, "system calls a measurement, at least 1")
	asJSON := flag.Bool("json", false, "print JSON")
	flag.Parse()
	if flag.Arg(0) == "worker" {
		work(*calls)
		return
	}
	if *pairs < 6 || *pairs > 1000 || *calls < 1 || flag.NArg() > 0 {
		flag.Usage()
		os.Exit(2)
	}
	r, err := measure(*pairs, *calls)
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
	fmt.Printf("getppid of an unwatched process, ns a call, medians of %d pairs of %d calls:\n", r.Pairs, r.Calls)
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

// work measures once for each line on standard input, and ends with it.
func work(calls int) {
	runtime.LockOSThread()
	in := bufio.NewScanner(os.Stdin)
	for in.Scan() {
		start := cpuTime()
		for range calls {
			unix.RawSyscall(unix.SYS_GETPPID, 0, 0, 0)
		}
		fmt.Println(cpuTime() - start)
	}
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

func startWorker(calls int) (*worker, error) {
	cmd := exec.Command("/proc/self/exe", "-calls", fmt.Sprint(calls), "worker")
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
	return &worker{cmd, in, bufio.NewReader(out)}, nil
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

func measure(pairs, calls int) (r result, err error) {
	busy, err := startWorker(calls)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, busy.stop()) }()
	idle, err := startWorker(calls)
	if err != nil {
		return r, err
	}
	defer func() { err = errors.Join(err, idle.stop()) }()

	traced := func() (ns float64, err error) {
		t, err := tracer.Open(tracer.Options{})
		if err != nil {
			return 0, err
		}
		defer func() { err = errors.Join(err, t.Close()) }()
		if _, err := t.Watch(tracer.PID(idle.cmd.Process.Pid), tracer.WatchOptions{}); err != nil {
			return 0, err
		}
		return busy.once(calls)
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
