// SPDX-License-Identifier: Apache-2.0

package source

import "github.com/ummu/ummu/internal/target"

// groups remembers the control groups of processes. It is not safe for
// concurrent use.
type groups struct {
	known map[uint32]string
	path  func(pid uint32) string
}

// lookups bounds the files that are read for one answer; the rest is known a
// little later.
const lookups = 1000

func newGroups() *groups { return &groups{known: make(map[uint32]string), path: target.ControlGroup} }

// of returns the groups of processes, by what is known of them. It is a new map.
func (g *groups) of(pids []uint32) map[uint32]string {
	out := make(map[uint32]string, len(pids))
	looked := 0
	for _, p := range pids {
		name, ok := g.known[p]
		if !ok && looked < lookups {
			looked++
			name, ok = target.Container(g.path(p)), true
		}
		if ok {
			out[p] = name
		}
	}
	g.known = make(map[uint32]string, len(out)) // without those that are gone
	for p, name := range out {
		g.known[p] = name
	}
	return out
}
