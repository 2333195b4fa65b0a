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
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

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

-include mk/*.mk

# The checks of Python go on while Rust builds.
test:  ## Every test and check that needs no vLLM
	$(MAKE) build
	$(MAKE) -j2 --output-sync=target lint test-rust
	$(MAKE) test-python

lint: build  ## Formatting, linters, types, stubs
	cargo fmt --check
	cargo fmt --check --manifest-path fuzz/Cargo.toml
	cargo clippy -q --all-targets -- -D warnings
	cargo clippy -q --all-targets --features python -- -D warnings
	$(BIN)/ruff format --check python tests benches scripts contrib
	$(BIN)/ruff check python tests benches scripts contrib
	$(BIN)/mypy
	$(BIN)/python -m mypy.stubtest --mypy-config-file pyproject.toml ubatch_guard._core

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
