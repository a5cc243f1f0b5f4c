// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"io"
	"testing"

	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/tracer"
)

func TestFlagValues(t *testing.T) {
	var z Size
	for s, want := range map[string]Size{"0": 0, "17": 17, "4K": 4096, "2m": 2 << 20, "1G": 1 << 30, "3T": 3 << 40} {
		if err := z.Set(s); err != nil || z != want {
			t.Errorf("size %q: %d, %v", s, z, err)
		}
	}
	for _, s := range []string{"", "K", "-1", "1P", "1.5K", "99999999999T"} {
		if z.Set(s) == nil {
			t.Errorf("size %q is accepted", s)
		}
	}
	for _, s := range []string{"", "0", "-1", "a", "99999999999", "1,"} {
		if new(PIDs).Set(s) == nil {
			t.Errorf("pid %q is accepted", s)
		}
	}
}

func TestExitCode(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, 0}, {io.EOF, 1}, {Usagef("x"), 2}, {fmt.Errorf("a: %w", tracer.ErrNotSupported), 3}, {fmt.Errorf("a: %w", tracer.ErrPermission), 4},
		{fmt.Errorf("a: %w", recording.ErrCorrupt), 5}, {fmt.Errorf("a: %w", recording.ErrTruncated), 5}, {Exit(77, nil), 77},
	} {
		if got := ExitCode(c.err); got != c.want {
			t.Errorf("%v: %d, want %d", c.err, got, c.want)
		}
	}
}
