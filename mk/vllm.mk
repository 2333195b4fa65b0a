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
