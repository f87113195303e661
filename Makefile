# Everything runs in .venv, which `make` builds on first use. PYTHON chooses the interpreter (3.10 to 3.13).
PYTHON ?= python3
BIN := .venv/bin

.PHONY: train test lint bench clean

train: .venv/ready
	$(BIN)/python -m tfdist.train

test: .venv/ready
	$(BIN)/python -m pytest

lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: .venv/ready
	$(BIN)/python benchmarks/bench.py

.venv/ready: setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	touch $@

clean:
	rm -rf .venv build dist *.egg-info runs
