// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ummu/ummu/internal/truth"
	"github.com/ummu/ummu/test/extras"
	"github.com/ummu/ummu/test/injectees"
	"github.com/ummu/ummu/test/planted"
	"github.com/ummu/ummu/test/tracees"
	"github.com/ummu/ummu/test/vm/wire"
)

// Modules that every guest gets. One with a question mark is left out where
// the kernel does not have it, or has it built in (7.3 does not say what it has).
var baseModules = []string{"?virtio_pci", "?virtio_blk", "?crc32c_generic", "?crc32c", "ext4", "kvm-amd"}

// Modules of soft-RoCE, in addition. The driver asks for its checksum itself.
var rdmaModules = []string{"?crc32_generic", "dummy", "rdma_rxe", "ib_uverbs", "rdma_ucm"}

// payload is what is the same for all guests, built once.
type payload struct {
	dir    string // built files; bin, programs, guest
	repo   string
	suites []suite
	rdma   bool
}

func build(ctx context.Context, dir, repo string, suites []suite, rdma bool) (*payload, error) {
	p := &payload{dir, repo, suites, rdma}
	goTool := func(cgo string, args ...string) error {
		c := exec.CommandContext(ctx, "go", args...)
		c.Dir = repo
		c.Env = append(os.Environ(), "CGO_ENABLED="+cgo)
		if out, err := c.CombinedOutput(); err != nil {
			return fmt.Errorf("go %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	if err := goTool("0", "build", "-ldflags=-s -w", "-o", dir+"/guest", "./test/vm/guest"); err != nil {
		return nil, err
	}
	for _, s := range suites {
		if s.command != "" {
			continue
		}
		cgo := "0"
		if s.rdma {
			cgo = "1"
		}
		if err := goTool(cgo, "test", "-c", "-ldflags=-s -w", "-o", dir+"/"+s.name, s.pkg); err != nil {
			return nil, err
		}
	}
	programs := filepath.Join(dir, "programs")
	if err := os.Mkdir(programs, 0o755); err != nil {
		return nil, err
	}
	for _, name := range extras.Names() {
		if _, err := extras.Build(ctx, programs, name); err != nil {
			return nil, err
		}
	}
	if _, err := tracees.Build(programs); err != nil {
		return nil, err
	}
	if _, err := injectees.Build(programs); err != nil {
		return nil, err
	}
	if _, err := planted.Build(ctx, programs); err != nil {
		return nil, err
	}
	if _, err := truth.Build(programs); err != nil {
		return nil, err
	}
	c := exec.CommandContext(ctx, "mke2fs", "-q", "-F", "-t", "ext2", dir+"/disk", "128M")
	if out, err := c.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("mke2fs: %w\n%s", err, out)
	}
	return p, nil
}

// guestSuites are the suites as the guest runs them.
func (m *machine) guestSuites() []wire.Suite {
	var list []wire.Suite
	for _, s := range m.payload.suites {
		if !m.has(&s) || !s.runsOn(m.kernel.name) {
			continue
		}
		list = append(list, wire.Suite{
			Name:    s.name,
			Dir:     path.Join("/src", s.pkg),
			Argv:    s.argv(m.pattern),
			Env:     []string{"UMMU_TEST_PROGRAMS=/programs", "UMMU_TEST_MACHINE=full"},
			Data:    s.data,
			Timeout: s.timeout,
		})
	}
	return list
}

// write makes the initial file system of one guest.
func (p *payload) write(ctx context.Context, file string, s *store, release string, plan wire.Plan) error {
	modules := baseModules
	if p.rdma {
		modules = append(slices.Clone(modules), rdmaModules...)
	}
	f, err := os.Create(file)
	if err != nil {
		return err
	}
	defer f.Close()
	a := newArchive(f)
	if plan.Modules, err = addModules(ctx, a, s, release, modules); err != nil {
		return err
	}
	b, err := json.Marshal(plan)
	if err != nil {
		return err
	}
	a.bytes(wire.PlanPath, 0o644, b)
	a.file("/init", p.dir+"/guest")
	for _, s := range p.suites {
		if s.command != "" {
			continue
		}
		if err := addProgram(ctx, a, "/suites/"+s.name, p.dir+"/"+s.name); err != nil {
			return err
		}
		a.dir(path.Join("/src", s.pkg))
		if d := filepath.Join(p.repo, s.pkg, "testdata"); exists(d) {
			a.tree(path.Join("/src", s.pkg, "testdata"), d)
		}
	}
	a.tree("/src/docs", filepath.Join(p.repo, "docs")) // generated pages are compared
	if err := p.userland(ctx, a); err != nil {
		return err
	}
	if err := a.Close(); err != nil {
		return err
	}
	return f.Close()
}

func exists(file string) bool {
	_, err := os.Stat(file)
	return err == nil
}

// addModules adds modules and what they need, and returns those that the
// guest has to load.
func addModules(ctx context.Context, a *archive, s *store, release string, names []string) ([]string, error) {
	tree := filepath.Join(s.dir, release)
	dir := "/lib/modules/" + release
	var load []string
	for _, name := range names {
		name, optional := strings.CutPrefix(name, "?")
		out, err := s.run(ctx, "", "modprobe", "-C", "/dev/null", "-d", tree, "-S", release, "--show-depends", name)
		if err != nil {
			if optional {
				continue
			}
			return nil, err
		}
		for line := range strings.Lines(out) {
			w := strings.Fields(line) // "insmod FILE [OPTION...]" or "builtin NAME"
			if len(w) >= 2 && w[0] == "insmod" {
				host := filepath.Clean(w[1])
				rel, err := filepath.Rel(tree+dir, host)
				if err != nil {
					return nil, fmt.Errorf("module %s: %w", name, err)
				}
				a.file(path.Join(dir, rel), host)
			}
		}
		load = append(load, name)
	}
	indexes, err := filepath.Glob(tree + dir + "/modules.*")
	if err != nil {
		return nil, err
	}
	for _, f := range indexes {
		a.file(path.Join(dir, filepath.Base(f)), f)
	}
	return load, nil
}

// userland adds what programs and tests expect around them.
func (p *payload) userland(ctx context.Context, a *archive) error {
	for name, contents := range map[string]string{
		"/etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
		"/etc/group":  "root:x:0:\nnogroup:x:65534:\n",
		"/etc/hosts":  "127.0.0.1 localhost vm\n",
	} {
		a.bytes(name, 0o644, []byte(contents))
	}
	a.dir("/root")
	a.dir("/var/tmp")
	programs, err := filepath.Glob(p.dir + "/programs/*")
	if err != nil {
		return err
	}
	for _, f := range programs {
		if err := addProgram(ctx, a, "/programs/"+filepath.Base(f), f); err != nil {
			return err
		}
	}
	for _, impl := range truth.Impls() {
		if impl.Preload != "" {
			if err := addProgram(ctx, a, impl.Preload, impl.Preload); err != nil {
				return err
			}
		}
	}
	tools := []string{"kmod", "git", "setarch", "strace"} // the tests of cmd/ummufeed watch them
	if p.rdma {
		tools = append(tools, "ip", "rdma", "ibv_devinfo")
	}
	for _, t := range tools {
		host, err := exec.LookPath(t)
		if err != nil {
			return fmt.Errorf("find %s: %w", t, err)
		}
		if err := addProgram(ctx, a, "/bin/"+t, host); err != nil {
			return err
		}
	}
	a.link("/sbin/modprobe", "/bin/kmod") // also called by the kernel
	if p.rdma {
		// opened, not linked
		for _, pattern := range []string{"libibverbs/librxe-*.so", "libibverbs.so.1", "librdmacm.so.1"} {
			files, err := filepath.Glob("/usr/lib/*/" + pattern)
			if err != nil {
				return err
			}
			for _, f := range files {
				if err := addProgram(ctx, a, f, f); err != nil {
					return err
				}
			}
		}
		a.file("/etc/libibverbs.d/rxe.driver", "/etc/libibverbs.d/rxe.driver")
		libgcc, err := filepath.Glob("/lib/*/libgcc_s.so.1") // for pthread_cancel
		if err != nil {
			return err
		}
		for _, f := range libgcc {
			a.file(f, f)
		}
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		return fmt.Errorf("find busybox: %w", err)
	}
	applets, err := exec.CommandContext(ctx, busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("list applets of busybox: %w", err)
	}
	if err := addProgram(ctx, a, "/bin/busybox", busybox); err != nil {
		return err
	}
	for _, name := range strings.Fields(string(applets)) {
		if name != "modprobe" {
			a.link("/bin/"+name, "busybox")
		}
	}
	return nil
}

// addProgram adds an executable or a library, and the libraries it needs at
// the paths where the host has them.
func addProgram(ctx context.Context, a *archive, name, host string) error {
	a.file(name, host)
	out, err := exec.CommandContext(ctx, "ldd", host).CombinedOutput()
	if err != nil {
		// the only failure of ldd for a readable file: it is static
		if strings.Contains(string(out), "not a dynamic executable") {
			return nil
		}
		return fmt.Errorf("ldd %s: %w: %s", host, err, out)
	}
	for line := range strings.Lines(string(out)) {
		for _, w := range strings.Fields(line) {
			if strings.HasPrefix(w, "/") {
				a.file(w, w)
			}
		}
		if strings.Contains(line, "not found") {
			return fmt.Errorf("ldd %s: %s", host, strings.TrimSpace(line))
		}
	}
	return nil
}
