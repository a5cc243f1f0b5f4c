// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/target"
	"github.com/ummu/ummu/internal/top"
	"github.com/ummu/ummu/tracer"
)

// options are the flags.
type options struct {
	pids    command.PIDs
	comms   []string
	groups  []string
	tier    target.Tier
	ring    command.Size
	follow  bool
	replay  string
	socket  string
	once    bool
	samples int
	delay   time.Duration
	format  command.Format
	view    command.Format
	pprof   string
	loss    bool

	registrations bool
	viewGiven     bool // else a single process is shown first
}

func newRoot(s command.Streams) *cobra.Command {
	o := options{
		ring: 8 << 20, format: command.Format{Allowed: top.Formats}, view: command.Format{Allowed: top.ViewNames, Value: top.ViewNames[0]},
	}
	root := &cobra.Command{
		Use:   "ummutop [flags] [-p PID... | --comm NAME | --cgroup PATH | --replay FILE | -- CMD [ARG...]]",
		Short: "Watch what happens to the memory of processes",
		Long: `ummutop shows what processes unmap, replace, drop, move and protect, which memory
is registered with devices, and which registrations no longer show what the
program sees. Without a target it shows every process of the machine. ? lists the
keys, q leaves.

CMD is started and shown from its first instruction; its input is empty, its
output is thrown away while the screen is in use (else it goes to standard
error), and leaving ends it (SIGTERM, after 2 s SIGKILL). Its exit code is passed
on.

Where standard input or output is no terminal, or TERM is dumb, and with --once,
-n or -o, ummutop prints instead: each -d a table, or NDJSON with -o ndjson: one
object {"sample":{...}}, then one for each line of the --view: "process",
"registration" or "hook". Fields are added, never changed.

--replay shows a recording (ummufeed record, or NDJSON of ummufeed run and trace)
as if it happened now; the arrow keys go back and on in it. Printed, it is shown
at its end.

It needs the privileges of ummufeed trace, and CAP_SYS_ADMIN to count the runs of
hooks. Without a target and without privileges it shows what ummufeed serve tells
about the watches of your own processes. It leaves out what it does itself.

` + target.TierHelp + "\n\n" + command.ExitHelp,
		Version: command.Version(),
		Args:    cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, argv []string) error {
			if err := o.validate(cmd, argv); err != nil {
				return err
			}
			o.viewGiven = cmd.Flags().Changed("view")
			return run(s, &o, argv)
		},
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.Flags().SetInterspersed(false)
	root.CompletionOptions.HiddenDefaultCmd = true
	f := root.Flags()
	f.VarP(&o.pids, "attach", "p", "show the process PID and its children (repeatable)")
	f.StringSliceVar(&o.comms, "comm", nil, "show processes of this name")
	f.StringSliceVar(&o.groups, "cgroup", nil, "show processes of the control group with this path, those below it too, or of this container (docker:0123456789ab)")
	o.tier.Register(root)
	f.Var(&o.ring, "ring", "size of the ring between kernel and program: a power of two, at least a page")
	f.BoolVarP(&o.follow, "follow", "f", true, "with -p and CMD: children and what they execute too")
	f.StringVar(&o.replay, "replay", "", "show the recording `FILE`")
	f.BoolVar(&o.registrations, "registrations", true, "look for registrations of io_uring and libibverbs and for stale ones, with stacks; costs every process 60 ns per system call")
	f.StringVar(&o.socket, "socket", "", "`path` of the daemon's socket, without privileges (default $UMMU_SOCKET, or "+feed.DefaultSocket+")")
	f.BoolVar(&o.once, "once", false, "print once, after one -d, and end")
	f.IntVarP(&o.samples, "samples", "n", 0, "print `N` times and end")
	f.DurationVarP(&o.delay, "delay", "d", time.Second, "time between two looks")
	o.format.Register(root)
	f.Var(&o.view, "view", "what to print, or to show first")
	command.Complete(root, "view", o.view.Allowed)
	f.StringVar(&o.pprof, "pprof", "", "write the call sites to `FILE` at the end, for go tool pprof and flame graphs")
	f.BoolVar(&o.loss, "fail-on-loss", false, "exit code 5 if events were lost")
	root.AddCommand(target.NewSelfTestChild())
	return root
}

// validate finds contradictions.
func (o *options) validate(cmd *cobra.Command, argv []string) error {
	var targets []string
	for _, t := range []struct {
		name  string
		given bool
	}{
		{"-p", len(o.pids) > 0}, {"--comm or --cgroup", len(o.comms)+len(o.groups) > 0},
		{"--replay", o.replay != ""}, {"a command", len(argv) > 0},
	} {
		if t.given {
			targets = append(targets, t.name)
		}
	}
	switch {
	case len(targets) > 1:
		return command.Usagef("%s exclude each other", strings.Join(targets, " and "))
	case len(argv) > 0 && cmd.ArgsLenAtDash() != 0:
		return command.Usagef("unknown argument %q; write -- before a command to start", argv[0])
	case o.delay < 100*time.Millisecond:
		return command.Usagef("-d %v is less than 100ms", o.delay)
	case o.samples < 0:
		return command.Usagef("-n %d is negative", o.samples)
	case o.once && o.samples > 1:
		return command.Usagef("--once and -n exclude each other")
	case o.tier.Notifier():
		return command.Usagef("--tier notifier sees only processes that have a notifier, which ummufeed run and record make; then --replay")
	case o.ring == 0 || o.ring > 1<<30:
		return command.Usagef("--ring %d is out of range", o.ring)
	}
	if o.once {
		o.samples = 1
	}
	if err := o.watch().Validate(); err != nil {
		return command.Exit(command.ExitUsage, err)
	}
	return nil
}

func (o *options) watch() tracer.WatchOptions {
	return tracer.WatchOptions{Follow: o.follow, RingBytes: int(o.ring), Registrations: o.registrations}
}

// batch reports whether to print instead of taking over the terminal.
func (o *options) batch(s command.Streams) bool {
	return o.samples > 0 || o.format.Value != "" || !command.IsTerminal(s.In) || !command.IsTerminal(s.Out) ||
		slices.Contains([]string{"", "dumb"}, os.Getenv("TERM"))
}
