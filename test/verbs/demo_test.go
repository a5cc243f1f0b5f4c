// SPDX-License-Identifier: Apache-2.0

//go:build linux

package verbs

import (
	"fmt"
	"strings"
	"testing"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
	"github.com/ummu/ummu/internal/demo"
)

// The demo with a real device: stale without a feed, never with it.
func TestDemo(t *testing.T) {
	newRig(t)
	rep, err := demo.Run(t.Context(), demo.Options{
		Device: *device, Threads: 4, Rounds: 5,
		Open: func() (*feed.Watch, error) { return local.Open(local.Options{Tier: tier}) },
	})
	must(t, err)
	var table strings.Builder
	rep.WriteTable(&table)
	t.Logf("\n%s", &table)
	for _, row := range rep.Rows {
		if row.WithFeed.Stale != 0 {
			t.Errorf("%s, %d threads: %d of %d transfers are stale", row.Change, row.Threads, row.WithFeed.Stale, row.WithFeed.Transfers)
		}
		if row.WithoutFeed.Stale == 0 {
			t.Errorf("%s, %d threads: nothing is stale without a feed", row.Change, row.Threads)
		}
		if row.WithFeed.Hits == 0 {
			t.Errorf("%s, %d threads: no hits", row.Change, row.Threads)
		}
	}
	if rep.Device != *device || rep.LeftOut != "" || len(rep.Rows) != 12 {
		t.Errorf("device %q, %d rows, left out: %q", rep.Device, len(rep.Rows), rep.LeftOut)
	}
	t.Attr("stale", fmt.Sprintf("%d of %d without the feed, %d of %d with it",
		rep.WithoutFeed.Stale, rep.WithoutFeed.Transfers, rep.WithFeed.Stale, rep.WithFeed.Transfers))
}
