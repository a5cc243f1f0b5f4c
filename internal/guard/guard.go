// SPDX-License-Identifier: Apache-2.0

// Package guard names the steps of the protocol without which a stale hit, or
// a false alarm, would be possible, so that each can be switched off to see
// its test fail. In a normal build nothing can be switched off and [Off] is
// the constant false; with the build tag ummu_guards the environment variable
// UMMU_GUARD_OFF names one guard.
package guard

// Guard is one step of the protocol.
type Guard uint8

// Guards of the kernel side, in the order of the bits of guards_off in
// bpf/guard.bpf.h.
const (
	CommitFirst   Guard = iota // the record is committed before the generation moves
	LossCounts                 // a record that found no room moves the generation
	DeathCounts                // the death of the address space moves the generation
	CountAll                   // begun/ended move before the interest filter
	UnpairedLoss               // an end whose begin was not delivered is a loss
	StaleClosed                // a change whose end was missed is closed by the task's next call
	ExitClosed                 // ... or by the task's exit
	SpaceRemoved               // the entry of a dead address space is removed
	Incarnation                // references to a closed watch are dead
	CompatABI                  // 32-bit calls are decoded
	UringMadvise               // io_uring's madvise is seen
	BrkRace                    // overlapping brk calls cover each other
	VectorLimit                // a vector too long to read is the whole space
	Destination                // the destination of a move is tested against the interest
	RoundOutward               // ranges are rounded outward to pages
	PartnerRescue              // the classic tracepoints stand in for a skipped main hook
	ReplaceSeen                // MAP_FIXED over a mapping is a change
	Untracked                  // a change that finds no room to be tracked ends the watch
	Filtered                   // a change of nothing that is registered makes no record
	OwnerDeath                 // the end of the process that loaded the hooks ends every watch
	Watchdog                   // miss counters that nobody reads are a loss
	UringChain                 // the end of an io_uring request begins the next ones of its chain
	IODestroy                  // io_destroy unmaps what is at its address
	Holder                     // losing the page that keeps the notifier ends the watch
	Marker                     // the zap of the marker page says only where its thread is
	Foreign                    // a change of nobody-knows-whose is in flight for everybody
	Hidden                     // who has no privileges is told nothing of other processes
	// Faults: what a hook has to get right. Without one of them every test of a
	// tier as a whole must fail.
	HookThere   // the hook that most calls depend on is attached
	RangePlace  // a range is where it is, and not a page further
	RangeWhole  // a range is reported to its end
	ArgsOrder   // arguments are not taken for one another
	NeverMissed // no program is skipped without anybody noticing
	endOfKernelSide
)

// Guards of the loader (tracer).
const (
	PagesFrozen  = endOfKernelSide + iota // status and epoch pages are frozen
	OpenSettles                           // opening a feed waits for changes in flight
	MissPolled                            // the kernel's miss counters become losses
	CloseMarks                            // closing marks the watches dead first
	UnmarkedKept                          // ... and leaves everything as it is if it cannot
	Copies                                // where programs are skipped each event has copies
	WitnessAsked                          // probes that may all be skipped are refused without KVM behind them
	endOfLoader
)

// Guards of the daemon.
const (
	PeerSame    = endOfLoader + iota // who echoes the challenge is who connected
	NonceEchoed                      // ... and sends what it was sent
	SpaceSame                        // a watch is of the address space that its process still has
	LeaseExit                        // the end of the process ends its watch, whoever has the connection
	OfferLate                        // /dev/kvm goes to who has answered a challenge
	endOfDaemon
)

// Guards of the client side: feed, then regcache.
const (
	PublishLast   = endOfDaemon + iota // the generation seen is published after the entries are dropped
	GenerationOld                      // the generation published was loaded before the drain
	BusyRecord                         // a drain stops at an unfinished record without publishing
	WordExplained                      // a generation that moved by more than was read is a loss
	EpochCompared                      // validity includes the epoch page
	ZeroDead                           // generation 0 is never valid
	WipeOnFork                         // a forked child's watch is dead
	InterestFirst                      // Begin sets the interest before it looks for changes in flight
	BeginWaits                         // Begin waits for changes in flight
	EndedFirst                         // a bank is quiet if ended, read first, equals begun
	BankFlipped                        // new changes are counted in the other bank while Begin waits
	TicketMarked                       // a change during a registration refuses the commit
	LossRefuses                        // a loss during a registration refuses the commit
	InsertLocked                       // the entry is inserted under the drain lock
	FileRefused                        // what the tier cannot see is not cached
	QuietForeign                       // Begin waits for changes of nobody-knows-whose
	Proven                             // a watch by the daemon is used when it has seen a change
	LeaseShut                          // closing a watch ends the connection for children too
	ValidAsked                         // a lookup asks Valid before it looks into the index
	LossDrops                          // a loss drops everything
	InUseLeaves                        // an invalidated entry in use leaves the index at once
	ChangedTold                        // its holder is told at the release
	StaleReaped                        // what is stale is deregistered, though nobody looks it up
	ZombieKept                         // a failed deregistration is kept and retried
	numGuards
)

var names = [numGuards]string{
	"commit-first", "loss-counts", "death-counts", "count-all", "unpaired-loss",
	"stale-closed", "exit-closed", "space-removed", "incarnation", "compat-abi",
	"uring-madvise", "brk-race", "vector-limit", "destination", "round-outward",
	"partner-rescue", "replace-seen", "untracked", "filtered",
	"owner-death", "watchdog",
	"uring-chain", "io-destroy", "holder", "marker", "foreign", "hidden",
	"hook-there", "range-place", "range-whole", "args-order", "never-missed",

	"pages-frozen", "open-settles", "miss-polled", "close-marks", "unmarked-kept", "copies",
	"witness-asked",

	"peer-same", "nonce-echoed", "space-same", "lease-exit", "offer-late",

	"publish-last", "generation-old", "busy-record", "word-explained",
	"epoch-compared", "zero-dead", "wipe-on-fork", "interest-first",
	"begin-waits", "ended-first", "bank-flipped", "ticket-marked",
	"loss-refuses", "insert-locked", "file-refused", "quiet-foreign",
	"proven", "lease-shut",

	"valid-asked", "loss-drops", "in-use-leaves", "changed-told",
	"stale-reaped", "zombie-kept",
}

// String is the guard's name in UMMU_GUARD_OFF.
func (g Guard) String() string { return names[g] }

// All returns every guard.
func All() []Guard {
	gs := make([]Guard, numGuards)
	for i := range gs {
		gs[i] = Guard(i)
	}
	return gs
}

// KernelMask is what the kernel side's guards_off must be.
func KernelMask() uint64 {
	var m uint64
	for g := range endOfKernelSide {
		if Off(g) {
			m |= 1 << g
		}
	}
	return m
}
