// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package ibv

import (
	"errors"
	"net/netip"
	"strings"
	"testing"
)

// Built without cgo, everything says how to get it. TestWithoutCgo runs this.
func TestNotBuilt(t *testing.T) {
	_, open := Open("rxe0")
	_, devices := Devices()
	_, fork := ForkSafety()
	_, listen := Listen(netip.AddrPort{})
	_, resolve := Resolve(netip.AddrPort{})
	for name, err := range map[string]error{"open": open, "devices": devices, "fork": fork, "listen": listen, "resolve": resolve} {
		if !errors.Is(err, ErrNotBuilt) || !strings.Contains(err.Error(), "libibverbs-dev") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
