# Two commands on a fresh machine with Python 3.11 or newer, make and git:
#   make demo   installs into .venv and runs the main job on a sample model
#   make test   installs into .venv and runs every test
# And `make bench` compares gradscope with the field's other tools, which it installs into .venv too;
# `make drill` kills runs, fills disks and damages files for 20 minutes;
# `make gpu` checks everything on a GPU, or on a device made of the CPU where there is none.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= build/demo
BENCH ?= build/bench
BENCH_OPTIONS ?=
GPU ?= build/gpu.json
GPU_OPTIONS ?=
DRILL_OPTIONS ?=

.PHONY: demo test bench drill gpu lint format types check install install-dev install-bench clean

demo: install
	mkdir -p $(DEMO)
	$(BIN)/gradscope compute --config sample_models/digits_mlp/run.toml --overwrite -o $(DEMO)/digits.h5
	$(BIN)/gradscope stats $(DEMO)/digits.h5

test: install-dev
	$(BIN)/python -m pytest -n auto

bench: install-bench
	mkdir -p $(BENCH)
	$(BIN)/python -m benchmarks --scratch $(BENCH) \
		--json $(BENCH)/results.json --plot $(BENCH)/results.svg $(BENCH_OPTIONS)

drill: install-dev
	$(BIN)/python -m tests.drill $(DRILL_OPTIONS)

gpu: install-bench
	$(BIN)/python -m tests.gpu --json $(GPU) $(GPU_OPTIONS)

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

install-bench: $(VENV)/installed-bench

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/installed-bench: $(VENV)/installed-dev benchmarks/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt \
		--requirement benchmarks/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) build
