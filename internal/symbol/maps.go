// SPDX-License-Identifier: Apache-2.0

package symbol

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// mapping is one executable line of /proc/PID/maps.
type mapping struct {
	mm.Range
	offset uint64
	file   fileID
	path   string
}

// fileID tells files apart while one of them is open.
type fileID struct {
	dev   string
	inode uint64
}

// parseMaps reads the executable mappings of /proc/PID/maps, sorted.
func parseMaps(r io.Reader) ([]mapping, error) {
	var ms []mapping
	s := bufio.NewScanner(r)
	s.Buffer(nil, 64<<10)
	for s.Scan() {
		m, exec, err := parseMapping(s.Text())
		if err != nil {
			return nil, err
		}
		if exec {
			ms = append(ms, m)
		}
	}
	return ms, s.Err()
}

// parseMapping parses "start-end perms offset dev inode path".
func parseMapping(line string) (m mapping, exec bool, err error) {
	bad := fmt.Errorf("not a line of /proc/PID/maps: %q", line)
	fields := make([]string, 0, 5)
	rest := line
	for len(fields) < 5 {
		rest = strings.TrimLeft(rest, " ")
		f, r, _ := strings.Cut(rest, " ")
		if f == "" {
			return m, false, bad
		}
		fields, rest = append(fields, f), r
	}
	from, to, ok := strings.Cut(fields[0], "-")
	start, err1 := strconv.ParseUint(from, 16, 64)
	end, err2 := strconv.ParseUint(to, 16, 64)
	offset, err3 := strconv.ParseUint(fields[2], 16, 64)
	inode, err4 := strconv.ParseUint(fields[4], 10, 64)
	if !ok || err1 != nil || err2 != nil || err3 != nil || err4 != nil || len(fields[1]) < 4 {
		return m, false, bad
	}
	m = mapping{
		Range:  mm.Range{Start: mm.Addr(start), End: mm.Addr(end)},
		offset: offset,
		file:   fileID{fields[3], inode},
		path:   strings.TrimLeft(rest, " "),
	}
	return m, fields[1][2] == 'x', nil
}

func readMaps(pid int) ([]mapping, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return parseMaps(f)
}

// hasSpace reports whether a process has an address space: of one that has
// ended /proc/PID/statm says 0 pages (proc_pid_statm, fs/proc/array.c).
func hasSpace(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", pid))
	return err == nil && !bytes.HasPrefix(b, []byte("0 "))
}

// find returns the mapping that holds a.
func find(ms []mapping, a mm.Addr) *mapping {
	i, ok := slices.BinarySearchFunc(ms, a, func(m mapping, a mm.Addr) int {
		switch {
		case m.End <= a:
			return -1
		case m.Start > a:
			return 1
		}
		return 0
	})
	if !ok {
		return nil
	}
	return &ms[i]
}

// openMapped opens the file behind a mapping of a process: the very file, even
// if it was deleted, replaced, or lies in another mount namespace.
func openMapped(pid int, m *mapping) (*os.File, error) {
	f, err := os.Open(fmt.Sprintf("/proc/%d/map_files/%x-%x", pid, uint64(m.Start), uint64(m.End)))
	if err == nil {
		return f, nil
	}
	// Without the capability for map_files, or if the mapping was split since:
	// by name, as the process sees it.
	for _, name := range []string{fmt.Sprintf("/proc/%d/root%s", pid, m.path), m.path} { // it may have ended
		g, err := os.Open(name)
		if err != nil {
			continue
		}
		if id, err := idOf(g); err == nil && id == m.file {
			return g, nil
		}
		g.Close()
	}
	return nil, err
}

// idOf is the identity of an open file as /proc/PID/maps prints it.
func idOf(f *os.File) (fileID, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(f.Fd()), &st); err != nil {
		return fileID{}, err
	}
	return fileID{fmt.Sprintf("%02x:%02x", unix.Major(st.Dev), unix.Minor(st.Dev)), st.Ino}, nil
}
