// SPDX-License-Identifier: Apache-2.0

package command

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
)

// Format is one of some words, as of -o.
type Format struct {
	Allowed []string
	Value   string
}

func (f *Format) String() string { return f.Value }
func (f *Format) Type() string   { return strings.Join(f.Allowed, "|") }
func (f *Format) Set(s string) error {
	if !slices.Contains(f.Allowed, s) {
		return fmt.Errorf("one of %s", strings.Join(f.Allowed, ", "))
	}
	f.Value = s
	return nil
}

// Register adds -o to a command.
func (f *Format) Register(cmd *cobra.Command) {
	cmd.Flags().VarP(f, "format", "o", "output format")
	Complete(cmd, "format", f.Allowed)
}

// Complete makes a shell offer words for a flag.
func Complete(cmd *cobra.Command, flag string, words []string) {
	// It fails only for a flag that does not exist.
	if err := cmd.RegisterFlagCompletionFunc(flag, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)); err != nil {
		panic(err)
	}
}

// PIDs are process numbers.
type PIDs []int

func (p *PIDs) String() string { return "" }
func (p *PIDs) Type() string   { return "PID,..." }
func (p *PIDs) Set(s string) error {
	for _, w := range strings.Split(s, ",") {
		n, err := strconv.ParseInt(w, 10, 32)
		if err != nil || n <= 0 {
			return fmt.Errorf("%q is not a process number", w)
		}
		*p = append(*p, int(n))
	}
	return nil
}

// Size is a number of bytes with an optional suffix.
type Size uint64

func (z *Size) String() string {
	if *z == 0 {
		return ""
	}
	return strconv.FormatUint(uint64(*z), 10)
}
func (z *Size) Type() string { return "BYTES" }
func (z *Size) Set(s string) error {
	num, shift := s, 0
	if i := strings.IndexByte("KMGT", last(strings.ToUpper(s))); i >= 0 {
		num, shift = s[:len(s)-1], 10*(i+1)
	}
	n, err := strconv.ParseUint(num, 10, 64)
	if err != nil || n > math.MaxUint64>>shift {
		return fmt.Errorf("a number with an optional K, M, G or T")
	}
	*z = Size(n << shift)
	return nil
}

func last(s string) byte {
	if s == "" {
		return 0
	}
	return s[len(s)-1]
}
