// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"os/user"
	"strconv"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/daemon"
	"github.com/ummu/ummu/internal/target"
)

func newServe(s command.Streams) *cobra.Command {
	c := daemon.Config{Socket: feed.DefaultSocket}
	tier := target.Tier("auto")
	mode := modeFlag(daemon.DefaultMode)
	group := ""
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Give programs without privileges a feed of their own address space",
		Long: `serve loads the kernel side once and hands watches to the programs that connect
to its socket: each gets one of its own address space, as the kernel identifies
it, and nothing else. From then on the kernel writes into memory that the program
maps; the daemon does nothing per change or lookup.

A program gets the best way of seeing its changes that works for it: the notifier
that it already has; with --allow-kvm one by an empty virtual machine; and only
with --allow-syscall-tier, or --tier syscall, the tier that costs every process of
the machine some 100 ns a system call. Else it is refused, and runs uncached.

When serve ends, for whatever reason, every watch ends: programs go on uncached.

A service manager may pass the socket (LISTEN_FDS, type SEQPACKET) and is told
when it is ready (NOTIFY_SOCKET).

Exit code 3 if no tier works on this kernel, 4 if privileges are missing
(CAP_BPF and CAP_PERFMON).`,
		Args: command.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if tier != "auto" {
				tiers, err := tier.Tiers()
				if err != nil {
					return err
				}
				c.Tiers = tiers
			}
			if group != "" {
				gid, err := groupID(group)
				if err != nil {
					return err
				}
				c.GID = gid
			}
			c.Mode = fs.FileMode(mode)
			l, err := daemon.Activated()
			if err != nil {
				return err
			}
			if l != nil {
				if cmd.Flags().Changed("socket") {
					return command.Usagef("--socket is given, and a socket is passed by LISTEN_FDS")
				}
				c.Socket, c.Listener = "", l
			}
			c.Log = s.Log()
			return serve(cmd.Context(), c)
		},
	}
	fl := cmd.Flags()
	fl.StringVar(&c.Socket, "socket", c.Socket, "`path` to listen at")
	fl.Var(&mode, "mode", "access mode of the socket, octal")
	fl.StringVar(&group, "group", "", "`group` of the socket, by name or number")
	tier.Register(cmd)
	fl.BoolVar(&c.AllowKVM, "allow-kvm", false, "give programs an empty virtual machine each, for its notifier")
	fl.BoolVar(&c.AllowSyscallTier, "allow-syscall-tier", false, "use the syscall tier where nothing better works")
	fl.IntVar(&c.MaxWatchesPerProcess, "max-watches-per-process", daemon.DefaultMaxWatchesPerProcess, "limit")
	fl.IntVar(&c.MaxWatchesPerUID, "max-watches-per-uid", daemon.DefaultMaxWatchesPerUID, "limit")
	fl.IntVar(&c.MaxClients, "max-clients", daemon.DefaultMaxClients, "limit of connections")
	return cmd
}

func serve(ctx context.Context, c daemon.Config) error {
	if ctx == nil {
		ctx = context.Background()
	}
	ctx, stop := signal.NotifyContext(ctx, os.Interrupt, syscall.SIGTERM)
	defer stop()
	d, err := daemon.New(c)
	if err != nil {
		return err
	}
	if err := daemon.Notify("READY=1\nSTATUS=serving at " + d.Addr()); err != nil {
		c.Log.Warn("cannot tell the service manager", "error", err)
	}
	c.Log.Info("serving", "socket", d.Addr(), "version", command.Version())
	defer context.AfterFunc(ctx, func() {
		// Told while it is done: no watch lives any more when the hooks go.
		daemon.Notify("STOPPING=1")
	})()
	return d.Serve(ctx)
}

func groupID(name string) (int, error) {
	if n, err := strconv.ParseUint(name, 10, 31); err == nil {
		return int(n), nil
	}
	g, err := user.LookupGroup(name)
	if err != nil {
		return 0, command.Usagef("group %q: %w", name, err)
	}
	return strconv.Atoi(g.Gid)
}

// modeFlag is an access mode in octal.
type modeFlag fs.FileMode

func (m *modeFlag) String() string { return fmt.Sprintf("%04o", *m) }
func (m *modeFlag) Type() string   { return "MODE" }
func (m *modeFlag) Set(s string) error {
	n, err := strconv.ParseUint(s, 8, 16)
	if err != nil || n > 0o777 || n == 0 {
		return errors.New("octal digits, at most 0777")
	}
	*m = modeFlag(n)
	return nil
}
