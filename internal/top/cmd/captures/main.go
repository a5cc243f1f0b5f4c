// SPDX-License-Identifier: Apache-2.0

// Captures draws the screens in documents again, from a recording of a real
// run.
//
//	captures RECORDING DOCUMENT...
package main

import (
	"fmt"
	"os"

	"github.com/ummu/ummu/internal/top/screens"
)

func main() {
	if len(os.Args) < 3 {
		fmt.Fprintln(os.Stderr, "usage: captures RECORDING DOCUMENT...")
		os.Exit(2)
	}
	for _, name := range os.Args[2:] {
		if err := fill(name, os.Args[1]); err != nil {
			fmt.Fprintln(os.Stderr, "captures:", err)
			os.Exit(1)
		}
	}
}

func fill(name, recording string) error {
	b, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	text, err := screens.Fill(string(b), recording)
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	if text == string(b) {
		return nil
	}
	return os.WriteFile(name, []byte(text), 0o644)
}
