# Every target makes the environment it needs, says what it does, and may be repeated.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
SETUP_FILES := pyproject.toml setup.py requirements/pinned.txt requirements/lm_eval.txt scripts/setup.sh \
	$(wildcard src/dualflow/ops/native/csrc/*) src/dualflow/ops/native/build.py
# Small models on few cores: one thread a test process is quickest and keeps sums in one order.
TEST := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $(BIN)/python -m pytest

# A folder that was moved or copied needs its environment made anew.
ifneq ($(wildcard $(VENV)/.made-in),)
ifneq ($(shell cat $(VENV)/.made-in),$(CURDIR))
MOVED := moved
endif
endif

.DEFAULT_GOAL := help
.PHONY: help demo test check format bench gpu clean moved

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/.ready-run ## train a standard and a dual-flow model, compare them, generate text
	$(BIN)/dualflow demo $(ARGS)

test: $(VENV)/.ready-dev ## run the tests (ARGS="-k name -x" is handed to pytest)
	$(TEST) $(ARGS)

check: $(VENV)/.ready-dev ## lint, formatting, types and import direction
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(VENV)/.ready-dev ## mend what ruff can mend
	$(BIN)/ruff check --fix-only .
	$(BIN)/ruff format .

bench: $(VENV)/.ready-dev ## measure training, prefill and decode, standard against dual-flow
	$(BIN)/dualflow bench $(ARGS)

gpu: $(VENV)/.ready-dev ## run the tests that need a CUDA device
	$(TEST) -m gpu $(ARGS)

clean: ## remove caches and built files; the environment and runs/ stay
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache src/*.egg-info
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.ready-run: $(SETUP_FILES) $(MOVED)
	@scripts/setup.sh plot,train
	@touch $@

$(VENV)/.ready-dev: $(SETUP_FILES) $(MOVED)
	@scripts/setup.sh dev
	@touch $@ $(VENV)/.ready-run
