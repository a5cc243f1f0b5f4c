// SPDX-License-Identifier: Apache-2.0

package detector

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func write(t *testing.T, name, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(name, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// In the order of the dynamic linker: LD_LIBRARY_PATH, what the program names,
// the configuration, the standard directories.
func TestLibraries(t *testing.T) {
	dir := t.TempDir()
	write(t, filepath.Join(dir, "path", library), "")
	write(t, filepath.Join(dir, "bin", "lib", library), "")
	write(t, filepath.Join(dir, "empty", "other.so"), "")
	exe := filepath.Join(dir, "bin", "program")
	write(t, filepath.Join(dir, "main.c"), "int main(void) { return 0; }\n")
	c := exec.Command("gcc", "-o", exe, filepath.Join(dir, "main.c"), "-Wl,-rpath,$ORIGIN/lib:"+filepath.Join(dir, "empty"))
	if out, err := c.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	link := filepath.Join(dir, "link")
	if err := os.Symlink(exe, link); err != nil {
		t.Fatal(err)
	}
	want := []string{filepath.Join(dir, "path", library), filepath.Join(dir, "bin", "lib", library)}
	for _, name := range []string{exe, link} {
		got := libraries(name, filepath.Join(dir, "empty")+":"+filepath.Join(dir, "path"))
		if len(got) < 2 || !cmp.Equal(got[:2], want) {
			t.Errorf("%s: %v, want %v first", name, got, want)
		}
	}
	// libibverbs-dev brings it, where the linker looks without being told
	if got := libraries("", ""); len(got) == 0 {
		t.Error("the one of the system is not found")
	}
	script := filepath.Join(dir, "script")
	write(t, script, "#!/bin/sh\n")
	if got := runPath(script); got != nil {
		t.Errorf("of a script: %v", got)
	}
}

func TestConfigured(t *testing.T) {
	dir := t.TempDir()
	conf := filepath.Join(dir, "ld.so.conf")
	write(t, conf, "# comment\n/opt/a/lib # why\ninclude conf.d/*.conf\n\ninclude "+conf+"\n")
	write(t, filepath.Join(dir, "conf.d", "1.conf"), "/opt/b/lib\n")
	got := configured(conf, 0)
	if len(got) < 2 || got[0] != "/opt/a/lib" || got[1] != "/opt/b/lib" {
		t.Errorf("%v", got)
	}
	if configured(filepath.Join(dir, "none"), 0) != nil {
		t.Error("of no file")
	}
}
