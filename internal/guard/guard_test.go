// SPDX-License-Identifier: Apache-2.0

package guard

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// The guards of the kernel side are bits in the order of its header.
func TestKernelSideInOrder(t *testing.T) {
	header, err := os.ReadFile("../../bpf/guard.bpf.h")
	if err != nil {
		t.Fatal(err)
	}
	var in []string
	for _, m := range regexp.MustCompile(`(?m)^\tGUARD_(\w+),`).FindAllStringSubmatch(string(header), -1) {
		in = append(in, strings.ToLower(strings.ReplaceAll(m[1], "_", "-")))
	}
	var want []string
	for g := range endOfKernelSide {
		want = append(want, g.String())
	}
	if d := cmp.Diff(want, in); d != "" {
		t.Errorf("bpf/guard.bpf.h (-here +there):\n%s", d)
	}
}

func TestNames(t *testing.T) {
	seen := make(map[string]bool)
	for _, g := range All() {
		if n := g.String(); n == "" || seen[n] {
			t.Errorf("guard %d is named %q", g, n)
		}
		seen[g.String()] = true
	}
}

func TestNothingIsOff(t *testing.T) {
	for _, g := range All() {
		if Off(g) {
			t.Errorf("%v is off", g)
		}
	}
	if m := KernelMask(); m != 0 {
		t.Errorf("mask of the kernel side: %#x", m)
	}
}
