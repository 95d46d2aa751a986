# make setup   the environment alone: .venv, PyTorch, etcd
# make run     a real training job that changes size four times, with a table and a picture at the end
# make test    everything that must hold
# make test-long   sweeps that take minutes each, over every case of a kind
# make test-sweep  what takes longer still: deaths at every point of a step and of a change, checkpoints at every pair of
#                  configs, Slurm and containers for real
#
# Fresh Debian with Python 3.11 or newer; nothing but PyPI and Debian's packages.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := setup

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Where there is no GPU this release is known to work; on a GPU machine the newest one that setup.cfg admits is taken.
TORCH ?= $(if $(wildcard /dev/nvidiactl),torch,torch==2.13.0)
STAMP := $(VENV)/.installed
# Arguments for scripts/run_demo.py.
DEMO ?=
# Of the libraries that examples/ use, what their tests are known to pass with.
STACKS_VENV ?= .venv-stacks
STACKS_BIN := $(STACKS_VENV)/bin
STACKS_STAMP := $(STACKS_VENV)/.installed
STACKS := transformers==5.24.0 peft accelerate safetensors torchdata megatron-core==0.16.1 schedulefree
# Test files run beside each other: most of them wait for other processes most of the time.
TEST_JOBS ?= 4

export OMP_NUM_THREADS ?= 1

.PHONY: setup run test test-long test-stacks test-sweep lint clean

setup: $(STAMP)

$(STAMP): setup.cfg pyproject.toml scripts/install_etcd.sh scripts/install_iproute2.sh scripts/install_chromium.sh Makefile
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "etc-run needs Python 3.11 or newer; set PYTHON=")'
	bash scripts/make_venv.sh "$(PYTHON)" "$(VENV)"
	$(BIN)/pip install --quiet --disable-pip-version-check --progress-bar off "$(TORCH)"
	$(BIN)/pip install --quiet --disable-pip-version-check --progress-bar off --editable '.[dev]'
	bash scripts/install_etcd.sh "$(BIN)"
	bash scripts/install_iproute2.sh
	bash scripts/install_chromium.sh
	touch $@

run: setup
	$(BIN)/python scripts/run_demo.py $(DEMO)

test: setup lint
	$(BIN)/python -m pytest -q -rs -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder

test-long: setup
	$(BIN)/python -m pytest -q -rs -n $(TEST_JOBS) --dist loadfile --no-loadscope-reorder -m long

test-stacks: $(STACKS_STAMP)
	PATH="$(abspath $(STACKS_BIN)):$$PATH" $(STACKS_BIN)/python -m pytest -q -rs -m stacks

$(STACKS_STAMP): setup.cfg pyproject.toml scripts/install_etcd.sh Makefile
	bash scripts/make_venv.sh "$(PYTHON)" "$(STACKS_VENV)"
	$(STACKS_BIN)/pip install --quiet --disable-pip-version-check --progress-bar off "$(TORCH)" $(STACKS)
	$(STACKS_BIN)/pip install --quiet --disable-pip-version-check --progress-bar off --editable '.[dev]'
	bash scripts/install_etcd.sh "$(STACKS_BIN)"
	touch $@

test-sweep: setup
	bash scripts/install_deploy_tools.sh
	$(BIN)/python -m pytest -q -rs -m sweep

lint: setup
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

clean:
	rm -rf $(VENV) $(STACKS_VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis out *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
