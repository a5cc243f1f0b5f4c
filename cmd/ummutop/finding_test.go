// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/ummu/ummu/test/planted"
)

// line matches a function with its file and line.
func line(function string) *regexp.Regexp {
	return regexp.MustCompile(`\b` + function + ` \(\S*planted\.c:\d+\)`)
}

// A planted mistake of a program that knows nothing of us is found while it
// runs, with both stacks to function and line, and told in the terminal.
func TestPlantedMistake(t *testing.T) {
	t.Parallel()
	dir, err := planted.Build(context.Background(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(dir, string(planted.Uring))
	r := ummutop(t, nil, "--tier", "syscall", "--view", "findings", "-o", "ndjson", "--", program, "unmapped")
	samples, _, found := lines(t, r.out)
	if r.code != 0 || len(samples) == 0 || len(found) == 0 {
		t.Fatalf("%+v", r)
	}
	f := found[len(found)-1]
	by, changed := fmt.Sprint(f["registered_by"]), fmt.Sprint(f["changed_by"])
	if f["class"] != "freed-while-registered" || f["certain"] != true || f["kind"] != "unmap" || f["call"] != "munmap" ||
		!line("unmapped").MatchString(by) || !line("main").MatchString(by) || !line("unmapped").MatchString(changed) {
		t.Errorf("%v", f)
	}
	r = ummutop(t, nil, "--tier", "syscall", "--view", "findings", "-o", "ndjson", "--", program, "correct")
	if _, _, found := lines(t, r.out); r.code != 0 || len(found) != 0 {
		t.Errorf("of a correct program: %+v", r)
	}

	x := openTerminal(t, 120, 40, nil, "--tier", "syscall", "-d", "200ms", "--view", "findings", "--", program, "reused")
	x.wait(`\[findings\]  hooks *\n`, `(?m)^>.*freed-while-registered`)
	x.press("Enter")
	x.wait(`> finding 1`, `registered .* with io_uring`, `reused \(\S*planted.c:\d+\)`, `changed: unmap of .* by munmap`)
	x.press("Enter")
	x.wait(`address 0x[0-9a-f]+ of process`, `register +[0-9a-f]`, `unmap +[0-9a-f].*munmap\(\) = 0`)
	x.press("q")
	x.restored(0)
}
