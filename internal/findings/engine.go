// SPDX-License-Identifier: Apache-2.0

package findings

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/calls"
	"github.com/ummu/ummu/internal/symbol"
	"github.com/ummu/ummu/mm"
)

// Options configure an [Engine]. The zero value works.
type Options struct {
	// Calls names system calls; nil: those of this machine.
	Calls *calls.Table
	// Frames resolves mm.Record.Stack; nil: no stacks, nothing is a [Trim].
	Frames func(stack uint32) []symbol.Frame
	// BeginsOnly: the tier sees no ends; each begin is a change.
	BeginsOnly bool
	// Found, if set, is told of each finding when its change is known, and
	// Ended when nothing more will be added to it.
	Found, Ended func(*Finding)
	// Keep bounds the findings that Engine.Findings returns: of more, the
	// oldest are forgotten. MaxLive bounds the registrations that are
	// followed. 0: no bound.
	Keep, MaxLive int
}

// Engine finds stale registrations. It is not safe for concurrent use.
type Engine struct {
	o      Options
	spaces map[uint64]*space
	all    []*Finding
	last   time.Duration
	stats  Stats
}

// Stats count what an engine saw.
type Stats struct {
	Registrations   uint64 // that succeeded
	Deregistrations uint64
	Live            uint64 // now
	Unknown         uint64 // deregistrations of what was registered before the stream began
	Unread          uint64 // registrations whose ranges could not be read: changes of them are not found
	Untracked       uint64 // registrations that were more than Options.MaxLive: changes of them are not found
	Forgotten       uint64 // findings that were more than Options.Keep
	Lost            uint64 // events
}

// New returns an empty engine.
func New(o Options) *Engine {
	if o.Calls == nil {
		o.Calls = calls.Host()
	}
	return &Engine{o: o, spaces: make(map[uint64]*space)}
}

// registration is one live, or one that is about to be.
type registration struct {
	rec     mm.Record
	pages   mm.Range
	since   time.Duration // when its registering call had ended
	busy    busy
	doubt   string // why it may not be there any more
	finding *Finding
	changes uint64    // of its range, rights included
	last    mm.Record // of them
	// held are changes that hit it while it was being registered or
	// deregistered; what becomes of them the end of the call says.
	held []mm.Record
}

type busy uint8

const (
	settled busy = iota
	registering
	deregistering
)

// key names a registration within an address space.
type key struct{ device, handle uint64 }

// space is one address space.
type space struct {
	live   index[*registration] // those that are registering too
	byKey  map[key]*registration
	calls  map[uint32][]op        // by task: the registering call it is in
	open   map[uint64][]mm.Record // by task or ring: changes whose end is not known
	free   [][]mm.Record          // lists of open that are used again
	recent []place                // mapped while changes are open
	shared ranges                 // mappings that are known to be shared
	stale  index[*Finding]        // whose registration is live, by Stale
}

// place is a new mapping.
type place struct {
	mm.Range
	at time.Duration
}

// op is one element of a registering call.
type op struct {
	reg  *registration // to be registered, or
	gone []key         // to be deregistered
	dev  uint64        // ... with all: the device
	all  bool
	rec  mm.Record
	// untracked: a registration that was one too many
	untracked bool
}

func (e *Engine) space(id uint64) *space {
	s := e.spaces[id]
	if s == nil {
		s = &space{
			live: newIndex[*registration](), stale: newIndex[*Finding](), byKey: make(map[key]*registration),
			calls: make(map[uint32][]op), open: make(map[uint64][]mm.Record),
		}
		e.spaces[id] = s
	}
	return s
}

// Findings returns all findings so far, in the order of their changes. The
// engine goes on writing to those whose registration lives.
func (e *Engine) Findings() []*Finding { return e.all }

// Stats returns the counts so far.
func (e *Engine) Stats() Stats { return e.stats }

