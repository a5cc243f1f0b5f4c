// SPDX-License-Identifier: Apache-2.0

//go:build cgo

package ibv

// #cgo LDFLAGS: -ldl -lpthread
// #include <stdlib.h>
// #include <netinet/in.h>
// #include "shim.h"
import "C"

import (
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"unsafe"
)

// Compile-time comparison of the flags with those of the C side, which
// compares them with the header.
var (
	_ [flagLocalWrite - C.UMMU_LOCAL_WRITE]struct{}           = [0]struct{}{}
	_ [flagRemoteWrite - C.UMMU_REMOTE_WRITE]struct{}         = [0]struct{}{}
	_ [flagRemoteRead - C.UMMU_REMOTE_READ]struct{}           = [0]struct{}{}
	_ [flagRemoteAtomic - C.UMMU_REMOTE_ATOMIC]struct{}       = [0]struct{}{}
	_ [flagOnDemand - C.UMMU_ON_DEMAND]struct{}               = [0]struct{}{}
	_ [flagRelaxedOrdering - C.UMMU_RELAXED_ORDERING]struct{} = [0]struct{}{}
	_ [opWrite - C.UMMU_WRITE]struct{}                        = [0]struct{}{}
	_ [opRead - C.UMMU_READ]struct{}                          = [0]struct{}{}
	_ [opAdd - C.UMMU_ADD]struct{}                            = [0]struct{}{}
)

// load opens libibverbs, and librdmacm if cm is set.
func load(cm bool) error {
	var why [512]C.char
	with := C.int(0)
	if cm {
		with = 1
	}
	if C.ummu_load(with, &why[0], C.int(len(why))) != 0 {
		return fmt.Errorf("%w: %s", ErrNoLibrary, C.GoString(&why[0]))
	}
	return nil
}

func errnoOf(rc C.int) error {
	if rc == 0 {
		return nil
	}
	return syscall.Errno(rc)
}

// checkPointer panics if p leads to memory of the Go heap that is not pinned:
// the runtime looks at the pointers in what is passed to C.
func checkPointer(p unsafe.Pointer) {
	r := C.struct_ummu_range{addr: p}
	C.ummu_check(&r)
}

func libDevices() ([]string, error) {
	const size = 64 << 10
	names := (*C.char)(C.malloc(size))
	defer C.free(unsafe.Pointer(names))
	if err := errnoOf(C.ummu_devices(names, size)); err != nil {
		return nil, err
	}
	return strings.Fields(C.GoString(names)), nil
}

func libOpen(name string) (object, error) {
	s := C.CString(name)
	defer C.free(unsafe.Pointer(s))
	var c object
	err := errnoOf(C.ummu_open(s, &c))
	return c, err
}

func libClose(c object) error { return errnoOf(C.ummu_close(c)) }

func libName(c object) string { return C.GoString(C.ummu_name(c)) }

func libForkStatus() ForkStatus { return ForkStatus(C.ummu_fork_status()) }

func libQuery(c object) (Limits, error) {
	var l C.struct_ummu_limits
	if err := errnoOf(C.ummu_query(c, &l)); err != nil {
		return Limits{}, err
	}
	return Limits{
		MaxMR: int(l.max_mr), MaxMRSize: uint64(l.max_mr_size), Ports: int(l.ports),
		OnDemand:      l.odp_general&1 != 0, // IBV_ODP_SUPPORT
		OnDemandWrite: l.odp_rc&(1<<2) != 0, // IBV_ODP_SUPPORT_WRITE, as target
		OnDemandRead:  l.odp_rc&(1<<3) != 0, // IBV_ODP_SUPPORT_READ
	}, nil
}

func libPort(c object, port int) (portInfo, error) {
	var p C.struct_ummu_port
	if err := errnoOf(C.ummu_port(c, C.int(port), &p)); err != nil {
		return portInfo{}, err
	}
	return portInfo{gids: int(p.gids), lid: uint16(p.lid), ethernet: p.ethernet != 0, active: p.active != 0, mtu: uint8(p.mtu)}, nil
}

func libGID(c object, port, index int) (g [16]byte, err error) {
	err = errnoOf(C.ummu_gid(c, C.int(port), C.int(index), (*C.uint8_t)(&g[0])))
	return g, err
}

func libFatal(c object) (bool, error) {
	var fatal C.int
	err := errnoOf(C.ummu_fatal(c, &fatal))
	return fatal != 0, err
}

func libPD(c object) (object, error) {
	var pd object
	err := errnoOf(C.ummu_pd(c, &pd))
	return pd, err
}

func libFreePD(pd object) error { return errnoOf(C.ummu_free_pd(pd)) }

func libRegister(pd object, addr, length, iova uint64, flags uint32) (keys, error) {
	var mr C.struct_ummu_mr
	if err := errnoOf(C.ummu_register(pd, C.uint64_t(addr), C.uint64_t(length), C.uint64_t(iova), C.uint(flags), &mr)); err != nil {
		return keys{}, err
	}
	return keys{mr.mr, uint32(mr.lkey), uint32(mr.rkey)}, nil
}

