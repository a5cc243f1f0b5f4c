// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// A client may cause messages as fast as it can connect. So each text has a
// budget of its own: a burst, then one message per interval, which says how
// many were left out.
const (
	logBurst    = 10
	logInterval = time.Second
)

type limited struct {
	slog.Handler
	budgets *budgets
}

type budgets struct {
	mu sync.Mutex // guards by
	by map[string]*budget
}

// budget is of one text; texts are constants, so there are few.
type budget struct {
	left    int
	since   time.Time // when left was last raised
	dropped uint64
}

func limitRate(h slog.Handler) slog.Handler {
	return &limited{h, &budgets{by: make(map[string]*budget)}}
}

// Handle passes a record on if its text has a budget.
func (l *limited) Handle(ctx context.Context, r slog.Record) error {
	dropped, ok := l.budgets.take(r.Message, r.Time)
	if !ok {
		return nil
	}
	if dropped > 0 {
		r = r.Clone()
		r.AddAttrs(slog.Uint64("left_out", dropped))
	}
	return l.Handler.Handle(ctx, r)
}

func (l *limited) WithAttrs(a []slog.Attr) slog.Handler {
	return &limited{l.Handler.WithAttrs(a), l.budgets}
}

func (l *limited) WithGroup(name string) slog.Handler {
	return &limited{l.Handler.WithGroup(name), l.budgets}
}

// take reports whether one more message may be written, and how many were not
// since the last one that was.
func (b *budgets) take(text string, now time.Time) (dropped uint64, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.by[text]
	if u == nil {
		u = &budget{left: logBurst, since: now}
		b.by[text] = u
	}
	if n := now.Sub(u.since) / logInterval; n > 0 {
		u.left = int(min(int64(u.left)+int64(n), logBurst))
		u.since = u.since.Add(n * logInterval)
	}
	if u.left == 0 {
		u.dropped++
		return 0, false
	}
	u.left--
	dropped, u.dropped = u.dropped, 0
	return dropped, true
}
