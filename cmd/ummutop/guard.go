// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// exitInterrupted is the exit code after a second ctrl+c: 128 + SIGINT.
const exitInterrupted = 130

// grace is how long the screen has to go by itself after a second ctrl+c.
const grace = 500 * time.Millisecond

// keyboard is a terminal's input that notices ctrl+c by itself: if the screen
// hangs, the second one leaves all the same.
type keyboard struct {
	*os.File
	pressed atomic.Int32
	twice   func()
}

// interrupts are the forms in which terminals send ctrl+c: plain, and in the
// protocols for keys with modifiers (CSI u, modifyOtherKeys).
var interrupts = [][]byte{{3}, []byte("\x1b[99;5u"), []byte("\x1b[27;5;99~")}

func (k *keyboard) Read(b []byte) (int, error) {
	n, err := k.File.Read(b)
	for _, seq := range interrupts {
		for range bytes.Count(b[:n], seq) {
			if k.pressed.Add(1) == 2 {
				k.twice()
			}
		}
	}
	return n, err
}

// restorer remembers how a terminal is, and puts it back without the screen.
func restorer(in, out *os.File) (restore func(), err error) {
	modes, err := unix.IoctlGetTermios(int(in.Fd()), unix.TCGETS)
	if err != nil {
		return nil, err
	}
	return func() {
		// Main screen, cursor, no pasting marks, plain keys.
		out.WriteString("\x1b[?1049l\x1b[?25h\x1b[?2004l\x1b[>4m\x1b[=0u\x1b[0m\r\n")
		unix.IoctlSetTermios(int(in.Fd()), unix.TCSETS, modes)
	}, nil
}
