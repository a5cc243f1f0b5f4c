// SPDX-License-Identifier: Apache-2.0

// Package recording is the form in which records leave the tracer: NDJSON
// lines ([Encoder], [Decoder]) and files of compressed, checksummed blocks of
// such lines ([Writer], [Reader]).
//
// A stream is one line {"meta":{...}}, then one object per record, then one
// line {"summary":{...}}. Fields are only ever added to this schema, never
// changed or removed; a reader ignores fields it does not know.
//
// A record always has the fields
//
//	seq       counts the events of the stream from 1, lost ones included
//	time      RFC 3339, UTC, with nine digits of a second
//	pid, tid  of the task, in the initial pid namespace
//	comm      name of the task
//	kind      unmap replace zap move protect map fork exec exit lost register deregister
//	phase     begin (before the page tables change) or end (after, or a single event)
//	start, end, to_start, to_end
//	          half-open ranges, "0x..." in hexadecimal; to_* is the destination of a move, "0x0" if none
//	call      "munmap", "IORING_OP_MADVISE", empty if there was no call
//	flags     names of the call's flags, ["PROT_READ","MAP_FIXED"]
//	hook      what saw it
//
// and, where they mean something,
//
//	nr, abi   the call's number, and its ABI if that is not native: compat x32 io_uring
//	ret       what the call returned, a negative errno on failure (end of calls)
//	args      the raw flag arguments, two "0x..."
//	marks     superset maybe unpaired async last_task space_death new_process
//	          shares_space vector unknown_length rescued; see mm.Flags
//	lost      number of events lost (kind lost)
//	space     tells address spaces of one stream apart, "0x..."
//	child_pid, child_tid
//	          the new task of a fork; the former tid of an exec
//	by        who registers (register, deregister): io_uring verbs; start and end are then exact in bytes
//	device    tells rings and devices of one address space apart, "0x..."
//	handle    the index of a fixed buffer, the address of a struct ibv_mr, "0x..."
//	lkey, rkey, access
//	          of a memory region; access as passed to ibv_reg_mr
//	fd        of the ring, as passed to io_uring_register; -1 if there is none
//	all       true: everything of the device is deregistered
//	stack     number of the user stack within the stream, where stacks are recorded
//	frames    that stack, with the first record that has its number, innermost first: addr, func,
//	          file, line, module, offset (within the module), build_id, inlined, as far as they are known
//
// Lines {"finding":{...}} may be between the records of a stream that looks for
// stale registrations; a [Reader] passes over them.
package recording

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/ummu/ummu/mm"
)

// Schema is the version of the NDJSON schema. It grows when a field changes
// its meaning, which is not planned to happen.
const Schema = 1

// Meta is the first line: where and how the records were made.
type Meta struct {
	Schema  int    `json:"schema"`
	Version string `json:"version"` // of the program that recorded
	Host    string `json:"host"`
	Kernel  string `json:"kernel"` // release, as uname -r
	Arch    string `json:"arch"`   // Go's name; call numbers depend on it
	Tier    string `json:"tier"`
	Gaps    []Gap  `json:"gaps"` // what the tier cannot see
	// TierReason says why it is that tier.
	TierReason string `json:"tier_reason,omitempty"`
	// Start is the wall-clock time at which the watch was opened.
	Start time.Time `json:"start"`
	// MonotonicZero is the wall-clock time at which CLOCK_MONOTONIC was 0, by
	// the clocks at Start. It turns mm.Record.Time into time and back.
	MonotonicZero time.Time `json:"monotonic_zero"`
	PageSize      uint64    `json:"page_size"`
	Command       []string  `json:"command,omitempty"` // what `run` or `record` started
	PIDs          []int     `json:"pids,omitempty"`    // what was watched by number
}

// Gap is one kind of change that the tier cannot see.
type Gap struct {
	Name string `json:"name"`
	What string `json:"what"`
}

// Summary is the last line.
type Summary struct {
	// Records is the number of record lines, those of kind lost excepted.
	Records uint64 `json:"records"`
	// Lost is the number of events of which there is no record.
	Lost uint64 `json:"lost"`
	// Complete: nothing was lost, the stream was read to its end, and there
	// are no Gaps.
	Complete bool `json:"complete"`
	// ByKind counts record lines by kind, both phases, kind lost included.
	ByKind map[string]uint64 `json:"by_kind"`
	// ByTier counts the same lines by the tier that saw them.
	ByTier map[string]uint64 `json:"by_tier"`
	// Changes counts by kind what happened: begin and end are one.
	Changes map[string]Count `json:"changes"`
	// Filtered is the number of records that filters left out.
	Filtered uint64 `json:"filtered"`
	// Gaps are what was not seen, beyond those of the meta line, e.g. an
	// address space that could not be given a notifier.
	Gaps []Gap `json:"gaps,omitempty"`
	// Registrations were made, and Stale of them went stale, where they were
	// looked for.
	Registrations uint64 `json:"registrations,omitempty"`
	Stale         uint64 `json:"stale,omitempty"`
	// LostAt says which stage lost the events: "ring", "hook", "recording".
	LostAt []string `json:"lost_at,omitempty"`
	// Reason says why Complete is false, in words.
	Reason string `json:"reason,omitempty"`
}

// Count is a number of changes, of those whose call returned an error (it may
// have changed something all the same), and of the bytes in their ranges.
// Changes of unknown size count no bytes.
type Count struct {
	Count  uint64 `json:"count"`
	Failed uint64 `json:"failed"`
	Bytes  uint64 `json:"bytes"`
}

// AppendMeta appends the meta line, with its newline.
func AppendMeta(dst []byte, m *Meta) ([]byte, error) {
	return appendLine(dst, struct {
		Meta *Meta `json:"meta"`
	}{m})
}

// AppendSummary appends the summary line, with its newline.
func AppendSummary(dst []byte, s *Summary) ([]byte, error) {
	return appendLine(dst, struct {
		Summary *Summary `json:"summary"`
	}{s})
}

func appendLine(dst []byte, v any) ([]byte, error) {
	j, err := json.Marshal(v)
	if err != nil {
		return dst, fmt.Errorf("encode line: %w", err)
	}
	return append(append(dst, j...), '\n'), nil
}

// marks are the names of mm.Flags, by bit.
var marks = [...]string{
	"superset", "maybe", "unpaired", "async", "last_task", "space_death",
	"new_process", "shares_space", "vector", "unknown_length", "rescued",
}

// Marks appends the names of f to dst.
func Marks(dst []string, f mm.Flags) []string {
	for i, m := range marks {
		if f&(1<<i) != 0 {
			dst = append(dst, m)
		}
	}
	return dst
}

// abis are the names of mm.ABI.
var abis = [...]string{"native", "compat", "x32", "io_uring", "none"}
