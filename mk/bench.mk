.PHONY: bench

bench: build  ## Time the guard against vLLM's own rule on this machine
	$(BIN)/ubatch-guard bench --all
