// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// fake writes a shell script that takes the place of ummufeed.
func fake(t *testing.T, body string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ummufeed")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+body), 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

// skipFlags runs the command behind "--".
const skipFlags = `while [ "$1" != -- ]; do shift; done; shift; "$@" || exit $?` + "\n"

var trueProgram = Program{Name: "true", Command: func(string) []string { return []string{"true"} }}

// TestRunBlind: an ummufeed that sees nothing has missed every call.
func TestRunBlind(t *testing.T) {
	keep := t.TempDir()
	o := Options{Keep: keep, Ummufeed: fake(t, skipFlags+
		`echo '{"meta":{"tier":"none"}}'; echo '{"summary":{"records":0,"lost":0,"complete":true}}'`)}
	r, err := Run(context.Background(), trueProgram, o)
	if err != nil {
		t.Fatal(err)
	}
	if r.OK() || r.Program != "true" || r.Calls == 0 || r.Missing != r.Calls || r.Invented != 0 {
		t.Errorf("got %v, OK %t; want all missing", r, r.OK())
	}
	for _, name := range []string{"true.strace", "true.ndjson"} {
		if _, err := os.Stat(filepath.Join(keep, name)); err != nil {
			t.Error(err)
		}
	}
}

func TestRunFails(t *testing.T) {
	ctx := context.Background()
	t.Run("exit code", func(t *testing.T) {
		_, err := Run(ctx, trueProgram, Options{Ummufeed: fake(t, "echo no privileges >&2; exit 4")})
		var e *RunError
		if !errors.As(err, &e) || e.Stderr != "no privileges" {
			t.Errorf("got %v", err)
		}
	})
	t.Run("output of the program among the records", func(t *testing.T) {
		p := Program{Name: "echo", Command: func(string) []string { return []string{"echo", "hello"} }}
		if _, err := Run(ctx, p, Options{Ummufeed: fake(t, skipFlags)}); !errors.Is(err, ErrStream) {
			t.Errorf("got %v, want %v", err, ErrStream)
		}
	})
	t.Run("time", func(t *testing.T) {
		p := Program{Name: "sleep", Command: func(string) []string { return []string{"sleep", "1000"} }}
		_, err := Run(ctx, p, Options{Ummufeed: fake(t, skipFlags), Timeout: 200 * time.Millisecond})
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v, want %v", err, context.DeadlineExceeded)
		}
	})
	t.Run("options", func(t *testing.T) {
		if _, err := Run(ctx, trueProgram, Options{}); !errors.Is(err, ErrNoUmmufeed) {
			t.Errorf("got %v, want %v", err, ErrNoUmmufeed)
		}
	})
	t.Run("preparation", func(t *testing.T) {
		p := Program{Name: "p", Prepare: func(context.Context, string) error { return errNoLibrary }}
		if _, err := Run(ctx, p, Options{Ummufeed: "x"}); !errors.Is(err, errNoLibrary) {
			t.Errorf("got %v, want %v", err, errNoLibrary)
		}
	})
}

func TestSelect(t *testing.T) {
	all, err := Programs("../../test/programs")
	if err != nil {
		t.Fatal(err)
	}
	names := func(ps []Program) string {
		var s []string
		for _, p := range ps {
			s = append(s, p.Name)
		}
		return strings.Join(s, " ")
	}
	if got, want := names(all), "python3 git sort go-build jemalloc tcmalloc direct go"; got != want {
		t.Errorf("programs are %q, want %q", got, want)
	}
	if got, err := Select(all, []string{"go", "git"}); err != nil || names(got) != "go git" {
		t.Errorf("got %q, %v", names(got), err)
	}
	if _, err := Select(all, []string{"cobol"}); err == nil {
		t.Error("an unknown name is no error")
	}
}
