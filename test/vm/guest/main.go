// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Command guest is the first process of a virtual machine of the harness: it
// mounts what programs expect, loads modules, runs what the plan says, says
// how it went, and switches the machine off.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/test/vm/wire"
)

// The first process collects orphans, the second one works.
func main() {
	if os.Getpid() != 1 {
		if err := work(); err != nil {
			fmt.Fprintln(os.Stderr, "guest:", err)
			os.Exit(1)
		}
		return
	}
	if err := mounts(); err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
		off(1)
	}
	worker := exec.Command("/init")
	worker.Stdout, worker.Stderr = os.Stdout, os.Stderr
	worker.Env = []string{"PATH=/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "TMPDIR=/tmp"}
	if err := worker.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "guest:", err)
		off(1)
	}
	for {
		var ws unix.WaitStatus
		pid, err := unix.Wait4(-1, &ws, 0, nil)
		if err == unix.EINTR {
			continue
		}
		if err != nil || pid == worker.Process.Pid {
			if err == nil && ws.Exited() && ws.ExitStatus() == 0 {
				off(wire.ExitByte)
			}
			off(1)
		}
	}
}

// off ends QEMU with a status made of b.
func off(b byte) {
	unix.Sync()
	if f, err := os.OpenFile("/dev/port", os.O_WRONLY, 0); err == nil {
		f.WriteAt([]byte{b}, wire.ExitPort)
	}
	unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
}

func mounts() error {
	for _, m := range []struct{ fs, dir, options string }{
		{"proc", "/proc", ""},
		{"sysfs", "/sys", ""},
		{"devtmpfs", "/dev", ""},
		{"devpts", "/dev/pts", "ptmxmode=0666"},
		{"tmpfs", "/dev/shm", ""},
		{"tmpfs", "/tmp", ""},
		{"tmpfs", "/run", ""},
		{"debugfs", "/sys/kernel/debug", ""},
		{"tracefs", "/sys/kernel/tracing", ""},
		{"bpf", "/sys/fs/bpf", ""},
		{"securityfs", "/sys/kernel/security", ""},
		{"cgroup2", "/sys/fs/cgroup", ""},
	} {
		if err := os.MkdirAll(m.dir, 0o755); err != nil {
			return err
		}
		// devtmpfs may have been mounted by the kernel
		if err := unix.Mount(m.fs, m.dir, m.fs, 0, m.options); err != nil && err != unix.EBUSY {
			return fmt.Errorf("mount %s on %s: %w", m.fs, m.dir, err)
		}
	}
	return os.Chmod("/tmp", 0o1777)
}

// report writes events; it is safe for concurrent use.
type report struct {
	mu sync.Mutex // guards writes
	f  *os.File
}

func (r *report) event(e wire.Event) {
	b, err := json.Marshal(e)
	if err != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.f.Write(append(b, '\n'))
}

