# `make demo` and `make test` need nothing but Python 3.11+ and make: each sets up .venv once and reuses it.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: help setup demo test lint types docs format clean

help:  ## this list
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 10

setup: $(READY)  ## create .venv and install everything

# Anew only when the requirements change; an interrupted set-up leaves no .ready and starts over.
$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "Branchout needs Python 3.11 or newer; found $$($(PYTHON) --version). Try: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile -e ".[lite,serve,export,cluster,dev]"
	@touch $(READY)

demo: $(READY)  ## base model → extended model → table, on built-in data
	$(BIN)/branchout demo

# A file's tests stay together, for what they share. Two processes of one thread are twice as fast as one of two.
test: $(READY)  ## the whole test suite
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile

lint: $(READY)  ## style and the order of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(READY)  ## strict static types
	$(BIN)/mypy

docs: $(READY)  ## the documentation site, into site/; a broken link is an error
	$(BIN)/mkdocs build --quiet

format: $(READY)  ## rewrite the code in the house style
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove .venv and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
