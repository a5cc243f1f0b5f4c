// SPDX-License-Identifier: Apache-2.0

//go:build ignore

// Input of cgo -godefs; see gen.go.
package layout

// #include "../ummu.h"
import "C"

// The structures of ummu.h.
type (
	Record   C.struct_ummu_record
	Stack    C.struct_ummu_stack
	Status   C.struct_ummu_status
	Epoch    C.struct_ummu_epoch
	Interest C.struct_ummu_interest
)

// The constants of ummu.h.
const (
	Version = C.UMMU_LAYOUT_VERSION

	GenStart  = C.UMMU_GEN_START
	GenRecord = C.UMMU_GEN_RECORD
	GenLoss   = C.UMMU_GEN_LOSS
	GenDeath  = C.UMMU_GEN_DEATH

	Banks          = C.UMMU_BANKS
	InterestLevels = C.UMMU_INTEREST_LEVELS
	InterestBits   = C.UMMU_INTEREST_BITS
	InterestSpan   = C.UMMU_INTEREST_SPAN
	InterestShift0 = C.UMMU_INTEREST_SHIFT0
	InterestShift1 = C.UMMU_INTEREST_SHIFT1
	InterestShift2 = C.UMMU_INTEREST_SHIFT2

	TierNone               = C.UMMU_TIER_NONE
	TierSyscall            = C.UMMU_TIER_SYSCALL
	TierMM                 = C.UMMU_TIER_MM
	TierNotifierTracepoint = C.UMMU_TIER_NOTIFIER_TRACEPOINT
	TierNotifierProbe      = C.UMMU_TIER_NOTIFIER_PROBE

	GapFile   = C.UMMU_GAP_FILE
	GapDriver = C.UMMU_GAP_DRIVER

	KindLost       = C.UMMU_LOST
	KindDeregister = C.UMMU_DEREGISTER

	HookSysEnter             = C.UMMU_HOOK_SYS_ENTER
	HookSysExit              = C.UMMU_HOOK_SYS_EXIT
	HookEnterMunmap          = C.UMMU_HOOK_ENTER_MUNMAP
	HookEnterMremap          = C.UMMU_HOOK_ENTER_MREMAP
	HookEnterMprotect        = C.UMMU_HOOK_ENTER_MPROTECT
	HookExitMunmap           = C.UMMU_HOOK_EXIT_MUNMAP
	HookExitMremap           = C.UMMU_HOOK_EXIT_MREMAP
	HookExitMprotect         = C.UMMU_HOOK_EXIT_MPROTECT
	HookUringSubmit          = C.UMMU_HOOK_URING_SUBMIT
	HookUringQueue           = C.UMMU_HOOK_URING_QUEUE
	HookUringComplete        = C.UMMU_HOOK_URING_COMPLETE
	HookSchedFork            = C.UMMU_HOOK_SCHED_FORK
	HookSchedExec            = C.UMMU_HOOK_SCHED_EXEC
	HookSchedExit            = C.UMMU_HOOK_SCHED_EXIT
	HookExitMmap             = C.UMMU_HOOK_EXIT_MMAP
	HookKVMUnmap             = C.UMMU_HOOK_KVM_UNMAP
	HookNotifierStartFentry  = C.UMMU_HOOK_NOTIFIER_START_FENTRY
	HookNotifierStartKprobe  = C.UMMU_HOOK_NOTIFIER_START_KPROBE
	HookNotifierEndFentry    = C.UMMU_HOOK_NOTIFIER_END_FENTRY
	HookNotifierEndKprobe    = C.UMMU_HOOK_NOTIFIER_END_KPROBE
	HookExitMmapFentry       = C.UMMU_HOOK_EXIT_MMAP_FENTRY
	HookExitMmapKprobe       = C.UMMU_HOOK_EXIT_MMAP_KPROBE
	HookNotifierStartFentry2 = C.UMMU_HOOK_NOTIFIER_START_FENTRY2
	HookNotifierEndFentry2   = C.UMMU_HOOK_NOTIFIER_END_FENTRY2
	HookRegisterEnter        = C.UMMU_HOOK_REGISTER_ENTER
	HookRegisterExit         = C.UMMU_HOOK_REGISTER_EXIT
	HookVerbs                = C.UMMU_HOOK_VERBS
	HookVerbsReturn          = C.UMMU_HOOK_VERBS_RETURN
	HookKVMWitness           = C.UMMU_HOOK_KVM_WITNESS
	HookSysEnterCopy         = C.UMMU_HOOK_SYS_ENTER_COPY
	HookSysExitCopy          = C.UMMU_HOOK_SYS_EXIT_COPY
	HookSysEnterClassic      = C.UMMU_HOOK_SYS_ENTER_CLASSIC
	HookSysExitClassic       = C.UMMU_HOOK_SYS_EXIT_CLASSIC
	HookUringSubmitCopy      = C.UMMU_HOOK_URING_SUBMIT_COPY
	HookUringQueueCopy       = C.UMMU_HOOK_URING_QUEUE_COPY
	HookUringCompleteCopy    = C.UMMU_HOOK_URING_COMPLETE_COPY
	HookUringSubmitClassic   = C.UMMU_HOOK_URING_SUBMIT_CLASSIC
	HookUringQueueClassic    = C.UMMU_HOOK_URING_QUEUE_CLASSIC
	HookUringCompleteClassic = C.UMMU_HOOK_URING_COMPLETE_CLASSIC
	HookSchedForkCopy        = C.UMMU_HOOK_SCHED_FORK_COPY
	HookSchedExecCopy        = C.UMMU_HOOK_SCHED_EXEC_COPY
	HookSchedExitCopy        = C.UMMU_HOOK_SCHED_EXIT_COPY
	HookExitMmapCopy         = C.UMMU_HOOK_EXIT_MMAP_COPY
	HookExitMmapClassic      = C.UMMU_HOOK_EXIT_MMAP_CLASSIC
	HookKVMUnmapCopy         = C.UMMU_HOOK_KVM_UNMAP_COPY
	HookKVMUnmapClassic      = C.UMMU_HOOK_KVM_UNMAP_CLASSIC
	HookKVMWitnessCopy       = C.UMMU_HOOK_KVM_WITNESS_COPY
	HookKVMWitnessClassic    = C.UMMU_HOOK_KVM_WITNESS_CLASSIC
	HookUnmapFentry          = C.UMMU_HOOK_UNMAP_FENTRY
	HookUnmapFentry2         = C.UMMU_HOOK_UNMAP_FENTRY2
	HookUnmapKprobe          = C.UMMU_HOOK_UNMAP_KPROBE
	HookZapFentry            = C.UMMU_HOOK_ZAP_FENTRY
	HookZapFentry2           = C.UMMU_HOOK_ZAP_FENTRY2
	HookZapKprobe            = C.UMMU_HOOK_ZAP_KPROBE
	HookHugetlbFentry        = C.UMMU_HOOK_HUGETLB_FENTRY
	HookHugetlbFentry2       = C.UMMU_HOOK_HUGETLB_FENTRY2
	HookHugetlbKprobe        = C.UMMU_HOOK_HUGETLB_KPROBE
	HookFixupFentry          = C.UMMU_HOOK_FIXUP_FENTRY
	HookFixupKprobe          = C.UMMU_HOOK_FIXUP_KPROBE
	HookProtectFentry        = C.UMMU_HOOK_PROTECT_FENTRY
	HookProtectFentry2       = C.UMMU_HOOK_PROTECT_FENTRY2
	HookProtectKprobe        = C.UMMU_HOOK_PROTECT_KPROBE
	HookMoveFentry           = C.UMMU_HOOK_MOVE_FENTRY
	HookMoveFentry2          = C.UMMU_HOOK_MOVE_FENTRY2
	HookMoveKprobe           = C.UMMU_HOOK_MOVE_KPROBE
	HookMoveFexit            = C.UMMU_HOOK_MOVE_FEXIT
	HookGather               = C.UMMU_HOOK_GATHER
	HookFinishFentry         = C.UMMU_HOOK_FINISH_FENTRY
	HookFinishFentry2        = C.UMMU_HOOK_FINISH_FENTRY2
	HookFinishKprobe         = C.UMMU_HOOK_FINISH_KPROBE
	HookMax                  = C.UMMU_HOOK_MAX
)
