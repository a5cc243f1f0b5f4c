// SPDX-License-Identifier: Apache-2.0

// Package pairs joins the begin and the end of each change into one.
package pairs

import (
	"cmp"
	"slices"
	"strings"

	"github.com/ummu/ummu/mm"
)

// Change is what happened, once: the begin and the end of it joined.
type Change struct {
	mm.Record      // as known at the end; Time is that of the begin
	Open      bool // no end was seen
}

// maxPending bounds the begins without an end of one task. More means that
// ends were lost.
const maxPending = 4096

// Joiner joins begins and ends. A task is in one call at a time; requests of
// io_uring may end in another thread of the process. It is not safe for
// concurrent use.
type Joiner struct {
	pending map[uint64][]mm.Record
	emit    func(*Change) error
	// beginsOnly: there are no ends; each begin is a change.
	beginsOnly bool
	c          Change // emit's argument, kept to allocate nothing
}

// New returns a Joiner that hands each change to emit, valid during the call.
// beginsOnly: there are no ends; each begin is a change.
func New(beginsOnly bool, emit func(*Change) error) *Joiner {
	return &Joiner{pending: make(map[uint64][]mm.Record), emit: emit, beginsOnly: beginsOnly}
}

// BeginsOnly reports whether streams of a tier have records before a change
// and none after it, and neither arguments nor results of calls.
func BeginsOnly(tier string) bool { return strings.HasPrefix(tier, "notifier/") || tier == "mm" }

func registers(r *mm.Record) bool { return r.Kind == mm.Register || r.Kind == mm.Deregister }

func pairKey(r *mm.Record) uint64 {
	if registers(r) { // a library may change mappings inside
		return 2<<32 | uint64(r.TID)
	}
	if r.Call.ABI == mm.ABIIOUring {
		return uringKey(r)
	}
	return uint64(r.TID)
}

func uringKey(r *mm.Record) uint64 { return 1<<32 | uint64(r.PID) }

func (p *Joiner) out(r *mm.Record, open bool) error {
	p.c = Change{*r, open}
	return p.emit(&p.c)
}

// Add takes the next record of the stream.
func (p *Joiner) Add(r *mm.Record) error {
	if p.beginsOnly && !registers(r) {
		return p.out(r, r.Phase == mm.PhaseBegin)
	}
	key := pairKey(r)
	if r.Phase == mm.PhaseBegin {
		list := p.pending[key]
		if len(list) > 0 && (len(list) >= maxPending && !registers(r) || r.Call.ABI != mm.ABIIOUring && !sameVector(&list[0], r)) {
			// The task is in another call: the ends of the former are not seen any more.
			if err := p.flush(list); err != nil {
				return err
			}
			list = list[:0]
		}
		p.pending[key] = append(list, *r)
		return nil
	}
	switch {
	case r.Kind == mm.Exit && r.Flags&mm.SpaceDeath == 0:
		list := p.pending[key]
		delete(p.pending, key)
		list = append(list, p.pending[2<<32|key]...)
		delete(p.pending, 2<<32|key)
		if r.Flags&mm.LastTask != 0 {
			ring := uringKey(r)
			list = append(list, p.pending[ring]...)
			delete(p.pending, ring)
		}
		if err := p.flush(list); err != nil {
			return err
		}
		return p.out(r, false)
	case r.Call.ABI == mm.ABINone && !registers(r):
		return p.out(r, false)
	}
	list := p.pending[key]
	i := match(list, r)
	if i < 0 {
		return p.out(r, false)
	}
	if list[i].Flags&mm.Vector != 0 {
		// One end for all: what changed are the parts, not their hull.
		p.pending[key] = list[:0]
		for j := range list {
			list[j].Ret, list[j].Hook, list[j].Phase = r.Ret, r.Hook, r.Phase
			if err := p.out(&list[j], false); err != nil {
				return err
			}
		}
		return nil
	}
	end := *r
	end.Time, end.Stack = list[i].Time, list[i].Stack
	p.pending[key] = append(list[:i], list[i+1:]...)
	return p.out(&end, false)
}

// match finds the begin of an end; -1 if there is none.
func match(list []mm.Record, end *mm.Record) int {
	for i := len(list) - 1; i >= 0; i-- {
		b := &list[i]
		if b.Call == end.Call && (b.Kind == end.Kind || !registers(b) || end.Flags&b.Flags&mm.Vector != 0) && (end.Call.ABI != mm.ABIIOUring || b.Range == end.Range) {
			return i
		}
	}
	return -1
}

// sameVector reports whether b is another part of the call of a.
func sameVector(a, b *mm.Record) bool {
	return a.Flags&b.Flags&mm.Vector != 0 && a.Call == b.Call
}

func (p *Joiner) flush(list []mm.Record) error {
	for i := range list {
		if err := p.out(&list[i], true); err != nil {
			return err
		}
	}
	return nil
}

// End takes the end of the stream: what is pending stays open.
func (p *Joiner) End() error {
	var all []mm.Record
	for _, list := range p.pending {
		all = append(all, list...)
	}
	clear(p.pending)
	slices.SortFunc(all, func(a, b mm.Record) int { return cmp.Compare(a.Seq, b.Seq) })
	return p.flush(all)
}
