# Two commands do everything on a new machine with Python 3.10+, Rust and make: `make demo` and `make test`.
.DEFAULT_GOAL := help
SHELL := bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUST_SOURCES := Cargo.toml Cargo.lock pyproject.toml $(shell find rust -name '*.rs')

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export CARGO_TERM_COLOR := never

.PHONY: help build test test-rust test-python lint wheel clean

help:  ## Show the targets
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/:.*## /\t/' | expand -t 16

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

# Everything the tests, the checks and the demo need, then the package itself, editable.
$(VENV)/.requirements: requirements-dev.txt | $(BIN)/python
	$(BIN)/python -m pip install -q -r requirements-dev.txt
	@touch $@

$(VENV)/.build: $(VENV)/.requirements $(RUST_SOURCES)
	$(BIN)/maturin develop -q --release
	@touch $@

build: $(VENV)/.build  ## Make the environment and build the package into it

# The checks of Python go on while Rust builds.
test:  ## Every test and check that needs no vLLM
	$(MAKE) build
	$(MAKE) -j2 --output-sync=target lint test-rust
	$(MAKE) asv-check test-python

lint: build  ## Formatting, linters, types, stubs
	cargo fmt --check
	cargo fmt --check --manifest-path fuzz/Cargo.toml
	$(BIN)/ruff format --check python tests benches scripts contrib examples
	$(BIN)/ruff check python tests benches scripts contrib examples
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml ubatch_guard._core
	cargo clippy -q --all-targets -- -D warnings
	cargo clippy -q --all-targets --features python -- -D warnings

test-rust:  ## Rust: unit tests, properties, exhaustive small scope
	cargo test -q --profile checked

# Two processes, each test file in one of them: what a file sets up once is costly.
test-python: build  ## Python tests
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

# Linked by zig against the glibc of manylinux2014, so that it runs on machines older than this one.
wheel: build  ## One manylinux wheel for CPython 3.10 and later, in dist/
	$(BIN)/python -m pip install -q ziglang
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/maturin build --release --zig --compatibility manylinux2014 -o dist

clean:  ## Remove everything that was built
	rm -rf $(VENV) target dist .venv-vllm*

.PHONY: demo gpu-check

