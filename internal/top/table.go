// SPDX-License-Identifier: Apache-2.0

package top

import (
	"slices"
	"strings"

	"github.com/charmbracelet/x/ansi"
)

// column is one column of a table of T.
type column[T any] struct {
	title string
	width int
	left  bool // aligned to the left; else to the right
	flex  bool // gets what is left over
	// rank says which columns go where there is not room for all: the highest
	// first. Those of rank 0 stay.
	rank int
	text func(T) string
	// compare sorts, smallest first; nil: the column does not sort.
	compare func(a, b T) int
	// falling: the largest are interesting, and come first.
	falling bool
}

// table is a list of T on the screen: sorted, filtered, with a cursor.
type table[T any] struct {
	columns []column[T]
	key     func(T) string // names a row; the cursor stays on it
	find    func(T) string // what the filter looks at, in lower case
	bad     func(T) bool   // rows that should be seen; may be nil

	source  []T
	rows    []T // those that are shown, sorted
	cursor  int
	offset  int
	at      string // key of the row under the cursor
	moved   bool   // somebody put the cursor there
	sort    int    // column
	reverse bool
	filter  string
}

// lister is a table of whatever.
type lister interface {
	move(by int)
	home()
	end()
	selected() string
	nextSort()
	turn()
	setFilter(string)
	filtered() string
	refresh()
	scroll(height int)
	view(width, height int, th theme) []string
	sortedBy() string
	length() (shown, all int)
}

// set gives the table new rows, which become its own.
func (t *table[T]) set(rows []T) {
	t.source = rows
	t.refresh()
}

// refresh filters and sorts again.
func (t *table[T]) refresh() {
	rows := t.rows[:0]
	for _, x := range t.source {
		if t.filter == "" || strings.Contains(t.find(x), t.filter) {
			rows = append(rows, x)
		}
	}
	if c := t.columns[t.sort]; c.compare != nil {
		slices.SortStableFunc(rows, func(a, b T) int {
			n := c.compare(a, b)
			if c.falling != t.reverse {
				n = -n
			}
			return n
		})
	}
	t.rows = rows
	if t.moved && t.at != "" {
		if i := slices.IndexFunc(rows, func(x T) bool { return t.key(x) == t.at }); i >= 0 {
			t.cursor = i
		}
	}
	t.settle()
}

// settle keeps the cursor on a row and remembers which.
func (t *table[T]) settle() {
	t.cursor = max(0, min(t.cursor, len(t.rows)-1))
	t.at = ""
	if len(t.rows) > 0 {
		t.at = t.key(t.rows[t.cursor])
	}
}

func (t *table[T]) move(by int) {
	t.cursor += by
	t.moved = true
	t.settle()
}

func (t *table[T]) home() {
	t.cursor, t.moved = 0, false // the first row, whichever it is
	t.settle()
}

func (t *table[T]) end() { t.move(len(t.rows)) }

func (t *table[T]) selected() string { return t.at }

func (t *table[T]) current() (x T, ok bool) {
	if len(t.rows) == 0 {
		return x, false
	}
	return t.rows[t.cursor], true
}

func (t *table[T]) nextSort() {
	for range t.columns {
		t.sort = (t.sort + 1) % len(t.columns)
		if t.columns[t.sort].compare != nil {
			break
		}
	}
	t.reverse = false
	t.refresh()
}

func (t *table[T]) turn() {
	t.reverse = !t.reverse
	t.refresh()
}

func (t *table[T]) setFilter(s string) {
	t.filter = strings.ToLower(s)
	t.refresh()
}

func (t *table[T]) filtered() string { return t.filter }
func (t *table[T]) sortedBy() string { return t.columns[t.sort].title }

func (t *table[T]) length() (shown, all int) { return len(t.rows), len(t.source) }

// scroll makes the cursor visible in a table of this height, title included.
func (t *table[T]) scroll(height int) {
	n := max(height-1, 1)
	t.offset = max(t.cursor-n+1, min(t.offset, t.cursor))
	t.offset = max(0, min(t.offset, len(t.rows)-n))
}

// room is the width of a column: its title has an arrow when it sorts.
func (c *column[T]) room() int {
	if c.compare == nil {
		return max(c.width, len(c.title))
	}
	return max(c.width, len(c.title)+1)
}

// visible are the columns that have room, and the width of the flexible one.
func (t *table[T]) visible(width int) (shown []int, flex int) {
	for i := range t.columns {
		shown = append(shown, i)
	}
	for {
		sum, worst := len(shown)-1, -1
		for j, i := range shown {
			sum += t.columns[i].room()
			if r := t.columns[i].rank; r > 0 && (worst < 0 || r >= t.columns[shown[worst]].rank) {
				worst = j
			}
		}
		if sum <= width || worst < 0 {
			return shown, max(0, width-sum)
		}
		shown = slices.Delete(shown, worst, worst+1)
	}
}

// view draws a title and the rows around the cursor into width times height
// cells. The first cell of a line marks the cursor.
func (t *table[T]) view(width, height int, th theme) []string {
	shown, flex := t.visible(width - 1)
	line := func(mark string, cell func(i int) string) string {
		var b strings.Builder
		b.WriteString(mark)
		for j, i := range shown {
			c := &t.columns[i]
			if j > 0 {
				b.WriteByte(' ')
			}
			w := c.room()
			if c.flex {
				w += flex
			}
			s := cell(i)
			if j == len(shown)-1 && c.left {
				s = cut(s, w)
			} else {
				s = fit(s, w, !c.left)
			}
			b.WriteString(s)
		}
		return ansi.Truncate(b.String(), width, "")
	}
	out := []string{th.title(line(" ", func(i int) string {
		s := t.columns[i].title
		if i == t.sort && t.columns[i].compare != nil {
			arrow := "^"
			if t.columns[i].falling != t.reverse {
				arrow = "v"
			}
			s += arrow
		}
		return s
	}))}
	for i := t.offset; i < len(t.rows) && len(out) < height; i++ {
		x := t.rows[i]
		cell := func(c int) string { return t.columns[c].text(x) }
		switch {
		case i == t.cursor:
			out = append(out, th.cursor(fit(line(">", cell), width, false)))
		case t.bad != nil && t.bad(x):
			out = append(out, th.bad(line(" ", cell)))
		default:
			out = append(out, line(" ", cell))
		}
	}
	return out
}

// print is the table as text of any width: titles, then every row.
func (t *table[T]) print() string {
	widths := make([]int, len(t.columns))
	cells := make([][]string, 0, len(t.rows)+1)
	var head []string
	for _, c := range t.columns {
		head = append(head, c.title)
	}
	cells = append(cells, head)
	for _, x := range t.rows {
		var r []string
		for _, c := range t.columns {
			r = append(r, c.text(x))
		}
		cells = append(cells, r)
	}
	for _, r := range cells {
		for i, s := range r {
			widths[i] = max(widths[i], ansi.StringWidth(s))
		}
	}
	var b strings.Builder
	for _, r := range cells {
		var l strings.Builder
		for i, s := range r {
			if i > 0 {
				l.WriteString("  ")
			}
			l.WriteString(fit(s, widths[i], !t.columns[i].left))
		}
		b.WriteString(strings.TrimRight(l.String(), " "))
		b.WriteByte('\n')
	}
	return b.String()
}
