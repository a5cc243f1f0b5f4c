// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"syscall"
	"time"
)

// A Program is one command to compare. Prepare, if not nil, runs unwatched in
// the empty directory the command will run in.
type Program struct {
	Name    string
	Prepare func(ctx context.Context, dir string) error
	// Command gives the arguments, Env the variables to set for the
	// command but not for strace, both as they are in dir.
	Command func(dir string) []string
	Env     []string
}

// Options of [Run].
type Options struct {
	Ummufeed string        // path of the program; required
	Strace   string        // path of strace; empty: from PATH
	Keep     string        // directory for strace's and ummufeed's output; empty: not kept
	Timeout  time.Duration // per program; 0: two minutes
}

// ErrNoUmmufeed means that Options do not say which ummufeed to run.
var ErrNoUmmufeed = errors.New("no path of ummufeed")

// Validate checks the options.
func (o *Options) Validate() error {
	if o.Ummufeed == "" {
		return ErrNoUmmufeed
	}
	return nil
}

// RunError says how a watched command ended and what it printed.
type RunError struct {
	Program string
	Stderr  string // its end
	Err     error
}

func (e *RunError) Error() string {
	return fmt.Sprintf("run %s: %v: %s", e.Program, e.Err, e.Stderr)
}

func (e *RunError) Unwrap() error { return e.Err }

// Run runs the program under strace under ummufeed and compares the two. A
// program that fails is a *[RunError]; so is one that prints anything to its
// standard output, which it shares with the records, because those are then
// not readable.
func Run(ctx context.Context, p Program, o Options) (*Result, error) {
	if err := o.Validate(); err != nil {
		return nil, fmt.Errorf("run %s: %w", p.Name, err)
	}
	if o.Strace == "" {
		path, err := exec.LookPath("strace")
		if err != nil {
			return nil, fmt.Errorf("find strace: %w", err)
		}
		o.Strace = path
	}
	if o.Timeout == 0 {
		o.Timeout = 2 * time.Minute
	}
	ctx, cancel := context.WithTimeout(ctx, o.Timeout)
	defer cancel()

	dir, err := os.MkdirTemp("", "conform-"+p.Name+"-")
	if err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	defer os.RemoveAll(dir)
	work := filepath.Join(dir, "work")
	if err := os.Mkdir(work, 0o755); err != nil {
		return nil, fmt.Errorf("make directory: %w", err)
	}
	if p.Prepare != nil {
		if err := p.Prepare(ctx, work); err != nil {
			return nil, fmt.Errorf("prepare %s: %w", p.Name, err)
		}
	}
	out := dir
	if o.Keep != "" {
		out = o.Keep
		if err := os.MkdirAll(out, 0o755); err != nil {
			return nil, fmt.Errorf("make directory: %w", err)
		}
	}

	shown, records := filepath.Join(out, p.Name+".strace"), filepath.Join(out, p.Name+".ndjson")
	start := time.Now()
	if err := watch(ctx, p, o, work, shown, records); err != nil {
		return nil, err
	}
	res, err := compareFiles(shown, records)
	if err != nil {
		return nil, fmt.Errorf("compare %s: %w", p.Name, err)
	}
	res.Program = p.Name
	res.Seconds = time.Since(start).Seconds()
	return res, nil
}

// watch runs the command and writes both files.
func watch(ctx context.Context, p Program, o Options, work, shown, records string) error {
	stdout, err := os.Create(records)
	if err != nil {
		return fmt.Errorf("create file of records: %w", err)
	}
	defer stdout.Close()

	args := append([]string{"run", "-o", "ndjson", "--", o.Strace}, straceArgs(shown)...)
	for _, e := range p.Env {
		args = append(args, "-E", e)
	}
	args = append(append(args, "--"), p.Command(work)...)
	var stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, o.Ummufeed, args...)
	cmd.Dir = work
	cmd.Stdout = stdout
	cmd.Stderr = &stderr
	// The whole tree goes when time is up, not ummufeed alone.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 10 * time.Second
	if err := cmd.Run(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		tail := stderr.Bytes()
		return &RunError{p.Name, string(bytes.TrimSpace(tail[max(0, len(tail)-2000):])), err}
	}
	if err := stdout.Close(); err != nil {
		return fmt.Errorf("write records: %w", err)
	}
	return nil
}

