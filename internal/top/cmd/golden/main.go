// SPDX-License-Identifier: Apache-2.0

// Golden makes a recording fit to be kept for tests: without the names of the
// machine it was made on.
//
//	go run ./internal/top/cmd/golden FROM TO
package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/ummu/ummu/internal/recording"
	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/tracer"
)

func main() {
	if len(os.Args) != 3 {
		fmt.Fprintln(os.Stderr, "usage: golden FROM TO")
		os.Exit(2)
	}
	if err := rewrite(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "golden:", err)
		os.Exit(1)
	}
}

func rewrite(from, to string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer in.Close()
	rd, err := recording.NewReader(in, tracer.HookName)
	if err != nil {
		return err
	}
	m := *rd.Meta()
	m.Host, m.Kernel, m.Version, m.Command, m.TierReason = "node1", "6.18.0", "v1.0.0", nil, "asked for"
	enc, err := recording.NewEncoder(&m, tracer.HookName)
	if err != nil {
		return err
	}
	enc.Stacks(rd.Frames)
	out, err := os.Create(to)
	if err != nil {
		return err
	}
	w, err := recording.NewWriter(out)
	if err != nil {
		return errors.Join(err, out.Close())
	}
	write := func(line []byte, err error) error {
		if err != nil {
			return err
		}
		_, err = w.Write(line)
		return err
	}
	if err := write(recording.AppendMeta(nil, &m)); err != nil {
		return errors.Join(err, out.Close())
	}
	var r mm.Record
	for {
		if err = rd.Read(&r); err != nil {
			break
		}
		if err := write(enc.AppendRecord(nil, &r), nil); err != nil {
			return errors.Join(err, out.Close())
		}
	}
	if err == io.EOF {
		err = write(recording.AppendSummary(nil, rd.Summary()))
	}
	return errors.Join(err, w.Flush(), out.Close())
}
