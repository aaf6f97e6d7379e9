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
INSTALL := $(BIN)/python install.py

.PHONY: serve test images lint format types check chart clients docs pictures fuzz options clean

serve: $(STAMP)
	@exec $(BIN)/holdfast serve $(OPTIONS)

# Three at a time, each file whole in one of them: much of a test of a cluster is waiting.
test: $(STAMP_DEV)
	$(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder

# What the images of docker/ install can be resolved by pip. Asks a package index: some minutes.
images: $(STAMP_DEV)
	HOLDFAST_TEST_INDEX=1 $(BIN)/pytest tests/helm/test_images.py

lint: $(STAMP_DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(STAMP_DEV)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

types: $(STAMP_DEV)
	$(BIN)/mypy $(foreach p,kernels replicas router cluster loadgen,-p holdfast.$(p)) -p helm.build -p pocket

check: lint types test

# What schemathesis makes of /openapi.json, sent to a router over HTTP.
fuzz: $(STAMP_DEV)
	$(BIN)/python tools/api_fuzz.py --cases $(or $(CASES),20000)

# Clients of others (docs/clients.md), installed into .clients: all, or WHICH="LiteLLM,Claude Code"; TESTS= as pytest's -k.
clients: $(STAMP_DEV)
	$(BIN)/python tools/real_clients.py .clients "$(WHICH)"
	HOLDFAST_CLIENTS=.clients $(BIN)/pytest -rs --durations 12 tests/cluster/test_clients.py $(if $(TESTS),-k "$(TESTS)")

# The site, into build/site; a dead link or a page that is not in its menu is an error.
docs: $(STAMP_DEV)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The pictures of a server at work, from one that runs at URL= (make serve) while agents use it.
pictures: $(STAMP_DEV)
	$(BIN)/python tools/pictures.py $(or $(URL),http://127.0.0.1:8000)

# The page of all options, from the configuration classes.
options: $(STAMP_DEV)
	mkdir -p build
	$(BIN)/holdfast config options > build/options.md
	mv build/options.md docs/options.md

# What is made for and from the chart: dashboards, rules and the tables of docs/metrics.md; the schema of its values, its
# README, and the rendered objects that reviews look at.
chart: $(STAMP_DEV)
	$(BIN)/python -m helm.build
	$(BIN)/python tests/helm/snapshots.py

clean:
	rm -rf $(VENV) build dist *.egg-info kernels/*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "Holdfast needs Python 3.11 or later; say which with PYTHON=" >&2; exit 1; }
	@echo "making $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv $(VENV)

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard kernels/*_c.c) kernels/lanes.h | $(BIN)/python
	@echo "installing Holdfast and what it needs into $(VENV): torch is the largest; once, some minutes"
	@$(INSTALL) -e .
	@touch $@

$(STAMP_DEV): $(STAMP)
	@echo "installing what tests and tools need"
	@$(INSTALL) -e '.[dev]'
	@touch $@
