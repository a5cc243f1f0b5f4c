// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/internal/demo"
	"github.com/ummu/ummu/regcache/uring"
)

func newDemo(s streams) *cobra.Command {
	format := formatFlag{allowed: []string{"table", "json"}, value: "table"}
	var o demo.Options
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show stale transfers, and that the feed makes them go away",
		Long: `demo registers memory with io_uring, changes the mapping, and transfers again into
the same address: first with a registration cache that nobody tells about
changes, then with one that listens to the feed. A transfer is stale when it
reported success and the program does not see the bytes.

Exit code 1 if a transfer was stale with the feed, or none without it.`,
		Args: args(cobra.NoArgs),
		RunE: func(*cobra.Command, []string) error {
			if err := o.Validate(); err != nil {
				return usagef("%v", err)
			}
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			o.Open = func() (*feed.Watch, error) { return local.Open(local.Options{}) }
			r, err := demo.Run(ctx, o)
			switch {
			case errors.Is(err, uring.ErrDisabled):
				return &exitError{exitUnsupported, err}
			case err != nil:
				return err
			}
			if format.value == "json" {
				err = json.NewEncoder(s.out).Encode(r)
			} else {
				err = r.WriteTable(s.out)
			}
			switch {
			case err != nil:
				return err
			case r.WithFeed.Stale != 0:
				return errors.New("stale transfers with the feed: please report this")
			case r.WithoutFeed.Stale == 0:
				return errors.New("no stale transfer without the feed: the demo shows nothing here")
			}
			return nil
		},
	}
	format.register(cmd)
	cmd.Flags().IntVar(&o.Threads, "threads", 0, "threads of the second half (0: 8)")
	cmd.Flags().IntVar(&o.Rounds, "rounds", 0, "rounds per thread and kind of change (0: 100)")
	cmd.Flags().IntVar(&o.Pages, "pages", 0, "pages per round (0: 8)")
	return cmd
}