func libDeregister(mr object) error { return errnoOf(C.ummu_deregister(mr)) }

type queueObject struct {
	number uint32
	c      C.struct_ummu_queue
}

func libQueue(context, pd object, depth int) (*queueObject, error) {
	q := new(queueObject)
	if err := errnoOf(C.ummu_queue(context, pd, C.int(depth), &q.c)); err != nil {
		return nil, err
	}
	q.number = uint32(q.c.number)
	return q, nil
}

func (q *queueObject) free() error { return errnoOf(C.ummu_free_queue(&q.c)) }

func (q *queueObject) connect(p path) error {
	c := C.struct_ummu_peer{
		qpn: C.uint32_t(p.QPN), psn: C.uint32_t(p.PSN), my_psn: C.uint32_t(p.myPSN), lid: C.uint16_t(p.LID),
		port: C.uint8_t(p.port), gid_index: C.uint8_t(p.gidIndex), mtu: C.uint8_t(p.MTU),
	}
	if p.global {
		c.global = 1
	}
	for i, b := range p.GID {
		c.gid[i] = C.uint8_t(b)
	}
	return errnoOf(C.ummu_connect(q.c.qp, &c))
}

func (q *queueObject) disconnect() error { return errnoOf(C.ummu_disconnect(q.c.qp)) }

func (q *queueObject) send(w work) error {
	c := C.struct_ummu_work{
		addr: C.uint64_t(w.addr), remote: C.uint64_t(w.remote), add: C.uint64_t(w.add),
		length: C.uint32_t(w.length), lkey: C.uint32_t(w.lkey), rkey: C.uint32_t(w.rkey), op: C.int(w.op),
	}
	return errnoOf(C.ummu_send(q.c.qp, &c))
}

func (q *queueObject) complete(milliseconds int) (completion, error) {
	var c C.struct_ummu_completion
	err := errnoOf(C.ummu_complete(&q.c, C.int(milliseconds), &c))
	return completion{uint32(c.status), uint32(c.vendor)}, err
}

func libStatus(status uint32) string { return C.GoString(C.ummu_status(C.int(status))) }

// sockaddr is a name in C's memory, to be freed.
func sockaddr(a netip.AddrPort) unsafe.Pointer {
	p := C.calloc(1, C.sizeof_struct_sockaddr_in6)
	port := [2]byte{byte(a.Port() >> 8), byte(a.Port())}
	if a.Addr().Unmap().Is4() {
		s := (*C.struct_sockaddr_in)(p)
		s.sin_family = C.AF_INET
		*(*[2]byte)(unsafe.Pointer(&s.sin_port)) = port
		*(*[4]byte)(unsafe.Pointer(&s.sin_addr)) = a.Addr().Unmap().As4()
	} else {
		s := (*C.struct_sockaddr_in6)(p)
		s.sin6_family = C.AF_INET6
		*(*[2]byte)(unsafe.Pointer(&s.sin6_port)) = port
		*(*[16]byte)(unsafe.Pointer(&s.sin6_addr)) = a.Addr().As16()
	}
	return p
}

func cmListen(a netip.AddrPort) (object, error) {
	s := sockaddr(a)
	defer C.free(s)
	var id object
	err := errnoOf(C.ummu_cm_listen(s, &id))
	return id, err
}

func cmPort(id object) uint16 { return uint16(C.ummu_cm_port(id)) }

func cmNext(listener object, milliseconds int) (object, error) {
	var id object
	err := errnoOf(C.ummu_cm_next(listener, C.int(milliseconds), &id))
	return id, err
}

func cmResolve(a netip.AddrPort, milliseconds int) (object, error) {
	s := sockaddr(a)
	defer C.free(s)
	var id object
	err := errnoOf(C.ummu_cm_resolve(s, C.int(milliseconds), &id))
	return id, err
}

func cmContext(id object) object { return C.ummu_cm_context(id) }

func cmQueue(id, pd object, depth int) (*queueObject, error) {
	q := new(queueObject)
	if err := errnoOf(C.ummu_cm_queue(id, pd, C.int(depth), &q.c)); err != nil {
		return nil, err
	}
	q.number = uint32(q.c.number)
	return q, nil
}

func cmConnect(id object, accept bool, data []byte) error {
	how := C.int(0)
	if accept {
		how = 1
	}
	p := C.CBytes(data)
	defer C.free(p)
	return errnoOf(C.ummu_cm_connect(id, how, p, C.int(len(data))))
}

func cmData(id object) []byte {
	b := make([]byte, 256)
	n := C.ummu_cm_data(id, unsafe.Pointer(&b[0]), C.int(len(b)))
	return b[:n]
}

func cmDisconnect(id object) error { return errnoOf(C.ummu_cm_disconnect(id)) }

func cmFreeQueue(id object, q *queueObject) { C.ummu_cm_free_queue(id, &q.c) }

func cmFree(id object) error { return errnoOf(C.ummu_cm_free(id)) }
