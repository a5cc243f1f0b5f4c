// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/feed"
)

// BenchmarkOpen is a watch by the daemon, from nothing to proven; the daemon
// runs in the same process. One at a time: who opens them faster than places
// can be made ready waits for the kernel, see BenchmarkOpenAtOnce.
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
		time.Sleep(50 * time.Millisecond) // a place is made ready for the next one
		b.StartTimer()
	}
}

func init() {
	roles["opens"] = roleOpens
}

// roleOpens opens as many watches at once as it is told, and closes them.
func roleOpens(socket string, args []string) error {
	n, err := strconv.Atoi(args[0])
	if err != nil {
		return err
	}
	ws, errs := make([]*feed.Watch, n), make([]error, n)
	all := func(f func(i int) error) (string, error) {
		var g sync.WaitGroup
		for i := range ws {
			g.Go(func() { errs[i] = f(i) })
		}
		g.Wait()
		return "ok", errors.Join(errs...)
	}
	return serveLines(func(line string) (string, error) {
		if line == "close" {
			return all(func(i int) error { return ws[i].Close() })
		}
		return all(func(i int) (err error) {
			ws[i], err = feed.Dial(context.Background(), feed.Options{Socket: socket, Timeout: time.Minute})
			return err
		})
	})
}

// BenchmarkOpenAtOnce is 256 watches at once, of two processes.
func BenchmarkOpenAtOnce(b *testing.B) {
	const processes, each = 2, 128
	s := start(b, Config{MaxWatchesPerProcess: each, MaxWatchesPerUID: mostClients, MaxClients: mostClients})
	var cs [processes]*client
	for i := range cs {
		cs[i] = startClient(b, clientOptions{uid: nobody}, "opens", s.Addr(), strconv.Itoa(each))
	}
	for b.Loop() {
		var g sync.WaitGroup
		for _, c := range cs {
			g.Go(func() { c.expect(b, "open", "ok") })
		}
		g.Wait()
		b.StopTimer()
		for _, c := range cs {
			c.expect(b, "close", "ok")
		}
		eventually(b, "all places are free", func() bool { return s.watchCount() == 0 })
		s.clients.mu.Lock()
		for _, u := range s.clients.users { // it may open as many again
			u.paid = time.Time{}
		}
		s.clients.mu.Unlock()
		b.StartTimer()
	}
}

// mapsResident is how many bytes of BPF maps this process has mapped and
// present (smaps).
func mapsResident(t *testing.T) (bytes int) {
	t.Helper()
	text, err := os.ReadFile("/proc/self/smaps")
	if err != nil {
		t.Fatal(err)
	}
	ours := false
	for line := range strings.Lines(string(text)) {
		fields := strings.Fields(line)
		switch {
		case !strings.HasSuffix(fields[0], ":"):
			ours = strings.Contains(line, "bpf-map")
		case ours && fields[0] == "Rss:":
			kb, err := strconv.Atoi(fields[1])
			if err != nil {
				t.Fatal(err)
			}
			bytes += kb << 10
		}
	}
	return bytes
}

// A watch costs at most 1 MiB, as the kernel accounts its maps and as its client
// has them in memory, also when its ring is full.
func TestMemoryOfWatch(t *testing.T) {
	s := start(t, Config{})
	before := mapsResident(t)
	w := dial(t, s)
	b, r, unmap, err := mapPages(1)
	if err != nil {
		t.Fatal(err)
	}
	defer unmap()
	ticket := w.Begin(r)
	defer w.Abandon(ticket)
	for range defaultRingBytes / 100 {
		if err := unix.Madvise(b, unix.MADV_DONTNEED); err != nil {
			t.Fatal(err)
		}
	}
	w.Drain(nil)
	if w.Stats().Lost == 0 {
		t.Error("the ring was not full")
	}
	report, err := Status(t.Context(), s.Addr())
	if err != nil || len(report.Entries) != 1 {
		t.Fatalf("%+v, %v", report, err)
	}
	resident, accounted := mapsResident(t)-before, int(report.Entries[0].MemoryBytes)
	t.Logf("%d bytes by fdinfo, %d by smaps", accounted, resident)
	for _, n := range []int{resident, accounted} {
		if n < page || n > 1<<20 {
			t.Errorf("%d bytes, want at most 1 MiB", n)
		}
	}
}
