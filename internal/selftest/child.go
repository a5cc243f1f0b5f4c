// SPDX-License-Identifier: Apache-2.0

package selftest

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/truth/ops"
	"github.com/ummu/ummu/tracer"
)

// What a child does, by its first argument.
const (
	roleObey     = "obey"     // operations by command, as package ops
	roleNotifier = "notifier" // the same in a process with an MMU notifier
	roleBusy     = "busy"     // threads that compute
	roleHammer   = "hammer"   // threads that update a BPF map
)

// Main is what a child process does; args are those behind [Argument]. It
// returns the exit code.
func Main(args []string) int {
	if err := serve(args); err != nil {
		fmt.Fprintln(os.Stderr, "self-test:", err)
		return 1
	}
	return 0
}

func serve(args []string) error {
	if len(args) == 0 {
		return errors.New("a child process of check --self-test; not for people")
	}
	threads := 0
	if len(args) > 1 {
		threads, _ = strconv.Atoi(args[1])
	}
	switch args[0] {
	case roleNotifier:
		n, err := tracer.MakeNotifier()
		if err != nil {
			return err
		}
		defer n.Close()
		return ops.Serve(os.Stdin, os.Stdout)
	case roleObey:
		return ops.Serve(os.Stdin, os.Stdout)
	case roleBusy:
		return compete(threads, func(uint32) error { return nil })
	case roleHammer:
		m, err := ebpf.NewMap(&ebpf.MapSpec{Type: ebpf.Hash, KeySize: 4, ValueSize: 8, MaxEntries: 1024})
		if err != nil {
			return fmt.Errorf("create map: %w", err)
		}
		defer m.Close()
		return compete(threads, func(i uint32) error { return m.Put(i%1024, uint64(i)) })
	}
	return fmt.Errorf("no role %q", args[0])
}

// compete runs do in some threads for ever and counts in descriptor 3.
func compete(threads int, do func(uint32) error) error {
	page, err := unix.Mmap(3, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return fmt.Errorf("map progress: %w", err)
	}
	progress := (*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(page)))
	runtime.GOMAXPROCS(threads + 1)
	failed := make(chan error)
	for range threads {
		go func() {
			runtime.LockOSThread()
			for i := uint32(0); ; i++ {
				if err := do(i); err != nil {
					failed <- err
					return
				}
				progress.Add(1)
			}
		}()
	}
	return <-failed
}

// load is what competes with the operations: more busy threads than there are
// processors, and a process that updates a BPF map on as many threads, which
// keeps the kernel from running some types of programs meanwhile.
type load struct {
	competitors []competitor
	ran         time.Duration // how long it competed
}

type competitor struct {
	stop     func() error
	pid      int
	progress *atomic.Uint64
}

func startLoad() (_ *load, err error) {
	l := new(load)
	defer func() {
		if err != nil {
			l.close()
		}
	}()
	n := runtime.NumCPU()
	for role, threads := range map[string]int{roleBusy: n + 2, roleHammer: n} {
		if err := l.start(role, threads); err != nil {
			return nil, fmt.Errorf("start load: %w", err)
		}
	}
	for _, c := range l.competitors {
		if !eventually(func() bool { return c.progress.Load() != 0 }) {
			return nil, errors.New("start load: nothing happens")
		}
	}
	return l, l.pause()
}

func (l *load) start(role string, threads int) error {
	fd, err := unix.MemfdCreate("progress", unix.MFD_CLOEXEC)
	if err != nil {
		return err
	}
	f := os.NewFile(uintptr(fd), "progress")
	defer f.Close()
	if err := f.Truncate(int64(os.Getpagesize())); err != nil {
		return err
	}
	page, err := unix.Mmap(fd, 0, os.Getpagesize(), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return err
	}
	cmd := child(role, strconv.Itoa(threads))
	cmd.ExtraFiles = []*os.File{f}
	if err := cmd.Start(); err != nil {
		return errors.Join(err, unix.Munmap(page))
	}
	l.competitors = append(l.competitors, competitor{
		pid:      cmd.Process.Pid,
		progress: (*atomic.Uint64)(unsafe.Pointer(unsafe.SliceData(page))),
		stop: func() error {
			err := cmd.Process.Kill()
			cmd.Wait() // killed, and nothing else
			return errors.Join(err, unix.Munmap(page))
		},
	})
	return nil
}

func (l *load) signal(sig unix.Signal) error {
	for _, c := range l.competitors {
		if err := unix.Kill(c.pid, sig); err != nil {
			return fmt.Errorf("signal load: %w", err)
		}
	}
	return nil
}

// pause stops everything.
func (l *load) pause() error { return l.signal(unix.SIGSTOP) }

// resume lets everything run, and returns when it does.
func (l *load) resume() error {
	before := make([]uint64, len(l.competitors))
	for i, c := range l.competitors {
		before[i] = c.progress.Load()
	}
	if err := l.signal(unix.SIGCONT); err != nil {
		return err
	}
	for i, c := range l.competitors {
		if !eventually(func() bool { return c.progress.Load() != before[i] }) {
			return errors.New("resume load: nothing happens")
		}
	}
	return nil
}

func (l *load) close() error {
	var errs []error
	for _, c := range l.competitors {
		errs = append(errs, c.stop())
	}
	l.competitors = nil
	return errors.Join(errs...)
}

// while runs do under the load.
func (l *load) while(do func() error) error {
	if err := l.resume(); err != nil {
		return err
	}
	start := time.Now()
	err := do()
	l.ran += time.Since(start)
	return errors.Join(err, l.pause())
}
