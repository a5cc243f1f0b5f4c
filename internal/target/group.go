// SPDX-License-Identifier: Apache-2.0

package target

import (
	"fmt"
	"os"
	"path"
	"regexp"
	"slices"
	"strings"
)

// ControlGroup is the path of a process in the unified hierarchy, or in the
// first one that there is; empty if the process has ended.
func ControlGroup(pid uint32) string {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return ""
	}
	first := ""
	for line := range strings.Lines(string(b)) {
		// "0::/path", or "4:memory:/path" of version 1 (cgroups(7))
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) != 3 {
			continue
		}
		if f[0] == "0" && f[2] != "/" {
			return f[2]
		}
		if first == "" || first == "/" {
			first = f[2]
		}
	}
	return first
}

// containerID is how container engines name groups: docker-ID.scope,
// cri-containerd-ID.scope, libpod-ID.scope, or just ID.
var containerID = regexp.MustCompile(`^(?:([a-z-]+)-)?([0-9a-f]{64})(?:\.scope)?$`)

// Container is a control group in a few letters: engine and short number of a
// container, else the last part of the path.
func Container(group string) string {
	for p := group; p != "/" && p != "." && p != ""; p = path.Dir(p) {
		if m := containerID.FindStringSubmatch(path.Base(p)); m != nil {
			engine := m[1]
			if engine == "" {
				engine = path.Base(path.Dir(p))
			}
			return engine + ":" + m[2][:12]
		}
	}
	if group == "" || group == "/" {
		return group
	}
	return path.Base(group)
}

// Select returns which processes have one of the names or are in one of the
// control groups: below a path, or in a container as [Container] names it. nil:
// all, because nothing is asked for.
func Select(comms, groups []string) func(pid uint32, comm string) bool {
	if len(comms) == 0 && len(groups) == 0 {
		return nil
	}
	return func(pid uint32, comm string) bool {
		if len(comms) > 0 && !slices.Contains(comms, comm) {
			return false
		}
		if len(groups) == 0 {
			return true
		}
		in := ControlGroup(pid)
		return slices.ContainsFunc(groups, func(g string) bool { return inGroup(in, g) })
	}
}

// inGroup reports whether a path is the asked group, is below it, or is that
// of a container with this name.
func inGroup(in, asked string) bool {
	if in == "" {
		return false
	}
	below, ok := strings.CutPrefix(in, strings.TrimSuffix(asked, "/"))
	if ok && strings.HasPrefix(asked, "/") && (below == "" || below[0] == '/') {
		return true
	}
	return Container(in) == asked
}
