// SPDX-License-Identifier: Apache-2.0

package inject

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

var (
	// ErrSeccomp: the target filters its system calls; one of ours might
	// kill it.
	ErrSeccomp = errors.New("the process is under seccomp")
	// ErrNotSupported: this architecture, or this kind of program, is not.
	ErrNotSupported = errors.New("injection is not supported")
)

const kvmCreateVM = 0xae01 // linux/kvm.h

// Machine keeps a virtual machine alive, and with it the MMU notifier of the
// address space that it was made for. It does not keep the address space.
type Machine struct{ file *os.File }

// Close lets the notifier go. The kernel may take up to a second for it. It
// is idempotent.
func (m *Machine) Close() error {
	if err := m.file.Close(); err != nil && !errors.Is(err, os.ErrClosed) {
		return err
	}
	return nil
}

// FD is the descriptor of the virtual machine, which stays the Machine's.
func (m *Machine) FD() int { return int(m.file.Fd()) }

func openKVM() (*os.File, error) {
	f, err := os.OpenFile("/dev/kvm", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("make a notifier: %w", err)
	}
	return f, nil
}

// inject makes a machine in a task that stands at the trap at, and returns the
// trap at which it stands afterwards. No other task must run that shares its
// descriptors. options are those that the task is traced with.
func inject(pid, tid int, at stop, options uintptr, kvm *os.File) (*Machine, stop, error) {
	r, err := enter(pid, tid, options)
	if err != nil {
		return nil, at, err
	}
	m, err := r.makeMachine(kvm)
	at, lerr := r.leave()
	if err == nil {
		err = lerr
	}
	if err != nil && m != nil {
		m.Close()
		m = nil
	}
	return m, at, err
}

func (r *remote) makeMachine(kvm *os.File) (_ *Machine, err error) {
	var fds []uint64
	defer func() { // none stays open in the target
		for _, fd := range fds {
			if _, cerr := r.call(unix.SYS_CLOSE, fd); cerr != nil && err == nil {
				err = fmt.Errorf("close a descriptor of the target: %w", cerr)
			}
		}
	}()
	device, err := r.receive(kvm)
	if err != nil {
		return nil, err
	}
	fds = append(fds, device)
	var vm uint64
	for {
		vm, err = r.call(unix.SYS_IOCTL, device, kvmCreateVM, 0)
		if err != unix.EINTR {
			break
		}
	}
	if err != nil {
		return nil, fmt.Errorf("create virtual machine: %w", err)
	}
	fds = append(fds, vm)
	fd, err := unix.PidfdGetfd(r.pidfd, int(vm), 0)
	if err != nil {
		return nil, fmt.Errorf("duplicate virtual machine: %w", err)
	}
	unix.CloseOnExec(fd)
	return &Machine{os.NewFile(uintptr(fd), "kvm-vm")}, nil
}

// receive gives the target a descriptor of ours.
func (r *remote) receive(file *os.File) (fd uint64, err error) {
	size := uint64(os.Getpagesize())
	page, err := r.call(unix.SYS_MMAP, 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS, ^uint64(0), 0)
	if err != nil {
		return 0, fmt.Errorf("map a page: %w", err)
	}
	var pair [8]byte
	defer func() {
		if _, uerr := r.call(unix.SYS_MUNMAP, page, size); uerr != nil && err == nil {
			err = fmt.Errorf("unmap the page: %w", uerr)
		}
	}()
	if _, err := r.call(unix.SYS_SOCKETPAIR, unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0, page); err != nil {
		return 0, fmt.Errorf("make a socket pair: %w", err)
	}
	if _, err := r.mem.ReadAt(pair[:], int64(page)); err != nil {
		return 0, err
	}
	a, b := binary.NativeEndian.Uint32(pair[:]), binary.NativeEndian.Uint32(pair[4:])
	defer func() {
		for _, s := range []uint32{a, b} {
			if _, cerr := r.call(unix.SYS_CLOSE, uint64(s)); cerr != nil && err == nil {
				err = fmt.Errorf("close a socket of the target: %w", cerr)
			}
		}
	}()
	ours, err := unix.PidfdGetfd(r.pidfd, int(a), 0)
	if err != nil {
		return 0, fmt.Errorf("duplicate socket: %w", err)
	}
	defer unix.Close(ours)
	if err := unix.Sendmsg(ours, []byte{0}, unix.UnixRights(int(file.Fd())), nil, 0); err != nil {
		return 0, fmt.Errorf("send descriptor: %w", err)
	}
	// struct msghdr, its iovec, one byte of data, room for the rights
	const vector, data, control, room = 64, 128, 192, 24
	var msg [control + room]byte
	put := func(at int, v uint64) { binary.NativeEndian.PutUint64(msg[at:], v) }
	put(16, page+vector)
	put(24, 1)
	put(32, page+control)
	put(40, room)
	put(vector, page+data)
	put(vector+8, 1)
	if _, err := r.mem.WriteAt(msg[:], int64(page)); err != nil {
		return 0, err
	}
	if _, err := r.call(unix.SYS_RECVMSG, uint64(b), page, unix.MSG_CMSG_CLOEXEC|unix.MSG_DONTWAIT); err != nil {
		return 0, fmt.Errorf("receive descriptor: %w", err)
	}
	if _, err := r.mem.ReadAt(msg[:], int64(page)); err != nil {
		return 0, err
	}
	rights, err := unix.ParseSocketControlMessage(msg[control:])
	if err != nil || len(rights) != 1 || len(rights[0].Data) < 4 {
		return 0, errors.New("the descriptor did not arrive (too many open files?)")
	}
	return uint64(binary.NativeEndian.Uint32(rights[0].Data)), nil
}

