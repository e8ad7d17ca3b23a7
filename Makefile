# Two commands do everything: `make quickstart` and `make test`. Each makes .venv.
PYTHON ?= python3
VENV ?= .venv
RUNS ?= runs
BIN := $(VENV)/bin

.PHONY: quickstart compare test test-all lint format clean

quickstart: $(VENV)/installed
	$(BIN)/python -m experiments.run --config configs/quickstart.py --workdir $(RUNS)/quickstart

compare: $(VENV)/installed
	$(BIN)/python -m experiments.compare --config configs/compare_quickstart.py --workdir $(RUNS)/compare

test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2

test-all: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -m "slow or not slow"

lint: $(VENV)/installed-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

format: $(VENV)/installed-lint
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/installed: pyproject.toml
	$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else "clusterjax needs Python 3.11 or newer, found %d.%d; say which to use: make PYTHON=python3.12 ..." % v[:2])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

$(VENV)/installed-lint: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[lint]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache build dist
