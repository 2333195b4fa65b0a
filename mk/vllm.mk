# The real vLLM engine on a CPU, in an environment of its own. One process per file: an engine is made once.
VLLM_VENV := .venv-vllm
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_TESTS := $(wildcard tests/vllm_cpu/test_*.py)
OUTCOMES := .cache/vllm-outcomes

.PHONY: vllm-env test-vllm $(VLLM_TESTS:%=run/%)

vllm-env:  ## Make the environment with the real vLLM engine
	scripts/make_vllm_env.sh $(VLLM_VENV)
	scripts/fetch_vllm_releases.sh $(VLLM_VENV)
	VIRTUAL_ENV=$(CURDIR)/$(VLLM_VENV) $(VLLM_BIN)/maturin develop -q --release
	rm -rf $(OUTCOMES)

test-vllm: $(VLLM_TESTS:%=run/%)  ## The plugin on the real vLLM engine; writes docs/vllm-outcomes.md
	$(VLLM_BIN)/python tests/vllm_cpu/outcomes.py $(OUTCOMES) docs/vllm-outcomes.md

$(VLLM_TESTS:%=run/%): run/%: vllm-env
	UBATCH_OUTCOMES=$(OUTCOMES) $(VLLM_BIN)/python -m pytest -q -rs -W ignore $*
