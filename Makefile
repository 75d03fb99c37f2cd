# Each target is a line or two that calls the real tool. `make help` lists them.
SHELL := /bin/bash
PROFILE ?= release
CARGO_FLAGS := $(if $(filter release,$(PROFILE)),--release,)
BIN = target/$(shell rustc --print host-tuple)/$(if $(filter release,$(PROFILE)),release,debug)

CLIENTS = check-api check-python check-langgraph check-langsmith

.DEFAULT_GOAL := help
.PHONY: help build run demo test test-rust test-clients $(CLIENTS) loom lint lint-rust lint-python deny openapi fuzz bench bench-dataplane bench-broker bench-gateway bench-agent bench-sync soak setup setup-clients

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 17

build: ## Build cobox and boxd
	cargo build $(CARGO_FLAGS) -p cobox-cli -p cobox-boxd

run: build ## Build, start a broker here, and say what to type next
	$(BIN)/cobox up

demo: build ## A human and an agent in one sandbox, side by side, in a temporary directory
	COBOX_BIN=$(BIN)/cobox python3 examples/demo.py

setup: ## Install what the tests need, or say how
	scripts/setup

# What the clients' tests are written with, from the languages' own registries.
setup-clients: setup
	scripts/setup langgraph
	scripts/check-python --setup

# Brokers are started as root and as an ordinary user there, which takes root.
ROOT_ONLY = test(isolation) | test(ordinary_user) | test(full_disk)
# Those that use both databases anyway need no second run, nor do those that are about connections, documents, and who may do what; `make soak` runs all.
# The whole workspace is named so that nothing is compiled anew for one of its crates.
ON_POSTGRES = binary_id(cobox-broker::broker) & not test(/^(store_suite|store_races|cluster|failover|stalls|tls|cors|origin|openapi|adapted|sockets|limits|rates|policy|oidc|thread_authority|seeds|ops|door|links|asking|errors|access|outage)::/)
test: test-rust test-clients ## Unit, integration and end-to-end tests

# Every feature of cobox is compiled for the tests; `make build` has none of them.
TEST_FEATURES = --features cobox-cli/otel
# cobox and boxd are made with the tests: by themselves they'd have other features, and all would be compiled twice.
test-rust:
	cargo test --workspace $(TEST_FEATURES) --no-run
	scripts/setup
	@[ "$$(id -u)" = 0 ] || echo "not root: leaving out the tests that change users ($(ROOT_ONLY)); run make test as root for all"
	cargo nextest run --workspace $(TEST_FEATURES) $$([ "$$(id -u)" = 0 ] || echo "-E 'not ($(ROOT_ONLY))'")
	COBOX_TEST_STORE=postgres cargo nextest run --workspace $(TEST_FEATURES) -E '$(ON_POSTGRES)'

# Each is a client of the debug build, so they can run side by side.
test-clients: $(CLIENTS) loom
$(CLIENTS):
	@MAKEFLAGS= scripts/$@

loom:
	RUSTFLAGS="--cfg loom" cargo test -p cobox-stream --test loom --release --target-dir target/loom

lint: lint-rust lint-python deny ## Formatting, clippy, ruff, types, licences and sources

lint-rust:
	cargo fmt --all --check
	cargo clippy --workspace --all-targets -- -D warnings

lint-python: setup-clients
	scripts/check-python --lint

deny:
	scripts/deny

openapi: ## Write openapi/ anew from the code
	touch openapi/broker.json # the broker has it inside
	COBOX_WRITE_OPENAPI=1 cargo test -p cobox-boxd --test openapi
	COBOX_WRITE_OPENAPI=1 cargo test -p cobox-broker --lib openapi

# Our code has no unsafe where the targets reach, so the address sanitizer would only slow them down; so would optimising them whole.
FUZZ_SECONDS ?= 60
fuzz: ## Each fuzz target for a minute; needs a nightly compiler and cargo-fuzz
	@for target in $$(ls fuzz/corpus); do mkdir -p fuzz/work/$$target; \
		CARGO_PROFILE_RELEASE_LTO=off cargo +nightly fuzz run --features libfuzzer --sanitizer none $$target fuzz/work/$$target fuzz/corpus/$$target -- \
			-max_total_time=$(FUZZ_SECONDS) -max_len=8192 -timeout=10 -rss_limit_mb=2048 -print_final_stats=1 || exit 1; done

bench: build ## Time to the first exec, against bubblewrap and podman; writes bench/results/
	scripts/setup bench
	COBOX_BIN=$(BIN)/cobox python3 bench/start.py

bench-dataplane: build ## Exec, shells, files and search, against ssh, sshx, nginx, ripgrep and sandbox-agent
	cargo build $(CARGO_FLAGS) -p cobox-bench
	scripts/setup bench
	COBOX_BIN=$(BIN)/cobox COBOX_BENCH_BIN=$(BIN)/cobox-bench python3 bench/dataplane.py

bench-broker: ## Ensure and refresh on both databases, with a thousand sessions and a million, then the gateway; writes bench/results/
	scripts/bench-broker
	$(MAKE) bench-gateway

bench-gateway: build ## The gateway against boxd's own socket and nginx in front of it; writes bench/results/gateway.md
	cargo build $(CARGO_FLAGS) -p cobox-bench
	scripts/setup bench
	COBOX_BIN=$(BIN)/cobox COBOX_BENCH_BIN=$(BIN)/cobox-bench python3 bench/gateway.py

bench-agent: build ## An agent's tools through the Python backend, against deepagents' own scripts; writes bench/results/agent.md
	scripts/check-python --setup
	COBOX_BIN=$(BIN)/cobox target/tools/python-deepagents-0.7/bin/python bench/agent.py

bench-sync: build ## First copy, one save and a look at what hasn't changed, against rsync and unison; writes bench/results/sync.md
	scripts/setup bench
	COBOX_BIN=$(BIN)/cobox python3 bench/sync.py

soak: ## The long fault and load tests; records bench/results/soak.md
	cargo build -p cobox-cli -p cobox-boxd
	COBOX_TEST_STORE=postgres cargo nextest run --workspace -E 'binary_id(cobox-broker::broker)'
	COBOX_API_EXAMPLES=200 COBOX_API_SEED=$$RANDOM scripts/check-api
	COBOX_SDK_CUTS=200 COBOX_SDK_SEED=$$RANDOM scripts/check-langsmith test_cuts.py
	scripts/setup soak
	scripts/deny
	scripts/soak
