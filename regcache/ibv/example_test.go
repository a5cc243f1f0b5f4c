// SPDX-License-Identifier: Apache-2.0

package ibv_test

import (
	"context"
	"errors"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/ibv"
)

// A cache of memory regions. The watch is of this process: from feed/local, or
// from the daemon.
func Example() {
	_ = func(ctx context.Context, w *feed.Watch, buffer mm.Range, tell func(addr uint64, rkey uint32) error) (err error) {
		dev, err := ibv.Open("mlx5_0")
		if err != nil {
			return err // says which devices there are, or what is missing
		}
		defer func() { err = errors.Join(err, dev.Close()) }()
		pd, err := dev.NewPD(ibv.Options{})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, pd.Close()) }()
		cache, err := regcache.New(w, pd, regcache.Options{})
		if err != nil {
			return err
		}
		defer func() { err = errors.Join(err, cache.Close()) }()

		ref, err := cache.Acquire(buffer, regcache.RemoteWrite)
		if err != nil {
			return err // memlock, the device's limit: with the figures
		}
		defer ref.Release()
		m := ref.Handle()
		return tell(m.IOVA()+uint64(buffer.Start-m.Range().Start), m.RKey())
	}
}
