// SPDX-License-Identifier: Apache-2.0

//go:build linux

// Package verdict remembers what self-tests found, until the next boot, so
// that a program may take the strongest tier that passed without testing it at
// each start. A verdict holds for one boot of one kernel and one version of the
// kernel side; of anything else nothing is known.
package verdict

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf"
)

// Verdict is what became of the self-test of one tier.
type Verdict struct {
	Fit bool `json:"fit"`
	// Reason says why not.
	Reason string `json:"reason,omitempty"`
}

// key is what the verdicts of a file hold for.
type key struct {
	Boot       string `json:"boot"`
	Kernel     string `json:"kernel"`
	KernelSide string `json:"kernel_side"`
}

type file struct {
	For      key                `json:"for"`
	Verdicts map[string]Verdict `json:"verdicts"`
}

// Verdicts are the verdicts by tier name.
type Verdicts map[string]Verdict

// here is the key of this boot, kernel and program.
func here() (key, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return key{}, err
	}
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return key{}, fmt.Errorf("read kernel version: %w", err)
	}
	return key{
		Boot:       strings.TrimSpace(string(boot)),
		Kernel:     unix.ByteSliceToString(u.Release[:]) + " " + unix.ByteSliceToString(u.Version[:]),
		KernelSide: bpf.Digest(),
	}, nil
}

// path is where this user's verdicts are kept.
func path() (string, error) {
	dir, err := os.UserCacheDir()
	if err != nil {
		return "", err
	}
	return filepath.Join(dir, "ummu", "tiers.json"), nil
}

// errForeign: somebody else could have written the file.
var errForeign = errors.New("not only this user can write it")

// Load returns the verdicts that hold here; none is no error. It fails if they
// cannot be read, or if others than this user could have written them.
func Load() (Verdicts, error) {
	name, err := path()
	if err != nil {
		return nil, fmt.Errorf("find verdicts: %w", err)
	}
	k, err := here()
	if err != nil {
		return nil, fmt.Errorf("read verdicts: %w", err)
	}
	v, err := load(name, k)
	if err != nil {
		return nil, fmt.Errorf("read verdicts: %w", err)
	}
	return v, nil
}

func load(name string, k key) (Verdicts, error) {
	f, err := os.OpenFile(name, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return nil, fmt.Errorf("stat %s: %w", name, err)
	}
	if int(st.Uid) != os.Geteuid() || st.Mode&0o022 != 0 || st.Mode&unix.S_IFMT != unix.S_IFREG {
		return nil, fmt.Errorf("%s: %w", name, errForeign)
	}
	var x file
	if err := json.NewDecoder(f).Decode(&x); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if x.For != k {
		return nil, nil
	}
	return x.Verdicts, nil
}

// Save adds verdicts to those that hold here. Of two programs that save at the
// same time one may be forgotten.
func Save(add Verdicts) error {
	name, err := path()
	if err != nil {
		return fmt.Errorf("find verdicts: %w", err)
	}
	k, err := here()
	if err != nil {
		return fmt.Errorf("save verdicts: %w", err)
	}
	if err := save(name, k, add); err != nil {
		return fmt.Errorf("save verdicts: %w", err)
	}
	return nil
}

func save(name string, k key, add Verdicts) error {
	all, err := load(name, k)
	if err != nil || all == nil { // what cannot be read is written anew
		all = Verdicts{}
	}
	for tier, v := range add {
		all[tier] = v
	}
	b, err := json.MarshalIndent(file{k, all}, "", "\t")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(name), 0o700); err != nil {
		return err
	}
	f, err := os.CreateTemp(filepath.Dir(name), "tiers-")
	if err != nil {
		return err
	}
	_, err = f.Write(append(b, '\n'))
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), name)
	}
	if err != nil {
		os.Remove(f.Name())
	}
	return err
}
