// SPDX-License-Identifier: Apache-2.0

// Package preflight collects the facts about a machine that decide what
// ummu can see on it. It reads; it changes nothing and loads nothing.
package preflight

import (
	"bufio"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Facts are what [Gather] found. A fact that could not be found out says so
// in words and is never guessed.
type Facts struct {
	Kernel  string `json:"kernel"` // release
	Arch    string `json:"arch"`   // Go's name
	Version string `json:"kernel_version"`
	// Preemption is "none", "voluntary", "full", "lazy", "rt" or "unknown",
	// with the source in PreemptionFrom.
	Preemption     string `json:"preemption"`
	PreemptionFrom string `json:"preemption_from"`
	// Lockdown is "none", "integrity", "confidentiality", or "unavailable"
	// where the kernel has no lockdown or securityfs is not mounted.
	Lockdown     string          `json:"lockdown"`
	UID          int             `json:"uid"`
	Capabilities map[string]bool `json:"capabilities"` // effective
	// UnprivilegedBPF is kernel.unprivileged_bpf_disabled: 0 allowed, 1 and 2
	// not; -1 if there is no such sysctl.
	UnprivilegedBPF int      `json:"unprivileged_bpf_disabled"`
	PerfParanoid    int      `json:"perf_event_paranoid"` // -100: no such sysctl
	LSM             []string `json:"lsm"`                 // active, if securityfs tells
	SELinux         string   `json:"selinux"`             // enforcing, permissive, off
	AppArmor        string   `json:"apparmor"`            // this process's profile, or off
	// IOUringDisabled is kernel.io_uring_disabled: 0 everybody, 1 a group, 2
	// nobody; -1 where the kernel has no such sysctl (before 6.6, or without
	// io_uring).
	IOUringDisabled int    `json:"io_uring_disabled"`
	Memlock         Limit  `json:"memlock"`
	BTF             bool   `json:"btf"`
	KVM             string `json:"kvm"` // usable, denied, absent
}

// Limit is a resource limit in bytes.
type Limit struct {
	Soft Bytes `json:"soft"`
	Hard Bytes `json:"hard"`
}

// Bytes is a number of bytes of a limit; RLIM_INFINITY is "unlimited".
type Bytes uint64

// MarshalText makes an infinite limit a word.
func (b Bytes) MarshalText() ([]byte, error) { return []byte(b.String()), nil }

func (b Bytes) String() string {
	if uint64(b) == unix.RLIM_INFINITY {
		return "unlimited"
	}
	return strconv.FormatUint(uint64(b), 10)
}

// capabilities are those that matter, by number (linux/capability.h).
var capabilities = []struct {
	name string
	bit  uint
}{
	{"CAP_IPC_LOCK", unix.CAP_IPC_LOCK},
	{"CAP_SYS_PTRACE", unix.CAP_SYS_PTRACE},
	{"CAP_SYS_ADMIN", unix.CAP_SYS_ADMIN},
	{"CAP_SYS_RESOURCE", unix.CAP_SYS_RESOURCE},
	{"CAP_PERFMON", unix.CAP_PERFMON},
	{"CAP_BPF", unix.CAP_BPF},
}

// CapabilityNames are the keys of Facts.Capabilities, in a fixed order.
func CapabilityNames() []string {
	var names []string
	for _, c := range capabilities {
		names = append(names, c.name)
	}
	return names
}

// Gather collects the facts of this machine and this process.
func Gather() (Facts, error) {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return Facts{}, fmt.Errorf("read kernel release: %w", err)
	}
	f := gather(root("/"), unix.ByteSliceToString(u.Release[:]))
	f.UID = os.Getuid()
	var l unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_MEMLOCK, &l); err != nil {
		return Facts{}, fmt.Errorf("read limit of locked memory: %w", err)
	}
	f.Memlock = Limit{Bytes(l.Cur), Bytes(l.Max)}
	return f, nil
}

// root is the directory that holds proc, sys, dev and boot.
type root string

func gather(r root, release string) Facts {
	f := Facts{Kernel: release, Arch: runtime.GOARCH, Version: r.text("proc/version")}
	f.Preemption, f.PreemptionFrom = r.preemption(release, f.Version)
	f.Lockdown = "unavailable"
	if s, ok := selected(r.text("sys/kernel/security/lockdown"), '[', ']'); ok {
		f.Lockdown = s
	}
	f.Capabilities = effective(r.text("proc/self/status"))
	f.UnprivilegedBPF = r.number("proc/sys/kernel/unprivileged_bpf_disabled", -1)
	f.PerfParanoid = r.number("proc/sys/kernel/perf_event_paranoid", -100)
	f.IOUringDisabled = r.number("proc/sys/kernel/io_uring_disabled", -1)
	f.LSM = []string{}
	if s := r.text("sys/kernel/security/lsm"); s != "" {
		f.LSM = strings.Split(s, ",")
	}
	f.SELinux = "off"
	switch r.number("sys/fs/selinux/enforce", -1) {
	case 0:
		f.SELinux = "permissive"
	case 1:
		f.SELinux = "enforcing"
	}
	f.AppArmor = "off"
	if r.text("sys/module/apparmor/parameters/enabled") == "Y" {
		f.AppArmor = r.text("proc/self/attr/current")
		if f.AppArmor == "" {
			f.AppArmor = "unknown profile"
		}
	}
	f.BTF = r.readable("sys/kernel/btf/vmlinux")
	f.KVM = r.kvm()
	return f
}

func (r root) path(name string) string { return filepath.Join(string(r), name) }

// text is a small file without surrounding space, or "".
func (r root) text(name string) string {
	b, err := os.ReadFile(r.path(name))
	if err != nil {
		return ""
	}
	return strings.Trim(string(b), " \n\x00")
}

