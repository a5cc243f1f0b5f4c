// SPDX-License-Identifier: Apache-2.0

package truth

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ummu/ummu/mm"
)

var update = flag.Bool("update", false, "write docs/truth.md")

const docHead = `# What happens to a registration

Generated from internal/truth (` + "`go test ./internal/truth -run TestDocs -update`" + `), whose tests perform every row.
Measured on Linux 6.18, x86-64.

A buffer is registered as an io_uring fixed buffer: eight touched pages, four of hugetlb. Then comes the operation, then the
device writes known bytes to the old addresses, then the CPU looks at each page: ` + "`S`" + ` stale (it does not see the bytes),
` + "`U`" + ` no access, ` + "`.`" + ` coherent. The records are what a tracer must report, with half-open ranges of pages of the buffer; "nothing"
means that no change may be reported that touches it. A gap is what hooks on system calls cannot see.

| operation | memory | returned | pages | records | gap |
|---|---|---|---|---|---|
`

func doc() string {
	var b strings.Builder
	b.WriteString(docHead)
	for i := range Rows {
		row := &Rows[i]
		if row.Refused != 0 {
			fmt.Fprintf(&b, "| %s | %s | registration refused: %v | | | |\n", row.Name, row.Memory, row.Refused)
			continue
		}
		var returned, records []string
		for _, e := range row.Errnos {
			returned = append(returned, e.Error())
		}
		if returned == nil {
			returned = []string{"ok"}
		}
		for _, e := range row.Records {
			s := fmt.Sprintf("%v [%d,%d)", e.Kind, e.At.First, e.At.End)
			switch {
			case e.Kind == mm.Exit:
				s = "death of the address space"
			case e.Onto:
				s += " or move to it"
			case e.Counted > 1:
				s += fmt.Sprintf(" x %d", e.Counted)
			}
			records = append(records, s)
		}
		if !row.Changes() && row.Oracle != CPUOnly {
			records = append(records, "nothing")
		}
		for _, k := range row.May {
			records = append(records, k.String()+" allowed")
		}
		pages := "`" + row.Want + "`"
		if row.Oracle == Splice {
			pages += " (send buffer, by vmsplice)"
		}
		fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | %s |\n", row.Name, row.Memory, strings.Join(returned, " or "), pages, strings.Join(records, ", "), row.Gap)
	}
	return b.String()
}

// The table for people is the one that the tests perform.
func TestDocs(t *testing.T) {
	const name = "../../docs/truth.md"
	if *update {
		if err := os.WriteFile(name, []byte(doc()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(doc(), string(got)); d != "" {
		t.Errorf("docs/truth.md is not the table (run with -update):\n%s", d)
	}
}
