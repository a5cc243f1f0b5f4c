// SPDX-License-Identifier: Apache-2.0

package detector

import (
	"bufio"
	"debug/elf"
	"os"
	"path/filepath"
	"strings"
)

const library = "libibverbs.so.1"

// Where the dynamic linker looks besides its configuration; patterns.
var standardDirs = []string{"/lib/*-linux-gnu*", "/usr/lib/*-linux-gnu*", "/lib", "/usr/lib", "/lib64", "/usr/lib64"}

// configuration is the dynamic linker's.
const configuration = "/etc/ld.so.conf"

// libraries lists the copies of libibverbs that a program may load: those in
// the directories in which the dynamic linker looks on its behalf. Probing one
// that it does not load costs nothing.
func libraries(exe, searchPath string) []string {
	dirs := filepath.SplitList(searchPath)
	dirs = append(dirs, runPath(exe)...)
	dirs = append(dirs, configured(configuration, 0)...)
	for _, pattern := range standardDirs {
		if names, err := filepath.Glob(pattern); err == nil {
			dirs = append(dirs, names...)
		}
	}
	seen := map[string]bool{}
	var found []string
	for _, dir := range dirs {
		if dir == "" {
			dir = "."
		}
		f := filepath.Join(dir, library)
		if _, err := os.Stat(f); err == nil && !seen[f] {
			seen[f] = true
			found = append(found, f)
		}
	}
	return found
}

// runPath lists the directories that a program names itself.
func runPath(exe string) (dirs []string) {
	e, err := elf.Open(exe)
	if err != nil {
		return nil // a script; what it runs is seen when it does
	}
	defer e.Close()
	origin := "."
	if real, err := filepath.EvalSymlinks(exe); err == nil {
		if real, err = filepath.Abs(real); err == nil {
			origin = filepath.Dir(real)
		}
	}
	for _, tag := range []elf.DynTag{elf.DT_RPATH, elf.DT_RUNPATH} {
		lists, err := e.DynString(tag)
		if err != nil {
			continue
		}
		for _, l := range lists {
			for _, d := range strings.Split(l, ":") {
				d = strings.ReplaceAll(d, "${ORIGIN}", origin)
				dirs = append(dirs, strings.ReplaceAll(d, "$ORIGIN", origin))
			}
		}
	}
	return dirs
}

// configured reads the dynamic linker's list of directories, ld.so.conf(5).
func configured(name string, depth int) (dirs []string) {
	f, err := os.Open(name)
	if err != nil || depth > 4 {
		return nil
	}
	defer f.Close()
	for s := bufio.NewScanner(f); s.Scan(); {
		line, _, _ := strings.Cut(s.Text(), "#")
		line = strings.TrimSpace(line)
		rest, include := strings.CutPrefix(line, "include ")
		switch {
		case include:
			pattern := strings.TrimSpace(rest)
			if !filepath.IsAbs(pattern) {
				pattern = filepath.Join(filepath.Dir(name), pattern)
			}
			files, err := filepath.Glob(pattern)
			if err != nil {
				continue
			}
			for _, g := range files {
				dirs = append(dirs, configured(g, depth+1)...)
			}
		case line != "":
			dirs = append(dirs, line)
		}
	}
	return dirs
}
