// SPDX-License-Identifier: Apache-2.0

package selftest

import (
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"
)

// The test binary is its own child.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == Argument {
		os.Exit(Main(os.Args[2:]))
	}
	code := m.Run()
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}
