// SPDX-License-Identifier: Apache-2.0

package selftest

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/truth"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// Report is what a self-test found.
type Report struct {
	Tier   tracer.Tier `json:"tier"`
	Kernel string      `json:"kernel"`
	// Fit: every change was seen, whole, before anybody could have hit.
	Fit bool `json:"fit"`
	// Reasons say why not.
	Reasons []string `json:"reasons"`
	// Missed counts operations with pages that changed and were not reported
	// at all, Subset those with some that were not.
	Missed int `json:"missed"`
	Subset int `json:"subset"`
	// FalseInvalidations counts pages that were reported and had not changed,
	// by operations that change nothing.
	FalseInvalidations int `json:"false_invalidations"`
	// Lost counts events of which only the loss was told.
	Lost       uint64         `json:"lost"`
	Operations []Operation    `json:"operations"`
	Hooks      map[string]int `json:"hooks"` // operations that each saw
	Gaps       []string       `json:"gaps"`
	Cost       Cost           `json:"cost"`
	Seconds    float64        `json:"seconds"`
}

// Cost is the processor time of an mmap, a touch and a munmap of a page that
// nobody registered, in nanoseconds.
type Cost struct {
	Bare      float64 `json:"bare_ns"`      // before the tier was loaded
	Unwatched float64 `json:"unwatched_ns"` // of a process that nobody watches
	Watched   float64 `json:"watched_ns"`   // of one that is watched
}

// Seen says whether an operation was noticed.
type Seen string

// The values of Seen.
const (
	WasSeen Seen = "seen"
	Missed  Seen = "missed"
	Nothing Seen = "nothing" // nothing happened, and nothing was reported
	False   Seen = "false"   // nothing happened, and something was reported
	InGap   Seen = "gap"     // not seen; the tier says so, and what it concerns is not cached
	NotHere Seen = "not on this kernel"
)

// Range says how what was reported compares with what changed.
type Range string

// The values of Range.
const (
	RangeNone     Range = "none"
	RangeExact    Range = "exact"
	RangeSuperset Range = "superset"
	RangeSubset   Range = "SUBSET"
)

// Operation is what a feed told of one operation.
type Operation struct {
	Name  string `json:"name"`
	Seen  Seen   `json:"seen"`
	Range Range  `json:"range"`
	// Hook names the hooks that made the records, with commas between.
	Hook string `json:"hook"`
	// Verdict is what the feed said to caching the memory.
	Verdict string `json:"verdict"`
	// Changed and Reported have a character for each page of the buffer:
	// what the device and the processor see (. coherent, S stale, U no
	// access), and X where a record says so.
	Changed  string `json:"changed"`
	Reported string `json:"reported"`
	// Begin: the change was in flight before it happened. End: how its end
	// became known.
	Begin bool   `json:"begin"`
	End   string `json:"end"`
	// FalsePages counts reported pages that had not changed, if the operation
	// changes nothing.
	FalsePages int `json:"false_pages"`
	// Changes and Uncovered (of storms) count the changes made, and those
	// without a record or a loss.
	Changes   int    `json:"changes,omitempty"`
	Uncovered int    `json:"uncovered,omitempty"`
	Lost      uint64 `json:"lost,omitempty"`
	// Cost (of storms) is the processor time of a change with its record, and
	// of the fault of the page before it, in nanoseconds.
	Cost float64 `json:"cost_ns,omitempty"`

	unfit string // why it makes the tier unfit
}

func newReport(c tracer.Coverage) *Report {
	r := &Report{Tier: c.Tier, Kernel: kernel(), Reasons: []string{}, Operations: []Operation{}, Hooks: map[string]int{}, Gaps: []string{}}
	for _, h := range c.Hooks {
		if h.Attached {
			r.Hooks[h.Name] = 0
		}
	}
	for _, g := range c.Gaps {
		r.Gaps = append(r.Gaps, g.Name)
	}
	r.Reasons = append(r.Reasons, c.Weak...) // what a run need not meet
	return r
}

func (r *Report) add(op Operation) {
	r.Operations = append(r.Operations, op)
	if op.Hook != "" {
		for name := range strings.SplitSeq(op.Hook, ", ") {
			r.Hooks[name]++
		}
	}
	switch {
	case op.unfit == "": // what is not cacheable may be seen in part
	case op.Seen == Missed:
		r.Missed++
	case op.Range == RangeSubset:
		r.Subset++
	}
	r.FalseInvalidations += op.FalsePages
	r.Lost += op.Lost
	if op.unfit != "" {
		r.Reasons = append(r.Reasons, op.Name+": "+op.unfit)
	}
}

func (r *Report) finish(d time.Duration) {
	r.Seconds = d.Seconds()
	seen := 0
	for i := range r.Operations {
		if r.Operations[i].Seen == WasSeen {
			seen++
		}
	}
	if seen == 0 {
		r.Reasons = append(r.Reasons, "no operation was seen")
	}
	r.Fit = len(r.Reasons) == 0
}

// pages is a set of pages of a buffer.
type pages []bool

func (p pages) add(s truth.Span) {
	for i := max(0, s.First); i < min(s.End, len(p)); i++ {
		p[i] = true
	}
}

// touch adds the pages that a range touches.
func (p pages) touch(r *truth.Run, x mm.Range) {
	for i := range p {
		if x.Overlaps(r.Span(truth.Span{First: i, End: i + 1})) {
			p[i] = true
		}
	}
}

