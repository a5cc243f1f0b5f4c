// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"
)

// terminal is a real one, of tmux, in which a command runs in a shell. When it
// has ended, "left CODE" is printed, and what the terminal's modes are.
type terminal struct {
	t      *testing.T
	socket string
}

// openTerminal runs ummutop in a terminal of this size. env are settings of its
// environment; asCommand may be among them.
func openTerminal(t *testing.T, width, height int, env []string, args ...string) *terminal {
	t.Helper()
	x := &terminal{t: t, socket: filepath.Join(t.TempDir(), "tmux")}
	words := append([]string{"env", asCommand + "=1"}, env...)
	words = append(words, self())
	words = append(words, args...)
	line := ""
	for _, w := range words {
		line += "'" + strings.ReplaceAll(w, "'", `'\''`) + "' "
	}
	script := "stty -echo; " + line + "; echo left $?; stty -a | grep -o -w -e -icanon -e icanon; exec sleep 1000"
	x.tmux("-f", os.DevNull, "new-session", "-d", "-x", strconv.Itoa(width), "-y", strconv.Itoa(height), script)
	t.Cleanup(func() { exec.Command("tmux", "-S", x.socket, "kill-server").Run() })
	return x
}

func (x *terminal) tmux(args ...string) string {
	x.t.Helper()
	out, err := exec.Command("tmux", append([]string{"-S", x.socket}, args...)...).CombinedOutput()
	if err != nil {
		x.t.Fatalf("tmux %q: %v\n%s", args, err, out)
	}
	return string(out)
}

func (x *terminal) screen() string {
	x.t.Helper()
	return x.tmux("capture-pane", "-p")
}

// onlyTabs matches the line of tabs with nothing opened above them.
const onlyTabs = `(?m)\[processes\].* hooks( +/.*)?$`

// press sends keys by tmux's names.
func (x *terminal) press(keys ...string) {
	x.t.Helper()
	x.tmux(append([]string{"send-keys", "--"}, keys...)...)
}

// patience is for slow machines; nothing waits for it when all is well.
const enough = 60 * time.Second

// wait waits until the screen shows all of these regular expressions, and
// returns it.
func (x *terminal) wait(shows ...string) string {
	x.t.Helper()
	var all []*regexp.Regexp
	for _, s := range shows {
		all = append(all, regexp.MustCompile(s))
	}
	seen := ""
	for end := time.Now().Add(enough); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		seen = x.screen()
		missing := false
		for _, r := range all {
			missing = missing || !r.MatchString(seen)
		}
		if !missing {
			return seen
		}
	}
	x.t.Fatalf("the screen never showed %q:\n%s", shows, seen)
	return ""
}

// restored waits until the command has left with this code, and checks that
// the terminal is as it was.
func (x *terminal) restored(code int) {
	x.t.Helper()
	x.wait(fmt.Sprintf(`(?m)^left %d$`, code), `(?m)^icanon$`)
	flags := strings.Fields(x.tmux("display-message", "-p", "#{alternate_on} #{cursor_flag} #{mouse_any_flag} #{keypad_cursor_flag}"))
	if len(flags) != 4 || flags[0] != "0" || flags[1] != "1" || flags[2] != "0" {
		x.t.Errorf("the terminal is not restored: alternate screen, cursor, mouse, keypad: %v", flags)
	}
}

// From start to end, as a person would: over a running process.
func TestTerminal(t *testing.T) {
	t.Parallel()
	pid, pages := steady(t, 5*time.Millisecond)
	number := strconv.Itoa(pid)
	x := openTerminal(t, 100, 30, nil, "--tier", "syscall", "-d", "200ms")
	x.wait(`complete`, `\[processes\]`, `CHG/Sv`)
	x.press("/", number)
	x.wait(`/` + number + ` \(1 of \d+\)`)
	x.press("Enter", "s", "s", "s", "s") // UNMAP, REPLACE, ZAP, MOVE
	x.wait(`sorted by MOVE`, `(?m)^> *`+number+` `)
	x.press("Enter")
	x.wait(`process `+number+` `, `move \d`, `MEMORY`, `mremap`, `TOP CALL SITES`, `(?m)^>.*move`)
	x.press("p")
	x.wait(`PAUSED`)
	first := x.screen()
	time.Sleep(400 * time.Millisecond) // two looks, if it were not paused
	if now := x.screen(); now != first {
		t.Errorf("paused, it changed:\n%s\n%s", first, now)
	}
	x.press("e", strings.TrimPrefix(pages[0], "0x"), "Enter", "p")
	x.wait(`address `+pages[0]+` of process `+number, `move +[0-9a-f]+-[0-9a-f]+ -> `)
	x.tmux("resize-window", "-x", "44", "-y", "11")
	x.wait(`address `+pages[0], `complete`)
	x.tmux("resize-window", "-x", "12", "-y", "3")
	x.wait(`^(in)?complete`)
	x.tmux("resize-window", "-x", "120", "-y", "40")
	x.wait(`address `+pages[0], `tier syscall`)
	x.press("Escape") // a key that follows at once would be alt and that key
	x.wait(`TOP CALL SITES`)
	x.press("Escape")
	x.wait(onlyTabs)
	x.press("Tab", "Tab", "Tab")
	x.wait(`\[hooks\]`, `tp_btf/sys_enter +attached +\S+ +\S+ +\S+ +[1-9]`)
	x.press("?")
	x.wait(`acknowledge losses`)
	x.press("q")
	x.restored(0)
}