func compareFiles(shown, records string) (*Result, error) {
	f, err := os.Open(shown)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	log, err := ParseStrace(f)
	if err != nil {
		return nil, err
	}
	g, err := os.Open(records)
	if err != nil {
		return nil, err
	}
	defer g.Close()
	stream, err := ParseStream(g)
	if err != nil {
		return nil, err
	}
	return Compare(log, stream), nil
}

// Programs are the programs of `make conform`. The sources of three of them
// are in dir (test/programs) and built with cc and go.
func Programs(dir string) ([]Program, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	// The allocators are set to give memory back as soon as they can.
	churn := func(name, env string, libs ...string) Program {
		lib := preload(libs...)
		return Program{
			Name: name,
			Prepare: func(ctx context.Context, work string) error {
				if lib == "" {
					return fmt.Errorf("%w: none of %v", errNoLibrary, libs)
				}
				return build(ctx, work, "cc", "-O2", "-pthread", "-o", "prog", filepath.Join(dir, "churn.c"))
			},
			Command: prog("6", "6000"),
			Env:     []string{"LD_PRELOAD=" + lib, env},
		}
	}
	return []Program{
		{
			Name:    "python3",
			Command: func(string) []string { return []string{find("python3"), "-c", pythonScript} },
		},
		{
			Name:    "git",
			Prepare: gitRepository,
			Command: func(work string) []string {
				return []string{"git", "clone", "-q", "file://" + filepath.Join(work, "origin"), "copy"}
			},
		},
		{
			Name:    "sort",
			Prepare: largeFile,
			Command: func(string) []string {
				return []string{"sort", "--parallel=2", "-S", "24M", "-T", ".", "-o", "sorted", "large"}
			},
			Env: []string{"LC_ALL=C"},
		},
		{
			Name:    "go-build",
			Prepare: goModule,
			Command: func(string) []string { return []string{"go", "build", "-o", "prog", "."} },
		},
		churn("jemalloc", "MALLOC_CONF=dirty_decay_ms:0,muzzy_decay_ms:0,retain:false", "libjemalloc.so.2"),
		churn("tcmalloc", "TCMALLOC_RELEASE_RATE=10", "libtcmalloc_minimal.so.4", "libtcmalloc.so.4"),
		{
			Name: "direct",
			Prepare: func(ctx context.Context, work string) error {
				return build(ctx, work, "cc", "-O2", "-static", "-pthread", "-o", "prog", filepath.Join(dir, "direct.c"))
			},
			Command: prog(),
		},
		{
			Name: "go",
			Prepare: func(ctx context.Context, work string) error {
				return build(ctx, filepath.Join(dir, "gomem"), "go", "build", "-o", filepath.Join(work, "prog"), ".")
			},
			Command: prog(),
		},
	}, nil
}

// prog is the command built as "prog" in its directory.
func prog(args ...string) func(string) []string {
	return func(work string) []string { return append([]string{filepath.Join(work, "prog")}, args...) }
}

var errNoLibrary = errors.New("allocator library not installed")

// preload returns the path of the first library that is there, or "".
func preload(names ...string) string {
	for _, n := range names {
		for _, pattern := range []string{"/usr/lib/*-linux-gnu/", "/usr/lib64/", "/usr/lib/"} {
			if found, err := filepath.Glob(pattern + n); err == nil && len(found) > 0 {
				return found[0]
			}
		}
	}
	return ""
}

