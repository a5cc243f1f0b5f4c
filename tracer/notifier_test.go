// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/test/machine"
)

// Programs tell a kernel without probes by ErrNotSupported, and find the hook
// that could not be attached below it.
func TestNoProbes(t *testing.T) {
	for _, tier := range []Tier{TierNotifierProbe, TierMM} {
		tr, err := Open(Options{Tier: tier})
		if err == nil {
			err = tr.Close()
		}
		var hook *HookError
		if machine.HasProbes() && err != nil || !machine.HasProbes() && (!errors.Is(err, ErrNotSupported) || !errors.As(err, &hook)) {
			t.Errorf("%v: %v", tier, err)
		}
	}
}

// Programs tell a machine without KVM by ErrNoKVM, and find the system's own
// error below it.
func TestNoKVM(t *testing.T) {
	n, err := MakeNotifier()
	if machine.HasKVM() {
		if err != nil {
			t.Fatal(err)
		}
		if n.Holder() == 0 {
			t.Error("no page holds the machine")
		}
		if err := n.Close(); err != nil || n.Holder() != 0 {
			t.Errorf("close: %v, holder %v", err, n.Holder())
		}
		return
	}
	if !errors.Is(err, ErrNoKVM) || !errors.Is(err, unix.ENOENT) {
		t.Errorf("%v", err)
	}
}
