// SPDX-License-Identifier: Apache-2.0

// Package child starts the programs that tests talk to, line by line.
package child

import (
	"bufio"
	"io"
	"os/exec"
	"testing"
)

// Start starts c with a pipe to its standard input and one from its standard
// output. It is killed, and waited for, at the end of the test.
func Start(t testing.TB, c *exec.Cmd) (in io.WriteCloser, out *bufio.Reader) {
	t.Helper()
	in, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	pipe, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		c.Process.Kill()
		c.Wait()
	})
	return in, bufio.NewReader(pipe)
}
