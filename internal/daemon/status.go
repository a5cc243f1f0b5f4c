// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"time"

	"github.com/ummu/ummu/internal/wire"
)

// Report is what a daemon tells about its watches.
type Report struct {
	Entries []wire.Entry // those that the caller may see
	End     wire.End
}

// Status asks the daemon at a socket, for 5 s at most.
func Status(ctx context.Context, socket string) (*Report, error) {
	r, err := status(ctx, socket)
	if err != nil {
		return nil, fmt.Errorf("ask daemon at %s: %w", socket, err)
	}
	return r, nil
}

const statusTimeout = 5 * time.Second

func status(ctx context.Context, socket string) (*Report, error) {
	ctx, cancel := context.WithTimeout(ctx, statusTimeout)
	defer cancel()
	conn, err := new(net.Dialer).DialContext(ctx, "unixpacket", socket)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(past) })
	defer stop()
	var version uint16
	send := func(m wire.Message) error {
		_, err := conn.Write(wire.Append(nil, version, m))
		return err
	}
	if err := send(&wire.Hello{Versions: wire.Supported, Layouts: layouts, Purpose: wire.PurposeStatus}); err != nil {
		return nil, err
	}
	report := new(Report)
	buf := make([]byte, wire.MaxBytes+1)
	for {
		n, err := conn.Read(buf)
		switch {
		case ctx.Err() != nil:
			return nil, fmt.Errorf("no answer: %w", ctx.Err())
		case errors.Is(err, io.EOF):
			return nil, io.ErrUnexpectedEOF
		case err != nil:
			return nil, err
		}
		v, m, err := wire.Decode(buf[:n])
		if err != nil {
			return nil, err
		}
		version = max(version, v)
		switch m := m.(type) {
		case *wire.Challenge:
			if err := send(&wire.Echo{Nonce: m.Nonce}); err != nil {
				return nil, err
			}
		case *wire.Entry:
			report.Entries = append(report.Entries, *m)
		case *wire.End:
			report.End = *m
			return report, nil
		case *wire.Refused:
			return nil, fmt.Errorf("refused: %s", wire.Printable(m.Text))
		default:
			return nil, fmt.Errorf("%w: %v in a status", wire.ErrMalformed, wire.TypeOf(m))
		}
	}
}
