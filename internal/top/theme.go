// SPDX-License-Identifier: Apache-2.0

package top

import "charm.land/lipgloss/v2"

// theme is how things are set off. Without styles everything still reads: the
// cursor has a mark, and states are words.
type theme struct {
	plain                        bool
	titles, cursors, bads, goods lipgloss.Style
}

// newTheme uses the terminal's own sixteen colours, whatever they are.
func newTheme(plain bool) theme {
	s := lipgloss.NewStyle
	return theme{
		plain:   plain,
		titles:  s().Bold(true),
		cursors: s().Reverse(true),
		bads:    s().Bold(true).Foreground(lipgloss.Red),
		goods:   s().Foreground(lipgloss.Green),
	}
}

func (t theme) apply(s lipgloss.Style, text string) string {
	if t.plain || text == "" {
		return text
	}
	return s.Render(text)
}

func (t theme) title(s string) string  { return t.apply(t.titles, s) }
func (t theme) cursor(s string) string { return t.apply(t.cursors, s) }
func (t theme) bad(s string) string    { return t.apply(t.bads, s) }
func (t theme) good(s string) string   { return t.apply(t.goods, s) }
