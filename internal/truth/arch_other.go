// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package truth

const (
	map32Bit = 0
)
