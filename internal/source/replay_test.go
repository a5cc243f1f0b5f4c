// SPDX-License-Identifier: Apache-2.0

package source

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/internal/top"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

const golden = "../top/testdata/golden.ummurec"

func bytesOf(t *testing.T, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func replay(t *testing.T, b []byte) *Replay {
	t.Helper()
	r, err := NewReplay("x", func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b)), nil }, activity.Options{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close() })
	return r
}

func state(t *testing.T, r *Replay, at time.Duration) *top.State {
	t.Helper()
	s, err := r.State(context.Background(), top.Query{At: at, Query: activity.Query{PID: 1, Registrations: true}})
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Wherever one comes from, a time shows the same.
func TestReplayIsTheSameFromEverywhere(t *testing.T) {
	b := bytesOf(t, golden)
	r := replay(t, b)
	first := state(t, r, 0)
	p := *first.Position
	if p.At != p.From || p.To <= p.From || first.Ended != "" {
		t.Fatalf("it starts at %+v", p)
	}
	var there []*top.State
	const steps = 10
	at := func(i int) time.Duration { return p.From + (p.To-p.From)*time.Duration(i)/steps }
	for i := range steps + 1 {
		there = append(there, state(t, replay(t, b), at(i)))
	}
	for _, i := range []int{3, 3, 7, 2, steps, 0, 9, 1} {
		if d := cmp.Diff(there[i], state(t, r, at(i)), cmpopts.IgnoreUnexported(*there[i].Calls)); d != "" {
			t.Fatalf("at %d of %d:\n%s", i, steps, d)
		}
	}
	if s := state(t, r, 1<<62); s.Position.At != p.To || s.Ended == "" {
		t.Errorf("behind the end it is at %+v, %q", s.Position, s.Ended)
	}
}

// At the end everything of the recording is counted, as its summary says.
func TestReplayCountsEverything(t *testing.T) {
	b := bytesOf(t, golden)
	rd, err := recording.NewReader(bytes.NewReader(b), tracer.HookName)
	if err != nil {
		t.Fatal(err)
	}
	var rec mm.Record
	for err == nil {
		err = rd.Read(&rec)
	}
	s := state(t, replay(t, b), 1<<62)
	for i, k := range activity.Kinds {
		want := rd.Summary().Changes[k.String()]
		if got := s.Total.Counts[i]; got.Changes != want.Count || got.Failed != want.Failed || got.Bytes != want.Bytes {
			t.Errorf("%v: %+v, the summary says %+v", k, got, want)
		}
	}
	if s.Total.Counts.Sum().Changes == 0 || s.Doubt != "" {
		t.Errorf("%+v, %q", s.Total.Counts, s.Doubt)
	}
}

// A recording that is cut off is shown as far as it goes, and said not to be whole.
func TestReplayOfWhatIsLeft(t *testing.T) {
	b := bytesOf(t, golden)
	rd, err := recording.NewReader(bytes.NewReader(b), tracer.HookName)
	if err != nil {
		t.Fatal(err)
	}
	m := rd.Meta()
	enc, err := recording.NewEncoder(m, tracer.HookName)
	if err != nil {
		t.Fatal(err)
	}
	text, err := recording.AppendMeta(nil, m)
	if err != nil {
		t.Fatal(err)
	}
	var rec mm.Record
	for range 100 {
		if err := rd.Read(&rec); err != nil {
			t.Fatal(err)
		}
		text = enc.AppendRecord(text, &rec)
	}
	s := state(t, replay(t, text), 1<<62)
	if s.Records != 100 || s.Doubt == "" {
		t.Errorf("%d records, doubt %q", s.Records, s.Doubt)
	}
	if s := state(t, replay(t, text[:len(text)-5]), 1<<62); s.Records != 99 || s.Doubt == "" {
		t.Errorf("%d records, doubt %q", s.Records, s.Doubt)
	}
	_, err = NewReplay("x", func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader([]byte("nonsense"))), nil }, activity.Options{})
	if !errors.Is(err, recording.ErrNotRecording) {
		t.Errorf("nonsense: %v", err)
	}
}
