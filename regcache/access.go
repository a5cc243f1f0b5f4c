// SPDX-License-Identifier: Apache-2.0

package regcache

import "strings"

// Access is a set of rights of a registration. Reading by the local device
// (sending from the memory) is always implied.
type Access uint8

// The rights. The zero Access is local reading only.
const (
	LocalWrite Access = 1 << iota
	RemoteRead
	RemoteWrite
	RemoteAtomic

	allAccess    = LocalWrite | RemoteRead | RemoteWrite | RemoteAtomic
	accessValues = int(allAccess) + 1
)

var accessNames = [...]string{"local-write", "remote-read", "remote-write", "remote-atomic"}

// Has reports whether every right of b is in a.
func (a Access) Has(b Access) bool { return a&b == b }

// String lists the rights, "local-read" first.
func (a Access) String() string {
	var s strings.Builder
	s.WriteString("local-read")
	for i, n := range accessNames {
		if a&(1<<i) != 0 {
			s.WriteByte('|')
			s.WriteString(n)
		}
	}
	return s.String()
}
