// SPDX-License-Identifier: Apache-2.0

package symbol

import (
	"debug/elf"
	"encoding/binary"

	"github.com/go-delve/delve/pkg/dwarf/frame"

	"github.com/ummu/ummu/mm"
)

// maxFrames bounds a stack.
const maxFrames = 128

// registers are what is known of a frame, by DWARF's numbers.
type registers map[uint64]uint64

// architecture has DWARF's numbers of registers.
type architecture struct {
	sp, fp uint64
	lr     uint64 // 0: return addresses are on the stack
}

var (
	x86   = architecture{sp: 7, fp: 6}
	arm64 = architecture{sp: 31, fp: 29, lr: 30}
)

func archOf(m elf.Machine) (architecture, bool) {
	switch m {
	case elf.EM_X86_64:
		return x86, true
	case elf.EM_AARCH64:
		return arm64, true
	}
	return architecture{}, false
}

// stackMemory is the copy that came with a stack.
type stackMemory struct {
	at uint64
	b  []byte
}

func (s stackMemory) read(a uint64) (uint64, bool) {
	o := a - s.at
	if o > uint64(len(s.b)) || uint64(len(s.b))-o < 8 {
		return 0, false
	}
	return binary.LittleEndian.Uint64(s.b[o:]), true
}

// unwind lists the program counters of a stack, innermost first; lookup finds
// the image and the address in it. It ends where the stack does, or where
// nothing says how to go on.
func unwind(s *mm.Stack, lookup func(mm.Addr) (*image, uint64)) []mm.Addr {
	if s.PC == 0 {
		return nil
	}
	mem := stackMemory{uint64(s.SP), s.Memory}
	pcs := []mm.Addr{s.PC}
	pc := uint64(s.PC)
	arch := x86
	if s.LR != 0 {
		arch = arm64
	}
	regs := registers{arch.sp: uint64(s.SP), arch.fp: uint64(s.FP)}
	if arch.lr != 0 {
		regs[arch.lr] = uint64(s.LR)
	}
	for len(pcs) < maxFrames {
		look := pc
		if len(pcs) > 1 {
			look-- // in the call, not behind it
		}
		var fc *frame.FrameContext
		if m, a := lookup(mm.Addr(look)); m != nil {
			if found, ok := archOf(m.elf.Machine); !ok || found != arch {
				return pcs
			}
			fc = m.rule(a)
		}
		next, sp, ok := uint64(0), uint64(0), false
		if fc != nil {
			next, sp, ok = arch.byRules(fc, regs, mem)
		} else {
			next, sp, ok = arch.byFrame(regs, mem, len(pcs) == 1)
		}
		// A leaf of arm64 has its caller's stack pointer.
		if !ok || next == 0 || sp < regs[arch.sp] || sp == regs[arch.sp] && (arch.lr == 0 || len(pcs) > 1) {
			return pcs
		}
		regs[arch.sp] = sp
		pc = next
		pcs = append(pcs, mm.Addr(pc))
	}
	return pcs
}

// addressBits of a return address on arm64; the others may sign it.
const addressBits = 1<<48 - 1

// byRules goes to the calling frame by call frame information.
func (arch architecture) byRules(fc *frame.FrameContext, regs registers, mem stackMemory) (pc, sp uint64, ok bool) {
	if fc.CFA.Rule != frame.RuleCFA { // an expression: signal frames, the PLT
		return 0, 0, false
	}
	base, ok := regs[fc.CFA.Reg]
	if !ok {
		return 0, 0, false
	}
	cfa := base + uint64(fc.CFA.Offset)
	caller := make(registers, len(fc.Regs))
	for r, v := range regs { // what has no rule is what it was
		caller[r] = v
	}
	for r, rule := range fc.Regs {
		switch rule.Rule {
		case frame.RuleSameVal:
			continue
		case frame.RuleOffset:
			if v, ok := mem.read(cfa + uint64(rule.Offset)); ok {
				caller[r] = v
				continue
			}
		case frame.RuleValOffset:
			caller[r] = cfa + uint64(rule.Offset)
			continue
		case frame.RuleRegister:
			if v, ok := regs[rule.Reg]; ok {
				caller[r] = v
				continue
			}
		}
		delete(caller, r)
	}
	pc, ok = caller[fc.RetAddrReg]
	if arch.lr != 0 {
		pc &= addressBits
	} else {
		delete(caller, fc.RetAddrReg) // the caller's is elsewhere
	}
	clear(regs)
	for r, v := range caller {
		regs[r] = v
	}
	return pc, cfa, ok
}

// byFrame goes there by the frame pointer. The innermost function may not have
// made its frame yet.
func (arch architecture) byFrame(regs registers, mem stackMemory, innermost bool) (pc, sp uint64, ok bool) {
	fp, ok := regs[arch.fp]
	if !ok {
		return 0, 0, false
	}
	next, ok1 := mem.read(fp)
	pc, ok2 := mem.read(fp + 8)
	if !ok1 || !ok2 || fp < regs[arch.sp] {
		return 0, 0, false
	}
	if arch.lr != 0 {
		pc &= addressBits
	}
	clear(regs) // nothing is known of the others
	regs[arch.fp] = next
	return pc, fp + 16, true
}
