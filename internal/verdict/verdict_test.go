// SPDX-License-Identifier: Apache-2.0

//go:build linux

package verdict

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestVerdictsOfThisBoot(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	if v, err := Load(); v != nil || err != nil {
		t.Errorf("before the first: %v, %v", v, err)
	}
	if err := Save(Verdicts{"syscall": {Fit: true}}); err != nil {
		t.Fatal(err)
	}
	if err := Save(Verdicts{"mm": {Reason: "why not"}}); err != nil {
		t.Fatal(err)
	}
	got, err := Load()
	if d := cmp.Diff(Verdicts{"syscall": {Fit: true}, "mm": {Reason: "why not"}}, got); d != "" || err != nil {
		t.Errorf("%v, %s", err, d)
	}
}

// What holds for another boot, kernel or kernel side says nothing here.
func TestVerdictsOfOthers(t *testing.T) {
	k, err := here()
	if err != nil {
		t.Fatal(err)
	}
	if k.Boot == "" || k.Kernel == "" || len(k.KernelSide) < 32 {
		t.Errorf("%+v", k)
	}
	for what, other := range map[string]key{
		"boot": {"x", k.Kernel, k.KernelSide}, "kernel": {k.Boot, "x", k.KernelSide}, "kernel side": {k.Boot, k.Kernel, "x"},
	} {
		name := filepath.Join(t.TempDir(), "d", "tiers.json")
		if err := save(name, k, Verdicts{"mm": {Fit: true}}); err != nil {
			t.Fatal(err)
		}
		if v, err := load(name, k); err != nil || !v["mm"].Fit {
			t.Errorf("its own: %v, %v", v, err)
		}
		if v, err := load(name, other); v != nil || err != nil {
			t.Errorf("another %s: %v, %v", what, v, err)
		}
		if err := save(name, other, Verdicts{"syscall": {Fit: true}}); err != nil {
			t.Fatal(err)
		}
		if v, err := load(name, other); err != nil || len(v) != 1 {
			t.Errorf("another %s: the old verdicts live on: %v, %v", what, v, err)
		}
	}
}

// A file that others can write, or that is no list, is not believed, and is
// written anew.
func TestForeignFile(t *testing.T) {
	k, err := here()
	if err != nil {
		t.Fatal(err)
	}
	for what, spoil := range map[string]func(string) error{
		"mode":    func(name string) error { return os.Chmod(name, 0o666) },
		"owner":   func(name string) error { return os.Chown(name, 65534, 65534) },
		"content": func(name string) error { return os.WriteFile(name, []byte("{"), 0o600) },
		"link":    func(name string) error { return errors.Join(os.Rename(name, name+"2"), os.Symlink(name+"2", name)) },
	} {
		name := filepath.Join(t.TempDir(), "tiers.json")
		if err := save(name, k, Verdicts{"mm": {Fit: true}}); err != nil {
			t.Fatal(err)
		}
		if err := spoil(name); err != nil {
			t.Fatal(err)
		}
		if v, err := load(name, k); v != nil || err == nil {
			t.Errorf("%s: %v, %v", what, v, err)
		}
		if err := save(name, k, Verdicts{"syscall": {Fit: true}}); err != nil {
			t.Fatal(err)
		}
		if v, err := load(name, k); err != nil || len(v) != 1 || !v["syscall"].Fit {
			t.Errorf("%s: written anew: %v, %v", what, v, err)
		}
	}
}
