# Two commands on a fresh machine with Python 3.11 or newer, make and git:
#   make demo   installs into .venv and runs the main job on a sample model
#   make test   installs into .venv and runs the tests, without those marked `full`
# `make docs` builds the pages as a site in build/site, and `make docs-serve` shows it in a browser;
# `make dist` builds and checks the distributions.
# And `make test-full` runs the tests marked `full`: documentation, process groups, drills, the wheel;
# `make bench` compares gradscope with the field's other tools, which it installs into .venv too;
# `make zoo` builds all small models that ten libraries have and compares every answer with float64: hours;
# `make browser` clicks through the pages in headless Chromium, which must be there;
# `make gpu` checks everything on a GPU, or on a device made of the CPU where there is none;
# `make gpu-bench` measures large language models on a GPU, in bf16 and TF32;
# `make drill` kills runs, fills disks and damages files for 20 minutes. `make compat TORCH=2.15.0`
# runs the tests of the engine, and the demo, with another release of torch; `PYTHON=python3.13` chooses
# another Python. They are installed in build/compat (5 to 7 GB: torch comes with CUDA's libraries;
# delete it when you are done).
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO ?= build/demo
BENCH ?= build/bench
BENCH_OPTIONS ?=
ZOO ?= build/zoo.jsonl
ZOO_OPTIONS ?=
GPU ?= build/gpu.json
GPU_OPTIONS ?=
DRILL_OPTIONS ?=
SITE ?= build/site
TEST_OPTIONS ?= -n auto --dist worksteal
TORCH ?= 2.15.0
COMPAT := build/compat/$(TORCH)-$(notdir $(PYTHON))
COMPAT_OPTIONS ?= -n auto

.PHONY: demo test test-full bench zoo browser charts drill gpu gpu-bench compat docs docs-serve dist lint format types check install install-dev install-bench clean

define demonstrate
	mkdir -p $(2)
	$(1)/gradscope compute --config sample_models/digits_mlp/run.toml --overwrite -o $(2)/digits.h5
	$(1)/gradscope stats $(2)/digits.h5
endef

demo: install
	$(call demonstrate,$(BIN),$(DEMO))

test: install-dev
	$(BIN)/python -m pytest $(TEST_OPTIONS) -m "not full"

test-full: install-dev
	$(BIN)/python -m pytest $(TEST_OPTIONS) -m full

bench: install-bench
	mkdir -p $(BENCH)
	$(BIN)/python -m benchmarks --scratch $(BENCH) \
		--json $(BENCH)/results.json --plot $(BENCH)/results.svg $(BENCH_OPTIONS)

zoo: $(VENV)/installed-zoo
	$(BIN)/python -m benchmarks.zoo --json $(ZOO) $(ZOO_OPTIONS)

drill: install-dev
	$(BIN)/python -m tests.drill $(DRILL_OPTIONS)

gpu: install-bench
	$(BIN)/python -m tests.gpu --json $(GPU) $(GPU_OPTIONS)

gpu-bench: install-bench
	mkdir -p $(BENCH)
	for precision in bf16 tf32; do \
		$(BIN)/python -m benchmarks --device cuda --precision $$precision --scratch $(BENCH) \
			--models pythia-70m,pythia-160m,pythia-410m,pythia-1b --repeat 3 \
			--json $(BENCH)/gpu-$$precision.json $(BENCH_OPTIONS) || exit 1; \
	done

compat: $(COMPAT)/installed
	$(COMPAT)/bin/python -m pytest tests/backends tests/sources tests/stages tests/core tests/model tests/process \
		tests/training tests/test_scope.py tests/test_certificate.py tests/test_randomness.py \
		tests/test_ranks.py $(COMPAT_OPTIONS)
	$(call demonstrate,$(COMPAT)/bin,$(COMPAT)/demo)

browser: install-dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[browser]'
	$(BIN)/python -m pytest tests/browser/check_view.py tests/browser/check_curves.py

docs: $(VENV)/installed-docs
	$(BIN)/python -m sphinx -W --keep-going -q -b html docs $(SITE)

docs-serve: docs
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory $(SITE) 8000

dist: $(VENV)/installed-dist
	rm -rf dist
	$(BIN)/python -m build --quiet
	$(BIN)/python -m twine check --strict dist/*

charts:
	cd charts && npm install --silent && node build.mjs

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: install-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: install-dev
	$(BIN)/mypy

check: lint types test test-full

install: $(VENV)/installed

install-dev: $(VENV)/installed-dev

install-bench: $(VENV)/installed-bench

$(COMPAT)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(@D)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(@D)/constraints.txt
	$(@D)/bin/python -m pip install --quiet --constraint $(@D)/constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

$(VENV)/installed-dist: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt build twine
	touch $@

$(VENV)/installed-bench: $(VENV)/installed-dev benchmarks/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt \
		--requirement benchmarks/requirements.txt
	touch $@

$(VENV)/installed-zoo: $(VENV)/installed-bench benchmarks/zoo/requirements.txt
	$(BIN)/python -m pip install --quiet --no-deps --constraint constraints.txt \
		--requirement benchmarks/zoo/requirements.txt
	touch $@

clean:
	rm -rf $(VENV) build