// Incomplete says why findings may be missing; empty if none may.
func (e *Engine) Incomplete() string {
	var why []string
	if e.stats.Lost > 0 {
		why = append(why, fmt.Sprintf("%d events lost", e.stats.Lost))
	}
	if e.stats.Unread > 0 {
		why = append(why, fmt.Sprintf("%d registrations of unknown ranges", e.stats.Unread))
	}
	if e.stats.Untracked > 0 {
		why = append(why, fmt.Sprintf("%d registrations were too many to follow", e.stats.Untracked))
	}
	return strings.Join(why, ", ")
}

// Add takes the next record of the stream.
func (e *Engine) Add(r *mm.Record) {
	e.last = max(e.last, r.Time)
	switch {
	case r.Kind == mm.Lost:
		e.lose(r)
		return
	case r.Kind == mm.Exit:
		e.exit(r)
		return
	}
	s := e.space(r.Space)
	switch {
	case r.Kind == mm.Register || r.Kind == mm.Deregister:
		e.registers(s, r)
	case r.Kind.IsChange():
		e.change(s, r)
	case r.Kind == mm.Map && r.Phase == mm.PhaseEnd:
		if r.Call.ABI != mm.ABINone && e.o.Calls.Name(r.Call) == "mremap" {
			e.settle(s, r) // a growing mremap that stayed in place
		}
		e.mapped(s, r.Range, r.Time)
		s.maps(r, e.o.Calls.Name(r.Call))
	}
}

// lose takes the loss of anything: whatever is registered may not be any more.
func (e *Engine) lose(r *mm.Record) {
	e.stats.Lost += r.Lost
	for _, s := range e.spaces {
		s.live.each(func(g *registration) { g.doubt = "events were lost while it was registered" })
	}
}

// exit takes the end of a task or of an address space.
func (e *Engine) exit(r *mm.Record) {
	s := e.spaces[r.Space]
	if s == nil {
		return
	}
	if r.Flags&mm.SpaceDeath == 0 {
		e.finishTask(s, r)
		return
	}
	for _, k := range slices.Sorted(maps.Keys(s.open)) {
		e.finishAll(s, k)
	}
	s.stale.each(func(f *Finding) { e.end(f, SpaceEnded, r.Time) })
	e.stats.Live -= uint64(len(s.byKey))
	delete(e.spaces, r.Space)
}

// End takes the end of the stream: nothing comes after it.
func (e *Engine) End() {
	for _, id := range slices.Sorted(maps.Keys(e.spaces)) {
		s := e.spaces[id]
		for _, tid := range slices.Sorted(maps.Keys(s.calls)) {
			e.finishCall(s, tid, nil)
		}
		for _, k := range slices.Sorted(maps.Keys(s.open)) {
			e.finishAll(s, k)
		}
		s.stale.each(func(f *Finding) { e.end(f, StillRegistered, e.last) })
		s.stale = newIndex[*Finding]()
	}
}

// full: there are as many registrations as may be followed.
func (e *Engine) full() bool { return e.o.MaxLive > 0 && e.stats.Live >= uint64(e.o.MaxLive) }

func (e *Engine) end(f *Finding, by EndedBy, at time.Duration) {
	f.Ended, f.EndedAt = by, at
	if e.o.Ended != nil {
		e.o.Ended(f)
	}
}

// ---- registrations ----

func (e *Engine) registers(s *space, r *mm.Record) {
	if r.Flags&mm.UnknownLength != 0 {
		e.stats.Unread++
	}
	if r.Phase == mm.PhaseEnd {
		e.finishCall(s, r.TID, r)
		return
	}
	ops := s.calls[r.TID]
	if len(ops) > 0 && (r.Flags&mm.Vector == 0 || ops[0].rec.Flags&mm.Vector == 0 || ops[0].rec.Arg != r.Arg) {
		e.finishCall(s, r.TID, nil) // the end of the former is not seen any more
		ops = nil
	}
	o := op{rec: *r}
	reg := &r.Registration
	switch {
	case r.Kind == mm.Register && !r.Range.Empty() && e.full():
		o.untracked = true
	case r.Kind == mm.Register && !r.Range.Empty():
		o.reg = &registration{rec: *r, pages: r.Range.Pages(), busy: registering}
		s.live.insert(o.reg.pages, o.reg)
	case r.Kind == mm.Deregister && reg.All:
		o.dev, o.all = reg.Device, true
		for k, g := range s.byKey {
			if k.device == reg.Device {
				g.busy = deregistering
				o.gone = append(o.gone, k)
			}
		}
	case r.Kind == mm.Deregister:
		k := key{reg.Device, reg.Handle}
		if g := s.byKey[k]; g != nil {
			g.busy = deregistering
		}
		o.gone = []key{k}
	}
	s.calls[r.TID] = append(ops, o)
}

