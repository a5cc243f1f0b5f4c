// SPDX-License-Identifier: Apache-2.0

//go:build !amd64

package truth

const (
	haveI386 = false
	map32Bit = 0
)
