// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache/uring"
	"github.com/ummu/ummu/tracer"
)

const gapFile = layout.GapFile

// FindingKind is what is wrong.
type FindingKind string

const (
	// Uncovered: the translation changed, and a lookup would still hit.
	Uncovered FindingKind = "uncovered"
	// Unrecorded: only the witness saw the change, which undid itself.
	Unrecorded FindingKind = "unrecorded"
	// WrongVerdict: the feed let something be cached that its tier cannot see.
	WrongVerdict FindingKind = "wrong verdict"
	// Died: the target ended or hung; that is the harness, or the kernel.
	Died FindingKind = "target died"
)

// Finding is one thing that must not be.
type Finding struct {
	Kind       FindingKind
	Step       int      // after this step of the program
	Registered int      // the step that registered the entry
	Range      mm.Range // of the entry
	What       string
}

// String is the finding in a line.
func (f *Finding) String() string {
	if f.Kind == Died {
		return fmt.Sprintf("%s: %s", f.Kind, f.What)
	}
	return fmt.Sprintf("%s after step %d: %v, registered in step %d: %s", f.Kind, f.Step, f.Range, f.Registered, f.What)
}

// Result is what running programs came to. Results add up.
type Result struct {
	Ops           int            // operations, registrations not counted
	Registrations int            // that were cached
	Refused       int            // that the device refused: not mapped, not writable
	Verdicts      map[string]int // of the feed
	Hits          int            // entries found true and hit after a step
	Changes       int            // entries that changed, and were dropped for it
	False         map[string]int // entries dropped though they were true, by operation and kind of record
	WitnessMissed int            // changes that the witness did not see
	Transfers     int
	Hugetlb       bool // the program had its huge pages
	Finding       *Finding
	Error         string // of the harness
}

// Add adds the counts of o.
func (r *Result) Add(o *Result) {
	r.Ops += o.Ops
	r.Registrations += o.Registrations
	r.Refused += o.Refused
	r.Hits += o.Hits
	r.Changes += o.Changes
	r.WitnessMissed += o.WitnessMissed
	r.Transfers += o.Transfers
	for _, m := range []struct{ to, from *map[string]int }{{&r.Verdicts, &o.Verdicts}, {&r.False, &o.False}} {
		if *m.to == nil {
			*m.to = make(map[string]int)
		}
		for k, n := range *m.from {
			(*m.to)[k] += n
		}
	}
}

// hello is the first line of a target.
type hello struct {
	Witness bool
	Error   string
}

// target runs programs in this process.
type target struct {
	p       *performer
	t       *table
	witness *feed.Watch // nil: there is none
	seen    []mm.Record // what the witness saw in the step
	blind   bool        // the witness lost something
	workers [Threads]worker
	running atomic.Int32 // workers that wait for each other
}

type worker struct {
	jobs chan []job
	done chan error
}

type job struct {
	s      Step
	number int
	meet   int32 // how many workers begin together
}

func tierOf(name string) (tracer.Tier, error) {
	tiers := []tracer.Tier{tracer.TierSyscall, tracer.TierMM, tracer.TierNotifierProbe, tracer.TierNotifierTracepoint}
	var known []string
	for _, t := range tiers {
		if t.String() == name {
			return t, nil
		}
		known = append(known, t.String())
	}
	return 0, fmt.Errorf("unknown tier %q (known: %s)", name, strings.Join(known, ", "))
}

