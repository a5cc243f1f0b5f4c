// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"strings"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/ummu/ummu/mm"
)

// maps answers what kind of memory a range is, from a maps file of procfs. It
// keeps the file open: it belongs to the address space that was there then,
// and holds no reference that keeps its memory alive.
type maps struct {
	files bool // the tier sees what happens to files
	path  string

	mu    sync.Mutex // guards what is below, and is held over reads of the file
	file  *os.File
	text  bool // PROCMAP_QUERY does not work here
	done  bool
	query procmapQuery
	name  [256]byte
}

// procmapQuery is struct procmap_query of linux/fs.h (Linux 6.11).
type procmapQuery struct {
	size      uint64
	flags     uint64
	addr      uint64
	vmaStart  uint64
	vmaEnd    uint64
	vmaFlags  uint64
	pageSize  uint64
	offset    uint64
	inode     uint64
	devMajor  uint32
	devMinor  uint32
	nameSize  uint32
	buildSize uint32
	nameAddr  uint64
	buildAddr uint64
}

const (
	procmapQueryIoctl = 3<<30 | unsafe.Sizeof(procmapQuery{})<<16 | 'f'<<8 | 17 // _IOWR('f', 17, struct procmap_query)
	procmapShared     = 0x08                                                    // PROCMAP_QUERY_VMA_SHARED
)

func (m *maps) close() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.done = true
	if m.file != nil {
		m.file.Close()
	}
}

// classify returns the first reason, in the order of addresses, why a range
// is not private anonymous memory, or Cacheable.
func (m *maps) classify(r mm.Range) Verdict {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.done {
		return Unclassified
	}
	if m.file == nil {
		f, err := os.Open(m.path)
		if err != nil {
			return Unclassified
		}
		m.file = f
	}
	if !m.text {
		if v, ok := m.ask(r); ok {
			return v
		}
		m.text = true
	}
	if _, err := m.file.Seek(0, io.SeekStart); err != nil {
		return Unclassified
	}
	return m.classifyText(m.file, r)
}

// ask uses the ioctl; false: it does not work here.
func (m *maps) ask(r mm.Range) (v Verdict, ok bool) {
	conn, err := m.file.SyscallConn()
	if err != nil {
		return Unclassified, false
	}
	err = conn.Control(func(fd uintptr) { v, ok = m.askFile(fd, r) })
	return v, ok && err == nil
}

func (m *maps) askFile(fd uintptr, r mm.Range) (Verdict, bool) {
	q := &m.query
	for a := uint64(r.Start); a < uint64(r.End); a = q.vmaEnd {
		*q = procmapQuery{size: uint64(unsafe.Sizeof(*q)), addr: a, nameSize: uint32(len(m.name)), nameAddr: uint64(uintptr(unsafe.Pointer(&m.name)))}
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, fd, procmapQueryIoctl, uintptr(unsafe.Pointer(q)))
		name := ""
		switch errno {
		case 0:
			if n := int(q.nameSize); 0 < n && n <= len(m.name) {
				name = string(m.name[:n-1])
			}
		case unix.ENOENT:
			return NoMapping, true
		case unix.ENAMETOOLONG: // a file's path
			if !m.files {
				return FileBacked, true
			}
			return Unclassified, true // and where the mapping ends is not known
		case unix.ESRCH: // the address space is gone
			return Unclassified, true
		default:
			return Unclassified, false
		}
		if q.vmaEnd <= a {
			return Unclassified, true
		}
		if v := m.verdict(classifyVMA(q.vmaFlags&procmapShared != 0, q.inode != 0, name)); v != Cacheable {
			return v, true
		}
	}
	return Cacheable, true
}

// classifyVMA decides for one mapping. Shared memory, memfds, SysV segments
// and huge pages have an inode, even if anonymous to the program. Mappings
// without one are private anonymous if their name is one of those that such
// memory has; the others are the kernel's own ([vdso], [vvar], [uprobes]).
// Devices are told by their path, or by the anonymous inode of a driver;
// /dev/zero and /dev/shm are memory.
func classifyVMA(shared, inode bool, name string) Verdict {
	switch {
	case strings.HasPrefix(name, "anon_inode:"),
		strings.HasPrefix(name, "/dev/") && !strings.HasPrefix(name, "/dev/shm/") &&
			!strings.HasPrefix(name, "/dev/zero") && !strings.HasPrefix(name, "/dev/hugepages/"):
		return DriverMapping
	case shared, inode:
		return FileBacked
	case name == "", name == "[heap]", name == "[stack]", strings.HasPrefix(name, "[anon:"):
		return Cacheable
	}
	return DriverMapping
}

// errMapsLine is a line of a maps file that cannot be read.
var errMapsLine = errors.New("malformed line of maps file")

// verdict is v on this tier.
func (m *maps) verdict(v Verdict) Verdict {
	if v == FileBacked && m.files {
		return Cacheable
	}
	return v
}

// classifyText reads the text of a maps file (proc_pid_maps(5)).
func (m *maps) classifyText(f io.Reader, r mm.Range) Verdict {
	next := uint64(r.Start) // everything below is classified
	in := bufio.NewReaderSize(f, 64<<10)
	for {
		line, err := in.ReadSlice('\n')
		if err == io.EOF {
			return NoMapping
		}
		if err != nil {
			return Unclassified
		}
		start, end, shared, inode, name, err := parseMapsLine(line)
		switch {
		case err != nil:
			return Unclassified
		case end <= next:
			continue
		case start > next:
			return NoMapping
		}
		if v := m.verdict(classifyVMA(shared, inode, name)); v != Cacheable {
			return v
		}
		if next = end; next >= uint64(r.End) {
			return Cacheable
		}
	}
}

// parseMapsLine takes apart "start-end perms offset dev inode   path\n".
func parseMapsLine(line []byte) (start, end uint64, shared, inode bool, name string, err error) {
	line = bytes.TrimSuffix(line, []byte("\n"))
	var f [5][]byte
	for i := range f {
		var ok bool
		f[i], line, ok = bytes.Cut(line, []byte(" "))
		if !ok && i < len(f)-1 {
			return 0, 0, false, false, "", errMapsLine
		}
	}
	from, to, ok := bytes.Cut(f[0], []byte("-"))
	start, ok1 := parseHex(from)
	end, ok2 := parseHex(to)
	if !ok || !ok1 || !ok2 || start >= end || len(f[1]) != 4 || len(f[4]) == 0 {
		return 0, 0, false, false, "", errMapsLine
	}
	return start, end, f[1][3] == 's', string(f[4]) != "0", string(bytes.TrimLeft(line, " ")), nil
}

func parseHex(b []byte) (n uint64, ok bool) {
	if len(b) == 0 || len(b) > 16 {
		return 0, false
	}
	for _, c := range b {
		switch {
		case '0' <= c && c <= '9':
			n = n<<4 | uint64(c-'0')
		case 'a' <= c && c <= 'f':
			n = n<<4 | uint64(c-'a'+10)
		default:
			return 0, false
		}
	}
	return n, true
}
