// SPDX-License-Identifier: Apache-2.0

// Package extras builds the Go programs of this repository that tests run:
// the command, programs that can leave out a step of the protocol
// (internal/guard), and programs of the next version of the daemon's protocol
// (internal/wire).
package extras

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
)

const module = "github.com/ummu/ummu/"

// how is, by name, the go command and what it builds.
var how = map[string][]string{
	"ummufeed":        {"build", module + "cmd/ummufeed"},
	"ummufeed-guards": {"build", "-tags=ummu_guards", module + "cmd/ummufeed"},
	"ummufeed-next":   {"build", "-tags=ummu_next", module + "cmd/ummufeed"},
	"kill-next":       {"test", "-c", "-tags=ummu_next", module + "test/kill"},
	"soak":            {"build", module + "test/soak"},
	"soak-guards":     {"build", "-tags=ummu_guards", module + "test/soak"},
	"selftest-guards": {"test", "-c", "-tags=ummu_guards", module + "internal/selftest"},
	"oracle-guards":   {"test", "-c", "-tags=ummu_guards", module + "internal/oracle"},
	"tracer-guards":   {"test", "-c", "-tags=ummu_guards", module + "tracer"},
	"local-guards":    {"test", "-c", "-tags=ummu_guards", module + "feed/local"},
}

// Names are the programs' names.
func Names() []string {
	var names []string
	for name := range how {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}

// Build builds a program into dir, which must exist, and returns its path.
// Where the environment variable UMMU_TEST_PROGRAMS names a directory (of an
// earlier Build, on a machine with a compiler) it is the one there.
func Build(ctx context.Context, dir, name string) (string, error) {
	args, ok := how[name]
	if !ok {
		return "", fmt.Errorf("build %s: no such program", name)
	}
	if built := os.Getenv("UMMU_TEST_PROGRAMS"); built != "" {
		return filepath.Join(built, name), nil
	}
	file := filepath.Join(dir, name)
	last := len(args) - 1
	c := exec.CommandContext(ctx, "go", slices.Concat(args[:last], []string{"-ldflags=-s -w", "-o", file}, args[last:])...)
	c.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := c.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build %s: %w\n%s", name, err, out)
	}
	return file, nil
}