// find prefers the system's program: a PATH may begin with wrappers.
func find(name string) string {
	if path := "/usr/bin/" + name; syscall.Access(path, 1) == nil {
		return path
	}
	return name
}

func build(ctx context.Context, dir string, args ...string) error {
	cmd := exec.CommandContext(ctx, args[0], args[1:]...)
	cmd.Dir = dir
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s", args, err, bytes.TrimSpace(out))
	}
	return nil
}

const pythonScript = `
import gc, json, mmap, subprocess, threading
def work(n):
    for i in range(40):
        a = bytearray(1 << (14 + i % 9)); a[-1] = 1
        m = mmap.mmap(-1, 1 << 16); m[5] = 1
        m.resize(1 << 18) if i % 3 else m.resize(1 << 15)
        m.madvise(mmap.MADV_DONTNEED)
        m.close()
        json.loads(json.dumps([a[0]] * 1000))
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for t in threads: t.start()
for t in threads: t.join()
gc.collect()
subprocess.run(["true"], check=True)
`

// gitRepository makes a repository with enough objects that cloning it packs,
// sends and indexes them.
func gitRepository(ctx context.Context, work string) error {
	origin := filepath.Join(work, "origin")
	if err := build(ctx, work, "git", "init", "-q", origin); err != nil {
		return err
	}
	for i := range 3 {
		for j := range 40 {
			name := filepath.Join(origin, fmt.Sprintf("file%d", j))
			if err := os.WriteFile(name, noise(20_000+1000*j, byte(i*40+j)), 0o644); err != nil {
				return err
			}
		}
		if err := build(ctx, origin, "git", "add", "-A"); err != nil {
			return err
		}
		if err := build(ctx, origin, "git", "-c", "user.name=conform", "-c", "user.email=conform@localhost", "-c", "commit.gpgsign=false",
			"commit", "-q", "-m", fmt.Sprintf("commit %d", i)); err != nil {
			return err
		}
	}
	return nil
}

// largeFile writes 50 MB of lines.
func largeFile(_ context.Context, work string) error {
	f, err := os.Create(filepath.Join(work, "large"))
	if err != nil {
		return err
	}
	for i := range 50 {
		if _, err := f.Write(noise(1_000_000, byte(i))); err != nil {
			return errors.Join(err, f.Close())
		}
	}
	return f.Close()
}

// noise is n bytes of printable lines that are the same in every run.
func noise(n int, seed byte) []byte {
	b := make([]byte, n)
	x := uint64(seed)*0x9E3779B97F4A7C15 + 1
	for i := range b {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		b[i] = 'a' + byte(x%26)
		if i%72 == 71 {
			b[i] = '\n'
		}
	}
	return b
}

// goModule writes a package that no build cache holds yet, so that building
// it compiles and links. What it imports is built before, unwatched.
func goModule(ctx context.Context, work string) error {
	write := func(stamp string) error {
		src := "package main\n\nfunc main() { println(" + fmt.Sprintf("%q", stamp) + ") }\n"
		return os.WriteFile(filepath.Join(work, "main.go"), []byte(src), 0o644)
	}
	if err := os.WriteFile(filepath.Join(work, "go.mod"), []byte("module conform\n\ngo 1.21\n"), 0o644); err != nil {
		return err
	}
	if err := write("before"); err != nil {
		return err
	}
	if err := build(ctx, work, "go", "build", "-o", "prog", "."); err != nil {
		return err
	}
	return write(time.Now().Format(time.RFC3339Nano))
}

// Select returns the programs with the given names, all if there are none.
func Select(all []Program, names []string) ([]Program, error) {
	if len(names) == 0 {
		return all, nil
	}
	var out []Program
	for _, n := range names {
		i := slices.IndexFunc(all, func(p Program) bool { return p.Name == n })
		if i < 0 {
			return nil, fmt.Errorf("no program %q", n)
		}
		out = append(out, all[i])
	}
	return out, nil
}