demo: build  ## See the hazard and its cure on a small model, then audit step traces of vLLM
	$(BIN)/ubatch-guard demo --workload fewshot
	$(BIN)/ubatch-guard demo --workload fewshot --decode-threshold 512
	$(BIN)/ubatch-guard demo --workload grpo
	$(BIN)/ubatch-guard demo --workload rag
	$(BIN)/ubatch-guard demo --workload requests
	$(BIN)/ubatch-guard audit tests/traces/*.jsonl.gz

gpu-check: build  ## The same on a GPU with real streams, and step times; says so where there is none
	$(BIN)/python scripts/gpu_check

.PHONY: bench asv-check dashboard

bench: build  ## Time the guard against vLLM's own rule on this machine
	$(BIN)/ubatch-guard bench --all

ASV := $(CURDIR)/$(BIN)/asv

asv-check: build  ## Import every benchmark and see that asv can run it
	cd benches && $(ASV) check -E existing:$(CURDIR)/$(BIN)/python

# Ten commits take half an hour. The picture is the README's.
dashboard: build  ## Benchmark the last commits and make a site of graphs, benches/.asv/html
	$(BIN)/python scripts/dashboard.py --picture docs/dashboard.png
	$(BIN)/python -m pytest -q tests/test_dashboard.py

# Random bytes against the core, under AddressSanitizer; a nightly compiler is needed. Nothing runs by itself.
FUZZ_SECONDS ?= 60
FUZZ_TARGETS := checker mirror order
FUZZ_TOOLS := $(CURDIR)/target/tools
CARGO_FUZZ := $(FUZZ_TOOLS)/bin/cargo-fuzz

.PHONY: fuzz $(FUZZ_TARGETS:%=fuzz/%)

fuzz: $(FUZZ_TARGETS:%=fuzz/%)  ## Fuzz the core, FUZZ_SECONDS=60 for each of its targets

$(CARGO_FUZZ):
	cargo install cargo-fuzz --locked --root $(FUZZ_TOOLS)

# What was found new stays in fuzz/corpus, a crash in fuzz/artifacts; both are out of git. The seeds are in it.
$(FUZZ_TARGETS:%=fuzz/%): fuzz/%: $(CARGO_FUZZ)
	mkdir -p fuzz/corpus/$*
	cd fuzz && PATH="$(FUZZ_TOOLS)/bin:$$PATH" cargo +nightly fuzz run $* corpus/$* seeds/$* -- -max_total_time=$(FUZZ_SECONDS)

.PHONY: mutants

# Each change builds and runs most of the Rust tests: minutes, so it is no part of `make test`.
mutants:  ## Make small wrong changes to the core and see that the tests catch each
	$(PYTHON) scripts/mutants.py

# Millions of steps, answers sampled against reference and oracle, memory flat. Exit status 1 otherwise.
SOAK_STEPS ?= 10000000
SOAK_HOOK_STEPS ?= 2000000
SOAK_SEED ?= 0

.PHONY: soak

soak: build  ## Wear the core and the hooks: SOAK_STEPS=10000000 SOAK_HOOK_STEPS=2000000
	$(BIN)/python tests/soak.py --steps $(SOAK_STEPS) --hook-steps $(SOAK_HOOK_STEPS) --seed $(SOAK_SEED)

# What a release consists of, built and checked as .github/workflows/release.yml does. Publishes nothing.
RELEASE := $(CURDIR)/.cache/release
RELEASE_BIN := $(RELEASE)/venv/bin
RELEASE_TOOLS := maturin>=1.16,<2 ziglang>=0.15 auditwheel>=6.5 twine>=6.2
# Wheels are linked by zig against the glibc of manylinux2014, whatever machine builds them.
ARCHITECTURES := x86_64 aarch64
DENY := cargo deny --locked --all-features

.PHONY: release-check dist smoke licenses

release-check: dist smoke  ## Build sdist and wheels as for a release, and check them

$(RELEASE)/.tools: Makefile
	$(PYTHON) -m venv $(RELEASE)/venv
	$(RELEASE_BIN)/python -m pip install -q $(RELEASE_TOOLS:%='%')
	@touch $@

# The wheels are built from the unpacked sdist, which shows that nothing is missing in it.
dist: $(RELEASE)/.tools  ## sdist and manylinux wheels in dist/, checked by auditwheel and twine
	rm -rf dist $(RELEASE)/source
	mkdir -p $(RELEASE)/source
	PATH="$(RELEASE_BIN):$$PATH" maturin sdist -o dist
	tar -xzf dist/ubatch_guard-*.tar.gz -C $(RELEASE)/source --strip-components=1
	set -e; for architecture in $(ARCHITECTURES); do \
	  target=$$architecture-unknown-linux-gnu; \
	  if ! rustup target list --installed | grep -qx $$target && ! rustup target add $$target; then \
	    echo "release-check: no Rust target $$target here; the release workflow builds that wheel"; \
	    continue; \
	  fi; \
	  (cd $(RELEASE)/source && PATH="$(RELEASE_BIN):$$PATH" CARGO_TARGET_DIR=$(CURDIR)/target/release-check \
	    maturin build -q --release --locked --zig --compatibility manylinux2014 --target $$target -o $(CURDIR)/dist); \
	done
	set -e; for wheel in dist/*.whl; do $(RELEASE_BIN)/auditwheel show $$wheel; done
	$(RELEASE_BIN)/twine check --strict dist/*
	$(RELEASE_BIN)/python scripts/check_dist.py dist

smoke:  ## Install this machine's wheel of dist/ with numpy alone, and use it
	rm -rf $(RELEASE)/smoke
	$(PYTHON) -m venv $(RELEASE)/smoke
	$(RELEASE)/smoke/bin/python -m pip install -q --only-binary :all: numpy
	$(RELEASE)/smoke/bin/python -m pip install -q --no-index --no-deps --find-links dist ubatch-guard
	$(RELEASE)/smoke/bin/python -m pip check
	cd $(RELEASE)/smoke && bin/python -I $(CURDIR)/scripts/smoke.py

# Asks the advisory database too, on the network: cargo deny check, as CI does.
licenses:  ## The licences and origins of the crates (cargo install --locked cargo-deny)
	$(DENY) check licenses bans sources

# The real vLLM engine on a CPU. One environment; a release of vLLM is a folder on its path. One process per release
# and file: an engine is made once.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
OUTCOMES := .cache/vllm-outcomes
vllm_path = $(CURDIR)/.cache/vllm-$(1)

VLLM_TESTS := $(notdir $(wildcard tests/vllm_cpu/test_*.py))
# What only the newest release runs, and what it has not.
VLLM_NEWEST := test_v2_cuts.py test_v2_chunks.py test_patched.py test_scheduler_order.py test_versions.py
VLLM_OLDER := test_baseline.py $(filter test_v1%,$(VLLM_TESTS))
VLLM_RUNS := $(addprefix run/0.34.0/,$(filter-out $(VLLM_OLDER),$(VLLM_TESTS))) \
             $(addprefix run/0.32.0/,$(filter-out $(VLLM_NEWEST),$(VLLM_TESTS)))
VLLM_PREVIOUS := $(addprefix run/0.33.0/,test_v1.py test_v1_small.py test_v2.py test_v2_small.py)

.PHONY: vllm-env test-vllm test-vllm-previous demo-vllm soak-vllm $(VLLM_RUNS) $(VLLM_PREVIOUS)

vllm-env:  ## Make the environment with the real vLLM engine
	scripts/make_vllm_env.sh $(VLLM_VENV)
	scripts/fetch_vllm_releases.sh $(VLLM_VENV)
	VIRTUAL_ENV=$(CURDIR)/$(VLLM_VENV) $(VLLM_BIN)/maturin develop -q --release
	rm -rf $(OUTCOMES)

test-vllm: $(VLLM_RUNS)  ## The plugin on the real vLLM 0.34 and 0.32; writes docs/vllm-outcomes.md
	$(VLLM_BIN)/python tests/vllm_cpu/outcomes.py $(OUTCOMES) docs/vllm-outcomes.md

test-vllm-previous: $(VLLM_PREVIOUS)  ## The same on 0.33, which the gate leaves out
	$(VLLM_BIN)/python tests/vllm_cpu/outcomes.py $(OUTCOMES) docs/vllm-outcomes.md

$(VLLM_RUNS) $(VLLM_PREVIOUS): run/%: vllm-env
	PYTHONPATH=$(call vllm_path,$(*D)) UBATCH_OUTCOMES=$(OUTCOMES) \
	    $(VLLM_BIN)/python -m pytest -q -rs -W ignore tests/vllm_cpu/$(*F)

demo-vllm: vllm-env  ## Wrong answers of the real vLLM 0.34, and the same guarded
	@PYTHONPATH=$(call vllm_path,0.34.0) $(VLLM_BIN)/python -W ignore tests/vllm_cpu/demo.py

soak-vllm: vllm-env  ## 10,000 random requests on the real vLLM 0.34; writes docs/vllm-outcomes.md
	PYTHONPATH=$(call vllm_path,0.34.0) $(VLLM_BIN)/python -W ignore tests/vllm_cpu/soak.py docs/vllm-outcomes.md
