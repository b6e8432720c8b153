# `make demo` and `make test` work on a machine that has python3 (>= 3.10), make and git.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test lint figures docs clean

demo: $(STAMP)
	$(BIN)/python -m recipes.gpt.demo

test: lint
	$(BIN)/pytest

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

figures: $(STAMP)
	$(BIN)/python -m benchmarks.figures

docs: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[docs]'
	$(BIN)/mkdocs build --strict

$(STAMP): pyproject.toml constraints.txt
	@echo "Installing into .venv: some minutes, the first time"
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

clean:
	rm -rf .venv build dist demo .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