// finishCall takes the end of a registering call; r is nil if it was not seen,
// and the call is believed to have succeeded.
func (e *Engine) finishCall(s *space, tid uint32, r *mm.Record) {
	ops := s.calls[tid]
	delete(s.calls, tid)
	if r == nil {
		for i := range ops {
			if ops[i].reg != nil && ops[i].reg.doubt == "" {
				ops[i].reg.doubt = "the end of its registration was not seen"
			}
			e.apply(s, &ops[i], e.last)
		}
		return
	}
	if len(ops) == 0 {
		// Its begin was not seen, or there is none: a device was closed.
		if r.Ret < 0 {
			return
		}
		o := op{rec: *r}
		switch {
		case r.Kind == mm.Register && r.Flags&mm.Vector != 0:
			e.stats.Unread++ // there were some, of which nothing is known
			return
		case r.Kind == mm.Register && !r.Range.Empty() && e.full():
			e.stats.Untracked++
			return
		case r.Kind == mm.Register && !r.Range.Empty():
			o.reg = &registration{rec: *r, pages: r.Range.Pages()}
			s.live.insert(o.reg.pages, o.reg)
		case r.Kind == mm.Deregister && r.Registration.All:
			o.dev, o.all = r.Registration.Device, true
			for k := range s.byKey {
				if k.device == o.dev {
					o.gone = append(o.gone, k)
				}
			}
		case r.Kind == mm.Deregister:
			o.gone = []key{{r.Registration.Device, r.Registration.Handle}}
		}
		e.apply(s, &o, r.Time)
		return
	}
	done := len(ops)
	switch {
	case failed(r):
		done = 0
	case r.Registration.By == mm.ByIOUring && r.Arg[0] == UringUpdateBuffers && r.Ret < int64(len(ops)):
		done = int(r.Ret) // that many elements of the update
	}
	for i := range ops {
		o := &ops[i]
		if i >= done {
			e.undo(s, o)
			continue
		}
		if o.reg != nil && r.Flags&mm.Vector == 0 && r.Registration.By == mm.ByVerbs {
			o.reg.rec.Registration = r.Registration // handle and keys
		}
		e.apply(s, o, r.Time)
	}
}

// UringUpdateBuffers is IORING_REGISTER_BUFFERS_UPDATE, whose result is how
// many elements took effect. mm.Record.Arg[0] of io_uring's registrations is
// the opcode.
const UringUpdateBuffers = 16

// failed reports whether a registering call changed nothing. ibv_dereg_mr
// returns a positive errno.
func failed(r *mm.Record) bool {
	return r.Ret < 0 || r.Registration.By == mm.ByVerbs && r.Ret != 0
}

// undo takes an op of a call that failed.
func (e *Engine) undo(s *space, o *op) {
	if o.reg != nil {
		s.live.remove(o.reg.pages, o.reg)
		return
	}
	for _, k := range o.gone {
		if g := s.byKey[k]; g != nil {
			g.busy = settled
			for i := range g.held {
				e.hit(s, g, &g.held[i])
			}
			g.held = nil
		}
	}
}

// apply takes an op of a call that succeeded.
func (e *Engine) apply(s *space, o *op, at time.Duration) {
	if o.reg == nil {
		if o.untracked {
			e.stats.Untracked++
		}
		if len(o.gone) == 0 && !o.all && o.rec.Kind == mm.Deregister {
			e.stats.Unknown++
		}
		for _, k := range o.gone {
			e.drop(s, k, Deregistered, at)
		}
		return
	}
	g := o.reg
	k := key{g.rec.Registration.Device, g.rec.Registration.Handle}
	if s.byKey[k] != nil {
		e.drop(s, k, Replaced, at)
	}
	s.byKey[k] = g
	g.busy, g.since = settled, at
	e.stats.Registrations++
	e.stats.Live++
	for i := range g.held {
		h := &g.held[i]
		e.found(s, g, h, whyRacing, Racing)
	}
	g.held = nil
	for _, f := range s.stale.overlapping(g.pages) {
		if f != g.finding {
			f.RegisteredAgain = true
		}
	}
}

