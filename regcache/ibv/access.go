// SPDX-License-Identifier: Apache-2.0

package ibv

import (
	"strings"

	"github.com/ummu/ummu/regcache"
)

// Flags of ibv_reg_mr (enum ibv_access_flags); lib_cgo.go compares them.
const (
	flagLocalWrite      = 1 << 0
	flagRemoteWrite     = 1 << 1
	flagRemoteRead      = 1 << 2
	flagRemoteAtomic    = 1 << 3
	flagOnDemand        = 1 << 6
	flagRelaxedOrdering = 1 << 20
)

// flagsOf maps rights to flags. The kernel refuses (EINVAL) remote writing
// and atomics without local writing, which says no more than that the pages
// are writable: it is added.
func flagsOf(a regcache.Access, o Options) uint32 {
	var f uint32
	if a.Has(regcache.LocalWrite) || a&(regcache.RemoteWrite|regcache.RemoteAtomic) != 0 {
		f |= flagLocalWrite
	}
	if a.Has(regcache.RemoteRead) {
		f |= flagRemoteRead
	}
	if a.Has(regcache.RemoteWrite) {
		f |= flagRemoteWrite
	}
	if a.Has(regcache.RemoteAtomic) {
		f |= flagRemoteAtomic
	}
	if o.OnDemand {
		f |= flagOnDemand
	}
	if o.RelaxedOrdering {
		f |= flagRelaxedOrdering
	}
	return f
}

// rightsOf is the rights that registering with the flags gives.
func rightsOf(f uint32) regcache.Access {
	var a regcache.Access
	for flag, right := range map[uint32]regcache.Access{
		flagLocalWrite: regcache.LocalWrite, flagRemoteRead: regcache.RemoteRead,
		flagRemoteWrite: regcache.RemoteWrite, flagRemoteAtomic: regcache.RemoteAtomic,
	} {
		if f&flag != 0 {
			a |= right
		}
	}
	return a
}

// flagNames writes flags as in the manual page of ibv_reg_mr.
func flagNames(f uint32) string {
	var names []string
	for _, n := range []struct {
		flag uint32
		name string
	}{
		{flagLocalWrite, "LOCAL_WRITE"}, {flagRemoteWrite, "REMOTE_WRITE"}, {flagRemoteRead, "REMOTE_READ"},
		{flagRemoteAtomic, "REMOTE_ATOMIC"}, {flagOnDemand, "ON_DEMAND"}, {flagRelaxedOrdering, "RELAXED_ORDERING"},
	} {
		if f&n.flag != 0 {
			names = append(names, n.name)
		}
	}
	if names == nil {
		return "none"
	}
	return strings.Join(names, "|")
}
