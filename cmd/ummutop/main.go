// SPDX-License-Identifier: Apache-2.0

// Ummutop shows in a terminal what happens to the memory of processes, and
// which registrations went stale.
package main

import (
	"os"

	"github.com/ummu/ummu/internal/command"
)

func main() {
	s := command.Standard()
	os.Exit(command.Execute(newRoot(s), os.Args[1:], s))
}