// drop ends a registration.
func (e *Engine) drop(s *space, k key, by EndedBy, at time.Duration) {
	g := s.byKey[k]
	if g == nil {
		e.stats.Unknown++
		return
	}
	delete(s.byKey, k)
	s.live.remove(g.pages, g)
	e.stats.Live--
	if by == Deregistered {
		e.stats.Deregistrations++
	}
	if f := g.finding; f != nil {
		s.stale.remove(f.Stale, f)
		e.end(f, by, at)
	}
}

// ---- changes ----

func openKey(r *mm.Record) uint64 {
	if r.Call.ABI == mm.ABIIOUring {
		return 1<<32 | uint64(r.PID)
	}
	return uint64(r.TID)
}

func (e *Engine) change(s *space, r *mm.Record) {
	if e.o.BeginsOnly {
		if r.Phase == mm.PhaseBegin || r.Flags&mm.Unpaired != 0 {
			e.took(s, r, r)
		}
		return
	}
	if r.Phase == mm.PhaseEnd {
		e.settle(s, r)
		return
	}
	k := openKey(r)
	list := s.open[k]
	if len(list) > 0 && r.Call.ABI != mm.ABIIOUring && (list[0].Call != r.Call || list[0].Call.ABI != mm.ABINone && list[0].Flags&r.Flags&mm.Vector == 0 && !sameGather(&list[0], r)) {
		e.finishAll(s, k) // the task is in another call
		list = nil
	}
	if len(list) >= maxOpen {
		e.finishAll(s, k)
		list = nil
	}
	if n := len(s.free); list == nil && n > 0 {
		list, s.free = s.free[n-1], s.free[:n-1]
	}
	s.open[k] = append(list, *r)
}

// maxOpen bounds the changes of one task whose ends are not known.
const maxOpen = 4096

// sameGather reports whether b may be another range of the change that a began:
// hooks inside the kernel see one call as several.
func sameGather(a, b *mm.Record) bool { return a.Hook == b.Hook && a.Hook >= 64 }

// settle takes the end of a change, or of a call that turned out to be none.
func (e *Engine) settle(s *space, r *mm.Record) {
	defer s.forget()
	k := openKey(r)
	list := s.open[k]
	if r.Call.ABI == mm.ABIIOUring {
		for i := range list {
			if list[i].Range == r.Range {
				b := list[i]
				if s.open[k] = slices.Delete(list, i, i+1); len(s.open[k]) == 0 {
					delete(s.open, k)
				}
				e.took(s, &b, r)
				return
			}
		}
		e.took(s, r, r)
		return
	}
	n := 0
	for i := range list {
		if list[i].Call == r.Call {
			n++
		}
	}
	if n == 0 {
		if r.Kind.IsChange() {
			e.took(s, r, r)
		}
		return
	}
	delete(s.open, k)
	for i := range list {
		b := &list[i]
		if b.Call != r.Call {
			e.took(s, b, nil)
			continue
		}
		if n > 1 { // what changed are the parts, not their hull
			part := *b
			part.Ret, part.Phase = r.Ret, r.Phase
			e.took(s, b, &part)
			continue
		}
		e.took(s, b, r)
	}
	if len(s.free) < 8 {
		s.free = append(s.free, list[:0])
	}
}

// forget forgets new mappings when no change is open any more.
func (s *space) forget() {
	if len(s.open) == 0 {
		s.recent = s.recent[:0]
	}
}

// finishTask takes the exit of a task: what it was in is over.
func (e *Engine) finishTask(s *space, r *mm.Record) {
	if len(s.calls[r.TID]) > 0 {
		e.finishCall(s, r.TID, nil)
	}
	e.finishAll(s, uint64(r.TID))
	if r.Flags&mm.LastTask != 0 {
		e.finishAll(s, 1<<32|uint64(r.PID))
	}
}

