// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"fmt"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/mm"
)

// Tier names a way of seeing changes, weakest first. A stronger tier has
// fewer gaps.
type Tier uint32

// The tiers.
const (
	TierNone               Tier = layout.TierNone
	TierSyscall            Tier = layout.TierSyscall
	TierMM                 Tier = layout.TierMM
	TierNotifierTracepoint Tier = layout.TierNotifierTracepoint
	TierNotifierProbe      Tier = layout.TierNotifierProbe
)

// String is the tier's name as `ummufeed check` prints it.
func (t Tier) String() string {
	switch t {
	case TierNone:
		return "none"
	case TierSyscall:
		return "syscall"
	case TierMM:
		return "mm"
	case TierNotifierTracepoint:
		return "notifier/tracepoint"
	case TierNotifierProbe:
		return "notifier/probe"
	}
	return fmt.Sprintf("tier(%d)", uint32(t))
}

// MarshalText makes the tier its name in JSON.
func (t Tier) MarshalText() ([]byte, error) { return []byte(t.String()), nil }

// Coverage says what a tracer sees and what it cannot see.
type Coverage struct {
	Tier  Tier
	Hooks []HookStatus
	Gaps  []Gap
	// Weak says what the kernel may skip without another hook behind it. A tier
	// with anything here must not be used for a cache: a change could be unseen
	// until the miss counters are read.
	Weak []string `json:",omitempty"`
}

// HookStatus is the fate of one hook.
type HookStatus struct {
	Hook     mm.Hook
	Name     string // as the kernel names it, e.g. "tp_btf/sys_enter"
	Sees     string // in a few words
	Required bool   // without it the tier cannot work
	Attached bool
	Err      error // why it is not attached; a *HookError
}

// Gap is one kind of change that the tier cannot see. A range it concerns
// must not be cached.
type Gap struct {
	Name string // stable identifier, e.g. "file-truncate"
	What string // for people
}