// A recording, forwards and backwards in time.
func TestTerminalReplay(t *testing.T) {
	t.Parallel()
	x := openTerminal(t, 90, 24, nil, "--replay", golden, "-d", "200ms")
	x.wait(`recording golden`, `0s/\d+s`)
	x.press("p")
	x.wait(`PAUSED`)
	x.press(">")
	x.wait(`\(end\)`, `CHANGES`)
	x.press("<")
	x.wait(`\b0s/`)
	x.press("Right")
	x.wait(`\b1s/`)
	x.press("Left")
	x.wait(`\b0s/`)
	x.press("C-c")
	x.restored(0)
}

// The terminal is given back whatever ends the program.
func TestTerminalRestored(t *testing.T) {
	t.Parallel()
	t.Run("ctrl+c", func(t *testing.T) {
		t.Parallel()
		x := openTerminal(t, 80, 24, nil, "--replay", golden)
		x.wait(`recording`)
		x.press("/", "x", "C-c")
		x.restored(0)
	})
	for _, sig := range []string{"TERM", "HUP", "INT"} {
		t.Run(sig, func(t *testing.T) {
			t.Parallel()
			x := openTerminal(t, 80, 24, nil, "--replay", golden)
			x.wait(`recording`)
			x.signal(sig)
			x.restored(0)
		})
	}
	t.Run("hanging", func(t *testing.T) {
		t.Parallel()
		x := openTerminal(t, 80, 24, []string{asCommand + "=hang"})
		x.wait(`it hangs`)
		x.press("C-c")
		x.press("C-c")
		x.restored(exitInterrupted)
	})
	t.Run("panic", func(t *testing.T) {
		t.Parallel()
		x := openTerminal(t, 80, 24, []string{asCommand + "=panic"})
		x.wait(`error: screen: .*panic`)
		x.restored(1)
	})
}

// signal sends a signal to the program in the terminal.
func (x *terminal) signal(name string) {
	x.t.Helper()
	shell := strings.TrimSpace(x.tmux("display-message", "-p", "#{pane_pid}"))
	out, err := exec.Command("pkill", "-"+name, "-P", shell).CombinedOutput()
	if err != nil {
		x.t.Fatalf("kill: %v\n%s", err, out)
	}
}

// Terminals that can do less.
func TestTerminalKinds(t *testing.T) {
	t.Parallel()
	t.Run("unknown", func(t *testing.T) {
		t.Parallel()
		x := openTerminal(t, 80, 24, []string{"TERM=never-heard-of"}, "--replay", golden)
		x.wait(`\[processes\]`, `\[complete\]`)
		x.press("q")
		x.restored(0)
	})
	t.Run("dumb", func(t *testing.T) {
		t.Parallel()
		x := openTerminal(t, 200, 24, []string{"TERM=dumb"}, "--replay", golden, "--view", "findings")
		x.wait(`PID +COMMAND +WHAT`, `(?m)^left 0$`)
	})
	t.Run("NO_COLOR", func(t *testing.T) {
		t.Parallel()
		x := openTerminal(t, 80, 24, []string{"NO_COLOR=1"}, "--replay", golden)
		x.wait(`\[processes\]`)
		if s := x.tmux("capture-pane", "-p", "-e"); strings.Contains(s, "\x1b[3") || strings.Contains(s, "\x1b[1;3") {
			t.Errorf("colours in spite of NO_COLOR: %q", s)
		}
	})
	t.Run("colours", func(t *testing.T) {
		t.Parallel()
		x := openTerminal(t, 80, 24, []string{"TERM=xterm-256color"}, "--replay", golden)
		x.wait(`\[complete\]`)
		if s := x.tmux("capture-pane", "-p", "-e"); !strings.Contains(s, "\x1b[32m") {
			t.Errorf("no colours: %q", s)
		}
	})
}

// A program that is started, and ends while it is shown; its code is passed on.
func TestTerminalCommand(t *testing.T) {
	t.Parallel()
	x := openTerminal(t, 100, 30, nil, "--tier", "syscall", "-d", "200ms", "--", "sh", "-c", self()+" "+helperArg+" moves 50; exit 3")
	x.wait(`sh \(ended\)`, `process \d+ sh, seen since .*, ended`)
	x.press("Escape")
	x.wait(onlyTabs, `\(ended\)`)
	x.press("q")
	x.restored(3)
}

// Leaving ends the program that was started.
func TestTerminalEndsCommand(t *testing.T) {
	t.Parallel()
	x := openTerminal(t, 100, 30, nil, "--tier", "syscall", "--", "sleep", "98765")
	x.wait(`process \d+ sleep`)
	x.press("q")
	x.restored(0)
	if out, err := exec.Command("pgrep", "-f", "^sleep 98765").CombinedOutput(); err == nil {
		t.Errorf("it runs on: %s", out)
	}
}
