// SPDX-License-Identifier: Apache-2.0

package top

//go:generate go run ./cmd/captures testdata/golden.ummurec ../../README.md ../../docs/ummutop.md
