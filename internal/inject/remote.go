// SPDX-License-Identifier: Apache-2.0

package inject

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// pidfdThread is PIDFD_THREAD of pidfd_open (Linux 6.9).
const pidfdThread = unix.O_EXCL

// Options of every task we trace.
const traceOptions = unix.PTRACE_O_TRACESYSGOOD

const syscallStop = unix.SIGTRAP | 0x80 // by PTRACE_O_TRACESYSGOOD

// goneError is the end of a task on which something was to be done.
type goneError struct {
	tid    int
	status unix.WaitStatus
}

func (e *goneError) Error() string { return fmt.Sprintf("task %d ended", e.tid) }

// stop is why a task stands still.
type stop struct {
	signal unix.Signal
	event  int
}

func stopOf(ws unix.WaitStatus) stop { return stop{ws.StopSignal(), int(ws) >> 16} }

// trap is PTRACE_EVENT_STOP: the task stands at its way back to user space.
func (s stop) trap() bool { return s.event == unix.PTRACE_EVENT_STOP }

// group is a trap that belongs to the job control of the target.
func (s stop) group() bool { return s.trap() && s.signal != unix.SIGTRAP }

// delivers reports whether the task is about to get a signal.
func (s stop) delivers() bool { return s.event == 0 && s.signal != syscallStop }

// wait waits for the next stop of a task.
func wait(tid int) (stop, error) {
	for {
		var ws unix.WaitStatus
		_, err := unix.Wait4(tid, &ws, unix.WALL, nil)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return stop{}, fmt.Errorf("wait for task %d: %w", tid, err)
		case !ws.Stopped():
			return stop{}, &goneError{tid, ws}
		}
		return stopOf(ws), nil
	}
}

func ptrace(request, tid int, addr, data uintptr) error {
	if _, _, e := unix.Syscall6(unix.SYS_PTRACE, uintptr(request), uintptr(tid), addr, data, 0, 0); e != 0 {
		return e
	}
	return nil
}

func seize(tid int, options uintptr) error { return ptrace(unix.PTRACE_SEIZE, tid, 0, options) }

func setOptions(tid int, options uintptr) error {
	if err := ptrace(unix.PTRACE_SETOPTIONS, tid, 0, options); err != nil {
		return fmt.Errorf("set ptrace options: %w", err)
	}
	return nil
}

// detach lets a stopped task go, with a signal if it is not 0.
func detach(tid int, sig unix.Signal) error { return ptrace(unix.PTRACE_DETACH, tid, 0, uintptr(sig)) }

func signalMask(tid int) (mask uint64, err error) {
	err = ptrace(unix.PTRACE_GETSIGMASK, tid, 8, uintptr(unsafe.Pointer(&mask)))
	return mask, err
}

func setSignalMask(tid int, mask uint64) error {
	return ptrace(unix.PTRACE_SETSIGMASK, tid, 8, uintptr(unsafe.Pointer(&mask)))
}

// trapAgain brings a stopped task to a trap (again). Signals that come
// meanwhile are delivered.
func trapAgain(tid int) (stop, error) {
	if err := unix.PtraceInterrupt(tid); err != nil {
		return stop{}, fmt.Errorf("interrupt task %d: %w", tid, err)
	}
	sig := 0
	for {
		if err := unix.PtraceCont(tid, sig); err != nil {
			return stop{}, fmt.Errorf("continue task %d: %w", tid, err)
		}
		s, err := wait(tid)
		if err != nil || s.trap() {
			return s, err
		}
		sig = 0
		if s.delivers() {
			sig = int(s.signal)
		}
	}
}

// remote makes a task that stands at a trap execute system calls.
type remote struct {
	pid, tid int
	options  uintptr // of ptrace
	pidfd    int
	mem      *os.File
	site     uint64 // address of a syscall instruction
	saved    registers
	mask     uint64
	held     []unix.Signal // stop signals that came meanwhile; they cannot be blocked
}

