// SPDX-License-Identifier: Apache-2.0

package calls

import "golang.org/x/sys/unix"

// x32Bit is set in the numbers of the x32 ABI (__X32_SYSCALL_BIT).
const x32Bit = 0x40000000

// The numbers are literal because a table is needed on machines of other
// architectures too; a test compares those of the running machine with x/sys.

// Sources: arch/x86/entry/syscalls/syscall_64.tbl and syscall_32.tbl.
var amd64 = &Table{
	prot: protField,
	mmap: mmapField,
	native: map[uint32]entry{
		3:   {"close", noArgs, false},
		9:   {"mmap", protMap, true},
		10:  {"mprotect", protOnly, false},
		11:  {"munmap", noArgs, false},
		12:  {"brk", noArgs, true},
		16:  {"ioctl", noArgs, false},
		25:  {"mremap", mremap, true},
		28:  {"madvise", advice, false},
		30:  {"shmat", shmat, true},
		33:  {"dup2", noArgs, false},
		56:  {"clone", noArgs, false},
		57:  {"fork", noArgs, false},
		58:  {"vfork", noArgs, false},
		59:  {"execve", noArgs, false},
		60:  {"exit", noArgs, false},
		67:  {"shmdt", noArgs, false},
		76:  {"truncate", noArgs, false},
		77:  {"ftruncate", noArgs, false},
		207: {"io_destroy", noArgs, false},
		216: {"remap_file_pages", protMap, false},
		231: {"exit_group", noArgs, false},
		237: {"mbind", noArgs, false},
		256: {"migrate_pages", noArgs, false},
		279: {"move_pages", noArgs, false},
		285: {"fallocate", noArgs, false},
		292: {"dup3", noArgs, false},
		322: {"execveat", noArgs, false},
		329: {"pkey_mprotect", protPkey, false},
		426: {"io_uring_enter", noArgs, false},
		427: {"io_uring_register", uringRegister, false},
		435: {"clone3", noArgs, false},
		436: {"close_range", noArgs, false},
		440: {"process_madvise", advice, false},
		448: {"process_mrelease", noArgs, false},
	},
	compat: map[uint32]entry{
		1:   {"exit", noArgs, false},
		2:   {"fork", noArgs, false},
		6:   {"close", noArgs, false},
		11:  {"execve", noArgs, false},
		45:  {"brk", noArgs, true},
		54:  {"ioctl", noArgs, false},
		63:  {"dup2", noArgs, false},
		90:  {"mmap", protMap, true},
		91:  {"munmap", noArgs, false},
		92:  {"truncate", noArgs, false},
		93:  {"ftruncate", noArgs, false},
		117: {"ipc", shmat, false}, // only SHMAT and SHMDT change anything
		120: {"clone", noArgs, false},
		125: {"mprotect", protOnly, false},
		163: {"mremap", mremap, true},
		190: {"vfork", noArgs, false},
		192: {"mmap2", protMap, true},
		193: {"truncate64", noArgs, false},
		194: {"ftruncate64", noArgs, false},
		219: {"madvise", advice, false},
		246: {"io_destroy", noArgs, false},
		252: {"exit_group", noArgs, false},
		257: {"remap_file_pages", protMap, false},
		274: {"mbind", noArgs, false},
		294: {"migrate_pages", noArgs, false},
		317: {"move_pages", noArgs, false},
		324: {"fallocate", noArgs, false},
		330: {"dup3", noArgs, false},
		358: {"execveat", noArgs, false},
		380: {"pkey_mprotect", protPkey, false},
		397: {"shmat", shmat, true},
		398: {"shmdt", noArgs, false},
		426: {"io_uring_enter", noArgs, false},
		427: {"io_uring_register", uringRegister, false},
		435: {"clone3", noArgs, false},
		436: {"close_range", noArgs, false},
		440: {"process_madvise", advice, false},
		448: {"process_mrelease", noArgs, false},
	},
}

