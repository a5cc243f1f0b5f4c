// SPDX-License-Identifier: Apache-2.0

package ibv

import "unsafe"

// What lib_cgo.go and lib_none.go have in common: objects of the libraries,
// and results in Go's types. Errors are errnos.

type object = unsafe.Pointer

type portInfo struct {
	gids     int
	lid      uint16
	ethernet bool
	active   bool
	mtu      uint8
}

type keys struct {
	mr         object
	lkey, rkey uint32
}

type work struct {
	op                operation
	addr, remote, add uint64
	length            uint32
	lkey, rkey        uint32
}

type operation int32

const (
	opWrite operation = iota
	opRead
	opAdd
)

func (o operation) String() string {
	return [...]string{"RDMA WRITE", "RDMA READ", "fetch and add"}[o]
}

type completion struct{ status, vendor uint32 }

type path struct {
	Endpoint
	myPSN    uint32
	port     int
	gidIndex int
	global   bool
}
