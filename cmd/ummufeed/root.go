// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/target"
)

// execute runs the command line and returns the exit code.
func execute(args []string, s command.Streams) int { return command.Execute(newRoot(s), args, s) }

func newRoot(s command.Streams) *cobra.Command {
	root := &cobra.Command{
		Use:   "ummufeed",
		Short: "See every change of an address space",
		Long: `ummufeed shows what happens to the address spaces of programs: what is
unmapped, replaced, dropped, moved or protected, by whom and how, as it happens.
The programs are neither stopped nor changed.

` + command.ExitHelp,
		Version: command.Version(),
		Args:    cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return command.Usagef("unknown command %q", args[0])
			}
			return cmd.Help()
		},
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.AddCommand(newCheck(s), newRun(s), newTrace(s), newRecord(s), newReplay(s), newExplain(s), newDemo(s), newServe(s), newStatus(s), newVersion(s), target.NewSelfTestChild())
	return root
}

func newVersion(s command.Streams) *cobra.Command {
	return &cobra.Command{
		Use:   "version",
		Short: "Print the version",
		Args:  command.Args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			_, err := fmt.Fprintln(s.Out, command.Version())
			return err
		},
	}
}

// write sends what is left of a buffer and ignores nothing.
func write(w io.Writer, b []byte) error {
	_, err := w.Write(b)
	return err
}
