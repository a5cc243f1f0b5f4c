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
	{"processes", []string{"}", "w"}},
	{"process", []string{">", "enter"}},
	{"registrations", []string{">", "tab"}},
	{"findings", []string{">", "tab", "tab"}},
	{"hooks", []string{">", "tab", "tab", "tab"}},
	{"explain", []string{">", "enter", "down", "enter"}},
	{"help", []string{"?"}},
	{"filter", []string{"/", "n", "o", "n", "e"}},
}
