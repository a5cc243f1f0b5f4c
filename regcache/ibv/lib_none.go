// SPDX-License-Identifier: Apache-2.0

//go:build !cgo

package ibv

import (
	"net/netip"
	"syscall"
	"unsafe"
)

// load fails, so that nothing below is ever called.
func load(bool) error { return ErrNotBuilt }

type queueObject struct{ number uint32 }

func checkPointer(unsafe.Pointer)                                      {}
func libDevices() ([]string, error)                                    { return nil, syscall.ENOSYS }
func libOpen(string) (object, error)                                   { return nil, syscall.ENOSYS }
func libClose(object) error                                            { return syscall.ENOSYS }
func libName(object) string                                            { return "" }
func libForkStatus() ForkStatus                                        { return ForkUnknown }
func libQuery(object) (Limits, error)                                  { return Limits{}, syscall.ENOSYS }
func libPort(object, int) (portInfo, error)                            { return portInfo{}, syscall.ENOSYS }
func libGID(object, int, int) (g [16]byte, _ error)                    { return g, syscall.ENOSYS }
func libFatal(object) (bool, error)                                    { return false, syscall.ENOSYS }
func libPD(object) (object, error)                                     { return nil, syscall.ENOSYS }
func libFreePD(object) error                                           { return syscall.ENOSYS }
func libRegister(object, uint64, uint64, uint64, uint32) (keys, error) { return keys{}, syscall.ENOSYS }
func libDeregister(object) error                                       { return syscall.ENOSYS }
func libQueue(object, object, int) (*queueObject, error)               { return nil, syscall.ENOSYS }
func (*queueObject) free() error                                       { return syscall.ENOSYS }
func (*queueObject) connect(path) error                                { return syscall.ENOSYS }
func (*queueObject) disconnect() error                                 { return syscall.ENOSYS }
func (*queueObject) send(work) error                                   { return syscall.ENOSYS }
func (*queueObject) complete(int) (completion, error)                  { return completion{}, syscall.ENOSYS }
func libStatus(uint32) string                                          { return "" }
func cmListen(netip.AddrPort) (object, error)                          { return nil, syscall.ENOSYS }
func cmPort(object) uint16                                             { return 0 }
func cmNext(object, int) (object, error)                               { return nil, syscall.ENOSYS }
func cmResolve(netip.AddrPort, int) (object, error)                    { return nil, syscall.ENOSYS }
func cmContext(object) object                                          { return nil }
func cmQueue(object, object, int) (*queueObject, error)                { return nil, syscall.ENOSYS }
func cmConnect(object, bool, []byte) error                             { return syscall.ENOSYS }
func cmData(object) []byte                                             { return nil }
func cmDisconnect(object) error                                        { return syscall.ENOSYS }
func cmFreeQueue(object, *queueObject)                                 {}
func cmFree(object) error                                              { return syscall.ENOSYS }
