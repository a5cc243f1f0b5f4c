// SPDX-License-Identifier: Apache-2.0

//go:build ummu_guards

package guard

import (
	"fmt"
	"os"
)

var off = func() Guard {
	name, ok := os.LookupEnv("UMMU_GUARD_OFF")
	if !ok || name == "" {
		return numGuards
	}
	for g, n := range names {
		if n == name {
			return Guard(g)
		}
	}
	panic(fmt.Sprintf("UMMU_GUARD_OFF: no guard %q", name))
}()

// Off reports whether g is the guard that UMMU_GUARD_OFF names.
func Off(g Guard) bool { return g == off }