// finishAll takes changes whose end will not be seen: they happened.
func (e *Engine) finishAll(s *space, k uint64) {
	list := s.open[k]
	delete(s.open, k)
	for i := range list {
		e.took(s, &list[i], nil)
	}
	s.forget()
}

// took is the change that began with begin and ended with end, nil if that was
// not seen.
func (e *Engine) took(s *space, begin, end *mm.Record) {
	c := *begin
	if end != nil {
		if end.Kind == mm.Map { // grew in place: nothing was taken
			return
		}
		c.Kind, c.Range, c.To, c.Ret, c.Phase = end.Kind, end.Range, end.To, end.Ret, end.Phase
		c.Flags |= end.Flags
		if c.Stack == 0 {
			c.Stack = end.Stack
		}
	}
	name := e.o.Calls.Name(c.Call)
	why, happened := outcome(&c, name, end != nil || e.o.BeginsOnly)
	if !happened {
		return
	}
	if why == "" && c.Flags&mm.Superset != 0 {
		why = "the call does not tell exactly what it changed"
	}
	if why == "" && c.Flags&mm.Maybe != 0 && end == nil {
		why = "the end of the call was not seen"
	}
	if c.Kind.IsChange() {
		s.touch(&c)
	}
	if takesPages(&c) {
		for _, g := range s.live.overlapping(c.Range) {
			e.hits(s, g, &c, name, why)
		}
		if c.Kind == mm.Move {
			for _, g := range s.live.overlapping(c.To) { // what was at the destination
				e.hits(s, g, &c, name, why)
			}
		}
	}
	switch c.Kind {
	case mm.Replace:
		e.mapped(s, c.Range, c.Time)
	case mm.Move:
		e.mapped(s, c.To, c.Time)
	}
	s.maps(&c, name)
}

// outcome judges a change by what its call returned: whether it may have
// happened, and if that is not certain, why.
func outcome(c *mm.Record, name string, known bool) (why string, happened bool) {
	if !known || c.Ret >= 0 || c.Ret < -4095 || c.Call.ABI == mm.ABINone {
		return "", true
	}
	errno := unix.Errno(-c.Ret)
	switch name {
	case "munmap", "shmdt":
		return "", false // checked before anything is unmapped
	case "mmap", "mmap2":
		if errno == unix.EBADF || errno == unix.EACCES || errno == unix.ENODEV {
			return "", false // of the file, before that
		}
	case "madvise":
		if errno == unix.ENOMEM {
			return "", true // there was a hole; all else was dropped
		}
	}
	return fmt.Sprintf("%s failed (%v); it may have changed a part before", name, errno), true
}

// takesPages reports whether a pinned page is under another address, or none,
// after such a change.
func takesPages(c *mm.Record) bool { return c.Kind.IsChange() && c.Kind != mm.Protect }

// Advice that reaches a shared mapping's pages (MADV_REMOVE, HWPOISON,
// SOFT_OFFLINE); all other leaves them in the object.
func reachesShared(advice uint64) bool { return advice == 9 || advice == 100 || advice == 101 }

func isAdvice(name string) bool {
	return name == "madvise" || name == "process_madvise" || name == "IORING_OP_MADVISE"
}

// hits is a change of pages of a registration.
func (e *Engine) hits(s *space, g *registration, c *mm.Record, name, why string) {
	if g.rec.Registration.By == mm.ByVerbs && g.rec.Registration.Access&mm.AccessOnDemand != 0 {
		return
	}
	if c.Kind == mm.Zap && isAdvice(name) && !reachesShared(c.Arg[0]) && s.shared.contains(c.Range.Intersect(g.pages)) {
		return
	}
	c.Flags &^= uncertain
	if why != "" {
		c.Flags |= uncertain
	}
	if g.busy != settled {
		g.held = append(g.held, *c)
		return
	}
	e.hit(s, g, c)
}

// uncertain marks a change that is held, in a bit that no record has.
const uncertain mm.Flags = 1 << 15

