.PHONY: bench asv-check dashboard

bench: build  ## Time the guard against vLLM's own rule on this machine
	$(BIN)/ubatch-guard bench --all

ASV := $(CURDIR)/$(BIN)/asv

test: asv-check

asv-check: build  ## Import every benchmark and see that asv can run it
	cd benches && $(ASV) check -E existing:$(CURDIR)/$(BIN)/python

# Ten commits take half an hour. The picture is the README's.
dashboard: build  ## Benchmark the last commits and make a site of graphs, benches/.asv/html
	$(BIN)/python scripts/dashboard.py --picture docs/dashboard.png
	$(BIN)/python -m pytest -q tests/test_dashboard.py
