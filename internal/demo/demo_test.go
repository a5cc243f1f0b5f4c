// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/regcache"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Without a feed every transfer after the first change of a row is stale; a
// feed that is dead caches nothing and is never stale.
func TestDeadFeed(t *testing.T) {
	const threads, rounds = 4, 10
	rep, err := Run(t.Context(), Options{Threads: threads, Rounds: rounds})
	if err != nil {
		t.Fatal(err)
	}
	if len(rep.Rows) != 2*len(changes) {
		t.Errorf("%d rows, want %d", len(rep.Rows), 2*len(changes))
	}
	for _, row := range rep.Rows {
		n := uint64(row.Threads * rounds * transfersPerRound)
		first := uint64(row.Threads * transfersPerRound)
		if got, want := row.WithoutFeed, (Counts{Transfers: n, Stale: n - first, Hits: n - uint64(row.Threads), Misses: uint64(row.Threads)}); got != want {
			t.Errorf("%s, %d threads, without feed: %+v, want %+v", row.Change, row.Threads, got, want)
		}
		if got, want := row.WithFeed, (Counts{Transfers: n, Misses: n}); got != want {
			t.Errorf("%s, %d threads, dead feed: %+v, want %+v", row.Change, row.Threads, got, want)
		}
	}
	if rep.WithoutFeed.LookupNS <= 0 || rep.WithFeed.LookupNS <= 0 || rep.MunmapRatio <= 0 {
		t.Errorf("costs were not measured: %+v", rep)
	}
	if want := map[string]uint64{regcache.ReasonDead.String(): rep.WithFeed.Transfers}; !maps.Equal(rep.WithFeed.Uncached, want) {
		t.Errorf("uncached %v, want %v", rep.WithFeed.Uncached, want)
	}

	var keys struct {
		Without struct {
			Stale *uint64 `json:"stale"`
		} `json:"without_feed"`
		With struct {
			Stale    *uint64  `json:"stale"`
			Hits     *uint64  `json:"hits"`
			LookupNS *float64 `json:"lookup_ns"`
		} `json:"with_feed"`
	}
	text, err := json.Marshal(rep)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &keys); err != nil {
		t.Fatal(err)
	}
	if keys.Without.Stale == nil || *keys.Without.Stale != rep.WithoutFeed.Stale ||
		keys.With.Stale == nil || keys.With.Hits == nil || keys.With.LookupNS == nil {
		t.Errorf("JSON lacks a key: %s", text)
	}

	var table strings.Builder
	if err := rep.WriteTable(&table); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		changes[0].name,
		fmt.Sprintf("%d of %d", rep.WithoutFeed.Stale, rep.WithoutFeed.Transfers),
		fmt.Sprintf("0 of %d", rep.WithFeed.Transfers),
	} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("table without %q:\n%s", want, &table)
		}
	}
	t.Logf("\n%s", &table)
}

func TestOpenFails(t *testing.T) {
	_, err := Run(t.Context(), Options{Threads: 1, Rounds: 1, Open: func() (*feed.Watch, error) {
		return nil, os.ErrPermission
	}})
	if !errors.Is(err, os.ErrPermission) {
		t.Errorf("error %v, want that of Open", err)
	}
}

func TestCancelled(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := Run(ctx, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want context.Canceled", err)
	}
}

func TestOptions(t *testing.T) {
	for _, o := range []Options{{Threads: -1}, {Threads: 257}, {Rounds: -1}, {Pages: -1}, {Pages: 1<<14 + 1}} {
		if _, err := Run(t.Context(), o); err == nil {
			t.Errorf("%+v was accepted", o)
		}
	}
}
