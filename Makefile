# Every command that a developer or CI runs. `make` alone lists them.
#
# PYTHON   interpreter that builds .venv (3.11 to 3.13), e.g. PYTHON=python3.12 make venv
# WORKERS  processes of the test run
# ARGS     further arguments of `undertow quickstart`, of pytest or of the parity run

PYTHON ?= python3
WORKERS ?= 2
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
PYTEST := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup

.PHONY: help venv dev quickstart test test-slow parity check docs

help: ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1\t\2/p' Makefile | expand -t 18

venv: $(VENV)/.core ## build .venv with what the package itself needs

dev: $(VENV)/.dev ## add the tools for tests, checks and documentation to .venv

quickstart: $(VENV)/.core ## the whole path in miniature on this machine (ARGS=--short for the brief form)
	$(BIN)/undertow quickstart $(ARGS)

test: $(VENV)/.dev ## the tests that need no GPU and little time
	$(PYTEST) $(ARGS)

test-slow: $(VENV)/.dev ## the longer tests that need no GPU
	$(PYTEST) -m "slow and not gpu" $(ARGS)

parity: $(VENV)/.dev ## the model beside transformers' on 100 random models (ARGS="--configurations 20")
	$(BIN)/python -m benchmarks.parity $(ARGS)

check: $(VENV)/.dev ## lint, format, types and the directions of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo --no-cache

docs: $(VENV)/.dev ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

# Stamps, so that a second call costs nothing; both are made again when the requirements change.
$(VENV)/.core: pyproject.toml constraints.txt
	@command -v "$(PYTHON)" >/dev/null || { \
		echo "make: '$(PYTHON)' not found; Undertow needs Python 3.11 to 3.13, e.g. PYTHON=python3.12 make venv" >&2; exit 2; }
	@"$(PYTHON)" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || { \
		echo "make: '$(PYTHON)' is $$("$(PYTHON)" -V 2>&1); Undertow needs Python 3.11 to 3.13, e.g. PYTHON=python3.12 make venv" >&2; exit 2; }
	@"$(PYTHON)" -m venv $(VENV) || { \
		echo "make: '$(PYTHON)' has no working venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 2; }
	$(PIP) install -c constraints.txt -e .
	@touch $@

$(VENV)/.dev: $(VENV)/.core
	$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@
