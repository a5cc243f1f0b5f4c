// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"go.uber.org/goleak"

	"github.com/ummu/ummu/feed"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == contractClient {
		if err := runContract(os.Args[2]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	if role := os.Getenv(roleEnv); role != "" {
		os.Exit(runRole(role))
	}
	cleanup, err := copyBinary()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	code := m.Run()
	if common != nil {
		common.stop()
	}
	cleanup()
	if err := goleak.Find(); err != nil && code == 0 {
		fmt.Fprintln(os.Stderr, err)
		code = 1
	}
	os.Exit(code)
}

// common is a server that tests share which need nothing special: loading the
// kernel side takes a while.
var common *struct {
	*Server
	stop func()
}

func shared(t testing.TB) *Server {
	t.Helper()
	if common == nil {
		dir, err := os.MkdirTemp("", "ummu")
		if err == nil {
			err = os.Chmod(dir, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
		s, err := New(Config{Socket: filepath.Join(dir, "feed.sock"), Tiers: []tracer.Tier{tracer.TierSyscall}})
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(context.Background())
		done := make(chan error)
		go func() { done <- s.Serve(ctx) }()
		common = &struct {
			*Server
			stop func()
		}{s, func() {
			cancel()
			if err := <-done; err != nil {
				fmt.Fprintln(os.Stderr, "serve:", err)
				os.Exit(1)
			}
			os.RemoveAll(dir)
		}}
	}
	return common.Server
}

// start starts a server in a directory of its own.
func start(t testing.TB, c Config) *Server {
	t.Helper()
	if c.Socket == "" && c.Listener == nil {
		c.Socket = filepath.Join(socketDir(t), "feed.sock")
	}
	if c.Tiers == nil {
		c.Tiers = []tracer.Tier{tracer.TierSyscall}
	}
	if c.Log == nil {
		c.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	s, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error)
	go func() { done <- s.Serve(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return s
}

// socketDir is a directory that every user may search.
func socketDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "ummu")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

func dial(t testing.TB, s *Server) *feed.Watch {
	t.Helper()
	w, err := feed.Dial(t.Context(), feed.Options{Socket: s.Addr()})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.Close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

var page = int(mm.PageSize())
