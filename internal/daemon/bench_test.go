// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"sync"
	"testing"

	"github.com/ummu/ummu/feed"
)

// BenchmarkOpen is a watch by the daemon, from nothing to proven, and its end;
// the daemon runs in the same process.
func BenchmarkOpen(b *testing.B) {
	s := start(b, Config{MaxWatchesPerUID: mostClients, MaxClients: mostClients})
	for b.Loop() {
		w, err := feed.Dial(context.Background(), feed.Options{Socket: s.Addr()})
		if err != nil {
			b.Fatal(err)
		}
		b.StopTimer()
		if err := w.Close(); err != nil {
			b.Fatal(err)
		}
		eventually(b, "its place is free", func() bool { return s.watchCount() == 0 })
		b.StartTimer()
	}
}

// BenchmarkOpenAtOnce is as many at once as a process can have.
func BenchmarkOpenAtOnce(b *testing.B) {
	s := start(b, Config{MaxWatchesPerProcess: mostPerProcess, MaxWatchesPerUID: mostClients, MaxClients: mostClients})
	for b.Loop() {
		var g sync.WaitGroup
		ws := make([]*feed.Watch, mostPerProcess)
		for i := range ws {
			g.Go(func() {
				w, err := feed.Dial(context.Background(), feed.Options{Socket: s.Addr()})
				if err != nil {
					b.Error(err)
					return
				}
				ws[i] = w
			})
		}
		g.Wait()
		b.StopTimer()
		for _, w := range ws {
			if w != nil {
				w.Close()
			}
		}
		eventually(b, "all places are free", func() bool { return s.watchCount() == 0 })
		b.StartTimer()
	}
}
