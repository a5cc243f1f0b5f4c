# SPDX-License-Identifier: Apache-2.0

GO      ?= go
PREFIX  ?= /usr/local
UNITDIR ?= $(PREFIX)/lib/systemd/system
DESTDIR ?=

.PHONY: help
help:
	@echo 'make demo          stale transfers without the feed, none with it'
	@echo 'make test          set up what is missing, then every test, with the race detector'
	@echo 'make conform       real programs, compared call by call with strace'
	@echo 'make bench         benchmarks, and the cost for a process nobody watches'
	@echo 'make lint          gofmt, go vet, staticcheck, SPDX lines, import directions, scripts'
	@echo 'make generate      BPF objects and Go bindings again (clang-16)'
	@echo 'make install       PREFIX=$(PREFIX) DESTDIR=$(DESTDIR)'
	@echo 'make packages      .deb, .rpm and a tarball, in out/packages'
	@echo 'make races         a million rounds of each race of the protocol'
	@echo 'make cases         every test that docs/cases.md names: ran, and passed'
	@echo 'make guards        each step of the protocol left out in turn: its test must fail'
	@echo 'make test-package  the package, installed and used in a fresh Debian with systemd'
	@echo 'make test-vm       the tests on Debian kernels 6.1 and 6.12, in QEMU; at most 20 minutes'
	@echo 'make test-kernels  the same on 5.10, 6.18 and 7.3 as well'
	@echo 'make kill-test     the daemon killed, ended and stopped KILLS=1000 times under running programs'
	@echo 'make soak-daemon   128 programs at full speed over the daemon, FULL=60s'
	@echo 'make soak          random changes against the oracle: OPS= TIER= SEED='

.PHONY: build
build:
	@mkdir -p bin
	$(GO) build -o bin/ ./cmd/...

.PHONY: demo
demo:
	@scripts/setup demo
	@$(MAKE) --no-print-directory build
	bin/ummufeed demo

# No test skips: one that cannot get what it needs (BPF, io_uring) fails.
.PHONY: test
test:
	@scripts/setup test
	@$(MAKE) --no-print-directory build
	$(GO) test -race -shuffle=on -timeout 10m ./...

.PHONY: conform
conform: build
	$(GO) run ./internal/conform/cmd/conform $(CONFORM_FLAGS)

.PHONY: bench
bench:
	@scripts/setup bench
	@$(MAKE) --no-print-directory build
	$(GO) test -run '^$$' -bench . -benchmem ./...
	$(GO) run ./test/overhead
	hyperfine -N --warmup 3 'git --version' 'bin/ummufeed run -o ndjson -- git --version'

.PHONY: generate
generate:
	@scripts/setup generate
	$(GO) generate ./...

.PHONY: lint
lint:
	scripts/lint

.PHONY: install
install: build
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/share/doc/ummu
	install -m 0755 bin/ummufeed bin/ummutop $(DESTDIR)$(PREFIX)/bin/
	install -m 0644 README.md docs/*.md $(DESTDIR)$(PREFIX)/share/doc/ummu/
	install -d $(DESTDIR)$(UNITDIR) $(DESTDIR)$(PREFIX)/lib/sysusers.d $(DESTDIR)$(PREFIX)/lib/tmpfiles.d
	sed 's|/usr/bin/|$(PREFIX)/bin/|; s|/usr/share/|$(PREFIX)/share/|' packaging/ummufeed.service > $(DESTDIR)$(UNITDIR)/ummufeed.service
	install -m 0644 packaging/ummufeed.socket $(DESTDIR)$(UNITDIR)/
	install -m 0644 packaging/ummu.sysusers $(DESTDIR)$(PREFIX)/lib/sysusers.d/ummu.conf
	install -m 0644 packaging/ummu.tmpfiles $(DESTDIR)$(PREFIX)/lib/tmpfiles.d/ummu.conf

# .deb, .rpm and a tarball in out/packages. nfpm writes both formats from one
# file without the tools of either; it runs at a fixed version and is no
# dependency of the module.
VERSION ?= $(shell git describe --tags --match 'v[0-9]*' 2>/dev/null | sed 's/^v//' | grep . || echo 0.1.0)
NFPM    := $(GO) run github.com/goreleaser/nfpm/v2/cmd/nfpm@v2.43.0
.PHONY: packages
packages:
	@mkdir -p bin out/packages
	CGO_ENABLED=0 $(GO) build -trimpath -ldflags '-X github.com/ummu/ummu/internal/command.buildVersion=$(VERSION)' -o bin/ ./cmd/...
	VERSION=$(VERSION) GOARCH=$$($(GO) env GOARCH) $(NFPM) package -f packaging/nfpm.yaml -p deb -t out/packages/
	VERSION=$(VERSION) GOARCH=$$($(GO) env GOARCH) $(NFPM) package -f packaging/nfpm.yaml -p rpm -t out/packages/
	tar -C . --owner=0 --group=0 --transform 's|^|ummu-$(VERSION)/|' -czf out/packages/ummu-$(VERSION)-$$($(GO) env GOARCH).tar.gz bin/ummufeed bin/ummutop packaging docs README.md LICENSE

# A million rounds of each race, without the race detector, which makes the
# windows wide and the rounds few. `make test` runs some thousand with it.
ROUNDS ?= 1000000
.PHONY: races
races:
	@scripts/setup test
	$(GO) test -count 1 -timeout 60m -v -run 'TestRace|TestForked|TestShared' ./test/coherence -rounds $(ROUNDS)

# The package in a fresh Debian with systemd: installed, used by users without
# privileges, killed, removed. Not part of test: it downloads a Debian.
.PHONY: test-package
test-package:
	@scripts/setup package
	@$(MAKE) --no-print-directory packages
	test/package/run

# Every test that docs/cases.md names ran and passed. CASES_FLAGS=-race
.PHONY: cases
cases:
	@scripts/setup test
	$(GO) run ./test/cases/cmd/cases $(CASES_FLAGS)

# Each step of the protocol left out in turn: its test must fail. Writes
# docs/guards.md; about two minutes.
.PHONY: guards
guards:
	@scripts/setup test
	$(GO) run ./internal/guard/cmd/guards

# In virtual machines, two at a time. VM_FLAGS: see go run ./test/vm -h.
.PHONY: test-vm test-kernels
test-vm:
	@scripts/setup vm
	$(GO) run ./test/vm -quick $(VM_FLAGS)
test-kernels:
	@scripts/setup vm
	$(GO) run ./test/vm -kernels all $(VM_FLAGS)

# Random changes of an address space, looking for one that the tier does not
# cover: OPS=, TIER=syscall, notifier/probe or notifier/tracepoint, SEED=.
.PHONY: soak
soak:
	@scripts/setup demo
	@mkdir -p bin
	$(GO) build -o bin/soak ./test/soak
	bin/soak -ops $(or $(OPS),1000000) -tier $(or $(TIER),syscall) -seed $(or $(SEED),0)

# The daemon killed, ended and stopped at random while programs use its feed;
# about a second each time. SEED= repeats the order, not the moments.
KILLS ?= 1000
.PHONY: kill-test
kill-test:
	@scripts/setup test
	$(GO) test -count 1 -timeout 120m -v -run 'TestKill' ./test/kill -kills $(KILLS) -seed $(or $(SEED),0)

# Many programs that change and look up at full speed, each with two watches.
FULL ?= 60s
.PHONY: soak-daemon
soak-daemon:
	@scripts/setup test
	$(GO) test -count 1 -timeout 30m -v -run TestCrowd ./test/kill -full $(FULL)
