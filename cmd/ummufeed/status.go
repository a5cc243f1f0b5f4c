// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/daemon"
)

// statusReport is what status prints as JSON.
type statusReport struct {
	Socket  string         `json:"socket"`
	UpSec   float64        `json:"up_s"`
	Misses  uint64         `json:"skipped_programs"`
	Watches []daemon.Watch `json:"watches"`
}

func newStatus(s command.Streams) *cobra.Command {
	format := command.Format{Allowed: []string{"table", "json"}, Value: "table"}
	socket := ""
	var interval time.Duration
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the watches of a running daemon",
		Long: `status asks ummufeed serve for its watches: whose, in which tier, how much memory
they take, how many records they got and how many were lost. A user sees the
watches of its own processes; CAP_SYS_PTRACE shows all.

Rates are means since the watch was opened, or with --interval over that time.`,
		Args: command.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx := cmd.Context()
			if ctx == nil {
				ctx = context.Background()
			}
			if interval < 0 {
				return command.Usagef("--interval %v is negative", interval)
			}
			socket = cmp.Or(socket, os.Getenv(feed.EnvSocket), feed.DefaultSocket)
			var before *daemon.Report
			now, err := daemon.Status(ctx, socket)
			if err == nil && interval > 0 {
				before = now
				time.Sleep(interval)
				now, err = daemon.Status(ctx, socket)
			}
			if err != nil {
				return statusError(err)
			}
			r := &statusReport{Socket: socket, UpSec: now.Up().Seconds(), Misses: now.End.Misses, Watches: now.Watches(before)}
			if format.Value == "json" {
				e := json.NewEncoder(s.Out)
				e.SetIndent("", "  ")
				return e.Encode(r)
			}
			return r.table(s.Out)
		},
	}
	format.Register(cmd)
	cmd.Flags().StringVar(&socket, "socket", "", "`path` of the daemon's socket (default $UMMU_SOCKET, or "+feed.DefaultSocket+")")
	cmd.Flags().DurationVar(&interval, "interval", 0, "look twice and show the rates in between")
	return cmd
}

func statusError(err error) error {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%w; try: ummufeed serve, or set %s", err, feed.EnvSocket)
	case errors.Is(err, fs.ErrPermission):
		return command.Exit(command.ExitPrivileges, fmt.Errorf("%w; the socket's group may connect", err))
	}
	return err
}

func (r *statusReport) table(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "%s, up %v, %d watches, %d skipped programs\n", r.Socket,
		(time.Duration(r.UpSec) * time.Second), len(r.Watches), r.Misses)
	if len(r.Watches) > 0 {
		t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', tabwriter.AlignRight)
		fmt.Fprintln(t, "WATCH\tPID\tUID\tTIER\tSTATE\tAGE\tKIB\tRECORDS\tPER SECOND\tFILTERED\tLOST\tUNPAIRED\t  COMMAND")
		for _, w := range r.Watches {
			fmt.Fprintf(t, "%d\t%d\t%d\t%s\t%s\t%v\t%d\t%d\t%.1f\t%d\t%d\t%d\t  %s\n", w.Watch, w.PID, w.UID, w.Tier, w.State,
				(time.Duration(w.AgeSec) * time.Second), w.Bytes>>10, w.Records, w.Rate, w.Filtered, w.Lost, w.Unpaired, command.Printable(w.Comm))
		}
		t.Flush()
	}
	return write(w, []byte(b.String()))
}
