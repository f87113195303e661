# Everything runs in .venv, which `make` builds on first use. PYTHON chooses the interpreter (3.10 to 3.13).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test test-all faults horovod lint bench bench-workers bench-checkpoints bench-watching bench-input clean

train: .venv/ready
	$(BIN)/python -m tfdist.train

# Two files of tests at a time; those of a file stay together, since they share what is slow to set up.
test: .venv/ready horovod
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder

# Every cell of every table, and `faults`.
test-all: .venv/ready horovod
	$(BIN)/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -m ''

# The long ones: processes that are killed, stopped and cut off in mid-run.
faults: .venv/ready horovod
	$(BIN)/python -m pytest -m faults

# Two minutes the first time, nothing afterwards.
horovod: .venv/ready
	$(BIN)/python -m tfdist.horovod_build

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python benchmarks/bench.py

bench-checkpoints: .venv/ready
	$(BIN)/python benchmarks/bench_checkpoints.py

bench-watching: .venv/ready
	$(BIN)/python benchmarks/bench_watching.py

bench-input: .venv/ready
	$(BIN)/python benchmarks/bench_input.py

bench-workers: .venv/ready horovod
	$(BIN)/python benchmarks/bench_workers.py

.venv/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test,horovod]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info runs
