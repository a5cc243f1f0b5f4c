// SPDX-License-Identifier: Apache-2.0

// Package daemon is the privileged side of the feed for processes without
// privileges: it loads the kernel side once, and hands each client a watch of
// its own address space over a Unix socket (docs/protocol.md). After that the
// kernel side writes straight into memory that the client maps: the daemon
// does nothing per change and nothing per lookup.
//
// Everything that a client says is hostile until the kernel confirms it.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/bpf/layout"
	"github.com/ummu/ummu/internal/wire"
	"github.com/ummu/ummu/tracer"
)

// Config of a server. Socket or Listener must be set; everything else has a
// default.
type Config struct {
	// Socket is the path to listen at. Mode and GID are given to it before
	// anybody can connect.
	Socket string
	Mode   fs.FileMode // 0: 0666
	GID    int         // -1, 0: not changed
	// Listener is a listening socket made by somebody else (systemd), instead.
	Listener *net.UnixListener

	// Tiers are the only ones to be used; none: the best that a client can
	// have, of those that are allowed.
	Tiers []tracer.Tier
	// AllowKVM permits to give a client a virtual machine of its own.
	AllowKVM bool
	// AllowSyscallTier permits the tier that costs every process of the
	// machine something for each system call.
	AllowSyscallTier bool

	MaxWatchesPerProcess int // 0: 8
	// MaxWatchesPerUID also bounds how many watches a user may open at once,
	// before it is one a second, and, twice, how many of its processes may
	// live that ever had one. 0: 512.
	MaxWatchesPerUID int
	// MaxClients is of connections, and, four times, of processes that ever
	// had a watch. 0: 1000.
	MaxClients   int
	MaxRingBytes int // that a client may ask for; 0: 256 KiB

	// Patience is how long a client may take for each step of the handshake.
	// 0: 2 s.
	Patience time.Duration
	// Log gets what is worth telling, at a limited rate. nil: nothing.
	Log *slog.Logger

	versions  wire.Versions // tests; zero: wire.Supported
	welcoming func(*watch)  // tests: runs before a watch is handed out
}

// Defaults of [Config].
const (
	DefaultMode                 = 0o666
	DefaultMaxWatchesPerProcess = 8
	DefaultMaxWatchesPerUID     = 512
	DefaultMaxClients           = 1000
	DefaultMaxRingBytes         = defaultRingBytes

	defaultPatience  = 2 * time.Second
	defaultRingBytes = 256 << 10
	mostClients      = 4096
	// mostPerProcess is what one address space can have (tracer).
	mostPerProcess = 128
	// ready is how many watches are prepared ahead, so that a client need not
	// wait: some 300 KiB each. More at once wait for a grace period together.
	ready = 16
)

func (c *Config) complete() error {
	for _, d := range []struct {
		n             *int
		def, min, max int
		name          string
	}{
		{&c.MaxWatchesPerProcess, DefaultMaxWatchesPerProcess, 1, mostPerProcess, "MaxWatchesPerProcess"},
		{&c.MaxWatchesPerUID, DefaultMaxWatchesPerUID, 1, mostClients, "MaxWatchesPerUID"},
		{&c.MaxClients, DefaultMaxClients, 1, mostClients, "MaxClients"},
		{&c.MaxRingBytes, DefaultMaxRingBytes, defaultRingBytes, 1 << 30, "MaxRingBytes"},
	} {
		if *d.n == 0 {
			*d.n = d.def
		}
		if *d.n < d.min || *d.n > d.max {
			return fmt.Errorf("option %s %d is not in %d..%d", d.name, *d.n, d.min, d.max)
		}
	}
	if (c.Socket == "") == (c.Listener == nil) {
		return errors.New("either option Socket or Listener must be set")
	}
	if c.Mode == 0 {
		c.Mode = DefaultMode
	}
	if c.Patience == 0 {
		c.Patience = defaultPatience
	}
	if c.Patience < 0 {
		return fmt.Errorf("option Patience %v is negative", c.Patience)
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	if c.versions == (wire.Versions{}) {
		c.versions = wire.Supported
	}
	return nil
}

// Server serves watches. Its methods are safe for concurrent use.
type Server struct {
	cfg      Config
	log      *slog.Logger
	listener *net.UnixListener
	path     *ownPath // of the socket, if it is ours
	tiers    []candidate
	why      []string // what is not among tiers, and why
	started  uint64   // CLOCK_MONOTONIC, nanoseconds
	clients  registry
	sessions sync.WaitGroup
	closing  sync.Once
	closeErr error
}

// New loads the kernel side and listens. Errors are those of [tracer.Open] if
// no tier can be used, else about the socket.
func New(c Config) (*Server, error) {
	if err := c.complete(); err != nil {
		return nil, fmt.Errorf("start daemon: %w", err)
	}
	s := &Server{cfg: c, log: slog.New(limitRate(c.Log.Handler())), started: monotonic()}
	s.clients.init(&s.cfg)
	s.fitDescriptors()
	var err error
	if s.listener = c.Listener; s.listener == nil {
		// Before the kernel side, which takes a while: two daemons must not
		// both believe that they are the one.
		if s.listener, s.path, err = listen(c.Socket, c.Mode, c.GID); err != nil {
			return nil, fmt.Errorf("start daemon: %w", err)
		}
	}
	if err = passCredentials(s.listener); err == nil {
		s.tiers, s.why, err = loadTiers(&s.cfg)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start daemon: %w", err), s.Close())
	}
	for _, t := range s.tiers {
		s.log.Info("tier is loaded", "tier", t.tier.String(), "kvm", t.machine)
	}
	for _, w := range s.why {
		s.log.Info("tier is not used", "reason", w)
	}
	return s, nil
}

// descriptorsPerClient: connection, pidfd, four maps, virtual machine, what is
// open for a moment, and the processes that had a watch.
const descriptorsPerClient = 10 + knownPerClient

// fitDescriptors lowers the number of clients to what the process can have
// open, if need be.
func (s *Server) fitDescriptors() {
	var l unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_NOFILE, &l) != nil {
		return
	}
	if n := (int(min(l.Cur, 1<<20)) - 200) / descriptorsPerClient; n < s.cfg.MaxClients {
		s.cfg.MaxClients = max(n, 1)
		s.log.Warn("limit of open files allows fewer clients", "clients", s.cfg.MaxClients, "limit", l.Cur,
			"try", "LimitNOFILE= of the service, ulimit -n")
	}
}