// stopLimit bounds how long the threads of a target may take to stand still.
// A thread in uninterruptible sleep does not, nor one that waits for its vfork
// child.
const stopLimit = 2 * time.Second

// Process gives the running process pid a notifier. All its threads stand
// still for it, for some milliseconds. On return the process runs on, traced
// by nobody. If the calling process is killed meanwhile (SIGKILL, or a signal
// that it does not handle), the target is killed as well. Calls that a stop interrupts go on; those of them which signal(7)
// lists as failing with EINTR are started again, with their full timeout.
func Process(pid int) (*Machine, error) {
	if err := supported(); err != nil {
		return nil, err
	}
	kvm, err := openKVM()
	if err != nil {
		return nil, err
	}
	defer kvm.Close()
	var m *Machine
	var done sync.WaitGroup
	done.Go(func() {
		runtime.LockOSThread()
		if m, err = process(pid, kvm); err == nil {
			runtime.UnlockOSThread()
		}
		// Otherwise the thread ends here, and the kernel lets go whatever
		// it may still trace.
	})
	done.Wait()
	if err != nil {
		return nil, fmt.Errorf("make a notifier in process %d: %w", pid, err)
	}
	return m, nil
}

func process(pid int, kvm *os.File) (*Machine, error) {
	if err := refuseSeccomp(pid); err != nil {
		return nil, err
	}
	threads, err := stopAll(pid)
	defer func() {
		for tid := range threads {
			var regs registers
			if getRegisters(tid, &regs) == nil && restart(&regs) {
				setRegisters(tid, &regs)
			}
			detach(tid, 0) // fails only if it is gone
		}
	}()
	if err != nil {
		return nil, err
	}
	tid := pid
	if !threads[pid] { // the main thread has ended
		for tid = range threads {
			break
		}
	}
	m, _, err := inject(pid, tid, stop{}, traceOptions, kvm)
	return m, err
}

// stopAll brings every thread of a process to a trap and returns them, also
// with an error.
func stopAll(pid int) (threads map[int]bool, err error) {
	threads = map[int]bool{}
	deadline := time.Now().Add(stopLimit)
	for again := true; again; {
		again = false
		tids, err := threadsOf(pid)
		if err != nil {
			return threads, err
		}
		var fresh []int
		for _, tid := range tids {
			if threads[tid] || state(tid) == 'Z' {
				continue
			}
			switch err := seize(tid, traceOptions); err {
			case nil:
			case unix.ESRCH:
				continue
			default:
				return threads, fmt.Errorf("stop thread %d: %w", tid, err)
			}
			if err := unix.PtraceInterrupt(tid); err != nil && err != unix.ESRCH {
				return threads, fmt.Errorf("stop thread %d: %w", tid, err)
			}
			fresh = append(fresh, tid)
		}
		for _, tid := range fresh {
			stopped, err := waitTrap(tid, deadline)
			if err != nil {
				return threads, err
			}
			if stopped {
				threads[tid] = true
			}
			again = true // who was not stopped may have made another
		}
	}
	if len(threads) == 0 {
		return threads, unix.ESRCH
	}
	return threads, nil
}

// waitTrap waits for a running task to stand at a trap; false if it ended.
func waitTrap(tid int, deadline time.Time) (bool, error) {
	for {
		var ws unix.WaitStatus
		n, err := unix.Wait4(tid, &ws, unix.WALL|unix.WNOHANG, nil)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return false, fmt.Errorf("wait for thread %d: %w", tid, err)
		case n == 0 && time.Now().After(deadline):
			return false, fmt.Errorf("thread %d does not stop (state %c)", tid, state(tid))
		case n == 0:
			time.Sleep(50 * time.Microsecond)
		case !ws.Stopped():
			return false, nil
		case stopOf(ws).trap():
			return true, nil
		default:
			sig := 0
			if s := stopOf(ws); s.delivers() {
				sig = int(s.signal)
			}
			if err := unix.PtraceCont(tid, sig); err != nil && err != unix.ESRCH {
				return false, fmt.Errorf("continue thread %d: %w", tid, err)
			}
		}
	}
}

func threadsOf(pid int) ([]int, error) {
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		return nil, err
	}
	var tids []int
	for _, e := range entries {
		if tid, err := strconv.Atoi(e.Name()); err == nil {
			tids = append(tids, tid)
		}
	}
	return tids, nil
}
