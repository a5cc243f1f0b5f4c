// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"
)

// WriteTable writes the report for people.
func (r *Report) WriteTable(w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "device: %s\n", r.Device)
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "change\tthreads\ttransfers\tstale without feed\tstale with feed\thits with feed\n")
	for _, row := range r.Rows {
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\t%d\t%d\n", row.Change, row.Threads,
			row.WithFeed.Transfers, row.WithoutFeed.Stale, row.WithFeed.Stale, row.WithFeed.Hits)
	}
	t.Flush()
	b.WriteByte('\n')
	t = tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	fmt.Fprintf(t, "\twithout feed\twith feed\n")
	n, y := r.WithoutFeed, r.WithFeed
	fmt.Fprintf(t, "stale transfers\t%d of %d\t%d of %d\n", n.Stale, n.Transfers, y.Stale, y.Transfers)
	fmt.Fprintf(t, "hit rate\t%.1f %%\t%.1f %%\n", 100*n.HitRate, 100*y.HitRate)
	fmt.Fprintf(t, "ns per lookup\t%.0f\t%.0f\n", n.LookupNS, y.LookupNS)
	fmt.Fprintf(t, "ns per munmap\t%.0f\t%.0f (x%.2f)\n", n.MunmapNS, y.MunmapNS, r.MunmapRatio)
	t.Flush()
	if r.LeftOut != "" {
		fmt.Fprintf(&b, "left out: %s\n", r.LeftOut)
	}
	if len(y.Uncached) > 0 {
		var why []string
		for reason, n := range y.Uncached {
			why = append(why, fmt.Sprintf("%s %d", reason, n))
		}
		slices.Sort(why)
		fmt.Fprintf(&b, "not cached: %s\n", strings.Join(why, ", "))
	}
	_, err := io.WriteString(w, b.String())
	return err
}
