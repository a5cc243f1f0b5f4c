// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/pprof/profile"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/command"
)

var (
	loadFor  = flag.Duration("load-for", 10*time.Second, "how long BenchmarkLoad lasts")
	loadRate = flag.Int("load-rate", 100000, "changes a second of BenchmarkLoad")
)

// openPTY returns both ends of a new terminal.
func openPTY(b *testing.B, width, height uint16) (master, slave *os.File) {
	b.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		b.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		b.Fatal(err)
	}
	n, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		b.Fatal(err)
	}
	if err := unix.IoctlSetWinsize(int(master.Fd()), unix.TIOCSWINSZ, &unix.Winsize{Row: height, Col: width}); err != nil {
		b.Fatal(err)
	}
	slave, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		b.Fatal(err)
	}
	return master, slave
}

// output is what a program writes to its terminal.
type output struct {
	mu   sync.Mutex
	buf  bytes.Buffer // guarded by mu
	news chan struct{}
}

func (o *output) follow(r io.Reader) {
	b := make([]byte, 64<<10)
	for {
		n, err := r.Read(b)
		o.mu.Lock()
		o.buf.Write(b[:n])
		o.mu.Unlock()
		select {
		case o.news <- struct{}{}:
		default:
		}
		if err != nil {
			return
		}
	}
}

// await waits for a text and forgets everything before.
func (o *output) await(b *testing.B, text string) {
	b.Helper()
	for end := time.After(time.Minute); ; {
		o.mu.Lock()
		i := bytes.Index(o.buf.Bytes(), []byte(text))
		if i >= 0 {
			o.buf.Next(i + len(text))
		}
		o.mu.Unlock()
		if i >= 0 {
			return
		}
		select {
		case <-o.news:
		case <-end:
			b.Fatalf("the screen never showed %q", text)
		}
	}
}

// cpu is the time that a process has used.
func cpu(b *testing.B, pid int) time.Duration {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		b.Fatal(err)
	}
	f := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:]))
	user, err1 := strconv.Atoi(f[11])
	system, err2 := strconv.Atoi(f[12])
	if err1 != nil || err2 != nil {
		b.Fatal(err1, err2)
	}
	return time.Duration(user+system) * time.Second / 100 // USER_HZ
}

// memory is a field of /proc/PID/status in MiB.
func memory(b *testing.B, pid int, field string) float64 {
	b.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			kb, err := strconv.Atoi(strings.Fields(rest)[0])
			if err != nil {
				b.Fatal(err)
			}
			return float64(kb) / 1024
		}
	}
	b.Fatalf("no %s", field)
	return 0
}

// The screen over a process that changes its memory all the time: what it
// costs, whether it counts everything, and how soon it answers a key.
//
//	go test -run '^$' -bench Load -load-for 60s ./cmd/ummutop
func BenchmarkLoad(b *testing.B) {
	for b.Loop() {
		gen := exec.Command(self(), helperArg, "load", strconv.Itoa(*loadRate))
		in, err1 := gen.StdinPipe()
		out, err2 := gen.StdoutPipe()
		if err1 != nil || err2 != nil {
			b.Fatal(err1, err2)
		}
		if err := gen.Start(); err != nil {
			b.Fatal(err)
		}
		defer gen.Wait()
		defer in.Close()
		var word string
		if _, err := fmt.Fscan(out, &word); err != nil {
			b.Fatal(err)
		}
		if err := gen.Process.Signal(unix.SIGSTOP); err != nil {
			b.Fatal(err)
		}

		dir := b.TempDir()
		pprof := filepath.Join(dir, "p")
		master, slave := openPTY(b, 120, 40)
		defer master.Close()
		top := exec.Command(self(), "--tier", "syscall", "--fail-on-loss", "--pprof", pprof, "-p", strconv.Itoa(gen.Process.Pid))
		top.Env = append(os.Environ(), asCommand+"=1", "TERM=xterm-256color")
		top.Stdin, top.Stdout, top.Stderr = slave, slave, slave
		top.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
		if err := top.Start(); err != nil {
			b.Fatal(err)
		}
		slave.Close()
		screen := &output{news: make(chan struct{}, 1)}
		go screen.follow(master)
		press := func(keys string) {
			if _, err := master.Write([]byte(keys)); err != nil {
				b.Fatal(err)
			}
		}
		screen.await(b, "TOP CALL SITES")
		if err := gen.Process.Signal(unix.SIGCONT); err != nil {
			b.Fatal(err)
		}
		time.Sleep(time.Second) // the first screens are behind it
		begin, before := time.Now(), cpu(b, top.Process.Pid)
		var slowest, sum time.Duration
		presses := 0
		for time.Since(begin) < *loadFor {
			at := time.Now()
			press("?")
			screen.await(b, "acknowledge")
			d := time.Since(at)
			slowest, sum, presses = max(slowest, d), sum+d, presses+1
			press("?")
			screen.await(b, "CALL SITES")
			time.Sleep(250 * time.Millisecond)
		}
		took := time.Since(begin)
		used := cpu(b, top.Process.Pid) - before
		rss, peak := memory(b, top.Process.Pid, "VmRSS"), memory(b, top.Process.Pid, "VmHWM")
		in.Close()
		var sent int64
		if _, err := fmt.Fscan(out, &sent); err != nil {
			b.Fatal(err)
		}
		gen.Wait()
		time.Sleep(200 * time.Millisecond) // ten times what a record may wait
		press("q")
		lost := 0.0 // 1: something was
		switch err := top.Wait(); {
		case top.ProcessState.ExitCode() == command.ExitIncomplete:
			lost = 1
		case err != nil:
			b.Fatal(err)
		}
		f, err := os.Open(pprof)
		if err != nil {
			b.Fatal(err)
		}
		p, err := profile.Parse(f)
		f.Close()
		if err != nil {
			b.Fatal(err)
		}
		var counted int64
		for _, s := range p.Sample {
			if len(s.Label["kind"]) == 1 && s.Label["kind"][0] == "move" {
				counted += s.Value[0]
			}
		}
		b.ReportMetric(float64(counted)/(took.Seconds()+1), "changes/s")
		b.ReportMetric(float64(sent-counted), "not-counted")
		b.ReportMetric(lost, "incomplete")
		if lost == 0 && sent != counted {
			b.Errorf("counted %d of %d changes, and nothing was lost", counted, sent)
		}
		b.ReportMetric(100*used.Seconds()/took.Seconds(), "%core")
		b.ReportMetric(rss, "MiB-RSS")
		b.ReportMetric(peak, "MiB-peak")
		b.ReportMetric(float64(slowest.Microseconds())/1000, "ms-slowest-key")
		b.ReportMetric(float64(sum.Microseconds())/1000/float64(presses), "ms-mean-key")
	}
}
