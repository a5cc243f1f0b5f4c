// SPDX-License-Identifier: Apache-2.0

// Package planted builds the programs that register memory and then make one
// mistake each, for tests of the detector of stale registrations, and a library
// that stands in for libibverbs where there is no RDMA device.
package planted

import (
	"context"
	_ "embed"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

//go:embed planted.c
var source []byte

//go:embed standin.c
var standin []byte

//go:embed standin.map
var versions []byte

// Program is one of the built programs.
type Program string

// The programs, by what they register with.
const (
	Uring Program = "planted-uring"
	Verbs Program = "planted-verbs"
)

// Standin is the file, beside the programs, that stands in for libibverbs. The
// dynamic linker looks for libibverbs.so.1: see [StandIn].
const Standin = "planted-standin.so"

// StandIn makes a directory below dir for LD_LIBRARY_PATH, with the library of
// the programs in built.
func StandIn(dir, built string) (string, error) {
	dir = filepath.Join(dir, "standin")
	if err := os.Mkdir(dir, 0o755); err != nil {
		return "", err
	}
	return dir, os.Symlink(filepath.Join(built, Standin), filepath.Join(dir, "libibverbs.so.1"))
}

// Build builds everything into dir, which must exist. Where the environment
// variable UMMU_TEST_PROGRAMS names a directory (of an earlier Build, on a
// machine with a compiler) it returns that one.
func Build(ctx context.Context, dir string) (string, error) {
	if built := os.Getenv("UMMU_TEST_PROGRAMS"); built != "" {
		return built, nil
	}
	sources, err := os.MkdirTemp("", "")
	if err != nil {
		return "", fmt.Errorf("build planted programs: %w", err)
	}
	defer os.RemoveAll(sources)
	for name, text := range map[string][]byte{"planted.c": source, "standin.c": standin, "standin.map": versions} {
		if err := os.WriteFile(filepath.Join(sources, name), text, 0o644); err != nil {
			return "", fmt.Errorf("build planted programs: %w", err)
		}
	}
	for name, args := range map[string][]string{
		string(Uring): {"-O0", "-pthread", "planted.c"},
		string(Verbs): {"-O0", "-pthread", "-DVERBS", "planted.c", "-libverbs"},
		Standin:       {"-O1", "-shared", "-fPIC", "-Wl,--version-script=standin.map", "-Wl,-soname,libibverbs.so.1", "standin.c"},
	} {
		c := exec.CommandContext(ctx, "gcc", append([]string{"-g", "-Wall", "-Wextra", "-Werror", "-o", filepath.Join(dir, name)}, args...)...)
		c.Dir = sources
		if out, err := c.CombinedOutput(); err != nil {
			return "", fmt.Errorf("build planted programs: %w\n%s", err, out)
		}
	}
	return dir, nil
}

// Line is the line of planted.c with the comment "at: name"; 0 if there is none.
func Line(name string) int {
	for i, l := range strings.Split(string(source), "\n") {
		if strings.Contains(l, "/* at: "+name+" */") {
			return i + 1
		}
	}
	return 0
}
