// SPDX-License-Identifier: Apache-2.0

// Package tracees holds the C program that the tracer's tests watch. It does
// what it is told and nothing else to its address space; see tracee.c.
package tracees

import (
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
)

//go:embed tracee.c
var source []byte

// Build compiles the program into dir with the C compiler of the machine and
// returns its path. Where the environment variable UMMU_TEST_PROGRAMS names a
// directory (of an earlier Build, on a machine with a compiler) it is that one.
func Build(dir string) (string, error) {
	if built := os.Getenv("UMMU_TEST_PROGRAMS"); built != "" {
		return filepath.Join(built, "tracee"), nil
	}
	c, bin := filepath.Join(dir, "tracee.c"), filepath.Join(dir, "tracee")
	if err := os.WriteFile(c, source, 0o644); err != nil {
		return "", fmt.Errorf("write tracee source: %w", err)
	}
	// -no-pie: the heap is below 4 GiB, for brk by a 32-bit call
	args := []string{"-O2", "-g", "-Wall", "-Wextra", "-pthread", "-no-pie", "-o", bin, c}
	if runtime.GOARCH == "amd64" {
		args = append(args, "-mno-red-zone") // int $0x80 between push and pop
	}
	cc := exec.Command("cc", args...)
	if out, err := cc.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build tracee: %w\n%s", err, out)
	}
	return bin, nil
}
