# `make help` lists the targets. `make demo` and `make test` need nothing but a
# Debian 12 or 13 machine and root.

# scripts/setup may have found or installed Rust here.
export PATH := $(PATH):$(HOME)/.cargo/bin

LAB := target/release/understudy-lab
DEMO_OPTIONS := $(if $(MODE),--mode $(MODE)) $(if $(CUT),--cut $(CUT)) $(if $(JSON),--json)

# With JSON=1 standard output holds nothing but the JSON; progress goes to
# standard error.
PROGRESS := $(if $(JSON),1>&2)

.PHONY: help demo deb test test-kvm test-long simulate bench bench-quick readme-table bench-compression bench-lockstep bench-restore bench-guest setup guests build lint style audit clean
.DEFAULT_GOAL := help

help: ## List the targets
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 12

demo: build guests ## Kill a VM's host; its connection lives on (CUT=network: cut it off; MODE=lockstep; JSON=1: as JSON)
	@$(LAB) demo $(DEMO_OPTIONS)

test: ## All tests; the last line is the total (SHARE=K/N: of the longest stories the K-th share alone)
	@scripts/test $(if $(SHARE),--share $(SHARE))

test-long: ## All tests, the long ones included
	@scripts/test --include-ignored

test-kvm: setup guests ## The stories on real KVM, in an emulated host (SUITE=trixie; ONLY=pattern; REPEAT=n; HOSTS=n)
	@scripts/setup kvm
	@guests/installed $(PROGRESS)
	@scripts/kvm/build
	@scripts/kvm/lane $(if $(SUITE),--suite $(SUITE)) $(if $(ONLY),--only '$(ONLY)') $(if $(REPEAT),--repeat $(REPEAT)) $(if $(HOSTS),--hosts $(HOSTS))

simulate: setup ## Try the protocol on schedules of simulated failures (SEEDS=N; JSON=1: as JSON)
	@cargo build --release -p understudy-bench $(PROGRESS)
	@$(LAB) simulate --seeds $(or $(SEEDS),10000) $(if $(JSON),--json)

bench: build guests bench-guest ## What protection costs, all workloads (QUICK=1; ONLY=cpu,web; JSON=1: as JSON)
	@guests/toolchain $(PROGRESS)
	@$(LAB) bench $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(JSON),--json)

bench-quick: ## The same work in fewer variants, one round: a first look
	@$(MAKE) --no-print-directory bench QUICK=1

readme-table: setup ## The tables of README.md and docs/performance.md from a report (REPORT=target/bench/report.json; SHARED=that of a run that was not pinned)
	@cargo build --release -p understudy-bench
	@$(LAB) bench readme $(REPORT) $(if $(SHARED),--shared $(SHARED))

bench-compression: build guests ## Ways to encode pages, on a guest that compiles (JSON=1: as JSON)
	@guests/toolchain $(PROGRESS)
	@$(LAB) bench compression $(if $(JSON),--json)

bench-lockstep: build guests bench-guest ## What lockstep costs, and its log (QUICK=1; ONLY=cpu,web; JSON=1: as JSON)
	@$(LAB) bench lockstep $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(JSON),--json)

bench-restore: build bench-guest ## Snapshots and restores (QUICK=1; ONLY=modes,group; WAYS=eager,hot; SPEED=50: MB/s; JSON=1: as JSON)
	@$(LAB) bench restore $(if $(QUICK),--quick) $(if $(ONLY),--only $(ONLY)) $(if $(WAYS),--ways $(WAYS)) $(if $(SPEED),--store-speed $(SPEED)) $(if $(JSON),--json)

bench-guest: guests ## Build the guest of the benchmark suite into target/guest/bench
	@guests/bench $(PROGRESS)

setup: ## Install what is missing: QEMU, Rust, a guest kernel
	@scripts/setup $(PROGRESS)

guests: setup ## Build the test guests into target/guest
	@guests/build $(PROGRESS)

build: setup ## Build the release binaries and the agent
	@cargo build --release --workspace

deb: build ## Build the Debian packages into target/deb
	@scripts/setup deb
	@scripts/deb

lint: style ## Formatting, clippy, shellcheck, spelling, cited files, lengths, locks; warnings denied
	cargo clippy --workspace --all-targets --profile checks --features understudy/fail-points -- -D warnings
	cd guests/tools && cargo clippy --target-dir ../../target/guest/build --all-targets -- -D warnings

style: ## `make lint` without clippy
	@scripts/setup lint
	cargo fmt --all --check
	cd guests/tools && cargo fmt --check
	git ls-files -z '*.md' '*.rs' '*.toml' Makefile .ci packaging scripts | xargs -0 codespell
	git ls-files .ci guests packaging scripts | xargs grep -lE '^#!/bin/(ba)?sh' | xargs shellcheck --severity=warning
	scripts/check-citations
	scripts/check-lengths
	scripts/check-locks
	scripts/draw-crates --check

# cargo-deny, and its version with the format of deny.toml.
CARGO_DENY := target/tools/bin/cargo-deny
CARGO_DENY_VERSION := 0.19

audit: setup $(CARGO_DENY) ## Dependencies: advisories, licences, duplicates (ONLY=licenses: without the advisories' database)
	$(CARGO_DENY) --all-features check $(or $(ONLY),advisories licenses bans sources)

$(CARGO_DENY):
	cargo install --locked cargo-deny --version '~$(CARGO_DENY_VERSION)' --root target/tools --target-dir target/tools/build

clean: ## Remove everything that was built, the guest kernel included
	rm -rf target
