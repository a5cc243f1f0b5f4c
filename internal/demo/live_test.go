// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"strings"
	"testing"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
)

// With a live feed nothing is stale, and what did not change hits.
func TestLiveFeed(t *testing.T) {
	const threads, rounds = 8, 100
	rep, err := Run(t.Context(), Options{
		Threads: threads, Rounds: rounds,
		Open: func() (*feed.Watch, error) { return local.Open(local.Options{}) },
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range rep.Rows {
		if row.WithFeed.Stale != 0 {
			t.Errorf("%s, %d threads: %d of %d transfers are stale", row.Change, row.Threads, row.WithFeed.Stale, row.WithFeed.Transfers)
		}
		if row.WithoutFeed.Stale == 0 {
			t.Errorf("%s, %d threads: nothing stale without a feed", row.Change, row.Threads)
		}
		if row.WithFeed.Hits == 0 {
			t.Errorf("%s, %d threads: no hits", row.Change, row.Threads)
		}
	}
	var table strings.Builder
	rep.WriteTable(&table)
	t.Logf("\n%s", &table)
}
