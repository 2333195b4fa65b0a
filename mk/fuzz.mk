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
