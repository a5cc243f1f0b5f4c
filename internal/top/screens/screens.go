// SPDX-License-Identifier: Apache-2.0

// Package screens plays keys on a screen over a recording, without a terminal
// and without time passing: for golden tests and for the captures in the
// documentation.
package screens

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	tea "charm.land/bubbletea/v2"

	"github.com/ummu/ummu/internal/activity"
	"github.com/ummu/ummu/internal/source"
	"github.com/ummu/ummu/internal/top"
)

// Player plays keys on a screen.
type Player struct {
	m    tea.Model
	left bool
}

// New returns a screen of this size, without styles, in UTC.
func New(s top.Source, width, height int, o top.Options) *Player {
	o.Plain, o.Location, o.Interval = true, time.UTC, time.Second
	p := &Player{m: top.New(s, o)}
	p.Send(tea.WindowSizeMsg{Width: width, Height: height})
	p.run(p.m.Init())
	return p
}

// Open is New over a recording.
func Open(file string, width, height int) (*Player, io.Closer, error) {
	r, err := source.NewReplay(filepath.Base(file), func() (io.ReadCloser, error) { return os.Open(file) }, activity.Options{})
	if err != nil {
		return nil, nil, err
	}
	return New(r, width, height, top.Options{}), r, nil
}

// Send delivers a message, and those of the commands that follow from it.
func (p *Player) Send(msg tea.Msg) {
	var cmd tea.Cmd
	p.m, cmd = p.m.Update(msg)
	p.run(cmd)
}

// run runs a command and delivers what comes of it.
func (p *Player) run(cmd tea.Cmd) {
	if cmd == nil {
		return
	}
	switch msg := cmd().(type) {
	case nil:
	case tea.QuitMsg:
		p.left = true
	case tea.BatchMsg:
		for _, c := range msg {
			p.run(c)
		}
	default:
		p.Send(msg)
	}
}

// Press presses keys, by their names: "enter", "ctrl+c", "G".
func (p *Player) Press(keys ...string) error {
	for _, k := range keys {
		msg, err := Key(k)
		if err != nil {
			return err
		}
		p.Send(msg)
	}
	return nil
}

// Left reports whether a key has ended the program.
func (p *Player) Left() bool { return p.left }

// Screen is what is seen, trailing blanks removed.
func (p *Player) Screen() string { return p.m.(top.Model).View().Content + "\n" }

// named are keys with a name.
var named = map[string]rune{
	"enter": tea.KeyEnter, "esc": tea.KeyEscape, "tab": tea.KeyTab, "up": tea.KeyUp, "down": tea.KeyDown, "left": tea.KeyLeft,
	"right": tea.KeyRight, "home": tea.KeyHome, "end": tea.KeyEnd, "pgup": tea.KeyPgUp, "pgdown": tea.KeyPgDown, "backspace": tea.KeyBackspace,
}

// Key is the message of a key.
func Key(name string) (tea.KeyPressMsg, error) {
	var mod tea.KeyMod
	rest := name
	for {
		var ok bool
		if rest, ok = strings.CutPrefix(rest, "ctrl+"); ok {
			mod |= tea.ModCtrl
			continue
		}
		if rest, ok = strings.CutPrefix(rest, "shift+"); ok {
			mod |= tea.ModShift
			continue
		}
		break
	}
	if code, ok := named[rest]; ok {
		return tea.KeyPressMsg{Code: code, Mod: mod}, nil
	}
	runes := []rune(rest)
	if len(runes) != 1 {
		return tea.KeyPressMsg{}, fmt.Errorf("unknown key %q", name)
	}
	k := tea.KeyPressMsg{Code: runes[0], Mod: mod}
	if mod == 0 {
		k.Text = rest
	}
	return k, nil
}
