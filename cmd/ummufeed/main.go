// SPDX-License-Identifier: Apache-2.0

// Ummufeed shows every change of a process's address space as it happens.
package main

import (
	"os"

	"github.com/ummu/ummu/internal/command"
)

func main() {
	os.Exit(execute(os.Args[1:], command.Standard()))
}
