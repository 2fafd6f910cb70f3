# `make demo` and `make test` need nothing but Python 3.11+ and make. Each creates .venv once, from locked versions.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
LOCK   := $(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate \
          --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" pyproject.toml
# pip compiles nothing here, so the first import must: without these files every process compiles torch again, for 8 s.
unexport PYTHONDONTWRITEBYTECODE
EXTRAS := --extra lite --extra serve --extra export --extra cluster --extra dev

.PHONY: help setup demo test lint types docs format lock lowest newest torture clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(VENV)/.dev  ## create .venv with everything that development needs

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Branchout needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The marker files are written last, so that an interrupted installation starts over.
$(VENV)/.core: requirements.lock pyproject.toml | $(BIN)/python
	$(PIP) --require-hashes -r requirements.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $@

$(VENV)/.dev: requirements-dev.lock pyproject.toml | $(BIN)/python
	$(PIP) --require-hashes -r requirements-dev.lock
	$(PIP) --no-deps --no-build-isolation -e .
	@touch $(VENV)/.core $@

demo: $(VENV)/.core  ## base model → extended model → table, on built-in data
	$(BIN)/branchout demo

# One thread a process: two processes of one thread are faster than one of two. A file's tests share their fixtures;
# files start in the order of tests/conftest.py, the longest first.
test: $(VENV)/.dev  ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

lint: $(VENV)/.dev  ## style and the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(VENV)/.dev  ## strict static types
	$(BIN)/mypy

# Without --quiet, which hides warnings from strict mode too: a broken link would be no error.
docs: $(VENV)/.dev  ## the documentation site, into site/; a broken link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

format: $(VENV)/.dev  ## apply the code style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

lock: | $(BIN)/python  ## refresh both lock files to the newest versions that pyproject.toml allows
	$(PIP) uv
	echo setuptools | $(LOCK) - $(EXTRAS) --upgrade --output-file requirements-dev.lock
	echo setuptools | $(LOCK) - --constraint requirements-dev.lock --upgrade --output-file requirements.lock

# A few tests of every layer with the oldest and with the newest versions that pyproject.toml allows.
QUICK := tests/test_labels.py tests/test_metrics.py tests/test_files.py tests/test_api.py tests/model/test_checkpoint.py \
         tests/model/test_staged.py tests/method/test_stage2.py tests/method/test_stage1.py tests/data/test_images.py \
         tests/data/test_samples.py tests/data/test_scenarios.py

lowest: $(VENV)/.dev  ## quick tests with the oldest allowed versions
	.ci/versions lowest-direct $(QUICK)

newest: $(VENV)/.dev  ## quick tests with the newest versions; once a week in hosted CI
	.ci/versions highest $(QUICK)

torture: $(VENV)/.dev  ## attack the commands, files and server for half an hour; counts in results/torture.json
	$(BIN)/python -m benchmarks.torture --minutes 30 --out results/torture.json

clean:  ## remove environments and caches
	rm -rf $(VENV) .venv-* .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
