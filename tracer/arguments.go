// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"errors"

	"github.com/cilium/ebpf/btf"
)

// errArguments: a tracepoint of the right name does not say what its program
// reads.
var errArguments = errors.New("the tracepoint has other arguments on this kernel")

// requestArguments has, for each tracepoint of io_uring, where its program
// looks for the request. Before 6.0 the first argument was the ring, before
// 5.17 the second of io_uring_complete a number that user space chose
// (include/trace/events/io_uring.h). A program that takes those for a request
// would make records out of nothing.
var requestArguments = map[string]struct {
	index int
	typ   string // of what it points to; empty: anything
}{
	"io_uring_submit_req":       {0, "io_kiocb"},
	"io_uring_submit_sqe":       {0, "io_kiocb"},
	"io_uring_queue_async_work": {0, "io_kiocb"},
	"io_uring_complete":         {1, ""},
}

// checkArguments compares a raw tracepoint with what its program reads. One
// that the kernel does not have is not its business.
func checkArguments(kernel *btf.Spec, tracepoint string) error {
	want, ok := requestArguments[tracepoint]
	if !ok {
		return nil
	}
	var def *btf.Typedef // the type of its probes
	if err := kernel.TypeByName("btf_trace_"+tracepoint, &def); err != nil {
		return nil
	}
	pointer, ok := btf.UnderlyingType(def).(*btf.Pointer)
	if !ok {
		return errArguments
	}
	proto, ok := pointer.Target.(*btf.FuncProto)
	if !ok || len(proto.Params) < want.index+2 {
		return errArguments
	}
	arg, ok := btf.UnderlyingType(proto.Params[want.index+1].Type).(*btf.Pointer) // the first is the probe's own
	if !ok {
		return errArguments
	}
	if s, ok := btf.UnderlyingType(arg.Target).(*btf.Struct); want.typ != "" && (!ok || s.Name != want.typ) {
		return errArguments
	}
	return nil
}
