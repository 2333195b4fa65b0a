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
