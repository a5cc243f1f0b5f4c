// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/feed/local"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// What ummunotify's own test asks for: the counter moved, one event for
// exactly the page that was unmapped, then nothing; and no event after the
// watch of the pages has ended.
func TestUmmunotifyMiddlePage(t *testing.T) {
	w, err := local.Open(local.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	}()
	want := strings.Join([]string{
		"watching three pages, valid: true",
		"unmapped the middle one, valid: false",
		"unmap of pages 1 to 2",
		"drained: fresh, valid: true",
		"forgot them and unmapped the first, valid: true",
		"",
	}, "\n")
	for range 100 { // the interest ends each time
		var out strings.Builder
		if err := run(w, &out); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, out.String()); diff != "" {
			t.Fatal(diff)
		}
	}
	if s := w.Stats(); s.Records != 100 || s.Losses != 0 || s.Verdicts[feed.Cacheable] != 100 {
		t.Errorf("%+v, want 100 records and nothing else", s)
	}
}
