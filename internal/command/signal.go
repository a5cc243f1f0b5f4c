// SPDX-License-Identifier: Apache-2.0

package command

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
)

var sigpipe sync.Once

// catchSIGPIPE makes a write to a closed pipe an error instead of the end of
// this program: `run` has to wait for its program whoever reads. Caught, not
// ignored, because a started program would inherit that.
func catchSIGPIPE() {
	sigpipe.Do(func() { signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE) })
}

// Interrupts are the signals that end a stream.
var Interrupts = []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT}

// OnInterrupt calls f for each of the signals until stop is called, which
// waits for a running f.
func OnInterrupt(f func(syscall.Signal)) (stop func()) {
	c := make(chan os.Signal, 8)
	signal.Notify(c, Interrupts...)
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case s := <-c:
				f(s.(syscall.Signal))
			case <-quit:
				return
			}
		}
	}()
	return func() {
		signal.Stop(c)
		close(quit)
		<-done
	}
}
