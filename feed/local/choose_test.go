// SPDX-License-Identifier: Apache-2.0

package local

import (
	"io/fs"
	"strings"
	"testing"

	"github.com/ummu/ummu/internal/verdict"
	"github.com/ummu/ummu/tracer"
)

func TestChoose(t *testing.T) {
	probe, tracepoint := tracer.TierNotifierProbe.String(), tracer.TierNotifierTracepoint.String()
	for _, c := range []struct {
		name  string
		known verdict.Verdicts
		err   error
		kvm   error
		want  tracer.Tier
		why   string
	}{
		{"nothing known", nil, nil, nil, tracer.TierSyscall, "no self-test"},
		{"verdicts unreadable", nil, fs.ErrPermission, nil, tracer.TierSyscall, "permission"},
		{"strongest", verdict.Verdicts{probe: {Fit: true}, tracepoint: {Fit: true}}, nil, nil, tracer.TierNotifierProbe, "strongest"},
		{"next", verdict.Verdicts{probe: {Reason: "skipped"}, tracepoint: {Fit: true}}, nil, nil, tracer.TierNotifierTracepoint, "strongest"},
		{"mm", verdict.Verdicts{"mm": {Fit: true}, tracepoint: {Fit: true}}, nil, fs.ErrNotExist, tracer.TierMM, "strongest"},
		{"unfit", verdict.Verdicts{tracepoint: {Reason: "missed"}}, nil, nil, tracer.TierSyscall, "notifier/tracepoint is unfit: missed"},
		{"no KVM", verdict.Verdicts{tracepoint: {Fit: true}}, nil, fs.ErrPermission, tracer.TierSyscall, "/dev/kvm"},
	} {
		if got, why := choose(c.known, c.err, c.kvm); got != c.want || !strings.Contains(why, c.why) {
			t.Errorf("%s: %v, %q; want %v, %q", c.name, got, why, c.want, c.why)
		}
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	if got, why := Choose(); got != tracer.TierSyscall || why == "" {
		t.Errorf("no verdicts here: %v, %q", got, why)
	}
}