// enter prepares a task for calls: nothing but them will happen in it until
// leave. If it fails the task is as it was, at its trap.
//
// Until leave the task is lost without us: if this process dies the kernel
// kills the task, which would otherwise go on somewhere.
func enter(pid, tid int, options uintptr) (_ *remote, err error) {
	r := &remote{pid: pid, tid: tid, options: options, pidfd: -1}
	defer func() {
		if err != nil {
			r.close()
		}
	}()
	if err := refuseSeccomp(tid); err != nil {
		return nil, err
	}
	if r.mem, err = os.OpenFile(fmt.Sprintf("/proc/%d/mem", tid), os.O_RDWR, 0); err != nil {
		return nil, err
	}
	for try := 0; ; try++ {
		if err := getRegisters(tid, &r.saved); err != nil {
			return nil, fmt.Errorf("read registers: %w", err)
		}
		if !native(&r.saved) {
			return nil, fmt.Errorf("%w: a 32-bit program", ErrNotSupported)
		}
		if !r.inRestartable() {
			break
		}
		if try == 100 {
			return nil, fmt.Errorf("task %d does not leave its restartable sequence", tid)
		}
		if _, err := trapAgain(tid); err != nil {
			return nil, err
		}
	}
	if r.site, err = r.findSyscall(); err != nil {
		return nil, err
	}
	flags := 0
	if tid != pid {
		flags = pidfdThread
	}
	if r.pidfd, err = unix.PidfdOpen(tid, flags); err != nil {
		return nil, fmt.Errorf("open pidfd: %w", err)
	}
	if r.mask, err = signalMask(tid); err != nil {
		return nil, fmt.Errorf("read signal mask: %w", err)
	}
	if err := setOptions(tid, options|unix.PTRACE_O_EXITKILL); err != nil {
		return nil, err
	}
	if err := setSignalMask(tid, ^uint64(0)); err != nil {
		return nil, fmt.Errorf("block signals: %w", err)
	}
	return r, nil
}

func (r *remote) close() {
	if r.mem != nil {
		r.mem.Close()
	}
	if r.pidfd >= 0 {
		unix.Close(r.pidfd)
	}
}

// leave puts everything back. The task stands at a trap, where the kernel
// looks whether a call has to be restarted.
func (r *remote) leave() (stop, error) {
	defer r.close()
	s, err := trapAgain(r.tid)
	if err != nil {
		return s, err
	}
	regs := r.saved
	restart(&regs)
	if err := setRegisters(r.tid, &regs); err != nil {
		return s, fmt.Errorf("restore registers: %w", err)
	}
	if err := setSignalMask(r.tid, r.mask); err != nil {
		return s, fmt.Errorf("restore signal mask: %w", err)
	}
	if err := setOptions(r.tid, r.options); err != nil {
		return s, err
	}
	for _, sig := range r.held {
		if err := unix.PidfdSendSignal(r.pidfd, sig, nil, 0); err != nil {
			return s, fmt.Errorf("repeat %v: %w", sig, err)
		}
	}
	return s, nil
}

// call makes the task execute one system call. The error is an Errno if the
// call failed.
func (r *remote) call(nr uintptr, args ...uint64) (uint64, error) {
	regs := r.saved
	var a [6]uint64
	copy(a[:], args)
	setCall(&regs, r.site, nr, a)
	if err := setRegisters(r.tid, &regs); err != nil {
		return 0, fmt.Errorf("write registers: %w", err)
	}
	for range 2 { // to its entry, to its exit
		if err := r.toSyscallStop(); err != nil {
			return 0, err
		}
	}
	if err := getRegisters(r.tid, &regs); err != nil {
		return 0, fmt.Errorf("read registers: %w", err)
	}
	if n := result(&regs); n < 0 && n > -4096 {
		return 0, unix.Errno(-n)
	}
	return uint64(result(&regs)), nil
}

