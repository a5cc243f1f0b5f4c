// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/detector"
	"github.com/ummu/ummu/internal/pairs"
	"github.com/ummu/ummu/internal/source"
	"github.com/ummu/ummu/internal/target"
	"github.com/ummu/ummu/internal/top"
	"github.com/ummu/ummu/tracer"
)

// data is a source with what goes with it.
type data struct {
	top.Source
	mu       sync.Mutex // a screen that is left may still be asking
	activity func() *activity.Activity
	failed   <-chan error  // nothing is counted any more; nil: cannot happen
	ended    chan struct{} // closed: nothing will come any more
	pid      uint32        // the one process that was asked for; 0: not one
	close    func() error
	// result is the outcome of the program that was started, if any.
	result func() error
}

// State asks the source, one question at a time.
func (d *data) State(ctx context.Context, q top.Query) (*top.State, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.Source.State(ctx, q)
}

func run(s command.Streams, o *options, argv []string) error {
	batch := o.batch(s)
	var d *data
	var err error
	if o.replay != "" {
		d, err = openReplay(o)
	} else {
		d, err = openLive(s, o, argv, batch)
	}
	if err != nil {
		return err
	}
	if batch {
		err = printSamples(s, o, d)
	} else {
		err = showScreen(s, o, d)
	}
	st, stErr := d.State(context.Background(), top.Query{At: 1 << 62})
	err = errors.Join(err, stErr)
	if err == nil && o.pprof != "" {
		err = writeProfile(o.pprof, d, st)
	}
	d.mu.Lock() // for good: nobody asks what is closed
	if cerr := d.close(); err == nil {
		err = cerr
	}
	switch {
	case err != nil:
		return err
	case d.result != nil && d.result() != nil:
		return d.result()
	case o.replay != "" && st.Doubt != "":
		return command.Exit(command.ExitIncomplete, fmt.Errorf("recording: %s", st.Doubt))
	case o.loss && (st.Lost > 0 || st.Doubt != ""):
		return command.Exit(command.ExitIncomplete, nil)
	}
	return nil
}

func openReplay(o *options) (*data, error) {
	r, err := source.NewReplay(filepath.Base(o.replay), func() (io.ReadCloser, error) { return os.Open(o.replay) }, activity.Options{})
	if err != nil {
		return nil, err
	}
	return &data{Source: r, activity: r.Activity, ended: make(chan struct{}), close: r.Close}, nil
}

// openDaemon shows a user's own watches where refused says that nothing else
// may be seen.
func openDaemon(o *options, refused error) (*data, error) {
	meta, err := target.NewMeta(tracer.Coverage{}, "")
	if err != nil {
		return nil, err
	}
	meta.Tier = "" // each watch has one
	socket := cmp.Or(o.socket, os.Getenv(feed.EnvSocket), feed.DefaultSocket)
	d, err := source.NewDaemon(context.Background(), socket, meta)
	if err != nil {
		return nil, command.Exit(command.ExitPrivileges, fmt.Errorf("%w; and of your own watches a daemon would tell, but: %w", refused, err))
	}
	a, err := activity.New(activity.Options{})
	if err != nil {
		return nil, err
	}
	return &data{Source: d, activity: func() *activity.Activity { return a }, ended: make(chan struct{}), close: func() error { return nil }}, nil
}

func openLive(s command.Streams, o *options, argv []string, batch bool) (*data, error) {
	all := len(o.pids) == 0 && len(argv) == 0
	if err := target.MayWatch(o.pids, all); err != nil {
		if all && len(o.comms)+len(o.groups) == 0 {
			return openDaemon(o, err)
		}
		return nil, err
	}
	var path string
	if len(argv) > 0 {
		var err error
		if path, err = target.LookPath(argv[0]); err != nil {
			return nil, err
		}
	}
	var processes []*target.Process
	for _, pid := range o.pids {
		p, err := target.OpenProcess(pid)
		if err != nil {
			return nil, err
		}
		defer p.Close()
		processes = append(processes, p)
	}
	tr, why, err := o.tier.OpenWith(context.Background(), s.Log(), tracer.Options{Registrations: o.registrations})
	if err != nil {
		return nil, err
	}
	d, err := watch(s, o, tr, why, processes, path, argv, batch)
	if err != nil {
		return nil, errors.Join(err, tr.Close())
	}
	return d, nil
}

