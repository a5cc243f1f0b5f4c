// SPDX-License-Identifier: Apache-2.0

package regcache

import (
	"fmt"

	"github.com/ummu/ummu/feed"
)

// Reason says why a registration is not in the cache.
type Reason uint8

// The reasons. From ReasonChanged on they are the feed's verdicts: the cache
// could not keep such a registration coherent.
const (
	Cached              Reason = iota // it is in the cache
	ReasonBusy                        // another thread was applying changes, or a record was unfinished
	ReasonFull                        // everything in the cache is in use, up to a limit
	ReasonTooLarge                    // larger than MaxBytes
	ReasonRaced                       // another thread registered the same range with other rights meanwhile
	ReasonRights                      // the device refused the union of these rights and the cached ones
	ReasonChanged                     // the range changed during each of three registrations
	ReasonInFlight                    // a change that began before the registration had not ended
	ReasonLost                        // records were lost during the registration
	ReasonDead                        // there is no feed, or it is gone
	ReasonFileBacked                  // file or shared pages, whose changes this tier cannot see
	ReasonNoMapping                   // part of the range is not mapped
	ReasonDriverMapping               // part of the range is not host memory
	ReasonUnclassified                // what the range is could not be found out
	numReasons
)

var reasonNames = [numReasons]string{
	"cached", "busy", "full", "too large", "raced", "rights", "changed", "in flight", "lost",
	"dead", "file backed", "no mapping", "driver mapping", "unclassified",
}

// String is the reason in lower case.
func (r Reason) String() string {
	if r < numReasons {
		return reasonNames[r]
	}
	return fmt.Sprintf("reason(%d)", uint8(r))
}

func reasonOf(v feed.Verdict) Reason {
	switch v {
	case feed.Cacheable:
		return Cached
	case feed.Changed:
		return ReasonChanged
	case feed.InFlight:
		return ReasonInFlight
	case feed.LostRecords:
		return ReasonLost
	case feed.IsDead:
		return ReasonDead
	case feed.FileBacked:
		return ReasonFileBacked
	case feed.NoMapping:
		return ReasonNoMapping
	case feed.DriverMapping:
		return ReasonDriverMapping
	}
	return ReasonUnclassified
}
