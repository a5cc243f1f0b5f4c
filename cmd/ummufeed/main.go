// SPDX-License-Identifier: Apache-2.0

// Ummufeed shows every change of a process's address space as it happens.
package main

import "os"

func main() {
	os.Exit(execute(os.Args[1:], streams{os.Stdin, os.Stdout, os.Stderr}))
}