// Sources: include/uapi/asm-generic/unistd.h and arch/arm/tools/syscall.tbl.
var arm64 = &Table{
	prot: arm64ProtField,
	mmap: mmapField,
	native: map[uint32]entry{
		1:   {"io_destroy", noArgs, false},
		24:  {"dup3", noArgs, false},
		29:  {"ioctl", noArgs, false},
		45:  {"truncate", noArgs, false},
		46:  {"ftruncate", noArgs, false},
		47:  {"fallocate", noArgs, false},
		57:  {"close", noArgs, false},
		93:  {"exit", noArgs, false},
		94:  {"exit_group", noArgs, false},
		196: {"shmat", shmat, true},
		197: {"shmdt", noArgs, false},
		214: {"brk", noArgs, true},
		215: {"munmap", noArgs, false},
		216: {"mremap", mremap, true},
		220: {"clone", noArgs, false},
		221: {"execve", noArgs, false},
		222: {"mmap", protMap, true},
		226: {"mprotect", protOnly, false},
		233: {"madvise", advice, false},
		234: {"remap_file_pages", protMap, false},
		235: {"mbind", noArgs, false},
		238: {"migrate_pages", noArgs, false},
		239: {"move_pages", noArgs, false},
		281: {"execveat", noArgs, false},
		288: {"pkey_mprotect", protPkey, false},
		426: {"io_uring_enter", noArgs, false},
		427: {"io_uring_register", uringRegister, false},
		435: {"clone3", noArgs, false},
		436: {"close_range", noArgs, false},
		440: {"process_madvise", advice, false},
		448: {"process_mrelease", noArgs, false},
	},
	compat: map[uint32]entry{
		1:   {"exit", noArgs, false},
		2:   {"fork", noArgs, false},
		6:   {"close", noArgs, false},
		11:  {"execve", noArgs, false},
		45:  {"brk", noArgs, true},
		54:  {"ioctl", noArgs, false},
		63:  {"dup2", noArgs, false},
		91:  {"munmap", noArgs, false},
		92:  {"truncate", noArgs, false},
		93:  {"ftruncate", noArgs, false},
		120: {"clone", noArgs, false},
		125: {"mprotect", protOnly, false},
		163: {"mremap", mremap, true},
		190: {"vfork", noArgs, false},
		192: {"mmap2", protMap, true},
		193: {"truncate64", noArgs, false},
		194: {"ftruncate64", noArgs, false},
		220: {"madvise", advice, false},
		244: {"io_destroy", noArgs, false},
		248: {"exit_group", noArgs, false},
		253: {"remap_file_pages", protMap, false},
		305: {"shmat", shmat, true},
		306: {"shmdt", noArgs, false},
		319: {"mbind", noArgs, false},
		344: {"move_pages", noArgs, false},
		352: {"fallocate", noArgs, false},
		358: {"dup3", noArgs, false},
		387: {"execveat", noArgs, false},
		394: {"pkey_mprotect", protPkey, false},
		400: {"migrate_pages", noArgs, false},
		426: {"io_uring_enter", noArgs, false},
		427: {"io_uring_register", uringRegister, false},
		435: {"clone3", noArgs, false},
		436: {"close_range", noArgs, false},
		440: {"process_madvise", advice, false},
		448: {"process_mrelease", noArgs, false},
	},
}

func bit(v uint64, text string) name { return name{v, v, text} }

// Memory protection, asm-generic/mman-common.h.
var protField = field{zero: "PROT_NONE", names: protNames}

var protNames = []name{
	bit(unix.PROT_READ, "PROT_READ"),
	bit(unix.PROT_WRITE, "PROT_WRITE"),
	bit(unix.PROT_EXEC, "PROT_EXEC"),
	bit(0x8, "PROT_SEM"),
	bit(unix.PROT_GROWSDOWN, "PROT_GROWSDOWN"),
	bit(unix.PROT_GROWSUP, "PROT_GROWSUP"),
}

// arch/arm64/include/uapi/asm/mman.h adds two.
var arm64ProtField = field{zero: "PROT_NONE", names: append(protNames[:len(protNames):len(protNames)],
	bit(0x10, "PROT_BTI"),
	bit(0x20, "PROT_MTE"),
)}