func (p pages) count() (n int) {
	for _, in := range p {
		if in {
			n++
		}
	}
	return n
}

// without is how many pages are in p and not in q.
func (p pages) without(q pages) (n int) {
	for i := range p {
		if p[i] && !q[i] {
			n++
		}
	}
	return n
}

func (p pages) String() string {
	b := make([]byte, len(p))
	for i, in := range p {
		b[i] = '.'
		if in {
			b[i] = 'X'
		}
	}
	return string(b)
}

// hooks names the hooks of records that touch b, and of the watch's end.
func (o *observation) hooks(b mm.Range) string {
	var names []string
	for i := range o.records {
		rec := &o.records[i]
		if name := tracer.HookName(rec.Hook); rec.Touches(b) && !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if o.dead {
		names = append(names, tracer.HookName(layout.HookExitMmap))
	}
	return strings.Join(names, ", ")
}

// judge compares what a feed told of an operation with what happened: the
// pages that the oracle found changed, and those whose rights changed.
func judge(row *truth.Row, r *truth.Run, oracle string, verdict feed.Verdict, cov tracer.Coverage, o *observation) Operation {
	op := Operation{Name: row.Name, Verdict: verdict.String(), Changed: oracle, Begin: o.begun, End: o.end, Lost: o.lost}
	op.Hook = o.hooks(r.Buffer())

	needed, allowed, reported := make(pages, r.Pages), make(pages, r.Pages), make(pages, r.Pages)
	for i, c := range oracle {
		if c != '.' && i < r.Pages {
			needed[i] = true
		}
	}
	declared := row.Gap != "" && slices.ContainsFunc(cov.Gaps, func(g tracer.Gap) bool { return g.Name == row.Gap })
	for _, e := range row.Records {
		if !e.Kind.IsChange() {
			continue
		}
		if !declared {
			needed.add(e.At)
		}
		allowed.add(e.At)
		allowed.add(e.Within)
	}
	for i := range o.records {
		rec := &o.records[i]
		if !rec.Kind.IsChange() {
			continue
		}
		reported.touch(r, rec.Range)
		reported.touch(r, rec.To)
		if slices.Contains(row.May, rec.Kind) {
			allowed.touch(r, rec.Range)
			allowed.touch(r, rec.To)
		}
	}
	for i := range needed {
		allowed[i] = allowed[i] || needed[i]
		reported[i] = reported[i] || o.whole
	}
	op.Reported = reported.String()

	missing, more := needed.without(reported), reported.without(allowed)
	switch {
	case missing == 0 && more == 0:
		op.Range = RangeExact
	case missing == 0:
		op.Range = RangeSuperset
	default:
		op.Range = RangeSubset
	}
	cached := verdict == feed.Cacheable
	unfit := func(format string, args ...any) {
		if cached {
			op.unfit = fmt.Sprintf(format, args...)
		}
	}
	switch {
	case needed.count() == 0 && reported.count() == 0:
		op.Seen, op.Range = Nothing, RangeNone
	case needed.count() == 0 && more == 0:
		op.Seen = WasSeen // what may be reported
	case needed.count() == 0:
		op.Seen, op.FalsePages = False, more
	case missing == needed.count():
		op.Seen, op.Range = Missed, RangeNone
		unfit("missed: pages %s changed, and no record tells", oracle)
	case missing != 0:
		op.Seen = WasSeen
		unfit("SUBSET: pages %s changed, reported %s", oracle, op.Reported)
	default:
		op.Seen = WasSeen
		switch {
		case o.dead && row.Oracle != truth.CPUOnly:
			unfit("the watch died")
		case !o.invalid:
			op.Seen = Missed
			unfit("missed: reported, but not when the operation had returned")
		case !o.begun && !o.whole:
			unfit("reported, but never in flight")
		case o.end == endUnknown:
			unfit("its end is never known")
		}
	}
	if op.unfit == "" && (!cached && missing != 0 || declared && op.Seen == Nothing) {
		op.Seen = InGap
	}
	return op
}

// judgeStorm counts the records of a storm's page.
func judgeStorm(st storm, page mm.Range, changes int, o *observation) Operation {
	op := Operation{
		Name: st.name, Verdict: feed.Cacheable.String(), Changed: "S", Reported: "X", Seen: WasSeen, Range: RangeExact,
		Begin: o.begun, End: o.end, Changes: changes, Lost: o.lost,
	}
	op.Hook = o.hooks(page)
	covered := 0
	for i := range o.records {
		rec := &o.records[i]
		switch {
		case !rec.Kind.IsChange() || !rec.Range.Contains(page) || rec.Call != (mm.Call{NR: st.call}):
			// The write before a change may make one more, by a fault: the
			// page of zeros that a read got goes.
		case rec.Range != page:
			op.Range = RangeSuperset
			covered++
		default:
			covered++
		}
	}
	op.Uncovered = max(0, changes-covered-int(o.lost))
	switch {
	case covered == 0 && o.lost == 0:
		op.Seen, op.Range, op.Reported = Missed, RangeNone, "."
	case op.Uncovered > 0:
		op.Range = RangeSubset
	}
	if o.dead {
		op.unfit = "the watch died"
	} else if op.Uncovered > 0 {
		op.unfit = fmt.Sprintf("%d of %d changes without a record or a loss", op.Uncovered, changes)
	}
	return op
}
