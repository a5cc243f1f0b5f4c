// SPDX-License-Identifier: Apache-2.0

// Package layout is the shared memory of bpf/ummu.h in Go: generated, without
// dependencies, so that a client of the feed does not import a BPF loader.
package layout

//go:generate sh -c "CC=gcc go tool cgo -godefs godefs.go | sed -e '1,2c// Code generated from ummu.h by cgo -godefs; DO NOT EDIT.\\n\\n// SPDX-License-Identifier: Apache-2.0' | gofmt > layout.go && rm -rf _obj _cgo_2.o"
