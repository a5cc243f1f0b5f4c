// SPDX-License-Identifier: Apache-2.0

// Package injectees holds the C program into which the tests of
// internal/inject put a notifier; see target.c.
package injectees

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

//go:embed target.c
var source []byte

// Build compiles the program into dir with the C compiler of the machine,
// "dynamic" and "static", and returns their paths by these names. Where the
// environment variable UMMU_TEST_PROGRAMS names a directory (of an earlier
// Build, on a machine with a compiler) they are those there.
func Build(dir string) (map[string]string, error) {
	programs := map[string]string{}
	if built := os.Getenv("UMMU_TEST_PROGRAMS"); built != "" {
		for name := range flags {
			programs[name] = filepath.Join(built, "inject-"+name)
		}
		return programs, nil
	}
	c := filepath.Join(dir, "inject-target.c")
	if err := os.WriteFile(c, source, 0o644); err != nil {
		return nil, fmt.Errorf("write source of target: %w", err)
	}
	for name, more := range flags {
		bin := filepath.Join(dir, "inject-"+name)
		args := append([]string{"-O2", "-Wall", "-pthread", "-o", bin, c}, more...)
		if out, err := exec.Command("cc", args...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("build target: %w\n%s", err, out)
		}
		programs[name] = bin
	}
	return programs, nil
}

var flags = map[string][]string{"dynamic": nil, "static": {"-static"}}
