// SPDX-License-Identifier: Apache-2.0

package tracer

import (
	"bytes"
	"errors"
	"testing"

	"github.com/cilium/ebpf/btf"
)

func TestArgumentsOfThisKernel(t *testing.T) {
	kernel, err := btf.LoadKernelSpec()
	if err != nil {
		t.Fatal(err)
	}
	for name := range requestArguments {
		if err := checkArguments(kernel, name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// The prototypes of kernels gone by (include/trace/events/io_uring.h).
func TestArgumentsOfOthers(t *testing.T) {
	void := &btf.Pointer{Target: &btf.Void{}}
	number := &btf.Int{Name: "unsigned long long", Size: 8}
	request := &btf.Pointer{Target: &btf.Struct{Name: "io_kiocb", Size: 8}}
	ring := &btf.Pointer{Target: &btf.Struct{Name: "io_ring_ctx", Size: 8}}
	for _, c := range []struct {
		kernel, tracepoint string
		args               []btf.Type
		want               error
	}{
		{"5.10", "io_uring_submit_sqe", []btf.Type{void, number, number}, errArguments},
		{"5.17", "io_uring_submit_sqe", []btf.Type{void, void, number, number}, errArguments},
		{"6.0", "io_uring_submit_sqe", []btf.Type{request, number}, nil},
		{"6.3", "io_uring_submit_req", []btf.Type{request}, nil},
		{"5.10", "io_uring_queue_async_work", []btf.Type{void, number, void, void, number}, errArguments},
		{"6.0", "io_uring_queue_async_work", []btf.Type{request, number}, nil},
		{"5.10", "io_uring_complete", []btf.Type{void, number, number, number}, errArguments},
		{"5.17", "io_uring_complete", []btf.Type{void, void, number, number, number}, nil},
		{"6.18", "io_uring_complete", []btf.Type{ring, void, void}, nil},
		{"never", "io_uring_complete", []btf.Type{ring}, errArguments},
		{"never", "io_uring_submit_req", []btf.Type{ring}, errArguments},
	} {
		params := []btf.FuncParam{{Type: void}}
		for _, a := range c.args {
			params = append(params, btf.FuncParam{Type: a})
		}
		def := &btf.Typedef{Name: "btf_trace_" + c.tracepoint, Type: &btf.Pointer{Target: &btf.FuncProto{Return: &btf.Void{}, Params: params}}}
		b, err := btf.NewBuilder([]btf.Type{def}, nil)
		if err != nil {
			t.Fatal(err)
		}
		raw, err := b.Marshal(nil, nil)
		if err != nil {
			t.Fatal(err)
		}
		kernel, err := btf.LoadSpecFromReader(bytes.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		if err := checkArguments(kernel, c.tracepoint); !errors.Is(err, c.want) {
			t.Errorf("%s of %s: %v, want %v", c.tracepoint, c.kernel, err, c.want)
		}
	}
}
