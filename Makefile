# Every target sets up .venv by itself when pyproject.toml, constraints.txt or C files have changed.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Some CPUs announce AMX and then fault on it: keep oneDNN to AVX-512.
export DNNL_MAX_CPU_ISA := AVX512_CORE

.PHONY: setup demo test lint faults mutants bench data docs kernels clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt hatch_build.py $(wildcard clipwise/native/*.c)
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch hatchling editables
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/clipwise train digits --epsilon 3 --delta 1e-4 --ledger runs/digits/$$(date +%Y%m%d-%H%M%S).ledger

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# Triton's interpreter runs the GPU kernels on a CPU. Where it cannot be had, their tests are skipped.
.kernels/triton: constraints.txt
	-$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target .kernels --constraint constraints.txt triton
	-touch -c .kernels/triton

kernels: $(STAMP) .kernels/triton

test: lint kernels
	$(BIN)/python -m pytest -n 2

faults: $(STAMP)
	CLIPWISE_ALL=1 $(BIN)/python -m pytest -n 2 tests/faults

mutants: $(STAMP)
	$(BIN)/python tests/mutants

bench: $(STAMP)
	$(BIN)/python benchmarks/step.py --processes 5

data: $(STAMP)
	$(BIN)/python -m experiments data

docs: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-build-isolation --constraint constraints.txt --editable '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

clean:
	rm -rf .venv .kernels build dist site *.egg-info clipwise/native/*.so
