// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// confession is what this binary says when it runs again with less.
type confession struct {
	Text                     string
	Permission, NotSupported bool
	Hook                     *HookError
	Tier                     string
	Unattached               int // hooks with an error
}

// play is the main function in the role that UMMU_TEST_ROLE names.
func play(role string) {
	if way, ok := strings.CutPrefix(role, "owner-"); ok {
		if err := ownAndEnd(way); err != nil {
			fmt.Fprintln(os.Stderr, "owner:", err)
			os.Exit(1)
		}
		return
	}
	if role == "nobtf" {
		// an empty directory where the kernel's types were, for us alone
		dir, err := os.MkdirTemp("", "ummu-nobtf-")
		if err == nil {
			defer os.RemoveAll(dir)
			err = errors.Join(
				unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
				unix.Mount(dir, "/sys/kernel/btf", "", unix.MS_BIND, ""))
		}
		if err != nil {
			fmt.Fprintln(os.Stderr, "hide BTF:", err)
			os.Exit(1)
		}
		defer unix.Unmount("/sys/kernel/btf", unix.MNT_DETACH)
	}
	var c confession
	t, err := Open(Options{})
	if err == nil {
		t.Close()
	} else {
		c.Text = err.Error()
		c.Permission, c.NotSupported = errors.Is(err, ErrPermission), errors.Is(err, ErrNotSupported)
		errors.As(err, &c.Hook)
		if c.Hook != nil {
			c.Hook.Err = nil // an interface cannot be read back
		}
	}
	cov := Probe()
	c.Tier = cov.Tier.String()
	for _, h := range cov.Hooks {
		if h.Err != nil && !h.Attached {
			c.Unattached++
		}
	}
	if err := json.NewEncoder(os.Stdout).Encode(c); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func perform(t *testing.T, role string, attr *syscall.SysProcAttr) confession {
	t.Helper()
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), "UMMU_TEST_ROLE="+role)
	cmd.Dir, cmd.Stderr, cmd.SysProcAttr = "/", os.Stderr, attr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("run as %s: %v", role, err)
	}
	var c confession
	if err := json.Unmarshal(out, &c); err != nil {
		t.Fatalf("%v in %q", err, out)
	}
	return c
}
