// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/detector"
	"github.com/ummu/ummu/internal/findings"
	"github.com/ummu/ummu/internal/pairs"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/internal/target"
	"github.com/ummu/ummu/mm"
)

func newExplain(s command.Streams) *cobra.Command {
	t := targets{watchOptions: watchOptions{staleOptions: staleOptions{registrations: true}, ring: defaultRing, tier: "auto", follow: true}}
	var file string
	cmd := &cobra.Command{
		Use:   "explain (-p PID | --replay FILE [--pid PID]) ADDR",
		Short: "Tell the story of one address: mapped, registered, changed, deregistered",
		Long: `explain tells, in order, what happened to the address ADDR (hexadecimal): which
mapping it is in, by which calls and stacks it was registered, changed and
deregistered, and what went stale.

With -p it begins with the mapping as it is now, and follows the process until it
ends or SIGINT, SIGTERM or SIGHUP comes; what happened before is not known. With
--replay it tells the whole story from a recording made with --registrations.`,
		Args: command.Args(cobra.ExactArgs(1)),
		RunE: func(_ *cobra.Command, argv []string) error {
			addr, err := parseAddress(argv[0])
			if err != nil {
				return err
			}
			if (file == "") == (len(t.pids) == 0) || len(t.pids) > 1 {
				return command.Usagef("give either -p PID, once, or --replay FILE")
			}
			out := bufio.NewWriter(s.Out)
			tell := &story{out: out, addr: addr, seen: map[[2]uint64]bool{}}
			if file != "" {
				return tell.replay(file)
			}
			if err := target.MayWatch(t.pids, false); err != nil {
				return err
			}
			if err := tell.now(t.pids[0]); err != nil {
				return err
			}
			t.stacksOf = []mm.Range{{Start: addr, End: addr + 1}}
			return traceTargets(s, &streamFlags{}, &t, tell.openLive)
		},
	}
	fl := cmd.Flags()
	fl.VarP(&t.pids, "attach", "p", "explain an address of the process PID")
	fl.StringVar(&file, "replay", "", "explain an address of a recording")
	t.tier.Register(cmd)
	return cmd
}

func parseAddress(s string) (mm.Addr, error) {
	n, err := strconv.ParseUint(strings.TrimPrefix(strings.TrimPrefix(s, "0x"), "0X"), 16, 64)
	if err != nil {
		return 0, command.Usagef("%q is not a hexadecimal address", s)
	}
	return mm.Addr(n), nil
}

// story is a sink that shows what is about one address.
type story struct {
	found
	out    *bufio.Writer
	addr   mm.Addr
	calls  *calls.Table
	meta   *recording.Meta
	frames func(uint32) []symbol.Frame
	// seen are the registrations that held the address, by space and handle.
	seen  map[[2]uint64]bool
	told  bool   // something was
	after string // to be told behind the current change
	fresh bool   // ... which is not told yet
}

// open makes the story the sink of a live session.
func (t *story) open(m *recording.Meta) (sink, error) {
	c, err := calls.For(m.Arch)
	t.calls, t.meta = c, m
	return t, err
}

// openLive does so where the watch is open already.
func (t *story) openLive(m *recording.Meta) (sink, error) {
	for _, g := range m.Gaps {
		if g.Name == gapRegistered.Name {
			fmt.Fprintf(t.out, "gap: %s: %s\n", g.Name, g.What)
		}
	}
	fmt.Fprintf(t.out, "watching from here on, tier %s\n", m.Tier)
	if err := t.out.Flush(); err != nil {
		return nil, err
	}
	return t.open(m)
}

// now tells in which mapping the address is.
func (t *story) now(pid int) error {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return fmt.Errorf("read mappings of process %d: %w", pid, err)
	}
	defer f.Close()
	for l := bufio.NewScanner(f); l.Scan(); {
		span, _, _ := strings.Cut(l.Text(), " ")
		var r rangesFlag
		if r.Set(span) == nil && r[0].Has(t.addr) {
			fmt.Fprintf(t.out, "now       mapped: %s\n", command.Printable(l.Text()))
			return t.out.Flush()
		}
	}
	fmt.Fprintf(t.out, "now       not mapped\n")
	return t.out.Flush()
}

