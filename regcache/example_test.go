// SPDX-License-Identifier: Apache-2.0

package regcache_test

import (
	"fmt"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/feedtest"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
)

// nic stands for a device whose registrations are known by a key.
type nic struct{ key uint32 }

func (n *nic) Register(r mm.Range, a regcache.Access) (uint32, error) {
	n.key++
	return n.key, nil
}

func (n *nic) Deregister(key uint32) error {
	fmt.Println("deregister key", key)
	return nil
}

func Example() {
	// A feed in memory; a program uses that of its own address space.
	kernel, err := feedtest.New(feedtest.Options{})
	if err != nil {
		panic(err)
	}
	defer kernel.Close()
	watch, err := kernel.Watch()
	if err != nil {
		panic(err)
	}
	defer watch.Close()

	cache, err := regcache.New(watch, &nic{}, regcache.Options{MaxBytes: 1 << 30})
	if err != nil {
		panic(err)
	}
	buffer := mm.Range{Start: 0x7f0000000000, End: 0x7f0000000000 + 64<<10}
	transfer := func() {
		ref, err := cache.Acquire(buffer, regcache.LocalWrite)
		if err != nil {
			panic(err)
		}
		fmt.Println("transfer with key", ref.Handle())
		if ref.Release() {
			fmt.Println("the buffer changed during the transfer")
		}
	}
	transfer()
	transfer()                            // a hit
	kernel.Change(mm.Unmap, buffer)       // free and malloc gave the same address
	transfer()                            // never the old key
	if err := cache.Close(); err != nil { // before the watch
		panic(err)
	}
	// Output:
	// transfer with key 1
	// transfer with key 1
	// deregister key 1
	// transfer with key 2
	// deregister key 2
}

// Without a feed nothing is cached, and everything works.
func Example_withoutFeed() {
	cache, err := regcache.New(feed.Dead(), &nic{}, regcache.Options{})
	if err != nil {
		panic(err)
	}
	ref, err := cache.Acquire(mm.Range{Start: 0x1000, End: 0x2000}, regcache.LocalWrite)
	if err != nil {
		panic(err)
	}
	_, why := ref.Cached()
	fmt.Println("not cached:", why)
	ref.Release()
	if err := cache.Close(); err != nil {
		panic(err)
	}
	// Output:
	// not cached: dead
	// deregister key 1
}
