// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package demo

import (
	"errors"
	"testing"

	"github.com/ummu/ummu/regcache/ibv"
)

// What needs a device is tested by test/verbs, in guests that have one.
func TestNoDevice(t *testing.T) {
	_, err := Run(t.Context(), Options{Device: "no-such-device", Threads: 1, Rounds: 1})
	if !errors.Is(err, ibv.ErrNoDevice) {
		t.Errorf("error %v, want ErrNoDevice", err)
	}
}
