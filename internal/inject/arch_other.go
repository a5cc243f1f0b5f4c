// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package inject

import (
	"fmt"
	"runtime"
)

type registers struct{}

func supported() error {
	return fmt.Errorf("%w: architecture %s", ErrNotSupported, runtime.GOARCH)
}

// supported() keeps everybody away from these.

var syscallInstruction []byte

func getRegisters(int, *registers) error             { return ErrNotSupported }
func setRegisters(int, *registers) error             { return ErrNotSupported }
func native(*registers) bool                         { return false }
func instruction(*registers) uint64                  { return 0 }
func setCall(*registers, uint64, uintptr, [6]uint64) {}
func result(*registers) int64                        { return 0 }
func restart(*registers) bool                        { return false }
