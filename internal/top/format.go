// SPDX-License-Identifier: Apache-2.0

package top

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/charmbracelet/x/ansi"

	"github.com/ummu/ummu/mm"
)

// number is n in at most five cells.
func number(n float64) string {
	switch {
	case n == 0:
		return "0"
	case n < 9.95:
		return strings.TrimSuffix(strconv.FormatFloat(n, 'f', 1, 64), ".0")
	case n < 99999.5:
		return strconv.FormatFloat(n, 'f', 0, 64)
	}
	return scaled(n, 1000, "kMGTPE")
}

// size is a number of bytes in at most five cells.
func size(n uint64) string {
	if n < 1024 {
		return strconv.FormatUint(n, 10)
	}
	return scaled(float64(n), 1024, "KMGTPE")
}

func scaled(n, base float64, units string) string {
	i := -1
	for n >= base-0.5 && i < len(units)-1 {
		n /= base
		i++
	}
	if n < 99.95 {
		return strings.TrimSuffix(strconv.FormatFloat(n, 'f', 1, 64), ".0") + units[i:i+1]
	}
	return strconv.FormatFloat(n, 'f', 0, 64) + units[i:i+1]
}

// sizeOf is the size of a range; "-" where it is not known.
func sizeOf(r mm.Range) string {
	if r.Empty() || r.End == mm.MaxAddr {
		return "-"
	}
	return size(r.Len())
}

// age is a duration in at most six cells.
func age(d time.Duration) string {
	switch s := int(d.Seconds()); {
	case d < 0:
		return "-"
	case d < time.Millisecond:
		return fmt.Sprintf("%dus", d.Microseconds())
	case s < 1:
		return fmt.Sprintf("%dms", d.Milliseconds())
	case s < 60:
		return fmt.Sprintf("%ds", s)
	case s < 3600:
		return fmt.Sprintf("%dm%02ds", s/60, s%60)
	case s < 86400:
		return fmt.Sprintf("%dh%02dm", s/3600, s/60%60)
	default:
		return fmt.Sprintf("%dd%02dh", s/86400, s/3600%24)
	}
}

// fit cuts s to width cells, with an ellipsis, and fills it up.
func fit(s string, width int, right bool) string {
	if width <= 0 {
		return ""
	}
	n := ansi.StringWidth(s)
	if n > width {
		s = ansi.Truncate(s, width, "~")
		n = ansi.StringWidth(s)
	}
	fill := strings.Repeat(" ", width-n)
	if right {
		return fill + s
	}
	return s + fill
}

// cut is fit without filling up.
func cut(s string, width int) string {
	if width <= 0 {
		return ""
	}
	return ansi.Truncate(s, width, "~")
}

// wrap breaks words into lines of at most width cells.
func wrap(s string, width int) []string {
	if width <= 0 {
		return nil
	}
	return strings.Split(ansi.Wrap(s, width, ""), "\n")
}

var bars = []rune(" ▁▂▃▄▅▆▇█")

// sparkline draws values, the highest of which fills a cell.
func sparkline(values []uint32) string {
	var top uint32
	for _, v := range values {
		top = max(top, v)
	}
	var b strings.Builder
	for _, v := range values {
		i := 0
		if v > 0 {
			i = 1 + int(uint64(v)*uint64(len(bars)-2)/uint64(top))
		}
		b.WriteRune(bars[i])
	}
	return b.String()
}
