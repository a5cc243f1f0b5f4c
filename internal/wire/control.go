// SPDX-License-Identifier: Apache-2.0

package wire

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// Attachments are what came beside a message. The descriptors are the
// receiver's to close, which may take as long as the sender likes: a file of
// its own file system, a socket that lingers.
type Attachments struct {
	FDs []int
	// Cred is who sent the message, as the kernel says at the time of
	// sending; nil if it did not say. PID 0: a process that this one's pid
	// namespace does not show.
	Cred *unix.Ucred
}

// ControlBytes is the size of a buffer for the control messages of a message
// that may carry n descriptors: there is no room for more, so the kernel
// closes those.
func ControlBytes(n int) int {
	b := unix.CmsgSpace(unix.SizeofUcred)
	if n > 0 {
		b += unix.CmsgLen(4 * n) // exactly: padding would be room for one more
	}
	return b
}

// Attached takes control messages apart. With an error as well the descriptors
// that came are in the result: if messages are not well-formed, or if the
// kernel had to leave out some (flags of recvmsg).
func Attached(oob []byte, flags int) (a Attachments, err error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return a, fmt.Errorf("%w: control message: %w", ErrMalformed, err)
	}
	for i := range messages {
		m := &messages[i]
		if m.Header.Level != unix.SOL_SOCKET {
			continue
		}
		switch m.Header.Type {
		case unix.SCM_RIGHTS:
			fds, e := unix.ParseUnixRights(m)
			if e != nil {
				err = fmt.Errorf("%w: descriptors: %w", ErrMalformed, e)
			}
			a.FDs = append(a.FDs, fds...)
		case unix.SCM_CREDENTIALS:
			c, e := unix.ParseUnixCredentials(m)
			if e != nil {
				err = fmt.Errorf("%w: credentials: %w", ErrMalformed, e)
			}
			a.Cred = c
		}
	}
	if err == nil && flags&unix.MSG_CTRUNC != 0 {
		err = fmt.Errorf("%w: more descriptors than belong to any message", ErrMalformed)
	}
	if err == nil && flags&unix.MSG_TRUNC != 0 {
		err = fmt.Errorf("%w: more than %d bytes", ErrMalformed, MaxBytes)
	}
	return a, err
}

// Close closes the descriptors that are left.
func (a *Attachments) Close() {
	for _, fd := range a.FDs {
		unix.Close(fd)
	}
	a.FDs = nil
}
