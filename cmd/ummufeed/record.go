// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/detector"
	"github.com/ummu/ummu/internal/pairs"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/mm"
)

func newRecord(s command.Streams) *cobra.Command {
	var f streamFlags
	var t targets
	waitTree := true
	cmd := &cobra.Command{
		Use:   "record [flags] FILE (-- CMD [ARG...] | -p PID... | --all)",
		Short: "Write records into a compressed, checksummed file",
		Long: `record watches as run (with a CMD) or as trace (with -p or --all) do and writes
the records to FILE, which replay reads. The summary goes to standard error; a
CMD's command.Streams and exit code are its own.

FILE is readable up to its last whole block whatever happens: a block is written
when it is full, and at least each second when there is something to write.`,
		Args: command.Args(cobra.MinimumNArgs(1)),
		RunE: func(cmd *cobra.Command, argv []string) error {
			dash := cmd.ArgsLenAtDash()
			switch {
			case dash < 0 && len(argv) > 1:
				return command.Usagef("write -- before the command to start")
			case dash >= 0 && (dash != 1 || len(argv) < 2):
				return command.Usagef("the form is: record FILE -- CMD [ARG...]")
			case dash >= 0 && (t.all || len(t.pids) > 0 || t.inject):
				return command.Usagef("a command excludes -p, --all and --inject")
			}
			if dash < 0 && len(t.pids) == 0 && !t.all {
				t.pids = f.filter.pids
			}
			if dash < 0 {
				if err := t.validate(); err != nil {
					return err
				}
			}
			file, err := create(argv[0])
			if err != nil {
				return fmt.Errorf("open recording: %w", err)
			}
			open := func(m *recording.Meta) (sink, error) {
				if err := begin(file); err != nil {
					return nil, err
				}
				b, err := newBlocks(file, m)
				if err != nil {
					return nil, err
				}
				return &recorder{blocks: b, stderr: s.Err, tier: m.Tier}, nil
			}
			if dash >= 0 {
				err = startAndWatch(s, &f, &runOptions{t.watchOptions, waitTree}, argv[1:], open)
			} else {
				err = traceTargets(s, &f, &t, open)
			}
			if serr := file.Sync(); serr != nil && err == nil && !errors.Is(serr, syscall.EINVAL) {
				err = fmt.Errorf("write recording: %w", serr)
			}
			return closeOutput(file, err)
		},
	}
	f.format.Value = "ndjson"
	f.filter.register(cmd)
	f.registerLoss(cmd)
	t.watchOptions.register(cmd)
	t.register(cmd)
	cmd.Flags().BoolVar(&waitTree, "wait-tree", true, "wait for the descendants of CMD too")
	return cmd
}

// recorder is a recording whose summary people see as well. A failure is told
// at once: a program that runs on may do so for long.
type recorder struct {
	*blocks
	found
	stderr io.Writer
	tier   string
	told   bool
}

func (r *recorder) fail(err error) error {
	if err != nil && !r.told {
		r.told = true
		fmt.Fprintf(r.stderr, "ummufeed record: %v; recording ends here, readable up to its last whole block\n", err)
	}
	return err
}

func (r *recorder) record(rec *mm.Record) error { return r.fail(r.blocks.record(rec)) }
func (r *recorder) flush() error                { return r.fail(r.blocks.flush()) }

func (r *recorder) end(s *recording.Summary) error {
	if err := r.fail(r.blocks.end(s)); err != nil {
		return err
	}
	return write(r.stderr, summaryTable(r.text(), s, r.tier))
}

func newReplay(s command.Streams) *cobra.Command {
	var f streamFlags
	var o staleOptions
	cmd := &cobra.Command{
		Use:   "replay [flags] FILE",
		Short: "Show a recording as if it happened now",
		Long: `replay reads what record wrote, or NDJSON of run and trace, and prints it in the
same forms with the same filters. Of a recording that is cut off or damaged it
prints what is whole, says what is wrong, and exits with code 5.`,
		Args: command.Args(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, argv []string) error {
			if err := o.validate(); err != nil {
				return err
			}
			file, err := os.Open(argv[0])
			if err != nil {
				return fmt.Errorf("open recording: %w", err)
			}
			defer file.Close()
			out, err := openOutput(s, &f, false)
			if err != nil {
				return err
			}
			return closeOutput(out, replay(file, &f, &o, out))
		},
	}
	f.register(cmd)
	o.register(cmd)
	cmd.Flags().StringVar(&f.output, "output", "", `file for the records, "-" is standard output`)
	return cmd
}

func replay(r io.Reader, f *streamFlags, o *staleOptions, out *output) error {
	rd, err := recording.NewReader(r, hookName)
	if err != nil {
		return fmt.Errorf("read recording: %w", err)
	}
	meta := rd.Meta()
	sk, err := out.sink(f, meta)
	if err != nil {
		return err
	}
	v := newView(&f.filter, sk, meta.Tier)
	if st, ok := sk.(stacker); ok {
		st.stacks(rd.Frames)
	}
	if o.registrations {
		v.hunt = &hunt{Detector: detector.Replay(rd.Frames, detector.Options{BeginsOnly: pairs.BeginsOnly(meta.Tier)})}
		if err := v.hunt.show(sk, meta); err != nil {
			return err
		}
	}
	var rec mm.Record
	for {
		if err = rd.Read(&rec); err != nil {
			break
		}
		if v.hunt != nil {
			v.hunt.Record(&rec, mm.Stack{})
		}
		if err := v.record(&rec); err != nil {
			return fmt.Errorf("write records: %w", err)
		}
	}
	var at []string
	reason := ""
	if err == io.EOF {
		err = nil
		at, reason = rd.Summary().LostAt, rd.Summary().Reason
		v.sum.Gaps = rd.Summary().Gaps
	} else {
		reason = err.Error()
		err = fmt.Errorf("read recording: %w", err)
	}
	sum, werr := v.end(at, reason)
	switch {
	case werr != nil:
		return fmt.Errorf("write records: %w", werr)
	case err != nil:
		return err
	case f.failOnLoss && incomplete(sum):
		return command.Exit(command.ExitIncomplete, nil)
	case o.failOnStale:
		return v.hunt.exit(sum)
	}
	return nil
}
