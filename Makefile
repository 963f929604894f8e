PYTHON ?= python3
BIN := .venv/bin
# One thread per process: the examples and tests are tiny, and bits depend on the number of threads.
export OMP_NUM_THREADS ?= 1
# Tests wait for disks and processes more than for the CPU, so that two at a time take little more than one.
WORKERS ?= -n 2 --dist worksteal
# The long ones wait even more.
LONG_WORKERS ?= -n 3 --dist worksteal

.PHONY: demo test test-all campaign gpu-proof check bench pictures clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[dev]'
	touch $@

demo: .venv/installed
	$(BIN)/python -m pipeline new digits --data-home demo --exist-ok
	$(BIN)/torchrun --nproc-per-node=2 training_pipeline.py digits --data-home demo --reset --device cpu

test: .venv/installed
	$(BIN)/python -m pytest $(WORKERS) --durations=15

test-all: .venv/installed
	$(BIN)/python -m pytest $(LONG_WORKERS) -m slow --durations=20

# More kills than CI can afford; SEED repeats a campaign's draws.
SEED ?= 0
campaign: .venv/installed
	$(BIN)/python -m tests.crash lives --nproc 2 --kills 100 --seed $(SEED)
	$(BIN)/python -m tests.crash lives --nproc 4 --kills 100 --seed $(SEED)
	$(BIN)/python -m tests.crash kills --nproc 4 --kills 100 --seed $(SEED)

# For people who have a GPU: tries there what the tests can only simulate, and prints a table.
gpu-proof: .venv/installed
	$(BIN)/python -m tests.proof $(PROOF)

check: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# What we are compared with is needed for nothing else.
.venv/peers: .venv/installed
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --editable '.[dev,bench]'
	touch $@

bench: .venv/peers
	$(BIN)/python -m benchmarks --json bench.json

pictures: .venv/installed
	$(BIN)/python -m docs.pictures

clean:
	rm -rf .venv demo
