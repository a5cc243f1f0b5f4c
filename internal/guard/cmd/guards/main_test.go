// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
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
	for _, r := range rows {
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
	if n := strings.Count(string(doc), "| failed |") + strings.Count(string(doc), "| hung |") + strings.Count(string(doc), "| crashed |"); n != len(rows) {
		t.Errorf("%s has %d rows, want %d", output, n, len(rows))
	}
}
