// SPDX-License-Identifier: Apache-2.0

// Package house holds the tests about the repository itself: which package
// may import which, and the licence line of every source file.
package house

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const (
	module = "github.com/ummu/ummu"
	loader = "github.com/cilium/ebpf" // the BPF loader
	cgo    = module + "/regcache/ibv" // the only package with import "C"
)

// groups are the parts of the repository and what each may import, tests
// aside. A package belongs to the group with the longest matching path;
// within a group imports are free. Nobody may import cmd, examples and test.
var groups = map[string][]string{
	"mm":         {},
	"bpf":        {},
	"bpf/layout": {},
	"tracer":     {"bpf", "bpf/layout", "mm", "internal/guard"},
	"feed":       {"bpf/layout", "mm", "internal/guard", "internal/wire"},
	"feed/local": {"feed", "tracer", "bpf", "bpf/layout", "mm", "internal/guard", "internal/inject", "internal/verdict"},
	"regcache":   {"feed", "mm", "internal/guard"},

	"internal/inject":    {},                     // ptrace only
	"internal/verdict":   {"bpf"},                // of self-tests, by kernel side
	"internal/guard":     {},                     // constants
	"internal/wire":      {},                     // bytes
	"internal/truth/ops": {},                     // makes the calls it is told to make
	"test/ops":           {"internal/truth/ops"}, // programs as text, and where they lie

	"internal": {"internal/guard", "internal/verdict", "internal/wire", "internal/truth/ops", "test/ops", "regcache", "feed/local", "feed", "tracer", "bpf", "bpf/layout", "mm"},
	"cmd":      {"internal", "internal/verdict", "internal/wire", "internal/inject", "internal/truth/ops", "regcache", "feed/local", "feed", "tracer", "bpf", "bpf/layout", "mm"},
	"examples": {"regcache", "feed/local", "feed", "tracer", "mm"},
	"test":     {"internal", "internal/wire", "test/ops", "regcache", "feed/local", "feed", "tracer", "bpf", "bpf/layout", "mm"},
}

// withoutLoader are the groups a program must be able to use without having
// a BPF loader linked in.
var withoutLoader = []string{"mm", "bpf/layout", "feed", "regcache", "internal/wire"}

type goPackage struct {
	ImportPath string
	Imports    []string
	Deps       []string
	CgoFiles   []string
}

// group names the group of an import path of this module, "" if there is none.
func group(path string) string {
	path = strings.TrimPrefix(path, module+"/")
	for {
		if _, ok := groups[path]; ok {
			return path
		}
		i := strings.LastIndexByte(path, '/')
		if i < 0 {
			return ""
		}
		path = path[:i]
	}
}

func ours(path string) bool { return strings.HasPrefix(path, module+"/") }

// violations lists what is wrong with the packages, as sentences.
func violations(pkgs []goPackage) (wrong []string) {
	for _, p := range pkgs {
		g := group(p.ImportPath)
		if g == "" {
			wrong = append(wrong, p.ImportPath+" belongs to no group")
			continue
		}
		for _, to := range p.Imports {
			if h := group(to); ours(to) && h != g && !slices.Contains(groups[g], h) {
				wrong = append(wrong, p.ImportPath+" imports "+to)
			}
		}
		if len(p.CgoFiles) > 0 && p.ImportPath != cgo {
			wrong = append(wrong, p.ImportPath+` has import "C"`)
		}
		if !slices.Contains(withoutLoader, g) {
			continue
		}
		for _, to := range p.Deps {
			if to == loader || strings.HasPrefix(to, loader+"/") {
				wrong = append(wrong, p.ImportPath+" depends on "+to)
			}
		}
	}
	return wrong
}

func list(t *testing.T) []goPackage {
	t.Helper()
	c := exec.Command("go", "list", "-json=ImportPath,Imports,Deps,CgoFiles", module+"/...")
	c.Env = append(os.Environ(), "CGO_ENABLED=1") // else files with import "C" are not listed
	c.Stderr = os.Stderr
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	var pkgs []goPackage
	for d := json.NewDecoder(out); ; {
		var p goPackage
		if err := d.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		pkgs = append(pkgs, p)
	}
	if err := c.Wait(); err != nil {
		t.Fatalf("%v: %v", c, err)
	}
	return pkgs
}

func TestImportsPointDownwards(t *testing.T) {
	pkgs := list(t)
	for _, w := range violations(pkgs) {
		t.Error(w)
	}
	for _, must := range []string{"mm", "bpf/layout", "feed", "feed/feedtest", "regcache"} {
		if !slices.ContainsFunc(pkgs, func(p goPackage) bool { return p.ImportPath == module+"/"+must }) {
			t.Errorf("package %s is not there: what is checked?", must)
		}
	}
}

func TestViolationsAreSeen(t *testing.T) {
	for _, c := range []struct {
		name string
		pkg  goPackage
		want string // "" if it is allowed
	}{
		{"down", goPackage{ImportPath: module + "/feed/local", Imports: []string{module + "/tracer", "os"}}, ""},
		{"within a group", goPackage{ImportPath: module + "/regcache/uring", Imports: []string{module + "/regcache"}}, ""},
		{"up", goPackage{ImportPath: module + "/feed", Imports: []string{module + "/regcache"}}, "imports"},
		{"sideways", goPackage{ImportPath: module + "/tracer", Imports: []string{module + "/feed"}}, "imports"},
		{"the loader's side of bpf", goPackage{ImportPath: module + "/feed", Imports: []string{module + "/bpf"}}, "imports"},
		{"the words import something", goPackage{ImportPath: module + "/mm", Imports: []string{module + "/bpf/layout"}}, "imports"},
		{"a library imports an internal package", goPackage{ImportPath: module + "/regcache", Imports: []string{module + "/internal/oracle"}}, "imports"},
		{"an internal package imports a command", goPackage{ImportPath: module + "/internal/daemon", Imports: []string{module + "/cmd/ummufeed"}}, "imports"},
		{"loader linked in", goPackage{ImportPath: module + "/feed/feedtest", Deps: []string{loader + "/link"}}, "depends"},
		{"loader where it belongs", goPackage{ImportPath: module + "/feed/local", Deps: []string{loader}}, ""},
		{"cgo", goPackage{ImportPath: module + "/feed", CgoFiles: []string{"x.go"}}, "import \"C\""},
		{"cgo where it belongs", goPackage{ImportPath: cgo, CgoFiles: []string{"x.go"}}, ""},
		{"a new top-level package", goPackage{ImportPath: module + "/misc"}, "no group"},
	} {
		t.Run(c.name, func(t *testing.T) {
			got := strings.Join(violations([]goPackage{c.pkg}), "\n")
			if c.want == "" && got != "" || !strings.Contains(got, c.want) {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}
