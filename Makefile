# On a fresh machine, run `make run` or `make test`. Both first set up .venv.
PYTHON ?= python3
VENV := .venv
ifeq ($(OS),Windows_NT)
BIN := $(VENV)/Scripts
else
BIN := $(VENV)/bin
endif
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
RUN := $(VENV)/.run
DEV := $(VENV)/.dev
DOCS := $(VENV)/.docs
# The tests of the Triton kernels need Triton. torch's CUDA builds install it; the CPU build for Linux does not, so we
# install it. Version 3.7 does not work: its interpreter fails on these kernels.
LACKS_TRITON := import sys, importlib.util as u; sys.exit(sys.platform != 'linux' or u.find_spec('triton') is not None)
TRITON := triton==3.6.0

.PHONY: help run test test-all check docs format clean
.DEFAULT_GOAL := help

help:
	@echo "make run       reproduce Figure 1: train on MNIST with and without BN, write a figure and a report to runs/fig1"
	@echo "make test      run the tests"
	@echo "make test-all  run the tests, including the slow ones"
	@echo "make check     ruff (format and lint) and mypy"
	@echo "make docs      build the documentation into site/; open site/index.html"
	@echo "make format    let ruff rewrite the files"
	@echo "make clean     remove .venv, caches and build outputs"

# Install torch first, so that no other requirement can install a different build of it.
$(RUN): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) torch numpy
	$(PIP) --group build
	$(PIP) --no-build-isolation -e '.[report]'
	@touch $@

$(DEV): $(RUN)
	$(PIP) --no-build-isolation -e '.[all]' --group dev
	@! $(BIN)/python -c "$(LACKS_TRITON)" || $(PIP) $(TRITON)
	@touch $@

# The site is built from the source files, so torch and this package need not be installed.
$(DOCS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --upgrade pip
	$(PIP) --group docs
	@touch $@

run: $(RUN)
	$(BIN)/batchnorm reproduce fig1

test: $(DEV)
	$(BIN)/python -m pytest -n auto --dist loadfile --no-loadscope-reorder -m "not slow and not zoo"

test-all: $(DEV)
	$(BIN)/python -m pytest -m "not zoo"

check: $(DEV)
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy

docs: export NO_MKDOCS_2_WARNING = 1
docs: $(DOCS)
	$(BIN)/mkdocs build --quiet --strict

format: $(DEV)
	$(BIN)/ruff check --fix-only
	$(BIN)/ruff format

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
