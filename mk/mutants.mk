.PHONY: mutants

# Each change builds and runs most of the Rust tests: minutes, so it is no part of `make test`.
mutants:  ## Make small wrong changes to the core and see that the tests catch each
	$(PYTHON) scripts/mutants.py
