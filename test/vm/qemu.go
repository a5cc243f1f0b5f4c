// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"

	"github.com/ummu/ummu/test/vm/wire"
)

// machine is one virtual machine: a kernel with a preemption model.
type machine struct {
	kernel  kernel
	release string // uname -r
	model   string // "default", or what preempt= asks for
	store   *store
	payload *payload
	out     string // directory of its logs
	pattern string // of tests
	memory  int    // MiB
}

func (m *machine) name() string { return m.kernel.name + "-" + m.model }

// What a kernel says on its console when something went wrong in it.
var trouble = regexp.MustCompile(`(?m)^.*(BUG:|WARNING: CPU|Oops|Kernel panic|general protection fault|blocked for more than).*$`)

// boot runs the machine to its end and returns what it reported. An error is
// about the machine; failed tests are results.
func (m *machine) boot(ctx context.Context) (*report, error) {
	right := make(map[string]int)
	for _, s := range m.payload.suites {
		if s.command != "" {
			right[s.name] = s.exit[m.kernel.name]
		}
	}
	r := newReport(m.out, right)
	if err := os.MkdirAll(m.out, 0o755); err != nil {
		return r, err
	}
	plan := wire.Plan{Disk: true, RDMA: m.payload.rdma, Suites: m.guestSuites()}
	cmdline := "console=ttyS0 quiet panic=-1 oops=panic mitigations=off nokaslr"
	if m.model != "default" {
		plan.Preempt = m.model
		cmdline += " preempt=" + m.model
	}
	dir, err := os.MkdirTemp(m.store.dir, "run-")
	if err != nil {
		return r, err
	}
	defer os.RemoveAll(dir)
	initrd := filepath.Join(dir, "initrd")
	if err := m.payload.write(ctx, initrd, m.store, m.release, plan); err != nil {
		return r, fmt.Errorf("make initial file system: %w", err)
	}
	console := filepath.Join(m.out, "console.log")
	c := exec.CommandContext(ctx, "qemu-system-x86_64",
		"-M", "pc", "-accel", "tcg,thread=single", "-cpu", "max", "-smp", "2", "-m", fmt.Sprint(m.memory),
		"-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
		"-serial", "file:"+console, "-serial", "stdio",
		"-device", fmt.Sprintf("isa-debug-exit,iobase=%#x,iosize=1", wire.ExitPort),
		"-drive", "if=virtio,format=raw,snapshot=on,file="+m.payload.dir+"/disk",
		"-kernel", filepath.Join(m.store.dir, m.release, "vmlinuz"), "-initrd", initrd, "-append", cmdline)
	c.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // nothing stays when this process is killed
	var errs strings.Builder
	c.Stderr = &errs
	out, err := c.StdoutPipe()
	if err != nil {
		return r, err
	}
	if err := c.Start(); err != nil {
		return r, fmt.Errorf("start qemu: %w", err)
	}
	r.cpu = func() float64 { return cpuSeconds(c.Process.Pid) }
	readErr := r.read(out)
	last := r.cpu()
	r.cpu = func() float64 { return last }
	err = c.Wait()
	r.close()
	said, _ := os.ReadFile(console)
	switch status := c.ProcessState.ExitCode(); {
	case ctx.Err() != nil:
		return r, fmt.Errorf("not done in time; see %s", m.out)
	case readErr != nil:
		return r, fmt.Errorf("read events: %w", readErr)
	case r.failed != "":
		return r, errors.New(r.failed)
	case status != wire.ExitStatus || !r.done:
		return r, fmt.Errorf("crashed (qemu: %v) %s\n%s", err, strings.TrimSpace(errs.String()), tail(said, 15))
	}
	if lines := trouble.FindAllString(string(said), 5); lines != nil {
		return r, fmt.Errorf("the kernel complained; see %s\n%s", console, strings.Join(lines, "\n"))
	}
	return r, nil
}

// cpuSeconds is the processor time that a child has used so far; 0 if it
// cannot be told (proc_pid_stat(5): utime and stime, in ticks of 10 ms).
func cpuSeconds(pid int) float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	w := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	if len(w) < 13 {
		return 0
	}
	ticks := 0
	for _, s := range w[11:13] {
		n, err := strconv.Atoi(s)
		if err != nil {
			return 0
		}
		ticks += n
	}
	return float64(ticks) / 100
}

func tail(b []byte, n int) string {
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	return strings.Join(lines[max(0, len(lines)-n):], "\n")
}

// read follows the guest's events until its end.
func (r *report) read(in io.Reader) error {
	lines := bufio.NewReaderSize(in, 64<<10)
	for {
		line, err := lines.ReadBytes('\n')
		if err == io.EOF {
			return nil // a line without an end was cut by a crash
		}
		if err != nil {
			return err
		}
		var e wire.Event
		if err := json.Unmarshal(line, &e); err != nil {
			return fmt.Errorf("%q: %w", line, err)
		}
		r.event(&e)
	}
}
