// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// kernel is one that Debian publishes. The suites that have them change: the
// newest package that fits is taken, and none is an error.
type kernel struct {
	name    string         // as on the command line
	suite   string         // of Debian
	release *regexp.Regexp // of package names linux-image-RELEASE
	always  bool           // booted by make test-vm, not only by make test-kernels
	models  []string       // preemption: "default", and what preempt= can ask for
}

func releases(s string) *regexp.Regexp { return regexp.MustCompile(`^linux-image-(` + s + `)$`) }

var (
	fixed   = []string{"default"} // preempt= exists from 5.12
	dynamic = []string{"default", "full"}
	kernels = []kernel{
		{"5.10", "bullseye-security", releases(`5\.10\.0-[0-9]+-amd64`), false, fixed},
		{"6.1", "bookworm-security", releases(`6\.1\.0-[0-9]+-amd64`), true, dynamic},
		{"6.12", "bookworm-security", releases(`6\.12\.[0-9]+\+deb12-amd64`), true, dynamic},
		{"6.18", "trixie-backports", releases(`6\.18\.[0-9]+\+deb13-amd64`), false, dynamic},
		{"7.3", "trixie-backports", releases(`7\.3\.[0-9]+\+deb13-amd64`), false, dynamic},
	}
)

// store is where kernels are kept between runs, outside the source tree.
type store struct {
	dir string // absolute
	env []string
}

// openStore makes the store ready: an apt configuration of its own, with
// those of Debian's suites that the kernels need, from the mirror that the
// machine uses. The machine's own lists are not touched.
func openStore(ctx context.Context, dir string, wanted []kernel) (*store, error) {
	s := &store{dir: dir}
	for _, d := range []string{"lists/partial", "archives/partial"} {
		if err := os.MkdirAll(filepath.Join(dir, "apt", d), 0o755); err != nil {
			return nil, err
		}
	}
	main, security, err := mirrors(ctx)
	if err != nil {
		return nil, err
	}
	sources := make(map[string]bool)
	for _, k := range wanted {
		uri := main
		if strings.HasSuffix(k.suite, "-security") {
			uri = security
		}
		sources["deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] "+uri+" "+k.suite+" main\n"] = true
	}
	var list strings.Builder
	for _, l := range slices.Sorted(maps.Keys(sources)) {
		list.WriteString(l)
	}
	apt := filepath.Join(dir, "apt")
	conf := fmt.Sprintf(`Dir::Etc::sourcelist %q;
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists %q;
Dir::Cache %q;
APT::Sandbox::User "root";
Acquire::Languages "none";
Acquire::Retries "3";
`, apt+"/sources.list", apt+"/lists", apt)
	if err := errors.Join(
		os.WriteFile(apt+"/sources.list", []byte(list.String()), 0o644),
		os.WriteFile(apt+"/apt.conf", []byte(conf), 0o644),
	); err != nil {
		return nil, err
	}
	s.env = append(os.Environ(), "APT_CONFIG="+apt+"/apt.conf", "LC_ALL=C")
	if _, err := s.run(ctx, "", "apt-get", "-q", "update"); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err, "(going on with the lists of the last time)")
	}
	return s, nil
}

// lock keeps others that use the same store away until the returned function
// is called.
func lock(dir string) (func(), error) {
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return func() { f.Close() }, nil
}

// mirrors are the archive and the security archive of the machine's sources.
func mirrors(ctx context.Context) (main, security string, err error) {
	c := exec.CommandContext(ctx, "apt-get", "indextargets", "--format", "$(ORIGIN) $(REPO_URI) $(RELEASE)", "Identifier: Packages")
	out, err := c.Output()
	if err != nil {
		return "", "", fmt.Errorf("ask apt for the machine's sources: %w", err)
	}
	for line := range strings.Lines(string(out)) {
		w := strings.Fields(line)
		switch {
		case len(w) != 3 || w[0] != "Debian":
		case strings.HasSuffix(w[2], "-security"):
			security = w[1]
		case !strings.Contains(w[2], "-"):
			main = w[1]
		}
	}
	if main == "" || security == "" {
		return "", "", errors.New("the machine's apt sources have no Debian archive and security archive, where the kernels come from (apt-get update?)")
	}
	return main, security, nil
}

