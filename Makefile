# make demo   trains the built-in example and writes its report
# make test   runs the whole test suite
# Both work from a bare clone: they make .venv and install into it first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.PHONY: demo test lint format clean
.DEFAULT_GOAL := demo

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

demo: $(INSTALLED)
	$(BIN)/forgefield train

# Three workers for two cores: some tests wait for launchers and schedulers, and others go on meanwhile.
test: $(INSTALLED)
	OMP_NUM_THREADS=1 SYMPY_CACHE_SIZE=100000 $(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST_ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
