// SPDX-License-Identifier: Apache-2.0

package screens

// Scene is a view of the golden recording, and what is pressed to get there.
type Scene struct {
	Name string
	Keys []string
}

// Scenes are the views that are shown in the documentation and compared in
// tests.
var Scenes = []Scene{
	{"processes", []string{"right", "right", "right", "w"}},
	{"process", []string{"right", "right", "right", "/", "a", "p", "p", "enter", "enter"}},
	{"registrations", []string{"right", "right", "right", "tab"}},
	{"findings", []string{">", "tab", "tab"}},
	{"finding", []string{">", "tab", "tab", "down", "enter"}},
	{"hooks", []string{">", "tab", "tab", "tab"}},
	{"explain", []string{">", "tab", "tab", "down", "enter", "enter"}},
	{"help", []string{"?"}},
	{"filter", []string{">", "/", "n", "o", "n", "e"}},
}
