// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/ummu/ummu/internal/command"
	"github.com/ummu/ummu/internal/top"
)

// broken is a source that panics at its second question.
type broken struct{ asked int }

func (b *broken) State(context.Context, top.Query) (*top.State, error) {
	if b.asked++; b.asked > 1 {
		panic("broken")
	}
	return nil, fmt.Errorf("not yet")
}

// stuck is an error that the screen never gets over.
type stuck struct{}

func (stuck) Error() string {
	fmt.Fprint(os.Stdout, "it hangs")
	select {}
}

func (stuck) State(context.Context, top.Query) (*top.State, error) { return nil, stuck{} }

// hanging is a screen over such a source.
func hanging() int {
	err := showScreen(command.Standard(), &options{delay: 100 * time.Millisecond}, &data{Source: stuck{}})
	fmt.Fprintln(os.Stderr, "error:", err)
	return 1
}

// panicking is a screen over such a source; it returns an exit code.
func panicking() int {
	err := showScreen(command.Standard(), &options{delay: 100 * time.Millisecond}, &data{Source: &broken{}})
	fmt.Fprintln(os.Stderr, "error:", err)
	return 1
}
