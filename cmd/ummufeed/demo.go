// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/demo"
	"github.com/ummu/ummu/internal/target"
	"github.com/ummu/ummu/regcache/ibv"
	"github.com/ummu/ummu/regcache/uring"
)

func newDemo(s command.Streams) *cobra.Command {
	format := command.Format{Allowed: []string{"table", "json"}, Value: "table"}
	var o demo.Options
	throughDaemon := false
	tier := target.Tier("auto")
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show stale transfers, and that the feed makes them go away",
		Long: `demo registers memory with a device, changes the mapping, and transfers again into
the same address: first with a registration cache that nobody tells about
changes, then with one that listens to the feed. A transfer is stale when it
reported success and the program does not see the bytes.

The device is io_uring, whose registered buffers pin pages as RDMA does; with
--device it is a real RDMA device, such as rxe0 or mlx5_0 (RDMA WRITE from this
process to itself).

The feed is of the strongest tier that passed its self-test since the boot (check
--self-test), else of the syscall tier; or of the one that --tier asks for. The
notifier tiers make this program an empty KVM machine.

Exit code 1 if a transfer was stale with the feed, or none without it.`,
		Args: command.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := o.Validate(); err != nil {
				return command.Usagef("%v", err)
			}
			ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
			defer stop()
			switch {
			case throughDaemon && cmd.Flags().Changed("tier"):
				return command.Usagef("--tier is for a feed of one's own; with --daemon the daemon decides")
			case throughDaemon:
				o.Open = func() (*feed.Watch, error) {
					return feed.Dial(ctx, feed.Options{Socket: os.Getenv(feed.EnvSocket)})
				}
			default:
				chosen, why, err := tier.Own()
				if err != nil {
					return err
				}
				s.Log().Info("feed", "tier", chosen, "reason", why)
				o.Open = func() (*feed.Watch, error) { return local.Open(local.Options{Tier: chosen}) }
			}
			r, err := demo.Run(ctx, o)
			switch {
			case errors.Is(err, uring.ErrDisabled), errors.Is(err, ibv.ErrNotBuilt), errors.Is(err, ibv.ErrNoLibrary), errors.Is(err, ibv.ErrNoDevice):
				return command.Exit(command.ExitUnsupported, err)
			case o.Device != "" && errors.Is(err, os.ErrPermission):
				return command.Exit(command.ExitPrivileges, err)
			case err != nil:
				return err
			}
			if format.Value == "json" {
				err = json.NewEncoder(s.Out).Encode(r)
			} else {
				err = r.WriteTable(s.Out)
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
	format.Register(cmd)
	tier.Register(cmd)
	cmd.Flags().BoolVar(&throughDaemon, "daemon", false, "take the feed of ummufeed serve, which needs no privileges ($UMMU_SOCKET)")
	cmd.Flags().StringVar(&o.Device, "device", "", "RDMA device (default: io_uring)")
	completeDevices(cmd)
	cmd.Flags().IntVar(&o.Threads, "threads", 0, "threads of the second half (0: 8)")
	cmd.Flags().IntVar(&o.Rounds, "rounds", 0, "rounds per thread and kind of change (0: 100)")
	cmd.Flags().IntVar(&o.Pages, "pages", 0, "pages per round (0: 8)")
	return cmd
}

// completeDevices completes --device. The library is not asked before that.
func completeDevices(cmd *cobra.Command) {
	err := cmd.RegisterFlagCompletionFunc("device", func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
		names, err := ibv.Devices()
		if err != nil {
			return nil, cobra.ShellCompDirectiveError
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	})
	if err != nil {
		panic(err) // the flag does not exist
	}
}
