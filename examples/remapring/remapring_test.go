// SPDX-License-Identifier: Apache-2.0

//go:build linux

package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"go.uber.org/goleak"

	"github.com/ummu/ummu/regcache/ibv"
	"github.com/ummu/ummu/test/machine"
)

var tierFlag = flag.String("tier", "syscall", "of the feed")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestOptions(t *testing.T) {
	for _, args := range [][]string{{"-size", "0"}, {"-size", "1000000"}, {"-blocks", "0"}, {"-modes", "magic"}, {"-tier", "magic"}} {
		if err := run(t.Context(), args, os.Stdout); err == nil || errors.Is(err, ibv.ErrNoDevice) {
			t.Errorf("%v: %v", args, err)
		}
	}
}

func TestNoDevice(t *testing.T) {
	err := run(t.Context(), []string{"-device", "no-such-device"}, os.Stdout)
	if !errors.Is(err, ibv.ErrNoDevice) && !errors.Is(err, ibv.ErrNotBuilt) {
		t.Error(err)
	}
}

var line = regexp.MustCompile(`(?m)^(\S+) +(\d+) messages, (\d+) a second, [0-9.]+ registrations per message \((\d+)\), stale bytes (\d+)$`)

// No stale bytes with the cache or an on-demand region, and many without. The
// cache registers each block once for each time its pages are new.
func TestRing(t *testing.T) {
	machine.NeedRDMA(t)
	const messages, blocks, pages = 512, 4, 16
	var out strings.Builder
	err := run(t.Context(), []string{"-tier", *tierFlag, "-modes", "cache,on-demand,naive",
		"-messages", fmt.Sprint(messages), "-blocks", fmt.Sprint(blocks), "-pages", fmt.Sprint(pages)}, &out)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", &out)
	got := map[string][]string{}
	for _, m := range line.FindAllStringSubmatch(out.String(), -1) {
		got[m[1]] = m[2:]
		t.Attr(m[1], m[2]+" messages, "+m[3]+" a second, "+m[4]+" registrations, "+m[5]+" stale bytes")
		if m[2] != fmt.Sprint(messages) {
			t.Errorf("%s: %s messages", m[1], m[2])
		}
	}
	if n := got["cache"]; n == nil || n[3] != "0" {
		t.Errorf("cache: %v", n)
	} else if regs, err := strconv.Atoi(n[2]); err != nil || regs < messages/pages || regs > messages/2 {
		t.Errorf("cache: %s registrations, %d are needed", n[2], messages/pages)
	}
	if n := got["on-demand"]; n == nil && !strings.Contains(out.String(), "on-demand  not on this device") || n != nil && (n[2] != "1" || n[3] != "0") {
		t.Errorf("on-demand: %v", n)
	}
	if n := got["naive"]; n == nil || n[3] == "0" {
		t.Errorf("naive: %v: nothing goes wrong, what is shown here?", n)
	}
}
