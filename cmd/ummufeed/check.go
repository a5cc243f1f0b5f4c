// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/preflight"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/target"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// report is what check prints as JSON.
type report struct {
	Tier  string          `json:"tier"`
	Gaps  []recording.Gap `json:"gaps"`
	Hooks []hookReport    `json:"hooks"`
	preflight.Facts
	Remarks []remark `json:"remarks"`
}

type hookReport struct {
	Hook     string `json:"hook"`
	Attached bool   `json:"attached"`
	Required bool   `json:"required"`
	Sees     string `json:"sees"`
	Error    string `json:"error,omitempty"`
}

type remark struct {
	What string `json:"what"`
	Try  string `json:"try"`
}

func newCheck(s command.Streams) *cobra.Command {
	format := command.Format{Allowed: []string{"table", "json"}, Value: "table"}
	tier := target.Tier("auto")
	test := false
	cmd := &cobra.Command{
		Use:   "check",
		Short: "Tell what can be seen on this machine, and what not",
		Long: `check attaches every hook for real, detaches it again, and tells which tier that
gives, what it cannot see, and which facts about the machine matter.

With --self-test it proves it: child processes change registered memory in more
than a hundred ways while busy threads and updates of BPF maps compete for the
processors, and each change must be reported before the operation returns. With
--tier auto the strongest tier that passes is the last one tested. What was found is
kept until the next boot, for --tier auto of other commands. The notifier
tiers need /dev/kvm; hugetlb pages are set aside meanwhile and given back.

Exit code 0 if some tier works, 3 if this kernel cannot, 4 if privileges are missing;
of a self-test 1 if a change was missed or reported only in part.`,
		Args: command.Args(cobra.NoArgs),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if test {
				return selfTest(cmd.Context(), s, format.Value, tier)
			}
			if cmd.Flags().Changed("tier") {
				return command.Usagef("--tier is for --self-test")
			}
			facts, err := preflight.Gather()
			if err != nil {
				return err
			}
			return check(s.Out, format.Value, facts, tracer.Probe())
		},
	}
	format.Register(cmd)
	cmd.Flags().BoolVar(&test, "self-test", false, "perform operations and see whether they are reported (some 5 s a tier)")
	cmd.Flags().Var(&tier, "tier", "what to test: "+strings.Join(target.TierNames, ", "))
	return cmd
}

func check(w io.Writer, format string, facts preflight.Facts, c tracer.Coverage) error {
	r := report{Tier: c.Tier.String(), Gaps: target.GapsOf(c), Hooks: []hookReport{}, Facts: facts, Remarks: []remark{}}
	for _, h := range c.Hooks {
		hr := hookReport{Hook: h.Name, Attached: h.Attached, Required: h.Required, Sees: h.Sees}
		if h.Err != nil {
			hr.Error = h.Err.Error()
		}
		r.Hooks = append(r.Hooks, hr)
	}
	for _, weak := range c.Weak {
		r.Remarks = append(r.Remarks, remark{"this tier is not fit for a cache: " + weak, "the error of that hook says what it needs"})
	}
	for _, m := range facts.Remarks() {
		r.Remarks = append(r.Remarks, remark(m))
	}
	var err error
	if format == "json" {
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		err = e.Encode(r)
	} else {
		err = r.table(w)
	}
	if err != nil || c.Tier != tracer.TierNone {
		return err
	}
	code := command.ExitUnsupported
	for _, h := range c.Hooks {
		if h.Required && errors.Is(h.Err, tracer.ErrPermission) {
			code = command.ExitPrivileges
		}
	}
	return command.Exit(code, nil)
}

func (r *report) table(w io.Writer) error {
	var b strings.Builder
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	row := func(name, value string) { fmt.Fprintf(t, "%s\t%s\n", name, value) }
	row("tier", r.Tier)
	row("kernel", r.Kernel+" "+r.Arch)
	row("preemption", r.Preemption+" ("+r.PreemptionFrom+")")
	row("lockdown", r.Lockdown)
	var caps []string
	for _, n := range preflight.CapabilityNames() {
		mark := "+"
		if !r.Capabilities[n] {
			mark = "-"
		}
		caps = append(caps, mark+strings.TrimPrefix(n, "CAP_"))
	}
	row("capabilities", strings.Join(caps, " ")+" (uid "+strconv.Itoa(r.UID)+")")
	row("unprivileged_bpf_disabled", sysctl(r.UnprivilegedBPF, -1))
	row("perf_event_paranoid", sysctl(r.PerfParanoid, -100))
	row("io_uring_disabled", sysctl(r.IOUringDisabled, -1))
	lsm := "not known (securityfs)"
	if len(r.LSM) > 0 {
		lsm = strings.Join(r.LSM, ",")
	}
	row("LSM", lsm+"; SELinux "+r.SELinux+", AppArmor "+r.AppArmor)
	row("memlock", r.Memlock.Soft.String()+" (hard "+r.Memlock.Hard.String()+")")
	btf := "no"
	if r.BTF {
		btf = "yes"
	}
	row("BTF", btf)
	row("/dev/kvm", r.KVM)
	t.Flush()

	b.WriteString("\nHOOKS\n")
	for _, h := range r.Hooks {
		state := "attached"
		switch {
		case !h.Attached && h.Required:
			state = "MISSING"
		case !h.Attached:
			state = "missing"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", state, h.Hook, h.Sees)
	}
	t.Flush()
	said := map[string]bool{}
	for _, h := range r.Hooks {
		if h.Error != "" && !said[h.Error] {
			said[h.Error] = true
			fmt.Fprintf(&b, "  %s\n", h.Error)
		}
	}
	b.WriteString("\nGAPS (changes that this tier cannot see)\n")
	for _, g := range r.Gaps {
		fmt.Fprintf(t, "%s\t%s\n", g.Name, g.What)
	}
	t.Flush()
	if len(r.Remarks) > 0 {
		b.WriteString("\nREMARKS\n")
		for _, m := range r.Remarks {
			fmt.Fprintf(&b, "%s; try: %s\n", m.What, m.Try)
		}
	}
	return write(w, []byte(b.String()))
}

func sysctl(v, missing int) string {
	if v == missing {
		return "no such sysctl"
	}
	return strconv.Itoa(v)
}

// hookName is what encoders and decoders of records use.
func hookName(h mm.Hook) string { return tracer.HookName(h) }
