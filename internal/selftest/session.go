// SPDX-License-Identifier: Apache-2.0

package selftest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/internal/truth"
	"github.com/ummu/ummu/internal/truth/ops"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

// session is a tier under test: a tracer, a program that performs operations,
// a feed of its address space, and what competes with all that.
type session struct {
	o      Options
	ctx    context.Context
	tracer *tracer.Tracer
	load   *load
	p      *truth.Proc
	cost   Cost

	// of the present address space of p
	watch  *feed.Watch
	feed   *tracer.Feed
	status *layout.Status
	epoch  *layout.Epoch
}

func (s *session) notifier() bool {
	return s.o.Tier == tracer.TierNotifierProbe || s.o.Tier == tracer.TierNotifierTracepoint
}

func (s *session) open() (err error) {
	var bare *truth.Proc
	if len(s.o.Only) == 0 {
		if bare, err = truth.Start(byGo, child(roleObey)); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, bare.Close()) }()
		if s.cost.Bare, err = unmapCost(bare); err != nil {
			return err
		}
	}
	if s.tracer, err = tracer.Open(tracer.Options{Tier: s.o.Tier}); err != nil {
		return err
	}
	role := roleObey
	if s.notifier() {
		role = roleNotifier
		n, err := tracer.MakeNotifier() // to learn why the child could not
		if err != nil {
			return err
		}
		if err := n.Close(); err != nil {
			return err
		}
	}
	if s.p, err = truth.Start(byGo, child(role)); err != nil {
		return err
	}
	if err := s.openWatch(); err != nil {
		return err
	}
	if len(s.o.Only) == 0 {
		if s.cost.Unwatched, err = unmapCost(bare); err != nil {
			return err
		}
		if s.cost.Watched, err = unmapCost(s.p); err != nil {
			return err
		}
	}
	s.load, err = startLoad()
	return err
}

// ringBytes is room for some 7,000 records: more than an operation makes.
const ringBytes = 1 << 20

func (s *session) openWatch() error {
	f, err := s.tracer.OpenFeed(tracer.PID(s.p.PID()), tracer.FeedOptions{RingBytes: ringBytes, NoWakeup: true, Witness: true})
	if err != nil {
		return err
	}
	m, err := feed.Descriptors{
		Status: f.StatusFD(), Epoch: f.EpochFD(), Interest: f.InterestFD(), Ring: f.RingFD(), RingBytes: f.RingBytes(),
	}.Map()
	if err != nil {
		return errors.Join(err, f.Close())
	}
	m.Maps = fmt.Sprintf("/proc/%d/maps", s.p.PID())
	m.Release = f.Close
	if s.o.Tier == tracer.TierNotifierTracepoint {
		m.Settle = f.Settled
	}
	w, err := feed.New(m)
	if err != nil {
		m.Unmap()
		return errors.Join(err, f.Close())
	}
	s.watch, s.feed = w, f
	s.status = (*layout.Status)(unsafe.Pointer(unsafe.SliceData(m.Status)))
	s.epoch = (*layout.Epoch)(unsafe.Pointer(unsafe.SliceData(m.Epoch)))
	return nil
}

func (s *session) close() error {
	var errs []error
	if s.load != nil {
		errs = append(errs, s.load.close())
	}
	if s.watch != nil {
		errs = append(errs, s.watch.Close())
	}
	if s.p != nil {
		errs = append(errs, s.p.Close())
	}
	if s.tracer != nil {
		errs = append(errs, s.tracer.Close())
	}
	return errors.Join(errs...)
}

// begun is how many changes have begun, of this address space and of nobody
// knows whose.
func (s *session) begun() uint64 {
	return atomic.LoadUint64(&s.status.Begun[0]) + atomic.LoadUint64(&s.status.Begun[1]) +
		atomic.LoadUint64(&s.epoch.Begun[0]) + atomic.LoadUint64(&s.epoch.Begun[1])
}

// quiet reports that no change is in flight.
func (s *session) quiet() bool {
	for i := range s.status.Ended {
		ended, foreign := atomic.LoadUint64(&s.status.Ended[i]), atomic.LoadUint64(&s.epoch.Ended[i])
		if ended != atomic.LoadUint64(&s.status.Begun[i]) || foreign != atomic.LoadUint64(&s.epoch.Begun[i]) {
			return false
		}
	}
	return true
}

// observation is what a cache could know of an operation when it had returned.
type observation struct {
	invalid bool // a lookup would not have hit without a drain
	whole   bool // everything is invalid: events were lost, or the watch died
	dead    bool // the watch died
	lost    uint64
	records []mm.Record
	begun   bool   // counted as in flight, while it was or since
	end     string // how its end became known
}

// look drains what there is.
func (s *session) look(o *observation) error {
	o.invalid = !s.watch.Valid()
	state := feed.Busy
	if !eventually(func() bool {
		state = s.watch.Drain(func(rec *mm.Record) {
			switch {
			case rec.Kind == mm.Lost:
				o.whole, o.lost = true, o.lost+rec.Lost
			case rec.Kind == mm.Exit:
				return // see below
			}
			o.records = append(o.records, *rec)
		})
		return state != feed.Busy
	}) {
		return errors.New("drain feed: busy")
	}
	if state == feed.DeadState {
		o.whole, o.dead = true, true
	}
	return nil
}

// The ways in which the end of a change becomes known.
const (
	endCounted = "counted" // the tier saw it
	endAsked   = "asked"   // the task was found elsewhere
	endUnknown = "unknown"
)

