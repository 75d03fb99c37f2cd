# Each target calls the real tool in a line or two. `make help` lists them.
SHELL := /bin/bash
PROFILE ?= release
CARGO_FLAGS := $(if $(filter release,$(PROFILE)),--release,)
BIN = target/$(shell rustc --print host-tuple)/$(if $(filter release,$(PROFILE)),release,debug)

CLIENTS = check-api check-python check-langgraph check-langsmith

.DEFAULT_GOAL := help
.PHONY: help build run demo test test-rust compare-tests test-clients $(CLIENTS) loom lint lint-rust lint-python lint-prose deny openapi fuzz bench bench-dataplane bench-broker bench-gateway bench-agent bench-sync soak setup setup-clients

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

# Shown by the metric cobox_build_info. Only here, so that other builds are not repeated for each commit.
build: export COBOX_COMMIT ?= $(shell git describe --always --dirty --exclude='*' --abbrev=12 2>/dev/null)
build: ## Build cobox and boxd
	cargo build $(CARGO_FLAGS) -p cobox-cli -p cobox-boxd

run: build ## Build, start a broker on this machine, and print the next steps
	$(BIN)/cobox up

demo: build ## Show a human and an agent in one sandbox, side by side, in a temporary directory
	COBOX_BIN=$(BIN)/cobox python3 examples/demo.py

setup: ## Install what the tests need, or explain how
	scripts/setup

# Dependencies of the client tests, from the registries of their languages.
setup-clients: setup
	scripts/setup langgraph
	scripts/check-python --setup

# These tests start brokers as root and as an ordinary user, or mount file systems, which needs root.
ROOT_ONLY = test(isolation) | test(ordinary_user) | test(full_disk) | (package(cobox-e2e) & test(/^(host_disk|hostile_volumes|private_data|resources)::/))
# Excludes tests that use both databases anyway, and tests of connections, documents and permissions; `make soak` runs all.
# The command selects the whole workspace, so that no crate is compiled again with other features.
ON_POSTGRES = binary_id(cobox-broker::broker) & not test(/^(store_suite|store_races|cluster|failover|database_stalls|tls|cors|origin|openapi|adapter|websockets|gateway_limits|rate_limits|policy|oidc|thread_authority|protocol_examples|ops|gateway|file_links|request_validation|errors|access|database_outage)::/)
test: test-rust test-clients ## Run all unit, integration and end-to-end tests

# The tests are compiled with all features of cobox; `make build` uses none of them.
TEST_FEATURES = --features cobox-cli/otel
# cobox and boxd are built together with the tests: alone, they would have other features, and everything would be compiled twice.
test-rust:
	cargo test --workspace $(TEST_FEATURES) --no-run
	scripts/setup
	scripts/compare-tests $(TEST_FEATURES)
	@[ "$$(id -u)" = 0 ] || echo "not root: skipping the tests that change users ($(ROOT_ONLY)); run make test as root to run all"
	cargo nextest run --workspace $(TEST_FEATURES) -E "$$([ "$$(id -u)" = 0 ] && echo 'all()' || echo 'not ($(ROOT_ONLY))')"
	COBOX_TEST_STORE=postgres cargo nextest run --workspace $(TEST_FEATURES) -E '$(ON_POSTGRES)'

# Compiles the tests if they are not.
compare-tests:
	scripts/compare-tests $(TEST_FEATURES)

# Each only uses the debug build, so they can run in parallel.
test-clients: $(CLIENTS) loom
$(CLIENTS):
	@MAKEFLAGS= scripts/$@

loom:
	RUSTFLAGS="--cfg loom" cargo test -p cobox-stream --test loom --release --target-dir target/loom

lint: lint-rust lint-python lint-prose deny ## Check formatting, clippy, ruff, types, licenses and sources

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

lint-prose:
	scripts/check-prose
	scripts/check-commits

lint-python: setup-clients
	scripts/check-python --lint

deny:
	scripts/deny

openapi: ## Regenerate openapi/ from the code
	touch openapi/broker.json # embedded in the broker
	COBOX_WRITE_OPENAPI=1 cargo test -p cobox-boxd --test openapi
	COBOX_WRITE_OPENAPI=1 cargo test -p cobox-broker --lib openapi

# The fuzzed code contains no unsafe, so the address sanitizer would only slow it down; so would link-time optimization.
FUZZ_SECONDS ?= 60
fuzz: ## Run each fuzz target for a minute; needs a nightly compiler and cargo-fuzz
	@for target in $$(ls fuzz/corpus); do mkdir -p fuzz/work/$$target; \
		CARGO_PROFILE_RELEASE_LTO=off cargo +nightly fuzz run --features libfuzzer --sanitizer none $$target fuzz/work/$$target fuzz/corpus/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -max_len=8192 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 || exit 1; done

bench: build ## Measure the time to the first exec, against bubblewrap and podman; writes bench/results/
	scripts/setup bench
	COBOX_BIN=$(BIN)/cobox python3 bench/start.py

bench-dataplane: build ## Measure exec, shells, files and search, against ssh, sshx, nginx, ripgrep and sandbox-agent
	cargo build $(CARGO_FLAGS) -p cobox-bench
	scripts/setup bench
	COBOX_BIN=$(BIN)/cobox COBOX_BENCH_BIN=$(BIN)/cobox-bench python3 bench/dataplane.py

bench-broker: ## Measure ensure and refresh on both databases, with a thousand and a million sessions, then the gateway; writes bench/results/
	scripts/bench-broker
	$(MAKE) bench-gateway

bench-gateway: build ## Measure the gateway against boxd's own socket and nginx in front of it; writes bench/results/gateway.md
	cargo build $(CARGO_FLAGS) -p cobox-bench
	scripts/setup bench
	COBOX_BIN=$(BIN)/cobox COBOX_BENCH_BIN=$(BIN)/cobox-bench python3 bench/gateway.py

bench-agent: build ## Measure an agent's tools in the Python backend, against deepagents' own scripts; writes bench/results/agent.md
	scripts/check-python --setup
	COBOX_BIN=$(BIN)/cobox target/tools/python-deepagents-0.7/bin/python bench/agent.py

bench-sync: build ## Measure a first copy, one save and a run without changes, against rsync and unison; writes bench/results/sync.md
	scripts/setup bench
	COBOX_BIN=$(BIN)/cobox python3 bench/sync.py

soak: ## Run the long fault and load tests; records bench/results/soak.md
	cargo build -p cobox-cli -p cobox-boxd
	COBOX_TEST_STORE=postgres cargo nextest run --workspace -E 'binary_id(cobox-broker::broker)'
	COBOX_API_EXAMPLES=200 COBOX_API_SEED=$$RANDOM scripts/check-api
	COBOX_SDK_CUTS=200 COBOX_SDK_SEED=$$RANDOM scripts/check-langsmith test_lost_connections.py
	scripts/setup soak
	scripts/deny
	scripts/soak
