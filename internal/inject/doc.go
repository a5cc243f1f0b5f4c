// SPDX-License-Identifier: Apache-2.0

// Package inject gives other processes an MMU notifier, without which the
// notifier tiers see nothing of them.
//
// A notifier comes with an empty KVM virtual machine, and the kernel makes one
// only for the address space of the caller of KVM_CREATE_VM. So the target
// itself must make that system call: it is stopped by ptrace, its registers
// are pointed at a syscall instruction that is in its memory anyway (of the
// vDSO), and afterwards everything is put back: registers, signal mask, an
// interrupted call (which restarts), descriptors, memory. What a target can
// notice is the time that this takes, and one page in VmPeak.
//
// What the calls are, and why:
//   - mmap of one page for arguments: no memory of the target is written;
//   - socketpair and recvmsg: the descriptor of /dev/kvm is ours, sent as
//     SCM_RIGHTS. The target needs neither the right to open it nor the
//     device in its mount namespace or device cgroup;
//   - munmap of the page, before there is a notifier that would hear of it;
//   - ioctl KVM_CREATE_VM, repeated on EINTR;
//   - close of each descriptor. The machine lives on by the duplicate that
//     pidfd_getfd gave us: [Machine]. While it happens all threads of the
//     target stand still, so there is never a descriptor that close_range or
//     fork of the target could find.
//
// Refused, before the target is touched (each with an error that says so, and
// each a gap of whoever follows a tree): a target under seccomp, strict or
// filter, because a forbidden call might kill it ([ErrSeccomp]); one that is
// ptraced by somebody else; a 32-bit one; architectures other than amd64
// ([ErrNotSupported]). no_new_privs does not matter: no privilege is gained.
//
// A machine costs 0.2 to 0.6 ms, 6 to 16 ms in a target with 60,000 mappings
// (the kernel locks each of them once). Letting it go costs 0.1 ms to 1 s,
// spent by whoever closes the Machine.
//
// It needs Linux 5.6 (pidfd_getfd), access to /dev/kvm, and the rights of a
// debugger over the target (CAP_SYS_PTRACE, or the same user where Yama
// permits).
package inject
