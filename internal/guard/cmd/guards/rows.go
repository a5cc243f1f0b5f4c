// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/ummu/ummu/internal/guard"

// row says what a guard is for and which test notices that it is gone.
type row struct {
	guard guard.Guard
	// keeps lists what of the contract (C1-C7) and of the protocol's
	// invariants (1-11) would be broken without the guard.
	keeps []string
	what  string // the step, and what happens without it
	pkg   string // package directory
	test  string // -test.run, with / before a subtest
}

// rows and kvmRows have one row at least for each guard.
var rows = []row{
	// The kernel side: one change, one watch.
	{guard.CommitFirst, []string{"2", "C1"}, "The record is committed before the generation moves; else a drain in between publishes a generation whose record it has not read.",
		"test/coherence", "TestRaceValidMeansDrained"},
	{guard.LossCounts, []string{"1", "11", "C3"}, "A record that finds the ring full moves the generation by a loss; else the change is invisible.",
		"test/coherence", "TestInFlightWhenItsRecordIsLost"},
	{guard.DeathCounts, []string{"1", "6", "C4"}, "The end of an address space moves the generation; else a watch of a process that was killed stays valid.",
		"test/coherence", "TestTargetDies"},
	{guard.Filtered, []string{"10", "C7"}, "A change of what nobody registered makes no record; else a program that only allocates fills the ring and invalidates everything.",
		"test/coherence", "TestChangesOfOthersMakeNoRecord"},
	{guard.Destination, []string{"10", "C1"}, "The destination of a move is tested against the interest too; else mremap onto a registered range is filtered.",
		"test/coherence", "TestChange/mremap_onto"},
	// Changes in flight.
	{guard.CountAll, []string{"3", "C2"}, "Every change is counted as begun and ended before the interest is tested; else one that began before its range was registered is invisible.",
		"test/coherence", "TestInFlightWhenInterestIsSet"},
	{guard.UnpairedLoss, []string{"4", "C3"}, "An end whose begin was not delivered is a loss.",
		"tracer", "TestFeedUnpairedEnd"},
	{guard.StaleClosed, []string{"4", "C7"}, "A change whose end was missed is closed by its task's next call; else nothing is cacheable any more.",
		"tracer", "TestFeedMissedEndThenCall"},
	{guard.ExitClosed, []string{"4", "C7"}, "A change whose end was missed is closed by its task's exit.",
		"tracer", "TestFeedMissedEndThenExit"},
	{guard.Untracked, []string{"4", "C3", "C4"}, "A change for which there is no room to track it ends the watch.",
		"tracer", "TestFeedWithoutRoomToTrack"},
	// Watches and address spaces.
	{guard.SpaceRemoved, []string{"6"}, "The entry of an address space goes when it dies; else the next one at the same address of the kernel inherits its watches.",
		"tracer", "TestDeadSpaceIsForgotten"},
	{guard.Incarnation, []string{"6", "8"}, "References to a closed watch are dead; else the next watch in its place gets the changes of another process.",
		"tracer", "TestClosedWatchIsNotTheNext"},
	// What a call does.
	{guard.UringMadvise, []string{"C6"}, "io_uring drops pages without a system call.",
		"test/coherence", "TestChange/io_uring"},
	{guard.BrkRace, []string{"C6"}, "A brk during another one is the whole space, since the old end is not known.",
		"tracer", "TestBrkDuringBrk"},
	{guard.VectorLimit, []string{"C6"}, "A vector with more elements than are read is the whole space.",
		"test/coherence", "TestChange/last_of_a_long_vector"},
	{guard.RoundOutward, []string{"C6"}, "Ranges are rounded outward to pages, as the kernel does.",
		"test/coherence", "TestChange/one_byte"},
	{guard.ReplaceSeen, []string{"C1", "C6"}, "mmap with MAP_FIXED over a mapping is a change.",
		"test/coherence", "TestChange/mmap_over"},
	{guard.UringChain, []string{"C6"}, "The end of an io_uring request begins the next ones of its chain, which a worker runs without another event.",
		"tracer", "TestURingWaitedSinceBefore"},
	{guard.IODestroy, []string{"C6"}, "io_destroy unmaps what is where its ring was mapped.",
		"tracer", "TestIODestroy"},
	{guard.PartnerRescue, []string{"C3"}, "Where the kernel skips the main hook its partner, another type of program, makes the record.",
		"tracer", "TestPartners/no_enter"},
	// Faults of a hook, which the self-test and the oracle must both notice.
	{guard.HookThere, []string{"C1", "C6"}, "The hook is there.", "internal/selftest", "TestPlanted/syscall"},
	{guard.HookThere, []string{"C1", "C6"}, "The same.", "internal/oracle", "TestPlanted/syscall"},
	{guard.RangePlace, []string{"C6"}, "A range is where it is, and not a page further.", "internal/selftest", "TestPlanted/syscall"},
	{guard.RangePlace, []string{"C6"}, "The same.", "internal/oracle", "TestPlanted/syscall"},
	{guard.RangeWhole, []string{"C6"}, "A range is reported to its end, not a subset of it.", "internal/selftest", "TestPlanted/syscall"},
	{guard.RangeWhole, []string{"C6"}, "The same.", "internal/oracle", "TestPlanted/syscall"},
	{guard.ArgsOrder, []string{"C6"}, "An argument is not taken for another one.", "internal/selftest", "TestPlanted/syscall"},
	{guard.ArgsOrder, []string{"C6"}, "The same.", "internal/oracle", "TestPlanted/syscall"},
	{guard.NeverMissed, []string{"C3"}, "No program is skipped without anybody noticing.", "internal/selftest", "TestPlanted/syscall"},
	{guard.NeverMissed, []string{"C3"}, "The same.", "internal/oracle", "TestPlanted/syscall"},
	// The loader.
	{guard.Copies, []string{"C3"}, "Where the kernel skips raw tracepoint programs each event has copies of other kinds.",
		"tracer", "TestTruthByCopies/second"},
	{guard.PagesFrozen, []string{"9"}, "Status and epoch pages are frozen before they are handed out; else whoever has the descriptor can write them.",
		"tracer", "TestPagesAreFrozen"},
	{guard.OpenSettles, []string{"3", "C2"}, "Opening a feed waits until no change is in flight that began before and is counted nowhere.",
		"test/coherence", "TestInFlightWhenTheWatchOpens"},
	{guard.MissPolled, []string{"C3"}, "A rise of the kernel's miss counters is a loss for everybody.",
		"tracer", "TestFeedSkippedPrograms"},
	{guard.CloseMarks, []string{"1", "7", "C4"}, "Closing a feed, or its tracer, marks the watches dead while the hooks are there; else they are valid for ever.",
		"tracer", "TestFeedCloseMarks"},
	{guard.UnmarkedKept, []string{"7", "C4"}, "A watch that cannot be marked dead keeps its place and its hooks; else it looks alive and hears of nothing.",
		"tracer", "TestCloseUnmarked"},
	{guard.OwnerDeath, []string{"7", "C4"}, "The end of the process that loaded the hooks, by whatever signal or call, marks every watch dead before the first hook goes.",
		"tracer", "TestOwnerEnds"},
	{guard.Watchdog, []string{"C3", "C4"}, "Counters of skipped programs that nobody reads, because the reader is stopped, are a loss; else it stays unknown until it goes on.",
		"tracer", "TestStoppedPoller"},
	// The daemon: who gets a watch, and how long.
	{guard.PeerSame, []string{"C4"}, "Who echoes the challenge is the process that connected, says the kernel; else whoever was passed a connection is handed another's watch.",
		"internal/daemon", "TestForgedSender"},
	{guard.NonceEchoed, []string{"C4"}, "The echo is of the challenge, so it was sent after the watch was opened; else one sent before stands for a process that may have changed since.",
		"internal/daemon", "TestWrongEcho"},
	{guard.SpaceSame, []string{"6", "C4"}, "A watch is handed out only if its process still has the address space it is of; else a program started by exec has a watch of the one before.",
		"internal/daemon", "TestExecDuringTheHandshake"},
	{guard.OfferLate, []string{"C5"}, "/dev/kvm is handed to who has answered a challenge, not to whoever was passed the connection.",
		"internal/daemon", "TestChallengeBeforeOffer"},
	{guard.LeaseExit, []string{"6", "C4"}, "The end of a process ends its watch although a child has the connection; else the dead keep their places.",
		"internal/daemon", "TestChildrenKeepTheConnection"},
	{guard.LeaseShut, []string{"6"}, "Closing a watch ends the connection for children too; else the watch lives as long as they do.",
		"internal/daemon", "TestCloseWithChildren"},
	{guard.Proven, []string{"C1", "C4"}, "A watch by the daemon is used only when a change of one's own has arrived; else one that hears of nothing is trusted.",
		"feed", "TestBlindWatch"},
	// The client: validity and drain.
	{guard.PublishLast, []string{"2", "C1"}, "The generation seen is published after the entries are dropped; else another thread hits one in between.",
		"test/coherence", "TestRaceStuckDrain"},
	{guard.GenerationOld, []string{"2", "C1"}, "The generation published was loaded before the drain; else a change during the drain is taken for seen.",
		"feed", "TestDrainEndsUnderAFasterProducer"},
	{guard.BusyRecord, []string{"2", "C1"}, "A drain that stops at a record still being written publishes nothing.",
		"feed", "TestDrainUnfinished"},
	{guard.WordExplained, []string{"1", "C3"}, "A generation that moved by more than what was read and counted is a loss.",
		"feed", "TestDrain/word_moved_without_a_record"},
	{guard.EpochCompared, []string{"1", "C3", "C4"}, "Validity includes the epoch page, by which losses and the end of the kernel side reach every watch.",
		"regcache", "TestLossEmptiesTheCache/machine"},
	{guard.ZeroDead, []string{"5", "C4"}, "Generation 0 is never valid: it is what a watch without a feed has, and what one that died remembers.",
		"feed", "TestDrain/generation_zero"},
	{guard.WipeOnFork, []string{"5", "C4"}, "What was seen lies in a page that a forked child finds wiped, so its lookups miss.",
		"test/coherence", "TestForkedChild"},
	// The client: registrations.
	{guard.InterestFirst, []string{"3", "C2"}, "Begin sets the interest before it looks for changes in flight; else one that begins between the two is filtered.",
		"feed", "TestInterestBeforeQuiet"},
	{guard.BeginWaits, []string{"3", "C2"}, "Begin waits until no change is in flight that began before the interest was set.",
		"feed", "TestBeginWaitsForFilteredChange"},
	{guard.EndedFirst, []string{"3", "C2"}, "Quiet means ended equals begun, with ended loaded first; the other order counts ends of changes that began later.",
		"feed", "TestQuietNeverDuringOverlappingChanges"},
	{guard.QuietForeign, []string{"3", "C2"}, "Begin waits for changes of nobody-knows-whose address space too.",
		"feed", "TestBeginWaitsForForeignChange"},
	{guard.BankFlipped, []string{"3", "C7"}, "While Begin waits new changes are counted in the other bank; else it never finds quiet in a busy program.",
		"feed", "TestBeginSettlesUnderTraffic"},
	{guard.TicketMarked, []string{"3", "C2"}, "A change between Begin and Commit refuses the commit, whichever thread drained it.",
		"test/coherence", "TestInFlightDuringRegistration"},
	{guard.LossRefuses, []string{"3", "C2", "C3"}, "A loss between Begin and Commit refuses the commit.",
		"feed", "TestCommit/loss"},
	{guard.InsertLocked, []string{"2", "C2"}, "The entry is inserted under the drain lock; else another thread may drain its change before it is there.",
		"feed", "TestInsertIsUnderTheDrainLock"},
	{guard.FileRefused, []string{"C1", "C6"}, "What the tier cannot see, memory with a file behind it, is registered but not cached.",
		"regcache", "TestGapsOfTheTier"},
	// The cache.
	{guard.ValidAsked, []string{"C1"}, "A lookup asks whether anything changed before it looks into the index.",
		"test/coherence", "TestChange/munmap_and_mmap"},
	{guard.LossDrops, []string{"C3"}, "A loss empties the cache.",
		"regcache", "TestLossEmptiesTheCache/watch"},
	{guard.InUseLeaves, []string{"C1"}, "An entry that changed while in use leaves the index at once.",
		"test/coherence", "TestChangeInUse"},
	{guard.ChangedTold, []string{"C1"}, "Whoever holds an entry that changed is told at the release.",
		"test/coherence", "TestChangeInUse"},
	{guard.StaleReaped, []string{"C5"}, "What is stale is deregistered though nobody looks it up; else memory that the program gave back stays pinned.",
		"regcache", "TestRunDeregistersStale"},
	{guard.ZombieKept, []string{"C5"}, "A deregistration that failed is kept and tried again; else its memory stays pinned for ever.",
		"regcache", "TestZombies"},
}