// watch opens the streams over a tracer, which becomes the data's if there is
// no error.
func watch(s command.Streams, o *options, tr *tracer.Tracer, why string, processes []*target.Process, path string, argv []string, batch bool) (*data, error) {
	meta, err := target.NewMeta(tr.Coverage(), why)
	if err != nil {
		return nil, err
	}
	var stacks *source.Detector // nil without registrations
	if o.registrations {
		all := len(processes) == 0 && len(argv) == 0
		found, err := detector.New(tr, all, detector.Options{BeginsOnly: pairs.BeginsOnly(meta.Tier)})
		if err != nil {
			return nil, err
		}
		found.Program(path)
		stacks = source.NewDetector(found)
	}
	a, err := activity.New(activity.Options{
		Frames: stacks.Frames,
		Start:  meta.Start.Sub(meta.MonotonicZero), BeginsOnly: pairs.BeginsOnly(meta.Tier), Self: uint32(os.Getpid()),
		Select: target.Select(o.comms, o.groups),
	})
	if err != nil {
		return nil, err
	}
	live := source.NewLive(tr, meta, a, stacks, o.what(argv))
	d := &data{
		Source: live, activity: func() *activity.Activity { return a }, failed: live.Failed(), ended: make(chan struct{}),
		close: func() error { return errors.Join(live.Close(), tr.Close()) },
	}
	open := func(t tracer.Target) error {
		st, err := tr.Watch(t, o.watch())
		if err == nil {
			live.Read(st)
		}
		return err
	}
	switch {
	case len(argv) > 0:
		return d, d.start(s, live, a, stacks, open, path, argv, batch)
	case len(processes) > 0:
		for _, p := range processes {
			name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", p.PID))
			if err == nil {
				a.Watch(uint32(p.PID), strings.TrimSuffix(string(name), "\n"))
			}
			if err := stacks.Process(p.PID); err != nil {
				return nil, errors.Join(err, live.Close())
			}
			if err := open(tracer.PIDFD(p.FD)); err != nil {
				return nil, errors.Join(err, live.Close())
			}
		}
		if len(processes) == 1 {
			d.pid = uint32(processes[0].PID)
		}
		return d, d.awaitEnd(live, o.pids)
	}
	if err := open(tracer.All()); err != nil {
		return nil, errors.Join(err, live.Close())
	}
	return d, nil
}

// what says in words what is watched.
func (o *options) what(argv []string) string {
	var words []string
	for _, p := range o.pids {
		words = append(words, fmt.Sprint(p))
	}
	switch {
	case len(argv) > 0:
		return command.Printable(filepath.Base(argv[0]))
	case len(words) > 0:
		return "process " + strings.Join(words, ", ")
	case len(o.comms)+len(o.groups) > 0:
		return "processes of " + command.Printable(strings.Join(append(o.comms, o.groups...), ", "))
	}
	return "all processes"
}

// awaitEnd notices when the processes have ended.
func (d *data) awaitEnd(live *source.Live, pids []int) error {
	var fds []unix.PollFd
	for _, pid := range pids {
		fd, err := unix.PidfdOpen(pid, 0)
		if err != nil {
			continue // it has ended
		}
		fds = append(fds, unix.PollFd{Fd: int32(fd), Events: unix.POLLIN})
	}
	go func() {
		for i := range fds {
			for fds[i].Revents == 0 {
				if _, err := unix.Poll(fds[i:i+1], -1); err != nil && err != unix.EINTR {
					break
				}
			}
			unix.Close(int(fds[i].Fd))
		}
		live.End("ended")
		close(d.ended)
	}()
	return nil
}

// printSamples prints until there were enough, until nothing will come any
// more, or until a signal.
func printSamples(s command.Streams, o *options, d *data) error {
	format := o.format.Value
	if format == "" {
		format = "table"
	}
	q := top.QueryFor(o.view.Value, activity.Windows[0])
	q.At = 1 << 62 // of a recording the end
	show := func() error {
		st, err := d.State(context.Background(), q)
		if err != nil {
			return err
		}
		return top.Print(s.Out, st, format, o.view.Value, time.Local)
	}
	if o.replay != "" {
		return show()
	}
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	stop := command.OnInterrupt(func(unix.Signal) { cancel() })
	defer stop()
	if _, err := d.State(ctx, q); err != nil { // begins to count what is asked for
		return err
	}
	every := time.NewTicker(o.delay)
	defer every.Stop()
	for i := 0; o.samples == 0 || i < o.samples; i++ {
		over := false
		select {
		case <-every.C:
		case <-d.ended:
			over = true
		case err := <-d.failed:
			return err
		case <-ctx.Done():
			return nil
		}
		if err := show(); err != nil {
			return err
		}
		if over {
			break
		}
	}
	return nil
}
