// SPDX-License-Identifier: Apache-2.0

package preflight

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

func tree(t *testing.T, files map[string]string) root {
	t.Helper()
	dir := t.TempDir()
	for name, text := range files {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
			t.Fatal(err)
		}
		if strings.HasSuffix(name, ".gz") {
			var b bytes.Buffer
			w := gzip.NewWriter(&b)
			w.Write([]byte(text))
			w.Close()
			text = b.String()
		}
		if err := os.WriteFile(p, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root(dir)
}

func TestPreemption(t *testing.T) {
	for _, c := range []struct {
		name        string
		files       map[string]string
		model, from string
	}{
		{"debugfs", map[string]string{"sys/kernel/debug/sched/preempt": "none voluntary (full) lazy\n", "proc/cmdline": "preempt=none"}, "full", "/sys/kernel/debug/sched/preempt"},
		{"rt", map[string]string{"proc/version": "Linux version 6.12 #1 SMP PREEMPT_RT Debian"}, "rt", "/proc/version"},
		{"full", map[string]string{"proc/version": "Linux version 5.10 #1 SMP PREEMPT Debian"}, "full", "/proc/version"},
		{"dynamic, command line", map[string]string{"proc/version": "#1 SMP PREEMPT_DYNAMIC", "proc/cmdline": "quiet preempt=voluntary\n"}, "voluntary", "/proc/cmdline"},
		{"dynamic, built as", map[string]string{"proc/version": "#1 SMP PREEMPT_DYNAMIC", "proc/config.gz": "CONFIG_PREEMPT_LAZY=y\nCONFIG_PREEMPT_DYNAMIC=y\n"}, "lazy", "/proc/config.gz"},
		{"static", map[string]string{"proc/version": "#1 SMP", "boot/config-6.1.0": "# CONFIG_PREEMPT is not set\nCONFIG_PREEMPT_NONE=y\n"}, "none", "/boot/config-6.1.0"},
		{"nothing", nil, "unknown", "no source readable"},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := tree(t, c.files)
			model, from := r.preemption("6.1.0", r.text("proc/version"))
			if model != c.model || from != c.from {
				t.Errorf("got %s from %s, want %s from %s", model, from, c.model, c.from)
			}
		})
	}
}

func TestGatherFromTree(t *testing.T) {
	f := gather(tree(t, map[string]string{
		"sys/kernel/security/lockdown":              "none [integrity] confidentiality\n",
		"sys/kernel/security/lsm":                   "lockdown,capability,selinux\n",
		"sys/fs/selinux/enforce":                    "1",
		"sys/module/apparmor/parameters/enabled":    "Y\n",
		"proc/self/attr/current":                    "snap.x (enforce)\n",
		"proc/self/status":                          "Name:\tx\nCapEff:\t000000c000080000\nSeccomp:\t0\n",
		"proc/sys/kernel/unprivileged_bpf_disabled": "2\n",
		"proc/sys/kernel/io_uring_disabled":         "1\n",
		"proc/sys/kernel/perf_event_paranoid":       "-1\n",
		"sys/kernel/btf/vmlinux":                    "x",
		"dev/kvm":                                   "",
		"sys/kernel/debug/sched/preempt":            "(none) voluntary",
	}), "6.1.0")
	want := Facts{
		Kernel: "6.1.0", Arch: f.Arch, Preemption: "none", PreemptionFrom: "/sys/kernel/debug/sched/preempt", Lockdown: "integrity",
		Capabilities:    map[string]bool{"CAP_SYS_PTRACE": true, "CAP_BPF": true, "CAP_PERFMON": true, "CAP_SYS_ADMIN": false, "CAP_IPC_LOCK": false, "CAP_SYS_RESOURCE": false},
		UnprivilegedBPF: 2, PerfParanoid: -1, LSM: []string{"lockdown", "capability", "selinux"}, SELinux: "enforcing", AppArmor: "snap.x (enforce)",
		IOUringDisabled: 1, BTF: true, KVM: "usable",
	}
	if d := cmp.Diff(want, f); d != "" {
		t.Errorf("facts (-want +got):\n%s", d)
	}
}

func TestGatherFromNothing(t *testing.T) {
	f := gather(tree(t, nil), "x")
	want := Facts{Kernel: "x", Arch: f.Arch, Preemption: "unknown", PreemptionFrom: "no source readable", Lockdown: "unavailable",
		Capabilities: map[string]bool{}, UnprivilegedBPF: -1, PerfParanoid: -100, LSM: []string{}, SELinux: "off", AppArmor: "off", IOUringDisabled: -1, KVM: "absent"}
	if d := cmp.Diff(want, f); d != "" {
		t.Errorf("facts (-want +got):\n%s", d)
	}
	var what []string
	for _, r := range f.Remarks() {
		what = append(what, r.What)
		if r.Try == "" {
			t.Errorf("%s: nothing to try", r.What)
		}
	}
	if len(what) != 3 { // capabilities, BTF, memlock
		t.Errorf("remarks %q", what)
	}
}

func TestGatherHere(t *testing.T) {
	f, err := Gather()
	if err != nil {
		t.Fatal(err)
	}
	if f.Kernel == "" || f.Version == "" || len(f.Capabilities) != len(CapabilityNames()) || f.UID != os.Getuid() {
		t.Errorf("facts are missing: %+v", f)
	}
	var hdr = unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&hdr, &data[0]); err != nil {
		t.Fatal(err)
	}
	eff := uint64(data[0].Effective) | uint64(data[1].Effective)<<32
	for _, c := range capabilities {
		if f.Capabilities[c.name] != (eff>>c.bit&1 != 0) {
			t.Errorf("%s differs from capget", c.name)
		}
	}
	if _, err := json.Marshal(f); err != nil {
		t.Error(err)
	}
}
