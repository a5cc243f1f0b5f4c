// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
	"github.com/ummu/ummu/regcache"
	"github.com/ummu/ummu/regcache/ibv"
	"github.com/ummu/ummu/regcache/uring"
)

// uringDevice reads a file of known bytes into registered buffers.
type uringDevice struct {
	*uring.Ring // the caller's
	src         int
}

func newUring(ring *uring.Ring, pages int) (device[uring.Buf], error) {
	data := make([]byte, uint64(pages)*mm.PageSize())
	known(data)
	fd, err := unix.MemfdCreate("ummu-demo", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("create source: %w", err)
	}
	if _, err := unix.Pwrite(fd, data, 0); err != nil {
		return nil, errors.Join(fmt.Errorf("write source: %w", err), unix.Close(fd))
	}
	return &uringDevice{ring, fd}, nil
}

func (d *uringDevice) rights() regcache.Access { return regcache.LocalWrite }

func (d *uringDevice) transfer(b uring.Buf, m mm.Range) error {
	n, err := d.ReadFixed(d.src, 0, b, m)
	if err == nil && uint64(n) != m.Len() {
		err = fmt.Errorf("read %d of %d bytes", n, m.Len())
	}
	return err
}

func (d *uringDevice) close() error { return unix.Close(d.src) }

// maxPairs bounds the queue pairs: each makes one transfer at a time.
const maxPairs = 8

// verbsDevice writes known bytes into memory regions, over pairs of queue pairs
// of this process, by the keys that a peer would have.
type verbsDevice struct {
	*ibv.PD
	dev   *ibv.Device
	src   mm.Range
	srcMR *ibv.MR
	all   []*ibv.Queue
	free  chan *ibv.Queue
}

func newVerbs(name string, pages, threads int) (_ device[*ibv.MR], err error) {
	d := &verbsDevice{free: make(chan *ibv.Queue, maxPairs)}
	defer func() {
		if err != nil {
			err = errors.Join(err, d.close())
		}
	}()
	if d.dev, err = ibv.Open(name); err != nil {
		return nil, err
	}
	if d.PD, err = d.dev.NewPD(ibv.Options{}); err != nil {
		return nil, err
	}
	if d.src, err = mapAnywhere(pages); err != nil {
		return nil, err
	}
	known(view(d.src))
	if d.srcMR, err = d.Register(d.src, 0); err != nil {
		return nil, err
	}
	for range min(threads, maxPairs) {
		var pair [2]*ibv.Queue
		for i := range pair {
			if pair[i], err = d.NewQueue(ibv.QueueOptions{}); err != nil {
				return nil, err
			}
			d.all = append(d.all, pair[i])
		}
		for i := range pair {
			if err := pair[i].Connect(pair[1-i].Endpoint()); err != nil {
				return nil, err
			}
		}
		d.free <- pair[0]
	}
	return d, nil
}

func (d *verbsDevice) rights() regcache.Access { return regcache.RemoteWrite }

func (d *verbsDevice) transfer(m *ibv.MR, at mm.Range) error {
	q := <-d.free
	defer func() { d.free <- q }()
	return q.Write(d.srcMR, d.src, m.IOVA()+uint64(at.Start-m.Range().Start), m.RKey())
}

// close closes what newVerbs came to open.
func (d *verbsDevice) close() error {
	var errs []error
	for _, q := range d.all {
		errs = append(errs, q.Close())
	}
	if d.srcMR != nil {
		errs = append(errs, d.Deregister(d.srcMR))
	}
	if !d.src.Empty() {
		errs = append(errs, unmap(d.src))
	}
	if d.PD != nil {
		errs = append(errs, d.PD.Close())
	}
	if d.dev != nil {
		errs = append(errs, d.dev.Close())
	}
	return errors.Join(errs...)
}