func (r root) number(name string, missing int) int {
	n, err := strconv.Atoi(r.text(name))
	if err != nil {
		return missing
	}
	return n
}

func (r root) readable(name string) bool {
	f, err := os.Open(r.path(name))
	if err != nil {
		return false
	}
	f.Close()
	return true
}

func (r root) kvm() string {
	f, err := os.OpenFile(r.path("dev/kvm"), os.O_RDWR, 0)
	switch {
	case err == nil:
		f.Close()
		return "usable"
	case errors.Is(err, fs.ErrPermission):
		return "denied"
	case errors.Is(err, fs.ErrNotExist):
		return "absent"
	}
	return err.Error()
}

// preemption finds the model in force: debugfs knows it where the kernel can
// switch it (5.12), else the version string and the configuration.
func (r root) preemption(release, version string) (model, from string) {
	if s, ok := selected(r.text("sys/kernel/debug/sched/preempt"), '(', ')'); ok {
		return s, "/sys/kernel/debug/sched/preempt"
	}
	words := strings.Fields(version)
	has := func(w string) bool {
		for _, x := range words {
			if x == w {
				return true
			}
		}
		return false
	}
	switch {
	case has("PREEMPT_RT"):
		return "rt", "/proc/version"
	case has("PREEMPT_DYNAMIC"):
		for _, w := range strings.Fields(r.text("proc/cmdline")) {
			if m, ok := strings.CutPrefix(w, "preempt="); ok {
				return m, "/proc/cmdline"
			}
		}
		// The configuration is the default of a kernel that can switch.
	case has("PREEMPT"):
		return "full", "/proc/version"
	}
	config, name := r.config(release)
	for _, c := range []struct{ option, model string }{
		{"CONFIG_PREEMPT_RT", "rt"},
		{"CONFIG_PREEMPT_LAZY", "lazy"},
		{"CONFIG_PREEMPT", "full"},
		{"CONFIG_PREEMPT_VOLUNTARY", "voluntary"},
		{"CONFIG_PREEMPT_NONE", "none"},
	} {
		if config[c.option] {
			return c.model, name
		}
	}
	return "unknown", "no source readable"
}

// config returns the options set to y, of those that matter, and their source.
func (r root) config(release string) (map[string]bool, string) {
	for _, name := range []string{"proc/config.gz", "boot/config-" + release, "lib/modules/" + release + "/config"} {
		f, err := os.Open(r.path(name))
		if err != nil {
			continue
		}
		defer f.Close()
		var rd io.Reader = f
		if strings.HasSuffix(name, ".gz") {
			if rd, err = gzip.NewReader(f); err != nil {
				continue
			}
		}
		set := map[string]bool{}
		for s := bufio.NewScanner(rd); s.Scan(); {
			if o, ok := bytes.CutSuffix(s.Bytes(), []byte("=y")); ok && bytes.HasPrefix(o, []byte("CONFIG_PREEMPT")) {
				set[string(o)] = true
			}
		}
		return set, "/" + name
	}
	return nil, ""
}

// selected finds the marked word of "none [integrity] confidentiality".
func selected(s string, open, end byte) (string, bool) {
	i := strings.IndexByte(s, open)
	if i < 0 {
		return "", false
	}
	word, _, ok := strings.Cut(s[i+1:], string(end))
	return word, ok
}

// effective reads the effective capabilities from /proc/self/status.
func effective(status string) map[string]bool {
	caps := map[string]bool{}
	for line := range strings.Lines(status) {
		s, ok := strings.CutPrefix(line, "CapEff:")
		if !ok {
			continue
		}
		mask, err := strconv.ParseUint(strings.TrimSpace(s), 16, 64)
		if err != nil {
			break
		}
		for _, c := range capabilities {
			caps[c.name] = mask>>c.bit&1 != 0
		}
	}
	return caps
}

// Remark is a fact that stands in the way, and what to do about it.
type Remark struct{ What, Try string }

// Remarks lists what of f hinders seeing changes or using the feed.
func (f *Facts) Remarks() []Remark {
	var rs []Remark
	add := func(bad bool, what, try string) {
		if bad {
			rs = append(rs, Remark{what, try})
		}
	}
	admin := f.Capabilities["CAP_SYS_ADMIN"]
	add(!admin && !(f.Capabilities["CAP_BPF"] && f.Capabilities["CAP_PERFMON"]),
		"loading programs needs CAP_BPF and CAP_PERFMON (or CAP_SYS_ADMIN)", "run as root, or: setcap cap_bpf,cap_perfmon+ep ummufeed")
	add(!f.BTF, "/sys/kernel/btf/vmlinux is missing or not readable", "a kernel with CONFIG_DEBUG_INFO_BTF=y")
	add(f.Lockdown == "confidentiality", "lockdown confidentiality forbids programs to read kernel memory", "boot with lockdown=integrity or none")
	add(f.SELinux == "enforcing" && !admin, "SELinux may forbid bpf(2)", "ausearch -m avc -c ummufeed")
	add(f.IOUringDisabled == 2, "io_uring is disabled for everybody", "sysctl kernel.io_uring_disabled=0")
	add(f.IOUringDisabled == 1 && !admin, "io_uring is disabled but for a group", "sysctl kernel.io_uring_disabled=0, or kernel.io_uring_group")
	add(uint64(f.Memlock.Soft) < 64<<20 && !f.Capabilities["CAP_IPC_LOCK"], "little memory may be locked: "+f.Memlock.Soft.String()+" bytes", "ulimit -l, or LimitMEMLOCK= of the service")
	return rs
}
