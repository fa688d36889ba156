# Two commands on a fresh machine: `make run` and `make test`. Both set up .venv themselves and are safe to run twice.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help run test test-all check format clean
.DEFAULT_GOAL := help

help:
	@echo "make run     Figure 1: train MNIST with and without BN, fold, write the figure and the report (runs/fig1)"
	@echo "make test    run the tests"
	@echo "make test-all  run the slow ones too"
	@echo "make check   ruff (format and lint) and mypy"
	@echo "make format  let ruff rewrite the files"
	@echo "make clean   remove .venv and caches"

# torch first and alone: with it in place no other requirement can pull another build of it.
$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt torch numpy
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation -e '.[all]' \
		pytest pytest-xdist hypothesis expecttest ruff mypy triton
	@touch $@

run: $(STAMP)
	$(BIN)/batchnorm reproduce fig1

test: $(STAMP)
	$(BIN)/python -m pytest -n auto -m "not slow"

test-all: $(STAMP)
	$(BIN)/python -m pytest

check: $(STAMP)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
