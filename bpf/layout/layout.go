// Code generated from ummu.h by cgo -godefs; DO NOT EDIT.

// SPDX-License-Identifier: Apache-2.0

package layout

type (
	Record struct {
		Time_ns   uint64
		Start     uint64
		End       uint64
		To_start  uint64
		To_end    uint64
		Lost      uint64
		Space     uint64
		Arg       [2]uint64
		Ret       int64
		Pid       uint32
		Tid       uint32
		Child_pid uint32
		Child_tid uint32
		Nr        uint32
		Flags     uint16
		Kind      uint8
		Phase     uint8
		Hook      uint8
		Abi       uint8
		By        uint8
		All       uint8
		Reserved  [4]uint8
		Comm      [16]int8
	}
	Stack struct {
		Pc       uint64
		Sp       uint64
		Fp       uint64
		Lr       uint64
		Size     uint32
		Reserved uint32
		Memory   [4096]uint8
	}
	Status struct {
		Generation uint64
		Version    uint32
		Size       uint32
		Tier       uint32
		Gaps       uint32
		Reserved0  [5]uint64
		Begun      [2]uint64
		Ended      [2]uint64
		Reserved1  [4]uint64
		Records    uint64
		Lost       uint64
		Filtered   uint64
		Unpaired   uint64
		Deaths     uint64
		Untracked  uint64
		Foreign    uint64
		Reserved2  [1]uint64
		Reserved3  [488]uint64
	}
	Epoch struct {
		Word      uint64
		Version   uint32
		Size      uint32
		Misses    uint64
		Deaths    uint64
		Untracked uint64
		Reserved0 [3]uint64
		Begun     [2]uint64
		Ended     [2]uint64
		Reserved1 [500]uint64
	}
	Interest struct {
		Version  uint32
		Size     uint32
		Bank     uint32
		All      uint32
		Dense    [3]uint64
		Marker   uint64
		Holder   uint64
		Reserved [505]uint64
		Bits     [3][512]uint64
	}
)

const (
	Version = 0x1

	GenStart  = 0x1
	GenRecord = 0x1
	GenLoss   = 0x1000000000001
	GenDeath  = 0x100000000000001

	Banks          = 0x2
	InterestLevels = 0x3
	InterestBits   = 0x8000
	InterestSpan   = 0x10
	InterestShift0 = 0x10
	InterestShift1 = 0x18
	InterestShift2 = 0x20

	TierNone               = 0x0
	TierSyscall            = 0x1
	TierMM                 = 0x2
	TierNotifierTracepoint = 0x3
	TierNotifierProbe      = 0x4

	GapFile   = 0x1
	GapDriver = 0x2

	KindLost       = 0xa
	KindDeregister = 0xc

	HookSysEnter             = 0x1
	HookSysExit              = 0x2
	HookEnterMunmap          = 0x3
	HookEnterMremap          = 0x4
	HookEnterMprotect        = 0x5
	HookExitMunmap           = 0x6
	HookExitMremap           = 0x7
	HookExitMprotect         = 0x8
	HookUringSubmit          = 0x9
	HookUringQueue           = 0xa
	HookUringComplete        = 0xb
	HookSchedFork            = 0xc
	HookSchedExec            = 0xd
	HookSchedExit            = 0xe
	HookExitMmap             = 0xf
	HookKVMUnmap             = 0x10
	HookNotifierStartFentry  = 0x11
	HookNotifierStartKprobe  = 0x12
	HookNotifierEndFentry    = 0x13
	HookNotifierEndKprobe    = 0x14
	HookExitMmapFentry       = 0x15
	HookExitMmapKprobe       = 0x16
	HookNotifierStartFentry2 = 0x17
	HookNotifierEndFentry2   = 0x18
	HookRegisterEnter        = 0x1a
	HookRegisterExit         = 0x1b
	HookVerbs                = 0x1c
	HookVerbsReturn          = 0x1d
	HookKVMWitness           = 0x19
	HookSysEnterCopy         = 0x28
	HookSysExitCopy          = 0x29
	HookSysEnterClassic      = 0x2a
	HookSysExitClassic       = 0x2b
	HookUringSubmitCopy      = 0x2c
	HookUringQueueCopy       = 0x2d
	HookUringCompleteCopy    = 0x2e
	HookUringSubmitClassic   = 0x2f
	HookUringQueueClassic    = 0x30
	HookUringCompleteClassic = 0x31
	HookSchedForkCopy        = 0x32
	HookSchedExecCopy        = 0x33
	HookSchedExitCopy        = 0x34
	HookExitMmapCopy         = 0x35
	HookExitMmapClassic      = 0x36
	HookKVMUnmapCopy         = 0x37
	HookKVMUnmapClassic      = 0x38
	HookKVMWitnessCopy       = 0x39
	HookKVMWitnessClassic    = 0x3a
	HookUnmapFentry          = 0x40
	HookUnmapFentry2         = 0x41
	HookUnmapKprobe          = 0x42
	HookZapFentry            = 0x43
	HookZapFentry2           = 0x44
	HookZapKprobe            = 0x45
	HookHugetlbFentry        = 0x46
	HookHugetlbFentry2       = 0x47
	HookHugetlbKprobe        = 0x48
	HookFixupFentry          = 0x49
	HookFixupKprobe          = 0x4a
	HookProtectFentry        = 0x4b
	HookProtectFentry2       = 0x4c
	HookProtectKprobe        = 0x4d
	HookMoveFentry           = 0x4e
	HookMoveFentry2          = 0x4f
	HookMoveKprobe           = 0x50
	HookMoveFexit            = 0x51
	HookGather               = 0x52
	HookFinishFentry         = 0x53
	HookFinishFentry2        = 0x54
	HookFinishKprobe         = 0x55
	HookMax                  = 0x60
)
