// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/spf13/cobra"

// moreCommands are the commands that need more than the tracer.
func moreCommands(streams) []*cobra.Command { return nil }
