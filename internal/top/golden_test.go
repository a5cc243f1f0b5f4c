// SPDX-License-Identifier: Apache-2.0

package top_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/charmbracelet/x/ansi"
	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/internal/top/screens"
)

var update = flag.Bool("update", false, "write the golden files")

const golden = "testdata/golden.ummurec"

// Each view of the golden recording, at three sizes.
func TestGolden(t *testing.T) {
	for _, size := range []struct{ width, height int }{{40, 10}, {80, 24}, {200, 50}} {
		for _, scene := range screens.Scenes {
			name := fmt.Sprintf("%s-%dx%d", scene.Name, size.width, size.height)
			t.Run(name, func(t *testing.T) {
				p, closer, err := screens.Open(golden, size.width, size.height)
				if err != nil {
					t.Fatal(err)
				}
				defer closer.Close()
				if err := p.Press(scene.Keys...); err != nil {
					t.Fatal(err)
				}
				got := p.Screen()
				lines := strings.Split(strings.TrimSuffix(got, "\n"), "\n")
				if len(lines) != size.height {
					t.Errorf("%d lines on a screen of %d", len(lines), size.height)
				}
				for i, l := range lines {
					if w := ansi.StringWidth(l); w > size.width {
						t.Errorf("line %d is %d wide: %q", i, w, l)
					}
				}
				file := filepath.Join("testdata", "screens", name+".txt")
				if *update {
					if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
						t.Fatal(err)
					}
					if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
						t.Fatal(err)
					}
				}
				want, err := os.ReadFile(file)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(string(want), got); d != "" {
					t.Errorf("(-want +got; go test ./internal/top -update writes it):\n%s", d)
				}
			})
		}
	}
}

// The screens in the documents are those of the recording, and each view is in one.
func TestDocuments(t *testing.T) {
	all := ""
	for _, name := range []string{"../../README.md", "../../docs/ummutop.md"} {
		b, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		want, err := screens.Fill(string(b), golden)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(want, string(b)); d != "" {
			t.Errorf("%s is not fresh: make generate (-want +got):\n%s", name, d)
		}
		all += want
	}
	for _, view := range []string{"processes", "process", "registrations", "findings", "finding", "hooks", "explain"} {
		if !strings.Contains(all, "<!-- screen "+view+" ") {
			t.Errorf("no document shows %s", view)
		}
	}
}