// mapType is MAP_TYPE: the low four bits are a number.
const mapType = 0xf

// Both architectures use the generic numbers; MAP_32BIT and MAP_ABOVE4G are
// x86's and mean nothing on arm64.
var mmapField = field{huge: true, names: []name{
	{mapType, unix.MAP_SHARED, "MAP_SHARED"},
	{mapType, unix.MAP_PRIVATE, "MAP_PRIVATE"},
	{mapType, unix.MAP_SHARED_VALIDATE, "MAP_SHARED_VALIDATE"},
	{mapType, 0x8, "MAP_DROPPABLE"},
	bit(unix.MAP_FIXED, "MAP_FIXED"),
	bit(unix.MAP_ANONYMOUS, "MAP_ANONYMOUS"),
	bit(0x40, "MAP_32BIT"),
	bit(0x80, "MAP_ABOVE4G"),
	bit(unix.MAP_GROWSDOWN, "MAP_GROWSDOWN"),
	bit(unix.MAP_DENYWRITE, "MAP_DENYWRITE"),
	bit(unix.MAP_EXECUTABLE, "MAP_EXECUTABLE"),
	bit(unix.MAP_LOCKED, "MAP_LOCKED"),
	bit(unix.MAP_NORESERVE, "MAP_NORESERVE"),
	bit(unix.MAP_POPULATE, "MAP_POPULATE"),
	bit(unix.MAP_NONBLOCK, "MAP_NONBLOCK"),
	bit(unix.MAP_STACK, "MAP_STACK"),
	bit(unix.MAP_HUGETLB, "MAP_HUGETLB"),
	bit(unix.MAP_SYNC, "MAP_SYNC"),
	bit(unix.MAP_FIXED_NOREPLACE, "MAP_FIXED_NOREPLACE"),
}}

var mremapField = field{names: []name{
	bit(unix.MREMAP_MAYMOVE, "MREMAP_MAYMOVE"),
	bit(unix.MREMAP_FIXED, "MREMAP_FIXED"),
	bit(unix.MREMAP_DONTUNMAP, "MREMAP_DONTUNMAP"),
}}

var shmatField = field{names: []name{
	bit(unix.SHM_RDONLY, "SHM_RDONLY"),
	bit(unix.SHM_RND, "SHM_RND"),
	bit(0o40000, "SHM_REMAP"),
	bit(0o100000, "SHM_EXEC"),
}}

// Opcodes of io_uring_register (include/uapi/linux/io_uring.h) that are about
// buffers.
var uringRegisterField = field{enum: true, zero: "IORING_REGISTER_BUFFERS", names: []name{
	bit(1, "IORING_UNREGISTER_BUFFERS"),
	bit(15, "IORING_REGISTER_BUFFERS2"),
	bit(16, "IORING_REGISTER_BUFFERS_UPDATE"),
	bit(30, "IORING_REGISTER_CLONE_BUFFERS"),
}}

