# Holdfast: `make serve` and `make test` do all of their own set-up, once.
#
#   make serve PORT=8000 MODEL=pocket REPLICAS=1 ROUTERS=1 CONFIG=holdfast.yaml

# The first that runs and is new enough; a version manager's stand-in may be on the path and still not run.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
  $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_DEV := $(VENV)/.installed-dev
OPTIONS := $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL)) \
           $(if $(REPLICAS),--replicas $(REPLICAS)) $(if $(ROUTERS),--routers $(ROUTERS)) $(if $(CONFIG),--config $(CONFIG))
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: serve test lint format types check chart clients docs fuzz options clean

serve: $(STAMP)
	@exec $(BIN)/holdfast serve $(OPTIONS)

# Two at a time, each file whole in one of them: much of a test of a cluster is waiting for processes to start.
test: $(STAMP_DEV)
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

lint: $(STAMP_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP_DEV)
	$(BIN)/mypy $(foreach p,kernels replicas router cluster loadgen,-p holdfast.$(p))

check: lint types test

# What schemathesis makes of /openapi.json, sent to a router over HTTP.
fuzz: $(STAMP_DEV)
	PYTHONPATH=tests/support $(BIN)/python tests/support/api_fuzz.py --cases $(or $(CASES),20000)

# Clients of others (docs/clients.md), installed into .clients: all, or WHICH="LiteLLM,Claude Code"; TESTS= as pytest's -k.
clients: $(STAMP_DEV)
	$(BIN)/python tests/support/real_clients.py .clients "$(WHICH)"
	HOLDFAST_CLIENTS=.clients $(BIN)/pytest tests/router/test_clients.py tests/cluster/test_clients_on_serve.py $(if $(TESTS),-k "$(TESTS)")

# The site, into build/site; a dead link or a page that is not in its menu is an error.
docs: $(STAMP_DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The page of all options, from the configuration classes.
options: $(STAMP_DEV)
	mkdir -p build
	$(BIN)/holdfast config options > build/options.md
	mv build/options.md docs/options.md

# What is made for and from the chart: dashboards, rules and the tables of docs/metrics.md; the schema of its values, its
# README, and the rendered objects that reviews look at.
chart: $(STAMP_DEV)
	$(BIN)/python -m holdfast.cluster.metrics_page docs/metrics.md
	$(BIN)/python -m holdfast.cluster.dashboards --out helm/holdfast/files/dashboards
	$(BIN)/python -m holdfast.cluster.rules --out helm/holdfast/files/rules
	$(BIN)/python helm/schema.py
	$(BIN)/python helm/readme.py
	$(BIN)/python tests/helm/snapshots.py

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Holdfast needs Python 3.11 or later; say which with PYTHON=" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard kernels/*_c.c) | $(BIN)/python
	@echo "installing into $(VENV); this takes some minutes, once"
	@$(PIP) -e .
	@touch $@

$(STAMP_DEV): $(STAMP)
	@$(PIP) -e '.[dev]'
	@touch $@
