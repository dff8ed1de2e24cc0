# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/.ready-run
	$(BIN)/python -m topovq demo

test: .venv/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.ready-run: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[tokens,explore]'
	touch $@

.venv/.ready-test: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

clean:
	rm -rf .venv runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
