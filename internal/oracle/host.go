// SPDX-License-Identifier: Apache-2.0

package oracle

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync/atomic"
	"time"
)

// Argument is the first argument of a target process; the second is the tier,
// the third whether a witness may look as well.
const Argument = "oracle-target"

const (
	witnessed = "witnessed"
	alone     = "alone"
)

// runLimit bounds one program, which takes some 100 ms.
const runLimit = 60 * time.Second

// Target is a process that runs programs, made anew when it dies. It is for
// one goroutine.
type Target struct {
	// Tier is the name of the tier: "syscall", "mm", "notifier/probe" or
	// "notifier/tracepoint".
	Tier string
	// Command is the program to run; empty: this one, which must call [Main].
	Command string
	// Env is added to the environment.
	Env []string
	// Alone: KVM's tracepoint is not to look as well.
	Alone bool
	// Witness tells whether KVM's tracepoint looks as well; valid after Run.
	Witness bool

	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *json.Decoder
	errs bytes.Buffer
}

func (t *Target) start() error {
	if _, err := tierOf(t.Tier); err != nil {
		return err
	}
	command := t.Command
	if command == "" {
		command = "/proc/self/exe"
	}
	t.errs.Reset()
	who := witnessed
	if t.Alone {
		who = alone
	}
	cmd := exec.Command(command, Argument, t.Tier, who)
	cmd.Env = append(os.Environ(), t.Env...)
	cmd.Stderr = &t.errs
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start target: %w", err)
	}
	t.cmd, t.in, t.out = cmd, in, json.NewDecoder(out)
	var h hello
	if err := t.answer(&h); err != nil {
		return fmt.Errorf("start target: %w", err)
	}
	if h.Error != "" {
		t.Close()
		return fmt.Errorf("start target: %s", h.Error)
	}
	t.Witness = h.Witness
	return nil
}

// errDied is wrapped by the error of a target that ended or hung.
var errDied = errors.New("target died")

// answer reads one answer. If there is none in time the target is killed.
func (t *Target) answer(to any) error {
	cmd := t.cmd
	var hung atomic.Bool
	limit := time.AfterFunc(runLimit, func() {
		hung.Store(true)
		cmd.Process.Kill()
	})
	err := t.out.Decode(to)
	limit.Stop()
	if err == nil {
		return nil
	}
	cmd.Process.Kill()
	end := cmd.Wait()
	t.cmd = nil
	said := t.errs.String()
	if len(said) > 4000 {
		said = said[:4000]
	}
	if hung.Load() {
		return fmt.Errorf("%w: no answer in %v\n%s", errDied, runLimit, said)
	}
	return fmt.Errorf("%w: %v\n%s", errDied, end, said)
}

// Run runs a program. If the target dies of it that is the finding. An error
// means that nothing can be said.
func (t *Target) Run(p Program) (*Result, error) {
	if t.cmd == nil {
		if err := t.start(); err != nil {
			return nil, err
		}
	}
	if err := json.NewEncoder(t.in).Encode(p.Encode()); err != nil {
		t.Close()
		return nil, fmt.Errorf("send program: %w", err)
	}
	r := new(Result)
	if err := t.answer(r); errors.Is(err, errDied) {
		return &Result{Finding: &Finding{Kind: Died, What: err.Error()}}, nil
	} else if err != nil {
		return nil, err
	}
	if r.Error != "" {
		t.Close() // in what state it is nobody knows
		return nil, fmt.Errorf("run program: %s", r.Error)
	}
	return r, nil
}

// Close ends the process. The next Run starts another one.
func (t *Target) Close() error {
	if t.cmd == nil {
		return nil
	}
	cmd := t.cmd
	t.cmd = nil
	t.in.Close()
	limit := time.AfterFunc(runLimit, func() { cmd.Process.Kill() })
	defer limit.Stop()
	if err := cmd.Wait(); err != nil {
		return fmt.Errorf("end target: %w\n%s", err, t.errs.String())
	}
	return nil
}

// shrinkLimit bounds the time for one finding.
const shrinkLimit = 60 * time.Second

// Shrink returns the smallest program it finds that repeats the finding f of
// p, and what that one ends with; nil if p does not repeat it in 20 runs.
func (t *Target) Shrink(p Program, f *Finding) (Program, *Finding, error) {
	if f.Kind != Died {
		p = p[:f.Step+1]
	}
	deadline := time.Now().Add(shrinkLimit)
	tries := 20
	var fail error
	repeat := func(q Program) *Finding {
		for range tries {
			if fail != nil || time.Now().After(deadline) {
				return nil
			}
			r, err := t.Run(q)
			if err != nil {
				fail = err
				return nil
			}
			if r.Finding != nil && r.Finding.Kind == f.Kind {
				return r.Finding
			}
		}
		return nil
	}
	sure := 0
	var last *Finding
	for range 5 {
		if g := repeat(p); g != nil {
			last = g
			sure++
		}
		if last == nil {
			return nil, nil, fail
		}
	}
	if tries = 1; sure < 5 {
		tries = 10 // a race
	}
	p, last = shrink(p, last, repeat)
	return p, last, fail
}

// shrink removes steps, in ever smaller pieces, and makes the others plainer,
// as long as repeat says that the finding is still there.
func shrink(p Program, last *Finding, repeat func(Program) *Finding) (Program, *Finding) {
	try := func(q Program) bool {
		g := repeat(q)
		if g == nil {
			return false
		}
		p, last = q, g
		return true
	}
	for size := (len(p) + 1) / 2; size > 0; {
		removed := false
		for from := 0; from < len(p); {
			to := min(from+size, len(p))
			if to-from < len(p) && try(append(append(Program{}, p[:from]...), p[to:]...)) {
				removed = true
			} else {
				from = to
			}
		}
		if !removed || size > 1 {
			size /= 2
		}
	}
	for i := range p {
		for _, plain := range []func(*Step){
			func(s *Step) { s.With = false },
			func(s *Step) { s.How = Direct },
			func(s *Step) { s.Thread = 0 },
			func(s *Step) { s.Area = Small },
			func(s *Step) { s.Pages = 1 },
		} {
			q := append(Program{}, p...)
			plain(&q[i])
			if q[i] != p[i] {
				try(q)
			}
		}
	}
	return p, last
}