func newTarget(tier string, witnessed bool) (_ *target, err error) {
	kind, err := tierOf(tier)
	if err != nil {
		return nil, err
	}
	// A process that dies of what it does to itself must not take long.
	if err := unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{}); err != nil {
		return nil, err
	}
	g := new(target)
	ring, err := uring.Open(uring.Options{})
	if err != nil {
		return nil, err
	}
	if g.p, err = newPerformer(ring); err != nil {
		return nil, err
	}
	if err := populate(g.p.keptPage()); err != nil {
		return nil, fmt.Errorf("MADV_POPULATE_WRITE needs Linux 5.14: %w", err)
	}
	watch, err := local.Open(local.Options{Tier: kind, NoWakeup: true, RingBytes: 1 << 20})
	if err != nil {
		return nil, err
	}
	if witnessed && (kind == tracer.TierSyscall || kind == tracer.TierMM) {
		g.witness, err = local.Open(local.Options{Tier: tracer.TierNotifierTracepoint, NoWakeup: true, RingBytes: 1 << 20})
		if err != nil && !errors.Is(err, tracer.ErrNoKVM) {
			return nil, fmt.Errorf("witness: %w", err)
		}
		if g.witness != nil {
			for _, z := range g.p.zones { // interest; never committed
				g.witness.Begin(z.span())
			}
		}
	}
	if g.t, err = newTable(watch, ring); err != nil {
		return nil, err
	}
	g.t.unseenGuards = kind != tracer.TierSyscall
	for i := range g.workers {
		w := worker{make(chan []job), make(chan error)}
		g.workers[i] = w
		go func() {
			runtime.LockOSThread()
			for jobs := range w.jobs {
				w.done <- g.work(jobs)
			}
		}()
	}
	return g, nil
}

func (g *target) work(jobs []job) error {
	if meet := jobs[0].meet; meet > 1 {
		g.running.Add(1)
		for i := 0; g.running.Load() < meet; i++ {
			if i > 1000 {
				runtime.Gosched()
			}
		}
	}
	for _, j := range jobs {
		if j.s.Op == OpRegister {
			if err := g.t.register(j.number, g.p.span(j.s)); err != nil {
				return err
			}
			continue
		}
		if err := g.p.do(j.s); err != nil {
			return fmt.Errorf("step %d: %w", j.number, err)
		}
	}
	return nil
}

// Serve is the target process: it runs the programs that come on in, one line
// each, and answers each with a line on out, until in ends. If witnessed, KVM's
// tracepoint looks as well, where the tier needs no notifier itself and the
// machine has KVM.
func Serve(tier string, witnessed bool, in io.Reader, out io.Writer) error {
	answers := json.NewEncoder(out)
	g, err := newTarget(tier, witnessed)
	if err != nil {
		return errors.Join(err, answers.Encode(hello{Error: err.Error()}))
	}
	if err := answers.Encode(hello{Witness: g.witness != nil}); err != nil {
		return err
	}
	for programs := json.NewDecoder(in); ; {
		var b []byte
		if err := programs.Decode(&b); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		r := g.run(Decode(b))
		if err := answers.Encode(r); err != nil {
			return err
		}
	}
}

// run runs one program, up to its first finding.
func (g *target) run(p Program) *Result {
	r := &Result{False: make(map[string]int)}
	g.t.verdicts, g.t.failed, g.t.wrong = make(map[string]int), 0, nil
	err := g.t.clear()
	if err == nil {
		err = g.p.reset(p)
	}
	r.Hugetlb = g.p.hugetlb
	for i := 0; i < len(p) && err == nil && r.Finding == nil; {
		// a group: steps at the same time, of different threads
		end := i + 1
		for end < len(p) && p[end-1].With && end-i < Threads {
			end++
		}
		if err = g.group(p, i, end); err == nil {
			err = g.check(p[i:end], i, r)
		}
		i = end
	}
	if e := g.t.clear(); err == nil {
		err = e
	}
	if err != nil {
		r.Error = err.Error()
	}
	r.Verdicts, r.Refused = g.t.verdicts, g.t.failed
	r.Registrations = r.Verdicts[feed.Cacheable.String()]
	return r
}

func (g *target) group(p Program, from, to int) error {
	var jobs [Threads][]job
	threads := int32(0)
	for i := from; i < to; i++ {
		k := p[i].Thread
		if len(jobs[k]) == 0 {
			threads++
		}
		jobs[k] = append(jobs[k], job{s: p[i], number: i})
	}
	g.running.Store(0)
	for k := range jobs {
		if len(jobs[k]) > 0 {
			jobs[k][0].meet = threads
			g.workers[k].jobs <- jobs[k]
		}
	}
	var errs []error
	for k := range jobs {
		if len(jobs[k]) > 0 {
			errs = append(errs, <-g.workers[k].done)
		}
	}
	return errors.Join(errs...)
}

