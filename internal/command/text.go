// SPDX-License-Identifier: Apache-2.0

package command

import (
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/ummu/ummu/mm"
)

// AppendRange appends a range as /proc/PID/maps has it; "-" if it is empty.
func AppendRange(b []byte, r mm.Range) []byte {
	switch {
	case r.Empty():
		return append(b, '-')
	case r == mm.Whole:
		return append(b, "whole-space"...)
	}
	b = append(strconv.AppendUint(b, uint64(r.Start), 16), '-')
	if r.End == mm.MaxAddr {
		return append(b, "top"...)
	}
	return strconv.AppendUint(b, uint64(r.End), 16)
}

// AppendSize is exact as long as it is short: 4K, 132K, 2M.
func AppendSize(b []byte, r mm.Range) []byte {
	if r.Empty() || r.End == mm.MaxAddr {
		return append(b, '-')
	}
	n, unit := r.Len(), 0
	for n%1024 == 0 && n >= 1024 && unit < 4 {
		n, unit = n/1024, unit+1
	}
	b = strconv.AppendUint(b, n, 10)
	if unit > 0 {
		b = append(b, "KMGT"[unit-1])
	}
	return b
}

// Printable replaces what could control a terminal: any program chooses its name.
func Printable(s string) string {
	for _, r := range s {
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return strings.Map(func(r rune) rune {
				if unicode.IsPrint(r) {
					return r
				}
				return '?'
			}, s)
		}
	}
	return s
}

// Human is a number of bytes for people: "1.5 MiB".
func Human(n uint64) string {
	if n < 1024 {
		return strconv.FormatUint(n, 10)
	}
	x, unit := float64(n)/1024, 0
	for x >= 1024 && unit < 4 {
		x, unit = x/1024, unit+1
	}
	return strconv.FormatFloat(x, 'f', 1, 64) + " " + "KMGTP"[unit:unit+1] + "iB"
}