var adviceField = field{enum: true, zero: "MADV_NORMAL", names: []name{
	bit(unix.MADV_RANDOM, "MADV_RANDOM"),
	bit(unix.MADV_SEQUENTIAL, "MADV_SEQUENTIAL"),
	bit(unix.MADV_WILLNEED, "MADV_WILLNEED"),
	bit(unix.MADV_DONTNEED, "MADV_DONTNEED"),
	bit(unix.MADV_FREE, "MADV_FREE"),
	bit(unix.MADV_REMOVE, "MADV_REMOVE"),
	bit(unix.MADV_DONTFORK, "MADV_DONTFORK"),
	bit(unix.MADV_DOFORK, "MADV_DOFORK"),
	bit(unix.MADV_MERGEABLE, "MADV_MERGEABLE"),
	bit(unix.MADV_UNMERGEABLE, "MADV_UNMERGEABLE"),
	bit(unix.MADV_HUGEPAGE, "MADV_HUGEPAGE"),
	bit(unix.MADV_NOHUGEPAGE, "MADV_NOHUGEPAGE"),
	bit(unix.MADV_DONTDUMP, "MADV_DONTDUMP"),
	bit(unix.MADV_DODUMP, "MADV_DODUMP"),
	bit(unix.MADV_WIPEONFORK, "MADV_WIPEONFORK"),
	bit(unix.MADV_KEEPONFORK, "MADV_KEEPONFORK"),
	bit(unix.MADV_COLD, "MADV_COLD"),
	bit(unix.MADV_PAGEOUT, "MADV_PAGEOUT"),
	bit(unix.MADV_POPULATE_READ, "MADV_POPULATE_READ"),
	bit(unix.MADV_POPULATE_WRITE, "MADV_POPULATE_WRITE"),
	bit(24, "MADV_DONTNEED_LOCKED"),
	bit(25, "MADV_COLLAPSE"),
	bit(unix.MADV_HWPOISON, "MADV_HWPOISON"),
	bit(101, "MADV_SOFT_OFFLINE"),
	bit(102, "MADV_GUARD_INSTALL"),
	bit(103, "MADV_GUARD_REMOVE"),
}}

// uringMadvise is IORING_OP_MADVISE.
const uringMadvise = 25

// uringOps are the opcodes of include/uapi/linux/io_uring.h, in order.
var uringOps = [...]string{
	"IORING_OP_NOP", "IORING_OP_READV", "IORING_OP_WRITEV", "IORING_OP_FSYNC",
	"IORING_OP_READ_FIXED", "IORING_OP_WRITE_FIXED", "IORING_OP_POLL_ADD", "IORING_OP_POLL_REMOVE",
	"IORING_OP_SYNC_FILE_RANGE", "IORING_OP_SENDMSG", "IORING_OP_RECVMSG", "IORING_OP_TIMEOUT",
	"IORING_OP_TIMEOUT_REMOVE", "IORING_OP_ACCEPT", "IORING_OP_ASYNC_CANCEL", "IORING_OP_LINK_TIMEOUT",
	"IORING_OP_CONNECT", "IORING_OP_FALLOCATE", "IORING_OP_OPENAT", "IORING_OP_CLOSE",
	"IORING_OP_FILES_UPDATE", "IORING_OP_STATX", "IORING_OP_READ", "IORING_OP_WRITE",
	"IORING_OP_FADVISE", "IORING_OP_MADVISE", "IORING_OP_SEND", "IORING_OP_RECV",
	"IORING_OP_OPENAT2", "IORING_OP_EPOLL_CTL", "IORING_OP_SPLICE", "IORING_OP_PROVIDE_BUFFERS",
	"IORING_OP_REMOVE_BUFFERS", "IORING_OP_TEE", "IORING_OP_SHUTDOWN", "IORING_OP_RENAMEAT",
	"IORING_OP_UNLINKAT", "IORING_OP_MKDIRAT", "IORING_OP_SYMLINKAT", "IORING_OP_LINKAT",
	"IORING_OP_MSG_RING", "IORING_OP_FSETXATTR", "IORING_OP_SETXATTR", "IORING_OP_FGETXATTR",
	"IORING_OP_GETXATTR", "IORING_OP_SOCKET", "IORING_OP_URING_CMD", "IORING_OP_SEND_ZC",
	"IORING_OP_SENDMSG_ZC", "IORING_OP_READ_MULTISHOT", "IORING_OP_WAITID", "IORING_OP_FUTEX_WAIT",
	"IORING_OP_FUTEX_WAKE", "IORING_OP_FUTEX_WAITV", "IORING_OP_FIXED_FD_INSTALL", "IORING_OP_FTRUNCATE",
	"IORING_OP_BIND", "IORING_OP_LISTEN", "IORING_OP_RECV_ZC", "IORING_OP_EPOLL_WAIT",
	"IORING_OP_READV_FIXED", "IORING_OP_WRITEV_FIXED", "IORING_OP_PIPE",
}
