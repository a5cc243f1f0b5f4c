// SPDX-License-Identifier: Apache-2.0

package feed

import (
	"strings"

	"github.com/ummu/ummu/mm"
)

// InterestHash is the bit of a granule.
var InterestHash = interestHash

// ClassifyText classifies by a maps file's text alone.
func ClassifyText(text string, r mm.Range) Verdict {
	var m maps
	return m.classifyText(strings.NewReader(text), r)
}

// Classify classifies as Commit does; text forces the fallback.
func Classify(path string, r mm.Range, text bool) Verdict {
	m := maps{path: path, text: text}
	defer m.close()
	return m.classify(r)
}

// SeenFree is how many lines are free for new watches.
func SeenFree() int {
	seenSlots.Lock()
	defer seenSlots.Unlock()
	return len(seenSlots.free)
}

// Quiet looks at one bank, as Begin does.
func Quiet(w *Watch, bank int) bool { return w.quiet(bank) }
