# Two commands do all the set-up on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# One process a core; tests of a file stay together, as they share what a file sets up.
PARALLEL := -n auto --maxprocesses 8 --dist loadfile

.PHONY: demo test test-all lint format types check clean

demo: $(VENV)/.runtime
	$(BIN)/python benchmarks/demo.py

test: $(VENV)/.test
	$(BIN)/pytest $(PARALLEL) -m "not slow"

test-all: $(VENV)/.test
	XLA_FLAGS="--xla_backend_optimization_level=3 $$XLA_FLAGS" $(BIN)/pytest $(PARALLEL)

lint: $(VENV)/.test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports

format: $(VENV)/.test
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(VENV)/.test
	$(BIN)/mypy

check: lint types test

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; v = sys.version_info; v >= (3, 12) or sys.exit("spec-jax needs Python 3.12 or newer, $(PYTHON) is %d.%d: run `make PYTHON=python3.13 ...`" % v[:2])'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(VENV)/.test: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[test]"
	touch $(VENV)/.runtime $@
