# Two commands on a fresh machine with Python 3.11 or newer, make and git:
#   make demo   installs into .venv and runs the main job on a sample model
#   make test   installs into .venv and runs every test
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= build/demo

.PHONY: demo test lint format types check install install-dev clean

demo: install
	mkdir -p $(DEMO)
	$(BIN)/gradscope compute --config sample_models/digits_mlp/run.toml --overwrite -o $(DEMO)/digits.h5
	$(BIN)/gradscope stats $(DEMO)/digits.h5

test: install-dev
	$(BIN)/python -m pytest -n auto

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install-dev
	$(BIN)/mypy

check: lint types test

install: $(VENV)/installed

install-dev: $(VENV)/installed-dev

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) build
