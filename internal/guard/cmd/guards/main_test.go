// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/ummu/ummu/internal/guard"
	"github.com/ummu/ummu/test/extras"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

const root = "../../../.."

// Each guard has a row, each row a test that is there, and the page is that
// of these rows.
func TestRows(t *testing.T) {
	if err := complete(); err != nil {
		t.Error(err)
	}
	doc, err := os.ReadFile(filepath.Join(root, output))
	if err != nil {
		t.Fatal(err)
	}
	source := make(map[string]string)
	for _, r := range slices.Concat(rows, kvmRows) {
		if source[r.pkg] == "" {
			files, err := filepath.Glob(filepath.Join(root, r.pkg, "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range files {
				b, err := os.ReadFile(f)
				if err != nil {
					t.Fatal(err)
				}
				source[r.pkg] += string(b)
			}
		}
		name, _, _ := strings.Cut(r.test, "/")
		if !strings.Contains(source[r.pkg], fmt.Sprintf("\nfunc %s(t *testing.T) {", name)) {
			t.Errorf("%s: no %s in %s", r.guard, name, r.pkg)
		}
		if !strings.Contains(string(doc), line(r)) {
			t.Errorf("%s: run make guards, %s is not of these rows", r.guard, output)
		}
	}
	if n := strings.Count(string(doc), "| failed |") + strings.Count(string(doc), "| hung |") + strings.Count(string(doc), "| crashed |"); n < len(rows) || n+strings.Count(string(doc), "| in guests |") != len(rows)+len(kvmRows) {
		t.Errorf("%s has %d rows with an outcome, want %d, and %d more", output, n, len(rows), len(kvmRows))
	}
}

// The rows that need KVM, in guests, where no toolchain is.
func TestKVMRows(t *testing.T) {
	if !machine.Full() {
		t.Skip("make guards does the same on a host; make test-vm runs this test in guests")
	}
	bins, binDir := make(map[string]string), t.TempDir()
	for _, r := range kvmRows {
		t.Run(r.guard.String()+"/"+r.pkg+"/"+r.test, func(t *testing.T) {
			if bins[r.pkg] == "" {
				name := r.pkg[strings.LastIndexByte(r.pkg, '/')+1:] + "-guards"
				bin, err := extras.Build(t.Context(), binDir, name)
				if err != nil {
					t.Fatal(err)
				}
				bins[r.pkg] = bin
			}
			const patience = 2 * time.Minute // for emulated processors
			dir := t.TempDir()
			if o, out := test(t.Context(), bins[r.pkg], dir, r, "", patience); o != passed {
				t.Fatalf("with all guards on: %s\n%s", o, out)
			}
			o, out := test(t.Context(), bins[r.pkg], dir, r, r.guard.String(), patience)
			if r.guard == guard.WitnessAsked && !tracer.Preemptible() {
				if o != passed { // there is nothing to be asked
					t.Errorf("off: %s\n%s", o, out)
				}
				return
			}
			if o == passed || o == notRun || o == skipped {
				t.Errorf("off: %s\n%s", o, out)
			}
		})
	}
}
