// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/selftest"
	"github.com/ummu/ummu/test/machine"
	"github.com/ummu/ummu/tracer"
)

// The binary performs the operations itself, and says what came of it in the
// form that scripts rely on.
func TestSelfTest(t *testing.T) {
	r := ummufeed(t, "check", "--self-test", "--tier", "syscall", "-o", "json")
	if r.code != command.ExitOK {
		t.Fatalf("code %d, stderr %s", r.code, r.errout)
	}
	var got struct {
		Tier               string
		Fit                bool
		Missed             *int
		FalseInvalidations *int `json:"false_invalidations"`
		Operations         []struct{ Name, Seen, Range, Hook string }
	}
	if err := json.Unmarshal([]byte(r.out), &got); err != nil {
		t.Fatalf("%v: %s", err, r.out)
	}
	if got.Tier != "syscall" || !got.Fit || got.Missed == nil || *got.Missed != 0 || got.FalseInvalidations == nil || *got.FalseInvalidations != 0 {
		t.Errorf("report %+v", got)
	}
	if len(got.Operations) < 60 {
		t.Errorf("%d operations", len(got.Operations))
	}
	for _, op := range got.Operations {
		if op.Name == "" || op.Seen == "" || op.Range == "" || op.Seen == "seen" && op.Hook == "" {
			t.Errorf("operation %+v", op)
		}
	}
}

func TestSelfTestUsage(t *testing.T) {
	for _, c := range []struct {
		args, says string
		code       int
	}{
		{"check --tier syscall", "--tier is for --self-test", command.ExitUsage},
		{"check --self-test --tier x", "one of auto, notifier, notifier/probe, notifier/tracepoint, mm, syscall", command.ExitUsage},
		{"check --self-test --tier mm", "test tier mm: ", command.ExitUnsupported},
		{selftest.Argument + " nonsense", "self-test: ", command.ExitFailure},
	} {
		if c.code == command.ExitUnsupported && machine.HasProbes() {
			continue // this kernel has the tier
		}
		r := ummufeed(t, strings.Fields(c.args)...)
		if r.code != c.code || r.out != "" || !strings.Contains(r.errout, c.says) {
			t.Errorf("%s: code %d, stdout %q, stderr %q", c.args, r.code, r.out, r.errout)
		}
	}
}

func TestShowSelfTest(t *testing.T) {
	fit := &selftest.Report{Tier: tracer.TierSyscall, Fit: true, Operations: []selftest.Operation{
		{Name: "munmap", Seen: selftest.WasSeen, Range: selftest.RangeExact, Hook: "tp_btf/sys_enter"},
		{Name: "guard", Seen: selftest.NotHere, Range: selftest.RangeNone},
		{Name: "storm", Seen: selftest.WasSeen, Range: selftest.RangeExact, Changes: 2000},
	}, Hooks: map[string]int{"tp_btf/sys_enter": 2}}
	unfit := &selftest.Report{Tier: tracer.TierNotifierTracepoint, Missed: 1, Reasons: []string{"munmap: missed: pages SS changed"}}
	for _, c := range []struct {
		name  string
		tried []selftest.Attempt
		code  int
		out   []string // of the table
		err   string
	}{
		{"fit", []selftest.Attempt{{Tier: fit.Tier, Report: fit}}, command.ExitOK,
			[]string{"munmap ", "not on this kernel", "2000 changes", "tier syscall: FIT: 3 operations"}, ""},
		{"the second", []selftest.Attempt{{Tier: unfit.Tier, Report: unfit}, {Tier: fit.Tier, Report: fit}}, command.ExitOK,
			[]string{"tier notifier/tracepoint: munmap: missed", "tier syscall: FIT"}, ""},
		{"none", []selftest.Attempt{{Tier: unfit.Tier, Report: unfit}}, command.ExitFailure,
			[]string{"tier notifier/tracepoint: UNFIT", "1 missed"}, "tier notifier/tracepoint is unfit: munmap: missed"},
		{"privileges", []selftest.Attempt{{Tier: fit.Tier, Err: fmt.Errorf("x: %w", tracer.ErrPermission)}}, command.ExitPrivileges, nil, "not permitted"},
		{"no KVM", []selftest.Attempt{{Tier: fit.Tier, Err: fmt.Errorf("x: %w", tracer.ErrNoKVM)}}, command.ExitUnsupported, nil, "no KVM"},
		{"no access to KVM", []selftest.Attempt{{Tier: fit.Tier, Err: fmt.Errorf("%w: %w", tracer.ErrNoKVM, os.ErrPermission)}}, command.ExitPrivileges, nil, "no KVM"},
	} {
		t.Run(c.name, func(t *testing.T) {
			var out bytes.Buffer
			err := showSelfTest(&out, "table", c.tried)
			if got := command.ExitCode(err); got != c.code || err != nil && !strings.Contains(err.Error(), c.err) {
				t.Errorf("code %d, error %v", got, err)
			}
			for _, s := range c.out {
				if !strings.Contains(out.String(), s) {
					t.Errorf("no %q in\n%s", s, out.String())
				}
			}
			out.Reset()
			again := showSelfTest(&out, "json", c.tried)
			if command.ExitCode(again) != c.code {
				t.Errorf("JSON: %v", again)
			}
			if c.out == nil {
				if out.Len() != 0 {
					t.Errorf("JSON without a report: %s", out.String())
				}
				return
			}
			var r struct {
				Tier  string
				Fit   bool
				Tried []struct{ Tier, Reason string }
			}
			if err := json.Unmarshal(out.Bytes(), &r); err != nil || r.Fit != (c.code == command.ExitOK) || len(r.Tried) != len(c.tried) {
				t.Errorf("%v: %s", errors.Join(err), out.String())
			}
		})
	}
}
