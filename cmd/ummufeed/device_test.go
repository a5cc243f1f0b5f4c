// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/ummu/ummu/internal/command"
)

// A device that is not there, and a command that was built without RDMA.
func TestDemoDevice(t *testing.T) {
	r := ummufeed(t, "demo", "--device", "no-such-device")
	if r.code != command.ExitUnsupported || !strings.Contains(r.errout, `"no-such-device"`) {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
	static := filepath.Join(t.TempDir(), "ummufeed")
	build := exec.Command("go", "build", "-o", static, ".")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	r = finish(t, exec.Command(static, "demo", "--device", "rxe0"))
	if r.code != command.ExitUnsupported || !strings.Contains(r.errout, "CGO_ENABLED=1") || !strings.Contains(r.errout, "libibverbs-dev") {
		t.Errorf("code %d: %s", r.code, r.errout)
	}
}
