// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"os"
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/source"
	"github.com/ummu/ummu/internal/target"
	"github.com/ummu/ummu/tracer"
)

// patience is how long a program has to end after SIGTERM.
const patience = 2 * time.Second

// start starts a program and shows it from its first instruction.
func (d *data) start(s command.Streams, live *source.Live, a *activity.Activity, stacks *source.Detector, open func(tracer.Target) error, path string, argv []string, batch bool) error {
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer null.Close()
	theirs := command.Streams{In: null, Out: null, Err: null}
	if batch {
		theirs.Out, theirs.Err = s.Err, s.Err
	}
	type started struct {
		child *target.Child
		err   error
	}
	begun := make(chan started)
	exited := make(chan struct{}) // it and its descendants, by themselves or not
	waited := make(chan struct{})
	var child *target.Child
	var waitErr error
	go func() { // ptrace belongs to one thread
		defer close(waited)
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		c, err := target.StartStopped(path, argv, theirs)
		if err == nil {
			a.Watch(uint32(c.PID), baseComm(path))
			if err = open(tracer.PID(c.PID)); err == nil {
				err = stacks.Process(c.PID)
			}
			if err == nil {
				err = c.Release()
			}
			if err != nil {
				c.Abandon()
			}
		}
		begun <- started{c, err}
		if err == nil {
			waitErr = c.Wait(true)
			close(exited)
			// What it did last is told at the latest now.
			waitErr = errors.Join(waitErr, live.Flush())
			live.End("ended")
			close(d.ended)
		}
	}()
	b := <-begun
	if b.err != nil {
		return errors.Join(b.err, live.Close())
	}
	child = b.child
	d.pid = uint32(child.PID)
	closeAll := d.close
	d.close = func() error {
		select {
		case <-exited:
			<-waited
		default:
			target.PassOn(unix.SIGTERM)
			select {
			case <-waited:
			case <-time.After(patience):
				target.KillDescendants()
				<-waited
			}
			child = nil // it did not end by itself
		}
		return errors.Join(waitErr, closeAll())
	}
	d.result = func() error {
		if child == nil || child.Code() == 0 {
			return nil
		}
		return command.Exit(child.Code(), nil)
	}
	return nil
}

func baseComm(path string) string {
	for i := len(path) - 1; i >= 0; i-- {
		if path[i] == '/' {
			path = path[i+1:]
			break
		}
	}
	return path[:min(len(path), 15)]
}
