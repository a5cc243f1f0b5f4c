// SPDX-License-Identifier: Apache-2.0

package top

import (
	"charm.land/bubbles/v2/key"
)

// keyMap is every key there is. Help is made from it.
type keyMap struct {
	up, down, pageUp, pageDown, home, end      key.Binding
	enter, back, next, previous, explain       key.Binding
	filter, sort, reverse, window, pause, seen key.Binding
	backward, forward, farBack, farForward     key.Binding
	first, last                                key.Binding
	help, quit, interrupt                      key.Binding
}

func bind(help, what string, keys ...string) key.Binding {
	return key.NewBinding(key.WithKeys(keys...), key.WithHelp(help, what))
}

func newKeyMap() keyMap {
	return keyMap{
		up:         bind("up/k", "up", "up", "k"),
		down:       bind("down/j", "down", "down", "j"),
		pageUp:     bind("pgup", "page up", "pgup", "ctrl+b"),
		pageDown:   bind("pgdn", "page down", "pgdown", "ctrl+f"),
		home:       bind("home/g", "first row", "home", "g"),
		end:        bind("end/G", "last row", "end", "G"),
		enter:      bind("enter", "open", "enter"),
		back:       bind("esc", "back", "esc"),
		next:       bind("tab", "next view", "tab"),
		previous:   bind("shift+tab", "view before", "shift+tab"),
		explain:    bind("e", "explain an address", "e"),
		filter:     bind("/", "filter", "/"),
		sort:       bind("s", "sort by next column", "s"),
		reverse:    bind("S", "turn the order", "S"),
		window:     bind("w", "rates over 1s, 10s, 1m", "w"),
		pause:      bind("p", "pause", "p"),
		seen:       bind("a", "acknowledge losses", "a"),
		backward:   bind("left/[", "1 s back", "left", "["),
		forward:    bind("right/]", "1 s on", "right", "]"),
		farBack:    bind("{", "10 s back", "{"),
		farForward: bind("}", "10 s on", "}"),
		first:      bind("<", "to the begin", "<"),
		last:       bind(">", "to the end", ">"),
		help:       bind("?", "help", "?"),
		quit:       bind("q", "leave", "q"),
		interrupt:  bind("ctrl+c", "leave", "ctrl+c"),
	}
}

// replaying enables the keys that move in time.
func (k *keyMap) replaying(on bool) {
	for _, b := range []*key.Binding{&k.backward, &k.forward, &k.farBack, &k.farForward, &k.first, &k.last} {
		b.SetEnabled(on)
	}
}

// ShortHelp are the keys of the last line.
func (k keyMap) ShortHelp() []key.Binding {
	return []key.Binding{k.help, k.quit, k.next, k.enter, k.back, k.filter, k.sort, k.pause, k.backward, k.forward, k.explain, k.window}
}

// FullHelp are all.
func (k keyMap) FullHelp() [][]key.Binding {
	return [][]key.Binding{
		{k.up, k.down, k.pageUp, k.pageDown, k.home, k.end, k.enter, k.back, k.next, k.previous},
		{k.explain, k.filter, k.sort, k.reverse, k.window, k.pause, k.seen, k.help, k.quit, k.interrupt},
		{k.backward, k.forward, k.farBack, k.farForward, k.first, k.last},
	}
}
