# longloop. `make train` and `make test` set up what they need.
VENV := .venv
PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.installed
export PYTHONUNBUFFERED := 1

.DEFAULT_GOAL := help
.PHONY: help setup train test test-all demo bench lint format

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## / - /'

setup: $(STAMP)  ## virtual environment in .venv with pinned versions

$(STAMP): pyproject.toml constraints.txt
	python3 -c 'import sys; sys.exit(sys.version_info < (3, 11) and "longloop needs Python 3.11 or newer; this is " + sys.version)'
	python3 -m venv $(VENV)
	$(PYTHON) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev,hub,wandb]'
	@touch $@

train: setup  ## the main job: a small InfiLoop on 6x6 Sudoku, minutes on two CPU cores
	$(PYTHON) train.py experiment=sudoku6_cpu

test: setup  ## the test suite without the slow tests
	$(PYTHON) -m pytest -m "not slow and not gpu"

test-all: setup  ## everything: real processes, README commands, mutants
	$(PYTHON) -m pytest -m "not gpu"

demo: setup  ## the two bundled checkpoints by depth, and a puzzle solved by each
	$(PYTHON) scripts/demo.py

bench: setup  ## training step against its own matrix products
	$(PYTHON) scripts/bench.py

lint: setup  ## ruff and pyright
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m pyright --pythonpath $(PYTHON)

format: setup  ## let ruff rewrite what it can
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .
