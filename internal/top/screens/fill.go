// SPDX-License-Identifier: Apache-2.0

package screens

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// block is a place for a screen in a document.
var block = regexp.MustCompile(`(?s)<!-- screen ([a-z]+) (\d+)x(\d+) -->\n.*?<!-- end -->`)

// Fill draws the screens that a document asks for, from a recording:
//
//	<!-- screen NAME WIDTHxHEIGHT -->
//	whatever was here before
//	<!-- end -->
func Fill(document, recording string) (string, error) {
	var failed error
	out := block.ReplaceAllStringFunc(document, func(s string) string {
		m := block.FindStringSubmatch(s)
		text, err := draw(m[1], m[2], m[3], recording)
		if err != nil && failed == nil {
			failed = err
		}
		return fmt.Sprintf("<!-- screen %s %sx%s -->\n```text\n%s```\n<!-- end -->", m[1], m[2], m[3], text)
	})
	return out, failed
}

func draw(name, width, height, recording string) (string, error) {
	w, err1 := strconv.Atoi(width)
	h, err2 := strconv.Atoi(height)
	if err1 != nil || err2 != nil {
		return "", fmt.Errorf("draw %s: %sx%s is no size", name, width, height)
	}
	for _, s := range Scenes {
		if s.Name != name {
			continue
		}
		p, closer, err := Open(recording, w, h)
		if err != nil {
			return "", fmt.Errorf("draw %s: %w", name, err)
		}
		defer closer.Close()
		if err := p.Press(s.Keys...); err != nil {
			return "", fmt.Errorf("draw %s: %w", name, err)
		}
		return strings.TrimRight(p.Screen(), "\n") + "\n", nil
	}
	return "", fmt.Errorf("draw %s: no such scene", name)
}