// Serve accepts clients until ctx ends, then closes the server.
func (s *Server) Serve(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { s.listener.SetDeadline(past) })
	defer stop()
	for {
		c, err := s.listener.AcceptUnix()
		switch {
		case err == nil:
			s.accepted(c)
		case ctx.Err() != nil:
			return s.Close()
		case errors.Is(err, net.ErrClosed):
			return s.Close()
		case errors.Is(err, unix.EMFILE), errors.Is(err, unix.ENFILE), errors.Is(err, unix.ENOMEM), errors.Is(err, unix.ENOBUFS):
			// Clients that leave make room.
			s.log.Warn("cannot accept a client", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond):
			}
		case errors.Is(err, unix.ECONNABORTED), errors.Is(err, unix.EPERM):
		default:
			return errors.Join(fmt.Errorf("accept: %w", err), s.Close())
		}
	}
}

// accepted begins a session, unless the server is being closed: who waits for
// the sessions must know of all.
func (s *Server) accepted(c *net.UnixConn) {
	s.clients.mu.Lock()
	stopping := s.clients.stopping
	if !stopping {
		s.sessions.Add(1)
	}
	s.clients.mu.Unlock()
	if stopping {
		c.Close()
		return
	}
	go func() {
		free := s.serve(c)
		s.sessions.Done()
		free()
	}()
}

// errBusy: a session is where a client keeps it, in the kernel: receiving a
// file that is not closed as long as the client likes.
var errBusy = errors.New("a session does not end: the kernel side stays loaded until the process ends")

// ended waits for all sessions; false: some do not end. Each step of a session
// takes Patience, or 2 s to open a watch.
func (s *Server) ended() bool {
	done := make(chan struct{})
	go func() {
		s.sessions.Wait()
		close(done)
	}()
	select {
	case <-done:
		return true
	case <-time.After(3*s.cfg.Patience + 2*time.Second):
		return false
	}
}

// Close ends every watch, waits for all sessions, then takes the hooks away. It
// is idempotent. If a session does not end in time (8 s with the default
// Patience) the hooks stay, without a watch, and that is an error.
func (s *Server) Close() error {
	s.closing.Do(func() {
		var errs []error
		if err := s.listener.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
			errs = append(errs, err)
		}
		// Nobody who asks from now on gets a watch, and whoever has one has
		// it in the registry.
		s.clients.stop()
		errs = append(errs, eachTracer(s.tiers, (*tracer.Tracer).Kill))
		s.clients.disconnect()
		// Sessions use what the tracers have, by its descriptors.
		if s.ended() {
			errs = append(errs, eachTracer(s.tiers, (*tracer.Tracer).Close))
		} else {
			errs = append(errs, errBusy)
		}
		s.clients.forgetAll()
		if s.path != nil {
			errs = append(errs, s.path.Close())
		}
		s.closeErr = errors.Join(errs...)
	})
	return s.closeErr
}

// Addr is the path of the socket.
func (s *Server) Addr() string { return s.listener.Addr().String() }

// layouts are the versions of the shared memory that the kernel side writes.
var layouts = wire.Versions{Min: layout.Version, Max: layout.Version}

func monotonic() uint64 {
	var ts unix.Timespec
	if unix.ClockGettime(unix.CLOCK_MONOTONIC, &ts) != nil {
		return 0
	}
	return uint64(ts.Nano())
}
