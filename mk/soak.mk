# Millions of steps, answers sampled against reference and oracle, memory flat. Exit status 1 otherwise.
SOAK_STEPS ?= 10000000
SOAK_HOOK_STEPS ?= 2000000
SOAK_SEED ?= 0

.PHONY: soak

soak: build  ## Wear the core and the hooks: SOAK_STEPS=10000000 SOAK_HOOK_STEPS=2000000
	$(BIN)/python tests/soak.py --steps $(SOAK_STEPS) --hook-steps $(SOAK_HOOK_STEPS) --seed $(SOAK_SEED)
