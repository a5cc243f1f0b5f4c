// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/ibv"
)

func newKeys(mode string, w *feed.Watch, pd *ibv.PD, ring mm.Range) (keys, error) {
	switch mode {
	case "cache":
		c, err := regcache.New(w, pd, regcache.Options{})
		return cached{c}, err
	case "on-demand":
		m, err := pd.RegisterAt(ring, regcache.RemoteWrite, uint64(ring.Start), ibv.Options{OnDemand: true})
		return onDemand{pd, m}, err
	}
	return &naive{pd: pd, regions: map[mm.Range]*ibv.MR{}}, nil
}

// cached asks the cache for each message: it knows when the block is another.
type cached struct{ c *regcache.Cache[*ibv.MR] }

func (k cached) key(block mm.Range) (uint64, uint32, func(), error) {
	ref, err := k.c.Acquire(block, regcache.RemoteWrite)
	if err != nil {
		return 0, 0, nil, err
	}
	m := ref.Handle()
	return m.IOVA() + uint64(block.Start-m.Range().Start), m.RKey(), func() { ref.Release() }, nil
}

func (k cached) registrations() uint64 { return k.c.Stats().Registrations }
func (k cached) close() error          { return k.c.Close() }

// onDemand has one region that follows the page tables.
type onDemand struct {
	pd *ibv.PD
	m  *ibv.MR
}

func (k onDemand) key(block mm.Range) (uint64, uint32, func(), error) {
	return uint64(block.Start), k.m.RKey(), func() {}, nil
}

func (k onDemand) registrations() uint64 { return 1 }
func (k onDemand) close() error          { return k.pd.Deregister(k.m) }

// naive believes for ever what it once registered.
type naive struct {
	pd      *ibv.PD
	regions map[mm.Range]*ibv.MR
}

func (k *naive) key(block mm.Range) (_ uint64, _ uint32, _ func(), err error) {
	m := k.regions[block]
	if m == nil {
		if m, err = k.pd.Register(block, regcache.RemoteWrite); err != nil {
			return 0, 0, nil, err
		}
		k.regions[block] = m
	}
	return m.IOVA(), m.RKey(), func() {}, nil
}

func (k *naive) registrations() uint64 { return uint64(len(k.regions)) }

func (k *naive) close() error {
	var errs []error
	for _, m := range k.regions {
		errs = append(errs, k.pd.Deregister(m))
	}
	return errors.Join(errs...)
}
