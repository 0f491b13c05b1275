# make study    install, run the offline study, print its tables        make test    lint and all tests
# make matrix   contract tests on old and new transformers              make lint    the static half of test
VENV := .venv
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check
WORKERS ?= 2
ARGS ?=

.DELETE_ON_ERROR:
.PHONY: install study test lint format matrix clean

install: $(INSTALLED)

$(INSTALLED): pyproject.toml env/requirements.txt env/requirements-dev.txt env/requirements-offline.txt env/constraints.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one with PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(PIP) -r env/requirements.txt -r env/requirements-dev.txt
	$(PIP) --no-deps -r env/requirements-offline.txt
	$(PIP) --no-deps -e .
	@touch $@

study: $(INSTALLED)
	$(BIN)/polykv run --profile offline $(ARGS)
	$(BIN)/polykv tables
	$(BIN)/polykv figures

lint: $(INSTALLED)
	$(BIN)/ruff check --output-format concise .
	$(BIN)/ruff format --check --output-format concise .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

test: lint
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

matrix:
	$(PYTHON) env/matrix.py $(ARGS)

clean:
	rm -rf $(VENV) .venv-matrix .mypy_cache .pytest_cache .ruff_cache
