// SPDX-License-Identifier: Apache-2.0

package local

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/verdict"
	"github.com/ummu/ummu/tracer"
)

// Choose is the strongest tier for a watch of the calling process that has
// passed its self-test since the machine was booted (`ummufeed check
// --self-test` as the same user), and why it is that one. It is the syscall
// tier, which needs no notifier, where nothing is known of the others, or
// /dev/kvm may not be used. Nothing is tested or loaded; it takes well under a
// millisecond.
func Choose() (tier tracer.Tier, why string) {
	known, err := verdict.Load()
	return choose(known, err, unix.Access("/dev/kvm", unix.R_OK|unix.W_OK))
}

func choose(known verdict.Verdicts, err, kvm error) (tier tracer.Tier, why string) {
	tier = tracer.TierSyscall
	if err != nil {
		return tier, err.Error()
	}
	why = "no self-test of a stronger tier since the boot (ummufeed check --self-test)"
	for _, t := range []tracer.Tier{tracer.TierNotifierProbe, tracer.TierNotifierTracepoint, tracer.TierMM} {
		v, ok := known[t.String()]
		switch {
		case !ok:
		case !v.Fit:
			why = fmt.Sprintf("%v is unfit: %s", t, v.Reason)
		case t != tracer.TierMM && kvm != nil:
			why = fmt.Sprintf("%v is fit, but /dev/kvm: %v", t, kvm)
		default:
			return t, "the strongest that passed its self-test"
		}
	}
	return tier, why
}
