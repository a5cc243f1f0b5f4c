// SPDX-License-Identifier: Apache-2.0

// Package wire is what the harness and the program inside the virtual machine
// say to each other: a plan in the initial file system, and one JSON object a
// line over the second serial port.
package wire

import "time"

// PlanPath is where the guest finds its [Plan].
const PlanPath = "/plan.json"

// Port is the device that the guest writes its events to.
const Port = "/dev/ttyS1"

// ExitPort is the I/O port of QEMU's isa-debug-exit device: QEMU ends with
// (b<<1)|1 after byte b was written, so success is [ExitStatus].
const (
	ExitPort   = 0xf4
	ExitByte   = 0x2a
	ExitStatus = ExitByte<<1 | 1
)

// Plan is what a guest has to do.
type Plan struct {
	Modules []string // loaded in this order; one that cannot be is an error
	Disk    bool     // /dev/vda has an ext4 file system for /var/tmp
	RDMA    bool     // make a soft-RoCE device
	Preempt string   // the preemption model that must be in force; empty: any
	Suites  []Suite
}

// Suite is one program to run.
type Suite struct {
	Name    string
	Dir     string // working directory
	Argv    []string
	Env     []string
	Data    bool          // its standard output is data, not text: [Data] events
	Timeout time.Duration // then it is killed and has failed
}

// Event is one line of the guest.
type Event struct {
	Type    string  // one of the constants below
	Suite   string  `json:",omitempty"`
	Text    string  `json:",omitempty"` // output, or what went wrong
	Exit    int     `json:",omitempty"` // exit status; 128+n for signal n
	Seconds float64 `json:",omitempty"`
	Kernel  string  `json:",omitempty"` // Hello: uname -r
	Preempt string  `json:",omitempty"` // Hello: the model in force
}

// Types of events.
const (
	Hello  = "hello"  // the guest is ready
	Failed = "failed" // the guest cannot do what the plan says
	Start  = "start"
	Output = "output" // some output of a suite, cut anywhere
	Data   = "data"   // the same of its standard output, where that is apart
	End    = "end"
	Done   = "done" // all suites have run
)
