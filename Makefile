# What people type. `make help` lists it.
.DEFAULT_GOAL := help
.PHONY: help setup demo up test slow chaos kills check fix docs lock bench compose-test clean

PYTHON ?= python3
BIN := .venv/bin
MINUTES ?= 5
# One core is left to what else runs; a laptop stays usable.
PYTEST := $(BIN)/python -m pytest

help: ## list these targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-13s %s\n", $$1, $$2}'

setup: .venv/installed ## make .venv with everything that the server, the tests and the checks need

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed, this is " + sys.version.split()[0] if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[server,dev]'
	touch $@

demo: setup ## fit four tables and predict, start to end, on free ports; leaves nothing running
	$(BIN)/tabrelay demo

up: setup ## start the stack on port 8000; Ctrl-C stops it, the next start finds everything again
	$(BIN)/tabrelay up

test: setup ## unit, integration and end-to-end tests, with real Redis, workers and models
	$(PYTEST) tests -m 'not slow and not gpu'

slow: setup ## the slow suites
	$(PYTEST) tests -m 'slow and not long' --timeout 900

chaos: setup ## break a running stack for MINUTES=5, seeded by CHAOS_SEED
	CHAOS_SECONDS=$$(($(MINUTES) * 60)) $(PYTEST) tests/chaos/test_chaos.py -m chaos -s

kills: setup ## 200 seeded kills of fit processes over 60 jobs and more; ten minutes
	$(PYTEST) tests/chaos/test_faults.py -m long -s

check: setup ## lint, types, import contracts, generated docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m common.settings | diff - docs/configuration.md

fix: setup ## let the tools mend what they can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: setup ## write the generated pages
	$(BIN)/python -m common.settings > docs/configuration.md
	$(BIN)/python -m bench.quality --page

lock: setup ## write constraints.txt from what is installed
	$(BIN)/python -m pip freeze --exclude-editable | sed 's/+cpu$$//' | sort -f > constraints.txt

bench: setup ## measurements
	$(BIN)/python -m bench.predict
	$(BIN)/python -m bench.relay
	$(BIN)/python -m bench.batching

compose-test: ## build the images and run the compose stack on the Docker engine that runs here
	tests/compose/run.sh

clean: ## remove the environment and caches; data folders stay
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build *.egg-info
