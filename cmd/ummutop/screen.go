// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"
	"sync/atomic"
	"time"

	tea "charm.land/bubbletea/v2"
	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/top"
)

// framesPerSecond bounds how often the terminal is written to.
const framesPerSecond = 30

// showScreen takes over the terminal until the person leaves. The terminal is
// given back on a panic and on signals too.
func showScreen(s command.Streams, o *options, d *data) error {
	first := top.Options{Interval: o.delay, Plain: !command.Colourful(s.Out), View: o.view.Value, Clock: true}
	if !o.viewGiven {
		first.PID = d.pid
	}
	m := top.New(d, first)
	restore, err := restorer(s.In, s.Out)
	if err != nil {
		return fmt.Errorf("read modes of the terminal: %w", err)
	}
	leave := func() { // the screen may hang
		time.Sleep(grace)
		restore()
		os.Exit(exitInterrupted)
	}
	keys := &keyboard{File: s.In, twice: func() { go leave() }}
	p := tea.NewProgram(m, tea.WithInput(keys), tea.WithOutput(s.Out), tea.WithoutSignalHandler(), tea.WithFPS(framesPerSecond))
	var signals atomic.Int32
	stop := command.OnInterrupt(func(unix.Signal) {
		if signals.Add(1) == 1 {
			go p.Quit() // it waits for the screen
		} else {
			go leave()
		}
	})
	defer stop()
	left := make(chan struct{})
	var failure error
	watched := make(chan struct{})
	go func() {
		defer close(watched)
		select {
		case failure = <-d.failed:
			p.Quit()
		case <-left:
		}
	}()
	_, err = p.Run()
	close(left)
	<-watched
	switch {
	case failure != nil:
		return failure
	case errors.Is(err, tea.ErrProgramPanic):
		return fmt.Errorf("screen: %w", err) // it has printed where
	case err != nil:
		return fmt.Errorf("screen: %w", err)
	}
	return nil
}