func (s *session) end() string {
	if s.o.Tier == tracer.TierNotifierTracepoint {
		if s.quiet() {
			return endCounted
		}
		if eventually(s.feed.Settled) {
			return endAsked
		}
	} else if eventually(s.quiet) {
		return endCounted
	}
	return endUnknown
}

// register registers the run's buffer as a cache does, again and again while
// changes of anybody are in flight. If the verdict is not cacheable the feed
// is interested all the same, until forget.
func (s *session) register(r *truth.Run) (v feed.Verdict, forget func(), err error) {
	b := r.Buffer()
	for start := time.Now(); time.Since(start) < watchdog; {
		t := s.watch.Begin(b)
		if ret, err := r.Register(); ret != 0 || err != nil {
			s.watch.Abandon(t)
			return 0, nil, errors.Join(fmt.Errorf("register memory: %w", unix.Errno(-ret)), err)
		}
		v = s.watch.Commit(t, func(*mm.Record) {}, func() {})
		switch v {
		case feed.Cacheable:
			return v, func() { s.watch.Forget(b) }, nil
		case feed.IsDead:
			return v, nil, errors.New("the watch is dead")
		case feed.FileBacked, feed.DriverMapping:
			t := s.watch.Begin(b)
			return v, func() { s.watch.Abandon(t) }, nil
		}
		if err := r.Unregister(); err != nil {
			return 0, nil, err
		}
	}
	return 0, nil, fmt.Errorf("memory is never cacheable: %v", v)
}

// perform performs one operation of the truth table.
func (s *session) perform(row *truth.Row) (op Operation, err error) {
	r, err := row.Setup(s.p)
	if err != nil {
		return op, err
	}
	defer func() { err = errors.Join(err, r.Teardown()) }()
	verdict, forget, err := s.register(r)
	if err != nil {
		return op, err
	}
	defer func() { forget() }()
	if err := s.look(new(observation)); err != nil {
		return op, err
	}

	var o observation
	begun := s.begun()
	err = s.load.while(func() error {
		if err := r.Act(); err != nil {
			return err
		}
		return s.look(&o)
	})
	if err != nil {
		return op, err
	}
	o.begun = s.begun() != begun || !s.quiet()
	o.end = s.end()
	pages, err := r.Oracle()
	if err != nil {
		return op, err
	}
	if s.o.tamper != nil {
		o.records = s.o.tamper(row.Name, o.records)
	}
	op = judge(row, r, pages, verdict, s.tracer.Coverage(), &o)

	if row.Oracle == truth.CPUOnly { // the program has a new address space
		if err := s.watch.Close(); err != nil {
			return op, err
		}
		forget = func() {}
		if err := s.openWatch(); err != nil {
			return op, err
		}
	}
	return op, nil
}

// storm is many changes of one page, for hooks that the kernel skips now and then.
type storm struct {
	name    string
	kind    uintptr
	call    uint32 // that makes the changes
	changes int    // that one turn makes
}

var storms = []storm{
	{"storm-madvise", ops.StormZap, unix.SYS_MADVISE, 1},
	{"storm-mmap", ops.StormReplace, unix.SYS_MMAP, 1},
	{"storm-mprotect", ops.StormProtect, unix.SYS_MPROTECT, 2},
}

// A storm is made in bursts: the kernel skips programs for as long as a
// process that is in bpf(2) waits for its processor.
const (
	bursts     = 10
	burstTurns = 200
)

func (s *session) storm(st storm) (op Operation, err error) {
	row := &truth.Row{Name: st.name, Act: func(*truth.Run) int64 { return 0 }}
	r, err := row.Setup(s.p)
	if err != nil {
		return op, err
	}
	defer func() { err = errors.Join(err, r.Teardown()) }()
	_, forget, err := s.register(r)
	if err != nil {
		return op, err
	}
	defer forget()
	page := r.Span(truth.Span{First: 0, End: 1})
	var o observation
	var spent int64
	begun := s.begun()
	for range bursts {
		if err := s.look(new(observation)); err != nil {
			return op, err
		}
		if err := s.load.while(func() error {
			n := s.p.Storm(st.kind, burstTurns, r.Base, r.Unit)
			if n < 0 {
				return errors.Join(unix.Errno(-n), s.p.Err())
			}
			spent += n
			return s.look(&o)
		}); err != nil {
			return op, err
		}
	}
	o.begun = s.begun() != begun || !s.quiet()
	o.end = s.end()
	if s.o.tamper != nil {
		o.records = s.o.tamper(st.name, o.records)
	}
	changes := bursts * burstTurns * st.changes
	op = judgeStorm(st, page, changes, &o)
	op.Cost = float64(spent) / float64(changes)
	return op, nil
}

// costTurns is how many times a cost is measured: some 40 ms.
const costTurns = 20_000

// unmapCost is what mmap, a touch and munmap of a page cost p, in nanoseconds
// of processor time.
func unmapCost(p *truth.Proc) (float64, error) {
	var costs []float64
	for range 5 {
		n := p.Storm(ops.StormUnmap, costTurns/5, 0, mm.PageSize())
		if n < 0 {
			return 0, errors.Join(fmt.Errorf("measure cost: %w", unix.Errno(-n)), p.Err())
		}
		costs = append(costs, float64(n)/(costTurns/5))
	}
	slices.Sort(costs)
	return costs[len(costs)/2], nil
}
