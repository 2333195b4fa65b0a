# What a release consists of, built and checked as .github/workflows/release.yml does. Publishes nothing.
RELEASE := $(CURDIR)/.cache/release
RELEASE_BIN := $(RELEASE)/venv/bin
RELEASE_TOOLS := maturin>=1.16,<2 ziglang>=0.15 auditwheel>=6.5 twine>=6.2
# Wheels are linked by zig against the glibc of manylinux2014, whatever machine builds them.
ARCHITECTURES := x86_64 aarch64
DENY := cargo deny --locked --all-features

.PHONY: release-check dist smoke licenses

release-check: dist smoke  ## Build sdist and wheels as for a release, and check them

$(RELEASE)/.tools: mk/release.mk
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
