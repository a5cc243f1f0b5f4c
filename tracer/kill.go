// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/guard"
)

// Kill marks every watch dead, those that are opened from now on too, and
// leaves everything else to Close: who must wait for its clients before Close
// calls it first. An error means that no watch was marked.
func (t *Tracer) Kill() error {
	if err := t.begin(); err != nil {
		return err
	}
	defer t.ops.Done()
	if guard.Off(guard.CloseMarks) {
		return nil
	}
	return t.control(ctlEpoch, layout.GenDeath, 0, 1)
}