func (r *remote) toSyscallStop() error {
	for {
		if err := unix.PtraceSyscall(r.tid, 0); err != nil {
			return fmt.Errorf("continue task %d: %w", r.tid, err)
		}
		s, err := wait(r.tid)
		switch {
		case err != nil:
			return err
		case s.signal == syscallStop:
			return nil
		case s.delivers() && s.signal == unix.SIGSTOP:
			r.held = append(r.held, s.signal)
		case s.delivers():
			// blocked, so the kernel forces it: a fault of the instruction itself
			return fmt.Errorf("task %d: %v instead of a system call", r.tid, s.signal)
		}
	}
}

// refuseSeccomp refuses tasks in which a system call may be forbidden.
func refuseSeccomp(tid int) error {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", tid))
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(b)) {
		if mode, ok := strings.CutPrefix(line, "Seccomp:"); ok && strings.TrimSpace(mode) != "0" {
			return fmt.Errorf("%w (mode %s)", ErrSeccomp, strings.TrimSpace(mode))
		}
	}
	return nil
}

// findSyscall finds a syscall instruction in the vDSO, or else in any code.
func (r *remote) findSyscall() (uint64, error) {
	if start := r.vdso(); start != 0 {
		if at := r.search(start, start+2*4096); at != 0 {
			return at, nil
		}
	}
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", r.tid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(maps)) {
		span, rest, _ := strings.Cut(line, " ")
		from, to, _ := strings.Cut(span, "-")
		start, err1 := strconv.ParseUint(from, 16, 64)
		end, err2 := strconv.ParseUint(to, 16, 64)
		if err1 != nil || err2 != nil || !strings.HasPrefix(rest, "r-x") {
			continue
		}
		if at := r.search(start, end); at != 0 {
			return at, nil
		}
	}
	return 0, errors.New("there is no syscall instruction in the program")
}

// vdso is where the kernel has mapped its code, 0 if it has not.
func (r *remote) vdso() uint64 {
	aux, err := os.ReadFile(fmt.Sprintf("/proc/%d/auxv", r.tid))
	if err != nil {
		return 0
	}
	const sysinfoEHDR = 33 // AT_SYSINFO_EHDR
	for ; len(aux) >= 16; aux = aux[16:] {
		if binary.NativeEndian.Uint64(aux) == sysinfoEHDR {
			return binary.NativeEndian.Uint64(aux[8:])
		}
	}
	return 0
}

// search looks for a syscall instruction as far as memory can be read.
func (r *remote) search(start, end uint64) uint64 {
	buf := make([]byte, 4096)
	for start < end {
		n, _ := r.mem.ReadAt(buf[:min(uint64(len(buf)), end-start)], int64(start))
		if i := bytes.Index(buf[:n], syscallInstruction); i >= 0 {
			return start + uint64(i)
		}
		if n < len(buf) {
			break
		}
		start += uint64(n) - 1 // the instruction may lie across
	}
	return 0
}

// inRestartable reports whether the task was stopped inside a restartable
// sequence (rseq(2)). The kernel aborts the sequence when the task goes on,
// unless it finds the task elsewhere: then it forgets about it.
func (r *remote) inRestartable() bool {
	var conf struct { // struct ptrace_rseq_configuration
		pointer         uint64
		size, signature uint32
		flags, pad      uint32
	}
	n := unsafe.Sizeof(conf)
	if ptrace(unix.PTRACE_GET_RSEQ_CONFIGURATION, r.tid, n, uintptr(unsafe.Pointer(&conf))) != nil || conf.pointer == 0 {
		return false // before 5.13 it cannot be known
	}
	var area [16]byte // cpu_id_start, cpu_id, rseq_cs
	if _, err := r.mem.ReadAt(area[:], int64(conf.pointer)); err != nil {
		return false
	}
	section := binary.NativeEndian.Uint64(area[8:])
	if section == 0 {
		return false
	}
	var cs [24]byte // version, flags, start_ip, post_commit_offset
	if _, err := r.mem.ReadAt(cs[:], int64(section)); err != nil {
		return false
	}
	start, length := binary.NativeEndian.Uint64(cs[8:]), binary.NativeEndian.Uint64(cs[16:])
	return instruction(&r.saved)-start < length
}
