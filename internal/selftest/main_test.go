// SPDX-License-Identifier: Apache-2.0

package selftest

import (
	"context"
	"encoding/json"
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
	if len(os.Args) > 3 && os.Args[1] == roleTest {
		os.Exit(testOne(os.Args[2], os.Args[3]))
	}
	code := m.Run()
	if err := goleak.Find(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// roleTest makes the test binary test one operation of a tier and print the
// report.
const roleTest = "test-of"

func testOne(tier, operation string) int {
	for _, t := range Tiers() {
		if t.String() != tier {
			continue
		}
		r, err := Run(context.Background(), Options{Tier: t, Only: []string{operation}})
		if err == nil {
			err = json.NewEncoder(os.Stdout).Encode(r)
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}
	fmt.Fprintln(os.Stderr, "no tier", tier)
	return 1
}