func (t *story) replay(name string) error {
	file, err := os.Open(name)
	if err != nil {
		return fmt.Errorf("open recording: %w", err)
	}
	defer file.Close()
	rd, err := recording.NewReader(file, hookName)
	if err != nil {
		return fmt.Errorf("read recording: %w", err)
	}
	if _, err := t.open(rd.Meta()); err != nil {
		return err
	}
	h := &hunt{Detector: detector.Replay(rd.Frames, detector.Options{BeginsOnly: pairs.BeginsOnly(rd.Meta().Tier)})}
	if err := h.show(t, rd.Meta()); err != nil {
		return err
	}
	v := newView(&filter{}, t, rd.Meta().Tier)
	v.hunt = h
	t.stacks(rd.Frames)
	var r mm.Record
	for err == nil {
		if err = rd.Read(&r); err == nil {
			h.Record(&r, mm.Stack{})
			err = v.record(&r)
		}
	}
	if err == io.EOF {
		v.sum.Gaps = rd.Summary().Gaps
		_, err = v.end(rd.Summary().LostAt, rd.Summary().Reason)
		return err
	}
	_, endErr := v.end(nil, err.Error())
	return errors.Join(fmt.Errorf("read recording: %w", err), endErr)
}

func (t *story) stacks(frames func(uint32) []symbol.Frame) { t.frames = frames }

// record tells what was found at the record before, whose change was told then.
func (t *story) record(r *mm.Record) error {
	if r != nil && t.fresh {
		t.fresh = false
		return nil
	}
	_, err := t.out.WriteString(t.after)
	t.after = ""
	return err
}

// concerns reports whether a record is about the address, or about a
// registration that holds it.
func (t *story) concerns(r *mm.Record) bool {
	k := [2]uint64{r.Space ^ r.Registration.Device, r.Registration.Handle}
	switch r.Kind {
	case mm.Lost:
		return true
	case mm.Register:
		if r.Range.Pages().Has(t.addr) {
			t.seen[k] = true
			return true
		}
		was := t.seen[k] // its slot is used for something else
		delete(t.seen, k)
		return was
	case mm.Deregister:
		if r.Registration.All {
			for s := range t.seen {
				if s[0] == k[0] {
					return true
				}
			}
			return false
		}
		was := t.seen[k]
		delete(t.seen, k)
		return was
	case mm.Exit:
		return r.Flags&mm.SpaceDeath != 0 && t.told
	case mm.Exec:
		return t.told
	}
	return r.Range.Has(t.addr) || r.To.Has(t.addr)
}

func (t *story) change(c *pairs.Change) error {
	r := &c.Record
	if !t.concerns(r) {
		return nil
	}
	t.told = true
	b := t.meta.MonotonicZero.Add(r.Time).Local().AppendFormat(nil, "15:04:05.000000 ")
	b = fmt.Appendf(b, "%d/%d %s  %v", r.PID, r.TID, command.Printable(r.Comm.String()), r.Kind)
	if r.Kind == mm.Lost {
		b = fmt.Appendf(b, ": %d events: the story has a hole here", r.Lost)
	}
	if !r.Range.Empty() && r.Kind != mm.Exit {
		b = command.AppendRange(append(b, ' '), r.Range)
	}
	if !r.To.Empty() {
		b = command.AppendRange(append(b, " to "...), r.To)
	}
	if r.Registration.By != mm.ByNobody {
		b = append(append(b, ' '), detector.Describe(&r.Registration)...)
	}
	if name := t.calls.Name(r.Call); name != "" {
		b = append(append(append(b, " by "...), name...), '(')
		if t.calls.HasArgs(r.Call) {
			b = t.calls.AppendArgs(b, r.Call, r.Arg)
		}
		b = append(b, ") = "...)
		if c.Open {
			b = append(b, '?')
		} else {
			b = t.calls.AppendResult(b, r.Call, r.Ret)
		}
	} else if r.Registration.By == mm.ByVerbs && r.Ret != 0 {
		b = append(b, " failed"...)
	}
	b = append(b, '\n')
	if t.frames != nil {
		b = detector.AppendStack(b, t.frames(r.Stack), "                  ", command.Printable)
	}
	return write(t.out, b)
}

// finding tells of the finding when it is found; the whole of it at the end.
func (t *story) finding(f *findings.Finding, final bool) error {
	if !f.Registration.Range.Pages().Has(t.addr) {
		return nil
	}
	if !final {
		t.fresh = true
		t.after += fmt.Sprintf("                stale: registration %d is %v\n", f.ID, f.Class)
		return nil
	}
	return t.found.finding(f, true)
}

func (t *story) flush() error {
	return errors.Join(t.record(nil), t.out.Flush())
}

func (t *story) end(s *recording.Summary) error {
	if !t.told {
		fmt.Fprintf(t.out, "nothing happened to %v\n", t.addr)
	}
	if err := errors.Join(t.record(nil), write(t.out, t.text())); err != nil {
		return err
	}
	for _, g := range s.Gaps {
		fmt.Fprintf(t.out, "gap: %s: %s\n", g.Name, g.What)
	}
	if !s.Complete {
		fmt.Fprintf(t.out, "INCOMPLETE: %s\n", s.Reason)
	}
	return t.out.Flush()
}
