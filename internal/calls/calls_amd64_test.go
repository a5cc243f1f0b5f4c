// SPDX-License-Identifier: Apache-2.0

package calls

import "golang.org/x/sys/unix"

var hostNumbers = map[string]uint32{
	"mmap": unix.SYS_MMAP, "mprotect": unix.SYS_MPROTECT, "munmap": unix.SYS_MUNMAP, "brk": unix.SYS_BRK,
	"mremap": unix.SYS_MREMAP, "madvise": unix.SYS_MADVISE, "shmat": unix.SYS_SHMAT, "shmdt": unix.SYS_SHMDT,
	"clone": unix.SYS_CLONE, "fork": unix.SYS_FORK, "vfork": unix.SYS_VFORK, "execve": unix.SYS_EXECVE,
	"exit": unix.SYS_EXIT, "truncate": unix.SYS_TRUNCATE, "ftruncate": unix.SYS_FTRUNCATE,
	"remap_file_pages": unix.SYS_REMAP_FILE_PAGES, "exit_group": unix.SYS_EXIT_GROUP, "mbind": unix.SYS_MBIND,
	"migrate_pages": unix.SYS_MIGRATE_PAGES, "move_pages": unix.SYS_MOVE_PAGES, "fallocate": unix.SYS_FALLOCATE,
	"execveat": unix.SYS_EXECVEAT, "pkey_mprotect": unix.SYS_PKEY_MPROTECT, "ioctl": unix.SYS_IOCTL,
	"io_destroy": unix.SYS_IO_DESTROY, "io_uring_enter": unix.SYS_IO_URING_ENTER, "clone3": unix.SYS_CLONE3,
	"process_madvise": unix.SYS_PROCESS_MADVISE, "process_mrelease": unix.SYS_PROCESS_MRELEASE,
	"close": unix.SYS_CLOSE, "close_range": unix.SYS_CLOSE_RANGE, "dup2": unix.SYS_DUP2, "dup3": unix.SYS_DUP3,
	"io_uring_register": unix.SYS_IO_URING_REGISTER,
}