// check compares what a lookup would hit now with the truth. No step runs.
func (g *target) check(steps []Step, first int, r *Result) error {
	t := g.t
	last := first + len(steps) - 1
	noise := false
	for _, s := range steps {
		noise = noise || s.harmless()
		if s.Op != OpRegister {
			r.Ops++
		}
	}
	if t.wrong != nil {
		r.Finding = t.wrong
		r.Finding.Step = last
		return nil
	}
	valid, err := t.drain()
	if err != nil {
		return err
	}
	witness := g.listen()
	// Changes of nobody-knows-whose memory come from other processes, too.
	own := func(w *mm.Record) bool {
		return w.Call.ABI == mm.ABINative && int(w.PID) == os.Getpid() && (w.Kind != mm.Zap || !noise)
	}
	any := func(*mm.Record) bool { return true }
	old := len(t.entries) - maxEntries
	keep := t.entries[:0]
	for i, e := range t.entries {
		if r.Finding != nil {
			keep = append(keep, e)
			continue
		}
		how, err := t.changed(e)
		if err != nil {
			return err
		}
		hit := valid && e.dropped == mm.KindNone
		if hit && how == "" && (e.fresh || (first+i)%32 == 0) {
			r.Transfers++
			if how, err = t.transfer(e, uint64(first)); err != nil {
				return err
			}
		}
		if how != "" && witness && g.witnessed(e.r, any) == nil {
			r.WitnessMissed++
		}
		found := Finding{Step: last, Registered: e.step, Range: e.r, What: how}
		switch {
		case hit && how != "":
			found.Kind = Uncovered
			r.Finding = &found
		case hit && witness && e.step < first && g.small(e.r) && g.witnessed(e.r, own) != nil:
			found.Kind, found.What = Unrecorded, "no record of what the witness saw: "+g.witnessed(e.r, own).String()
			r.Finding = &found
		case hit:
			r.Hits++
		case how != "":
			r.Changes++
		case e.dropped != mm.KindNone:
			r.False[falseCause(steps, e.dropped)]++
		}
		e.fresh = false
		if hit && i >= old {
			keep = append(keep, e)
		} else if err := t.forget(e); err != nil {
			return err
		}
	}
	clear(t.entries[len(keep):])
	t.entries = keep
	return nil
}

func falseCause(steps []Step, kind mm.Kind) string {
	if kind == mm.Lost {
		return "loss"
	}
	if len(steps) > 1 {
		return "several at once: " + kind.String()
	}
	return steps[0].cause() + ": " + kind.String()
}

// small: ordinary pages. The notifiers are told of whole huge pages.
func (g *target) small(r mm.Range) bool {
	return g.p.zones[Small].span().Contains(r) || g.p.zones[Heap].span().Contains(r)
}

// listen collects what the witness saw since the last call; false: it cannot
// be asked.
func (g *target) listen() bool {
	if g.witness == nil {
		return false
	}
	g.seen, g.blind = g.seen[:0], false
	for i := 0; !g.witness.Valid() && i < 1000; i++ {
		g.witness.Drain(func(r *mm.Record) {
			if !r.Kind.IsChange() {
				g.blind = true
				return
			}
			g.seen = append(g.seen, *r)
		})
		runtime.Gosched()
	}
	return !g.blind && g.witness.Valid()
}

// witnessed returns what the witness saw of a change of part of r, of those
// that count; nil: nothing.
func (g *target) witnessed(r mm.Range, counts func(*mm.Record) bool) *sight {
	for i := range g.seen {
		if g.seen[i].Touches(r) && counts(&g.seen[i]) {
			return (*sight)(&g.seen[i])
		}
	}
	return nil
}

// sight is a record of the witness.
type sight mm.Record

// String is what matters of it in a report.
func (s *sight) String() string {
	return fmt.Sprintf("%v of %v in call %d of thread %d", s.Kind, s.Range, s.Call.NR, s.TID)
}

// Main is a command whose first argument is [Argument]: the target process. It
// does not return. Every program that starts targets calls it first; it
// returns at once if this is none.
func Main() {
	if len(os.Args) != 4 || os.Args[1] != Argument {
		return
	}
	if err := Serve(os.Args[2], os.Args[3] == witnessed, os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "oracle target:", err)
		os.Exit(1)
	}
	os.Exit(0)
}
