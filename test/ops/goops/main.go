// SPDX-License-Identifier: Apache-2.0

// Command goops makes the calls that standard input tells it to make: see
// package ops.
package main

import (
	"fmt"
	"os"

	"github.com/ummu/ummu/internal/truth/ops"
)

func main() {
	if err := ops.Serve(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "goops:", err)
		os.Exit(1)
	}
}