// kvmRows are the rows that need /dev/kvm, or 32-bit calls, and more than one
// kernel to be all of use: guests try them as well (test/vm -suites guards).
var kvmRows = []row{
	{guard.CompatABI, []string{"C6"}, "32-bit calls have other numbers and registers.",
		"tracer", "TestCompatABI"},
	{guard.Holder, []string{"6", "C4"}, "Losing the page that keeps the notifier ends the watch; else it is valid and hears of nothing.",
		"feed/local", "TestNotifierPageUnmapped/notifier/tracepoint"},
	{guard.Marker, []string{"3", "C7"}, "The zap of the watch's own page shows that its thread's last change is over, and is none itself.",
		"feed/local", "TestNotifierMarker"},
	{guard.Foreign, []string{"3", "C2"}, "A change of nobody-knows-whose address space is in flight for everybody.",
		"feed/local", "TestNotifierForeignCounts"},
	{guard.Hidden, []string{"10"}, "A change of nobody-knows-whose address space is a loss, not a record, to a client of the daemon; else it learns addresses and threads of other processes.",
		"feed/local", "TestNotifierHidesOthers"},
	{guard.HookThere, []string{"C1", "C6"}, "The same.", "internal/selftest", "TestPlanted/notifier/tracepoint"},
	{guard.HookThere, []string{"C1", "C6"}, "The same.", "internal/oracle", "TestPlanted/notifier/tracepoint"},
	{guard.RangePlace, []string{"C6"}, "The same.", "internal/selftest", "TestPlanted/notifier/tracepoint"},
	{guard.RangePlace, []string{"C6"}, "The same.", "internal/oracle", "TestPlanted/notifier/tracepoint"},
	{guard.RangeWhole, []string{"C6"}, "The same.", "internal/selftest", "TestPlanted/notifier/tracepoint"},
	{guard.RangeWhole, []string{"C6"}, "The same.", "internal/oracle", "TestPlanted/notifier/tracepoint"},
	{guard.ArgsOrder, []string{"C6"}, "The same.", "internal/selftest", "TestPlanted/notifier/tracepoint"},
	{guard.ArgsOrder, []string{"C6"}, "The same.", "internal/oracle", "TestPlanted/notifier/tracepoint"},
	{guard.NeverMissed, []string{"C3"}, "The same.", "internal/selftest", "TestPlanted/notifier/tracepoint"},
	{guard.NeverMissed, []string{"C3"}, "The same.", "internal/oracle", "TestPlanted/notifier/tracepoint"},
	{guard.WitnessAsked, []string{"C1", "C3"}, "Where all probes of a change may be skipped a feed needs KVM's tracepoint behind them (kernels that preempt their own code).",
		"feed/local", "TestProbesNeedWitness"},
}

// Everything that must be in some row.
var (
	contract   = []string{"C1", "C2", "C3", "C4", "C5", "C6", "C7"}
	invariants = []string{"1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "11"}
)
