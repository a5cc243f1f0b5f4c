// SPDX-License-Identifier: Apache-2.0

package source

import (
	"sync"

	"github.com/ummu/ummu/internal/detector"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// Detector makes a [detector.Detector] safe for the readers of several streams
// and for the screen. A nil Detector knows no stacks.
type Detector struct {
	mu sync.Mutex // guards d; held while a stack is read, not over anything of the kernel's but the files of a process
	d  *detector.Detector
}

// NewDetector takes over a detector.
func NewDetector(d *detector.Detector) *Detector { return &Detector{d: d} }

// Process takes a process that runs already, or that stands before its first
// instruction.
func (x *Detector) Process(pid int) error {
	if x == nil {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.d.Process(pid)
}

// number gives a record the number of its stack.
func (x *Detector) number(r *mm.Record, s *tracer.Stream) {
	if x == nil {
		return
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.d.Number(r, s.Stack())
}

// Frames is the stack of a number.
func (x *Detector) Frames(id uint32) []symbol.Frame {
	if x == nil {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.d.Frames(id)
}

// gaps are what was not seen.
func (x *Detector) gaps() (out []string) {
	if x == nil {
		return []string{"registrations and findings: they were not asked for (--registrations)"}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, g := range x.d.Gaps() {
		out = append(out, g.Name+": "+g.What)
	}
	return out
}

func (x *Detector) close() error {
	if x == nil {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.d.Close()
}
