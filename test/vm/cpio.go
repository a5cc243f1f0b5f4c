// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"strings"
)

// archive writes an initial file system in the "newc" cpio format
// (Documentation/driver-api/early-userspace/buffer-format.rst). It is written
// here because the format is one line of Printf, and every library brings
// more than that. Directories are made as needed; a path that is added twice
// keeps its first contents. Errors are sticky and returned by Close.
type archive struct {
	w    *bufio.Writer
	size int64 // written so far
	ino  int
	have map[string]bool
	err  error
}

func newArchive(w io.Writer) *archive {
	return &archive{w: bufio.NewWriterSize(w, 1<<20), have: map[string]bool{"": true}}
}

const (
	modeDir  = 0o040000
	modeFile = 0o100000
	modeLink = 0o120000
)

func (a *archive) fail(err error) {
	if a.err == nil {
		a.err = err
	}
}

func (a *archive) write(b []byte) {
	n, err := a.w.Write(b)
	a.size += int64(n)
	if err != nil {
		a.fail(fmt.Errorf("write archive: %w", err))
	}
}

// pad fills up to a multiple of 4 bytes.
func (a *archive) pad() {
	a.write(make([]byte, -a.size&3))
}

func (a *archive) header(name string, mode uint32, size int64) {
	a.ino++
	nlink := 1
	if mode&modeDir != 0 && mode&modeFile == 0 {
		nlink = 2
	}
	// magic, ino, mode, uid, gid, nlink, mtime, filesize, device and
	// rdevice (major, minor), namesize, check
	a.write(fmt.Appendf(nil, "070701%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%08X%s\x00",
		a.ino, mode, 0, 0, nlink, 0, size, 0, 0, 0, 0, len(name)+1, 0, name))
	a.pad()
}

// claim says whether a path is new, and makes its directories.
func (a *archive) claim(name string) (string, bool) {
	name = strings.TrimPrefix(path.Clean("/"+name), "/")
	if a.have[name] {
		return name, false
	}
	a.dir(path.Dir("/" + name))
	a.have[name] = true
	return name, true
}

func (a *archive) dir(name string) {
	if name, ok := a.claim(name); ok {
		a.header(name, modeDir|0o755, 0)
	}
}

func (a *archive) link(name, target string) {
	if name, ok := a.claim(name); ok {
		a.header(name, modeLink|0o777, int64(len(target)))
		a.write([]byte(target))
		a.pad()
	}
}

func (a *archive) bytes(name string, perm fs.FileMode, contents []byte) {
	if name, ok := a.claim(name); ok {
		a.header(name, modeFile|uint32(perm.Perm()), int64(len(contents)))
		a.write(contents)
		a.pad()
	}
}

// file adds a file of the host, links followed.
func (a *archive) file(name, host string) {
	info, err := os.Stat(host)
	if err != nil {
		a.fail(err)
		return
	}
	contents, err := os.ReadFile(host)
	if err != nil {
		a.fail(err)
		return
	}
	a.bytes(name, info.Mode(), contents)
}

// tree adds the files below a directory of the host.
func (a *archive) tree(name, host string) {
	err := filepath.WalkDir(host, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(host, p)
		if err != nil {
			return err
		}
		a.file(path.Join(name, filepath.ToSlash(rel)), p)
		return nil
	})
	if err != nil {
		a.fail(err)
	}
}

// Close writes the end of the archive.
func (a *archive) Close() error {
	a.header("TRAILER!!!", 0, 0)
	a.write(make([]byte, -a.size&511))
	if err := a.w.Flush(); err != nil {
		a.fail(fmt.Errorf("write archive: %w", err))
	}
	return a.err
}
