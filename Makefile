# make demo   trains the built-in example and writes its report
# make test   runs the whole test suite
# make docs   builds the documentation in docs/_build/html;  make linkcheck checks its links to other sites
# All work from a bare clone: they make .venv and install into it first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
SPHINX := $(VENV)/.sphinx
TRITON := $(VENV)/.triton
# Tests of generated kernels, which run in Triton's interpreter where there is no GPU.
KERNEL_TESTS := tests/kernels tests/ldos/training/test_fused.py tests/ldos/training/test_reference.py \
  tests/training/engines/test_graphs_load.py tests/inference/engine --ignore=tests/kernels/cpu

# make reference, make tutorials, make dist: generated pages, executed tutorials, sdist and wheel
.PHONY: demo test docs linkcheck reference tutorials dist lint format clean
.DEFAULT_GOAL := demo

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(TRITON): $(INSTALLED)
	[ "$$(uname -s)" != Linux ] || $(BIN)/python -c "import triton" 2> /dev/null || \
	  $(BIN)/python -m pip install --quiet --disable-pip-version-check triton==3.7.1
	touch $@

demo: $(INSTALLED)
	$(BIN)/forgefield train

# Pages of the reference that are generated from declarations in the code.
reference: $(INSTALLED)
	$(BIN)/python docs/generate.py

$(SPHINX): $(INSTALLED)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[docs]"
	touch $@

# Executes the tutorials in docs/notebooks and stores them with their output, which takes about half an hour.
tutorials: $(SPHINX)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python docs/execute.py

docs: $(SPHINX)
	$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

# Addresses of other sites in the documentation; links between its pages are checked by `make docs`.
linkcheck: $(SPHINX)
	$(BIN)/python -m sphinx -q -b linkcheck docs docs/_build/linkcheck

# Three workers for two cores: some tests wait for launchers and schedulers, and others run meanwhile. After failures
# in the first part (status 1) the kernel tests run as well.
test: $(INSTALLED) $(TRITON) $(SPHINX)
	OMP_NUM_THREADS=1 SYMPY_CACHE_SIZE=100000 $(BIN)/python -m pytest -n 3 --dist worksteal $(PYTEST_ARGS); \
	  status=$$?; [ $$status -le 1 ] || exit $$status; \
	  TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal $(KERNEL_TESTS) && \
	  exit $$status

# Source distribution and wheel in dist/; the wheel is installed into an environment of its own and trains there.
dist: $(INSTALLED)
	rm -rf build dist
	$(BIN)/python -m build --outdir dist .
	.ci/try-wheel $(PYTHON) dist/*.whl

lint: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) runs docs/_build build dist .pytest_cache .mypy_cache .ruff_cache
