# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test docs wheel campaign audit clean

demo: .venv/.ready-run
	$(BIN)/python -m topovq demo

test: .venv/.ready-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest

docs: .venv/.ready-docs
	OMP_NUM_THREADS=1 $(BIN)/sphinx-build -q -W --keep-going -n -b html docs docs/_build
	@echo "The pages: docs/_build/index.html"

# Attacks, for half an hour: damaged files, kills, lost ranks, hostile requests. `CASES=1000` has it done in minutes.
campaign: .venv/.ready-test
	$(BIN)/python -m campaign --cases $(or $(CASES),10000) --seed $(or $(SEED),0) --out campaign.csv

# Known advisories on what is installed; needs the network
audit: .venv/.ready-test
	$(BIN)/pip install --quiet --disable-pip-version-check pip-audit
	$(BIN)/pip-audit --skip-editable

wheel: .venv/.ready-test
	rm -rf dist
	$(BIN)/python -m build

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/.ready-run: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[view]'
	touch $@

.venv/.ready-test: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test]'
	touch $@

.venv/.ready-docs: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[som,train,view,docs]'
	touch $@

clean:
	rm -rf .venv build dist runs docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis
