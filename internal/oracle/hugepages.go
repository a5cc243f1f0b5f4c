// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// hugePages is what a program needs: its area, its file, and copies for
// children.
const hugePages = 8

// ReserveHugePages makes the system set huge pages aside for the programs
// about hugetlb memory, and returns what gives them back. Who else does this
// takes a lock on the file; if it is taken, wait says whether to wait or to
// return nil. Whether there was memory for them a program finds out by itself
// ([Result.Hugetlb]).
func ReserveHugePages(wait bool) (release func() error, err error) {
	f, err := os.OpenFile("/proc/sys/vm/nr_hugepages", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("reserve huge pages: %w", err)
	}
	how := unix.LOCK_EX
	if !wait {
		how |= unix.LOCK_NB
	}
	switch err := unix.Flock(int(f.Fd()), how); {
	case err == unix.EWOULDBLOCK:
		return nil, f.Close()
	case err != nil:
		return nil, errors.Join(fmt.Errorf("reserve huge pages: %w", err), f.Close())
	}
	var before int
	if _, err := fmt.Fscan(f, &before); err != nil {
		return nil, errors.Join(fmt.Errorf("reserve huge pages: %w", err), f.Close())
	}
	release = func() error {
		_, err := f.WriteAt(fmt.Appendln(nil, before), 0)
		return errors.Join(err, f.Close())
	}
	if _, err := f.WriteAt(fmt.Appendln(nil, before+hugePages), 0); err != nil {
		return nil, errors.Join(fmt.Errorf("reserve huge pages: %w", err), release())
	}
	return release, nil
}