func (s *store) run(ctx context.Context, dir, name string, args ...string) (string, error) {
	c := exec.CommandContext(ctx, name, args...)
	c.Dir, c.Env = dir, s.env
	var errs strings.Builder
	c.Stderr = &errs
	out, err := c.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", name, strings.Join(args, " "), err, strings.TrimSpace(errs.String()))
	}
	return string(out), nil
}

// get returns the newest release of k, unpacked: s.dir/RELEASE has vmlinuz
// and lib/modules/RELEASE with the files of depmod.
func (s *store) get(ctx context.Context, k kernel) (release string, err error) {
	names, err := s.run(ctx, "", "apt-cache", "pkgnames", "linux-")
	if err != nil {
		return "", err
	}
	known := make(map[string]bool)
	for n := range strings.Lines(names) {
		n = strings.TrimSpace(n)
		known[n] = true
		if m := k.release.FindStringSubmatch(n); m != nil && (release == "" || newer(m[1], release)) {
			release = m[1]
		}
	}
	if release == "" {
		return "", fmt.Errorf("kernel %s: no package %v in Debian's %s", k.name, k.release, k.suite)
	}
	final := filepath.Join(s.dir, release)
	if _, err := os.Stat(final); err == nil {
		return release, nil
	}
	// from 7.2 the image and the modules are packages of their own
	var packages []string
	for _, p := range []string{"linux-image-", "linux-binary-", "linux-modules-"} {
		if known[p+release] {
			packages = append(packages, p+release)
		}
	}
	fmt.Fprintf(os.Stderr, "vm: downloading %s\n", strings.Join(packages, " "))
	dir, err := os.MkdirTemp(s.dir, "unpack-")
	if err != nil {
		return "", err
	}
	defer os.RemoveAll(dir)
	if _, err := s.run(ctx, dir, "apt-get", append([]string{"-q", "download"}, packages...)...); err != nil {
		return "", err
	}
	debs, err := filepath.Glob(dir + "/*.deb")
	if err != nil {
		return "", err
	}
	for _, d := range debs {
		if _, err := s.run(ctx, dir, "dpkg-deb", "-x", d, dir+"/root"); err != nil {
			return "", err
		}
	}
	tree := filepath.Join(dir, "tree")
	if err := os.MkdirAll(tree+"/lib/modules", 0o755); err != nil {
		return "", err
	}
	modules := tree + "/lib/modules/" + release
	if err := first(modules, dir+"/root/lib/modules/"+release, dir+"/root/usr/lib/modules/"+release); err != nil {
		return "", fmt.Errorf("kernel %s: modules: %w", release, err)
	}
	if err := first(tree+"/vmlinuz", dir+"/root/boot/vmlinuz-"+release, modules+"/vmlinuz"); err != nil {
		return "", fmt.Errorf("kernel %s: image: %w", release, err)
	}
	if _, err := s.run(ctx, "", "depmod", "-b", tree, release); err != nil {
		return "", err
	}
	return release, os.Rename(tree, final)
}

// first moves the first of the paths that exists.
func first(to string, from ...string) error {
	var err error
	for _, f := range from {
		if err = os.Rename(f, to); !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	return err
}

// newer compares release names, numbers as numbers.
func newer(a, b string) bool {
	na, nb := numbers(a), numbers(b)
	return slices.Compare(na, nb) > 0
}

func numbers(s string) []int {
	var ns []int
	for _, w := range strings.FieldsFunc(s, func(r rune) bool { return r < '0' || r > '9' }) {
		n, err := strconv.Atoi(w)
		if err != nil {
			continue
		}
		ns = append(ns, n)
	}
	return ns
}
