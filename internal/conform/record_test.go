// SPDX-License-Identifier: Apache-2.0

package conform

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/mm"
)

const (
	metaLine    = `{"meta":{"schema":1,"version":"0","host":"h","kernel":"6.18","tier":"syscall","gaps":[]}}` + "\n"
	recordLine  = `{"seq":1,"time":"2026-01-02T03:04:05.000000006Z","pid":7,"tid":8,"comm":"prog","kind":"move","phase":"end","start":"0x1000","end":"0xffffffffffffffff","to_start":"0x5000","to_end":"0x6000","call":"mremap","flags":["MREMAP_MAYMOVE"],"hook":"sys_exit","ret":-12,"marks":["superset","maybe"],"future":{}}` + "\n"
	forkLine    = `{"seq":2,"time":"2026-01-02T03:04:05.000000006Z","pid":7,"tid":7,"comm":"prog","kind":"fork","phase":"end","start":"0x0","end":"0x0","to_start":"0x0","to_end":"0x0","call":"","flags":[],"hook":"sched_process_fork","child_pid":9,"child_tid":9}` + "\n"
	lostLine    = `{"seq":5,"time":"2026-01-02T03:04:05.000000006Z","pid":0,"tid":0,"comm":"","kind":"lost","phase":"end","start":"0x0","end":"0x0","to_start":"0x0","to_end":"0x0","call":"","flags":[],"hook":"","lost":3}` + "\n"
	summaryLine = `{"summary":{"records":2,"lost":3,"complete":false,"by_kind":{"move":1},"by_tier":{}}}` + "\n"
)

func TestParseStream(t *testing.T) {
	got, err := ParseStream(strings.NewReader(metaLine + recordLine + forkLine + lostLine + summaryLine))
	if err != nil {
		t.Fatal(err)
	}
	ret := int64(-12)
	want := &Stream{Tier: "syscall", Lost: 3, Records: []Record{
		{
			Seq: 1, PID: 7, TID: 8, Comm: "prog", Kind: mm.Move, Phase: mm.PhaseEnd,
			Range: mm.Range{Start: 0x1000, End: mm.MaxAddr}, To: mm.Range{Start: 0x5000, End: 0x6000},
			Call: "mremap", Marks: []string{"superset", "maybe"}, Ret: &ret,
		},
		{Seq: 2, PID: 7, TID: 7, Comm: "prog", Kind: mm.Fork, Phase: mm.PhaseEnd, Child: 9},
		{Seq: 5, Kind: mm.Lost, Phase: mm.PhaseEnd},
	}}
	if d := cmp.Diff(want, got); d != "" {
		t.Errorf("-want +got:\n%s", d)
	}
}

func TestParseStreamRefuses(t *testing.T) {
	for _, tc := range []struct{ name, text string }{
		{"nothing", ""},
		{"no summary", metaLine + recordLine},
		{"no meta", recordLine + summaryLine},
		{"meta twice", metaLine + metaLine + summaryLine},
		{"behind the summary", metaLine + recordLine + forkLine + summaryLine + recordLine},
		{"wrong count", metaLine + recordLine + summaryLine},
		{"summary without counts", metaLine + `{"summary":{"records":0}}` + "\n"},
		{"output of the program", metaLine + "hello\n" + summaryLine},
		{"two on a line", metaLine + strings.TrimSpace(recordLine) + forkLine + summaryLine},
		{"unknown kind", metaLine + strings.Replace(recordLine, "move", "jump", 1) + forkLine + summaryLine},
		{"unknown phase", metaLine + strings.Replace(recordLine, `"end",`, `"middle",`, 1) + forkLine + summaryLine},
		{"decimal address", metaLine + strings.Replace(recordLine, "0x1000", "4096", 1) + forkLine + summaryLine},
		{"cut line", metaLine + recordLine[:40]},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if s, err := ParseStream(strings.NewReader(tc.text)); !errors.Is(err, ErrStream) {
				t.Errorf("got %+v, error %v, want %v", s, err, ErrStream)
			}
		})
	}
}

func FuzzParseStream(f *testing.F) {
	f.Add(metaLine + recordLine + forkLine + lostLine + summaryLine)
	f.Add(metaLine + `{"summary":{"records":0,"lost":0,"complete":true}}`)
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseStream(strings.NewReader(text))
		if err != nil {
			return
		}
		for i := range s.Records {
			if r := &s.Records[i]; r.Kind == mm.KindNone || r.String() == "" {
				t.Errorf("record %d is %v", i, r)
			}
		}
		Compare(&Log{Root: 7, Threads: map[int][]*Call{7: nil}}, s)
	})
}
