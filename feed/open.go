// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/internal/wire"
)

// ErrUnavailable: there is no watch to be had, and the program goes on
// uncached ([Dead]) or gives up.
var ErrUnavailable = errors.New("feed is unavailable")

// UnavailableError says why, and what an administrator can do. It is
// [ErrUnavailable].
type UnavailableError struct {
	Reason string
	Try    string // an action, as an imperative sentence without a full stop
	Err    error  // the cause, nil if the daemon said no
}

// Error is one line.
func (e *UnavailableError) Error() string {
	return fmt.Sprintf("%v: %s; try: %s", ErrUnavailable, e.Reason, e.Try)
}

// Is reports that e is [ErrUnavailable].
func (e *UnavailableError) Is(target error) bool { return target == ErrUnavailable }

// Unwrap returns the cause.
func (e *UnavailableError) Unwrap() error { return e.Err }

// noDaemon is the error of a connection that was not made.
func noDaemon(path string, err error) error {
	e := &UnavailableError{Reason: fmt.Sprintf("nobody answers at %s (%v)", path, err), Err: err}
	switch {
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ECONNREFUSED):
		e.Try = "start the daemon: systemctl enable --now ummufeed.socket, or ummufeed serve; or set UMMU_SOCKET"
	case errors.Is(err, fs.ErrPermission):
		e.Try = "give this user access to the socket: its group, ummufeed serve --group or --mode"
	case errors.Is(err, unix.EPROTOTYPE), errors.Is(err, unix.ENOTSOCK):
		e.Try = "set UMMU_SOCKET to the socket of ummufeed serve; this is another program's"
	default:
		e.Try = "look whether the daemon is stopped or overloaded: systemctl status ummufeed"
	}
	return e
}

// refused is the error for a daemon that says no.
func refused(path string, r *wire.Refused) error {
	e := &UnavailableError{Reason: fmt.Sprintf("the daemon at %s refuses: %s", path, wire.Printable(r.Text))}
	switch r.Code {
	case wire.CodeVersion:
		e.Try = "update the older of the program and the daemon"
	case wire.CodeIdentity:
		e.Try = "connect from the process that is to be watched, in a pid namespace that the daemon sees"
	case wire.CodeLimit:
		e.Try = "raise the limit that it names in the options of ummufeed serve"
	case wire.CodeUnavailable:
		e.Try = "ummufeed serve --allow-kvm, or --allow-syscall-tier; see ummufeed check --self-test"
	case wire.CodeStopping:
		e.Try = "start the daemon again"
	default:
		e.Try = "look at its log: journalctl -u ummufeed"
	}
	return e
}

// Environment variables that [Open] obeys.
const (
	// EnvMode is off, try or require; unset or empty: try.
	EnvMode = "UMMU"
	// EnvSocket is the daemon's socket.
	EnvSocket = "UMMU_SOCKET"
)

// Open is what a library calls: the user decides by the environment variable
// UMMU whether there is a feed.
//
//	off      no feed: Dead
//	try      the daemon's (see [Dial]), or Dead if it is unavailable; the default
//	require  the daemon's, or an error
//
// UMMU_SOCKET says where the daemon listens, unless Options.Socket does. Any
// other value of UMMU is an error, and so is a context that ends. A program
// that runs with more rights than its caller has (set-user-ID, capabilities of
// the file) has no such variables for Open.
func Open(ctx context.Context, o Options) (*Watch, error) {
	mode := getenv(EnvMode)
	switch mode {
	case "off":
		return Dead(), nil
	case "", "try", "require":
	default:
		return nil, fmt.Errorf("open feed: environment variable %s is %q, not off, try or require", EnvMode, wire.Printable(mode))
	}
	if o.Socket == "" {
		o.Socket = getenv(EnvSocket)
	}
	w, err := Dial(ctx, o)
	if errors.Is(err, ErrUnavailable) && mode != "require" {
		if o.Unavailable != nil {
			o.Unavailable(err)
		}
		return Dead(), nil
	}
	return w, err
}

// getenv is secure_getenv(3).
func getenv(name string) string {
	if isSecure() {
		return ""
	}
	return os.Getenv(name)
}

// isSecure reports whether whoever has started this program is not to be
// believed: the kernel said so then (AT_SECURE), or did not say.
func isSecure() bool {
	const atSecure = 23 // linux/auxvec.h
	vector, err := unix.Auxv()
	if err != nil {
		return true
	}
	for _, v := range vector {
		if v[0] == atSecure {
			return v[1] != 0
		}
	}
	return true
}