// hit is the same, of a settled registration.
func (e *Engine) hit(s *space, g *registration, c *mm.Record) {
	if c.Time < g.since { // began before that
		e.found(s, g, c, whyRacing, Racing)
		return
	}
	why := ""
	if c.Flags&uncertain != 0 {
		why, _ = outcome(c, e.o.Calls.Name(c.Call), true)
		switch {
		case why != "":
		case c.Flags&mm.Superset != 0:
			why = "the call does not tell exactly what it changed"
		default:
			why = "the end of the call was not seen"
		}
	}
	class := Freed
	if isTrim(e.frames(c.Stack)) {
		class = Trim
	}
	e.found(s, g, c, why, class)
}

const whyRacing = "the change came while the memory was being registered: which was first is not known"

// ringAfter is how often a range is replaced until that is a design.
const ringAfter = 3

func (e *Engine) found(s *space, g *registration, c *mm.Record, why string, class Class) {
	change := *c
	change.Flags &^= uncertain
	stale := g.pages.Intersect(c.Range)
	if stale.Empty() {
		stale = g.pages.Intersect(c.To)
	}
	if why == "" {
		why = g.doubt
	}
	f := g.finding
	if f == nil {
		f = &Finding{
			ID: int(e.stats.Forgotten) + len(e.all) + 1, Registration: g.rec, Change: change, Stale: stale, Class: class,
			Certain: why == "", Why: why, EndedAt: c.Time,
		}
		g.finding = f
		e.all = append(e.all, f)
		e.keep()
	} else {
		f.Repeats++
		s.stale.remove(f.Stale, f)
		f.Stale = f.Stale.Hull(stale)
		if !f.Certain && why == "" {
			f.Certain, f.Why, f.Class, f.Change = true, "", class, change
		}
	}
	s.stale.insert(f.Stale, f)
	for _, p := range s.recent {
		if p.at > c.Time && p.Overlaps(stale) {
			f.reuse(p.at)
		}
	}
	if replaces(c, stale) {
		f.replaced++
		if f.replaced >= ringAfter {
			f.Class = Ring
		}
	}
	if replaces(c, stale) || c.Kind == mm.Zap {
		f.reuse(c.Time)
	}
	if f.Repeats == 0 && e.o.Found != nil {
		e.o.Found(f)
	}
}

// replaces reports whether the change put something in the place of r.
func replaces(c *mm.Record, r mm.Range) bool {
	return c.Kind == mm.Replace && c.Range.Overlaps(r) || c.Kind == mm.Move && c.To.Overlaps(r)
}

func (f *Finding) reuse(at time.Duration) {
	if !f.Reused {
		f.Reused, f.ReusedAt = true, at
	}
}

// mapped is a new mapping at r.
func (e *Engine) mapped(s *space, r mm.Range, at time.Duration) {
	if len(s.open) > 0 { // one of them may be seen to have made room for it
		s.recent = append(s.recent, place{r, at})
	}
	for _, f := range s.stale.overlapping(r) {
		if at > f.Change.Time {
			f.reuse(at)
		}
	}
}

func (e *Engine) frames(id uint32) []symbol.Frame {
	if id == 0 || e.o.Frames == nil {
		return nil
	}
	return e.o.Frames(id)
}

// ---- mappings ----

const (
	mapType           = 0xf
	mapShared         = 1
	mapSharedValidate = 3
)

// maps keeps track of what is known to be shared.
func (s *space) maps(c *mm.Record, name string) {
	switch c.Kind {
	case mm.Map, mm.Replace:
		if name == "mmap" || name == "mmap2" {
			if t := c.Arg[1] & mapType; t == mapShared || t == mapSharedValidate {
				s.shared.add(c.Range)
			} else {
				s.shared.remove(c.Range)
			}
		} else if c.Kind == mm.Replace {
			s.shared.remove(c.Range)
		}
	case mm.Unmap:
		s.shared.remove(c.Range)
	case mm.Move:
		was := s.shared.contains(c.Range)
		s.shared.remove(c.Range)
		s.shared.remove(c.To)
		if was {
			s.shared.add(c.To)
		}
	}
}
