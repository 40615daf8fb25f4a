# One entry point for every developer command. Each target sets up what it needs in .venv; a stamp
# file a set of packages says that it is there and is remade when pyproject.toml changes.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip -qq --disable-pip-version-check install

CORE_COVERAGE_MIN := 95
ARGS ?=
SEEDS ?= 200
JOBS ?= 2

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo test check sglang-envs sglang engines consumers sim storm bench gpu docs clean

help:
	@echo "make venv   everything for development in $(VENV)"
	@echo "make demo   install the runtime alone, then run treecored demo"
	@echo "make test   tests without GPU and SGLang, with line coverage of directory/core >= $(CORE_COVERAGE_MIN) %"
	@echo "make check  ruff, mypy --strict, import contracts"
	@echo "make sglang-envs  real SGLang for machines without a GPU, in .sglang (1.4 GB)"
	@echo "make sglang  tests with real SGLang: in its environments, and with engines"
	@echo "make engines  all of them: every cell of version, page size, mode; 10,000 operations"
	@echo "make consumers  KV events read by a router's indexer and a viewer, in .consumers (280 MB)"
	@echo "make sim    deterministic simulation (SEEDS=200 JOBS=2; ARGS=... is handed on)"
	@echo "make storm  a million random operations of eight schedulers (ARGS=... is handed on)"
	@echo "make bench  list the benchmarks (ARGS=\"core match\" or ARGS=--all runs them)"
	@echo "make gpu    tests that need a CUDA device"
	@echo "make docs   remake the generated parts of docs/"
	@echo "make clean  remove $(VENV), .sglang, .consumers and caches"

# ---------------------------------------------------------------------------------- environment

$(VENV)/.stamp-venv:
	@test -n "$(PYTHON)" || { echo "no python3 found: install Python 3.11 or newer" >&2; exit 1; }
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is too old: Python 3.11 or newer is needed" >&2; exit 1; }
	@"$(PYTHON)" -m venv $(VENV)
	@touch $@

$(VENV)/.stamp-run: pyproject.toml $(VENV)/.stamp-venv
	@echo "setting up $(VENV): runtime"
	@$(PIP) -e .
	@touch $@

$(VENV)/.stamp-test: pyproject.toml $(VENV)/.stamp-venv
	@echo "setting up $(VENV): test"
	@$(PIP) -e '.[test]'
	@touch $@ $(VENV)/.stamp-run

$(VENV)/.stamp-dev: pyproject.toml $(VENV)/.stamp-venv
	@echo "setting up $(VENV): dev"
	@$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/.stamp-test $(VENV)/.stamp-run

$(VENV)/.stamp-bench: pyproject.toml $(VENV)/.stamp-venv
	@echo "setting up $(VENV): bench"
	@$(PIP) -e '.[bench]'
	@touch $@ $(VENV)/.stamp-run

$(VENV)/.stamp-gpu: pyproject.toml $(VENV)/.stamp-venv
	@echo "setting up $(VENV): test, cuda"
	@$(PIP) -e '.[test,cuda]'
	@touch $@ $(VENV)/.stamp-test $(VENV)/.stamp-run

venv: $(VENV)/.stamp-dev

# ------------------------------------------------------------------------------------- commands

demo: $(VENV)/.stamp-run
	@$(BIN)/treecored demo $(ARGS)

# Coverage is collected for all three packages, but only the core is held to a figure. Simulation
# and storm are left out of it (tests/conftest.py): the figure does not need them, and tracing would
# make them several times slower.
test: $(VENV)/.stamp-test
	@rm -f .coverage
	@$(BIN)/python -m pytest -q -m "not gpu and not sglang and not engines and not consumers" -n $(JOBS) --dist worksteal \
		--cov --cov-report= $(ARGS)
	@$(BIN)/python -m coverage report --include='directory/core/*' \
		--fail-under=$(CORE_COVERAGE_MIN)

check: $(VENV)/.stamp-dev
	@$(BIN)/ruff check --quiet .
	@$(BIN)/ruff format --quiet --check .
	@$(BIN)/mypy --strict --no-error-summary
	@$(BIN)/lint-imports --no-logo

sglang-envs:
	@"$(PYTHON)" -m tests.sglang.environments

# First what imports SGLang, inside each environment, all of them at once; then engines as processes
# of their own. Each environment compiles SGLang's extensions for itself: two that do it in one
# folder take each other's lock away. The long ones (10,000 operations of parity; every cell, storm
# and kill) are for `make engines`.
sglang: INSIDE := sglang and not slow
sglang: OUTSIDE := engines and not every_cell
engines: INSIDE := sglang
engines: OUTSIDE := engines
sglang engines: $(VENV)/.stamp-test sglang-envs
	@running=; failed=; for python in .sglang/[0-9]*/bin/python; do \
		TORCH_EXTENSIONS_DIR="$$PWD/$${python%/bin/python}/extensions" \
			PYTHONPATH=tests/sglang/stubs $$python -m pytest -q -m "$(INSIDE)" tests/sglang $(ARGS) \
			>"$${python%/bin/python}/inside.log" 2>&1 & running="$$running $$!:$$python"; \
	done; \
	for each in $$running; do \
		python=$${each#*:}; wait $${each%%:*} || failed="$$failed $$python"; \
		echo "inside $$python: $(INSIDE)"; cat "$${python%/bin/python}/inside.log"; \
	done; \
	test -z "$$failed" || { echo "failed inside$$failed" >&2; exit 1; }
	@$(BIN)/python -m pytest -v -m "$(OUTSIDE)" tests/sglang $(ARGS)

consumers: $(VENV)/.stamp-test
	@$(BIN)/python -m pytest -v -m consumers tests/consumers $(ARGS)

sim: $(VENV)/.stamp-test
	@$(BIN)/python -m tests.simulation --seeds $(SEEDS) --jobs $(JOBS) $(ARGS)

storm: $(VENV)/.stamp-test
	@$(BIN)/python -m tests.storm $(ARGS)

bench: $(VENV)/.stamp-bench
	@$(BIN)/python -m benchmarks $(ARGS)

gpu: $(VENV)/.stamp-gpu
	@$(BIN)/python -m pytest -q -m gpu $(ARGS)

docs: $(VENV)/.stamp-test
	@$(BIN)/python -m docs $(ARGS)

clean:
	@rm -rf $(VENV) .sglang .consumers .consumers.lock .coverage .hypothesis
	@rm -rf .mypy_cache .ruff_cache .pytest_cache .import_linter_cache
