// SPDX-License-Identifier: Apache-2.0

// Conform runs programs under strace under ummufeed and compares what the two
// saw. Exit code: 0 if they agree, 1 if not or if a program could not be run,
// 2 for wrong usage.
package main

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	"github.com/ummu/ummu/internal/conform"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx)
	stop()
	os.Exit(code)
}

func run(ctx context.Context) int {
	var o conform.Options
	flag.StringVar(&o.Ummufeed, "ummufeed", "bin/ummufeed", "the program under test")
	flag.StringVar(&o.Strace, "strace", "", "strace to compare with (default: from PATH)")
	flag.StringVar(&o.Keep, "keep", "", "keep both outputs of each program in this directory")
	flag.DurationVar(&o.Timeout, "timeout", 0, "time for each program (default 2m)")
	sources := flag.String("programs", "test/programs", "directory of the test programs' sources")
	output := flag.String("o", "table", "output format: table or json")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: conform [flags] [PROGRAM...]")
		flag.PrintDefaults()
	}
	flag.Parse()
	if *output != "table" && *output != "json" {
		fmt.Fprintf(os.Stderr, "conform: unknown output format %q (known: table, json)\n", *output)
		return 2
	}
	for _, path := range []*string{&o.Ummufeed, &o.Keep} {
		if *path == "" {
			continue
		}
		abs, err := filepath.Abs(*path)
		if err != nil {
			fmt.Fprintln(os.Stderr, "conform:", err)
			return 1
		}
		*path = abs
	}
	all, err := conform.Programs(*sources)
	if err != nil {
		fmt.Fprintln(os.Stderr, "conform:", err)
		return 1
	}
	programs, err := conform.Select(all, flag.Args())
	if err != nil {
		fmt.Fprintln(os.Stderr, "conform:", err)
		return 2
	}

	code := 0
	results := []*conform.Result{}
	for _, p := range programs {
		r, err := conform.Run(ctx, p, o)
		if err != nil {
			fmt.Fprintln(os.Stderr, "conform:", err)
			code = 1
			if ctx.Err() != nil {
				break
			}
			continue
		}
		results = append(results, r)
		if *output == "table" {
			fmt.Println(r)
		}
		if !r.OK() {
			code = 1
			for _, problem := range r.Problems {
				fmt.Fprintf(os.Stderr, "conform: %s: %s\n", r.Program, problem)
			}
		}
	}
	if *output == "json" {
		e := json.NewEncoder(os.Stdout)
		e.SetIndent("", "  ")
		if err := e.Encode(struct {
			OK       bool              `json:"ok"`
			Programs []*conform.Result `json:"programs"`
		}{code == 0, results}); err != nil {
			fmt.Fprintln(os.Stderr, "conform: write result:", err)
			return 1
		}
	}
	return code
}
