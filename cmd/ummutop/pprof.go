// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/ummu/ummu/internal/top"
)

// writeProfile writes the call sites for go tool pprof.
func writeProfile(name string, d *data, s *top.State) error {
	p, err := d.activity().Profile(s.Meta.MonotonicZero)
	if err != nil {
		return err
	}
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("write profile: %w", err)
	}
	if err := errors.Join(p.Write(f), f.Close()); err != nil {
		return fmt.Errorf("write profile: %w", err)
	}
	return nil
}