func openReport() (*report, error) {
	f, err := os.OpenFile(wire.Port, os.O_WRONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	// raw: every byte arrives as it was written
	t, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	if err != nil {
		return nil, fmt.Errorf("get modes of %s: %w", wire.Port, err)
	}
	t.Iflag, t.Oflag, t.Lflag = 0, 0, 0
	if err := unix.IoctlSetTermios(int(f.Fd()), unix.TCSETS, t); err != nil {
		return nil, fmt.Errorf("set modes of %s: %w", wire.Port, err)
	}
	return &report{f: f}, nil
}

func work() error {
	r, err := openReport()
	if err != nil {
		return err
	}
	var plan wire.Plan
	if err := prepare(&plan); err != nil {
		r.event(wire.Event{Type: wire.Failed, Text: err.Error()})
		return err
	}
	model := preemption()
	r.event(wire.Event{Type: wire.Hello, Kernel: release(), Preempt: model})
	if plan.Preempt != "" && plan.Preempt != model {
		err := fmt.Errorf("preemption model is %q, wanted %q", model, plan.Preempt)
		r.event(wire.Event{Type: wire.Failed, Text: err.Error()})
		return err
	}
	for i := range plan.Suites {
		run(r, &plan.Suites[i])
	}
	r.event(wire.Event{Type: wire.Done})
	// what was written to a serial port is still on its way
	return unix.IoctlSetInt(int(r.f.Fd()), unix.TCSBRK, 1)
}

func prepare(plan *wire.Plan) error {
	b, err := os.ReadFile(wire.PlanPath)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(b, plan); err != nil {
		return fmt.Errorf("read plan: %w", err)
	}
	for _, m := range plan.Modules {
		if err := command("modprobe", m); err != nil {
			return err
		}
	}
	// before 5.11 BPF maps are charged to it, whatever the capabilities
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}); err != nil {
		return fmt.Errorf("raise memlock limit: %w", err)
	}
	if err := unix.Sethostname([]byte("vm")); err != nil {
		return fmt.Errorf("set host name: %w", err)
	}
	if err := command("ip", "link", "set", "lo", "up"); err != nil {
		return err
	}
	if plan.Disk {
		if err := os.MkdirAll("/var/tmp", 0o1777); err != nil {
			return err
		}
		if err := unix.Mount("/dev/vda", "/var/tmp", "ext4", 0, ""); err != nil {
			return fmt.Errorf("mount disk: %w", err)
		}
	}
	if plan.RDMA {
		// the dummy module makes dummy0 by itself
		for _, c := range [][]string{
			{"ip", "addr", "add", "192.0.2.1/24", "dev", "dummy0"},
			{"ip", "link", "set", "dummy0", "up"},
			{"rdma", "link", "add", "rxe0", "type", "rxe", "netdev", "dummy0"},
		} {
			if err := command(c[0], c[1:]...); err != nil {
				return err
			}
		}
	}
	return nil
}

func command(name string, args ...string) error {
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		return fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, bytes.TrimSpace(out))
	}
	return nil
}

func release() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// preemption is the model in force: the word in parentheses of
// sched/preempt (5.12 and later); before, it is compiled in.
func preemption() string {
	b, err := os.ReadFile("/sys/kernel/debug/sched/preempt")
	if err != nil {
		return "built in"
	}
	_, s, _ := strings.Cut(string(b), "(")
	s, _, _ = strings.Cut(s, ")")
	return s
}

// output turns what a suite writes into events.
type output struct {
	r     *report
	suite string
	kind  string // wire.Output or wire.Data
}

func (o output) Write(b []byte) (int, error) {
	o.r.event(wire.Event{Type: o.kind, Suite: o.suite, Text: string(b)})
	return len(b), nil
}

func run(r *report, s *wire.Suite) {
	r.event(wire.Event{Type: wire.Start, Suite: s.Name})
	start := time.Now()
	c := exec.Command(s.Argv[0], s.Argv[1:]...)
	c.Dir = s.Dir
	c.Env = append(os.Environ(), s.Env...)
	c.Stderr = output{r, s.Name, wire.Output}
	c.Stdout = c.Stderr
	if s.Data {
		c.Stdout = output{r, s.Name, wire.Data}
	}
	c.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	c.WaitDelay = 5 * time.Second // for a grandchild that keeps the pipe
	end := wire.Event{Type: wire.End, Suite: s.Name}
	if err := c.Start(); err != nil {
		end.Text, end.Exit = err.Error(), 127
		r.event(end)
		return
	}
	timer := time.AfterFunc(s.Timeout, func() { syscall.Kill(-c.Process.Pid, syscall.SIGKILL) })
	err := c.Wait()
	if !timer.Stop() {
		end.Text = fmt.Sprintf("killed after %v", s.Timeout)
	}
	end.Seconds = time.Since(start).Seconds()
	ws := c.ProcessState.Sys().(syscall.WaitStatus)
	switch {
	case ws.Signaled():
		end.Exit = 128 + int(ws.Signal())
	case ws.ExitStatus() != 0:
		end.Exit = ws.ExitStatus()
	case err != nil && !errors.Is(err, exec.ErrWaitDelay):
		end.Exit, end.Text = 126, err.Error()
	}
	r.event(end)
}
