# make run: from nothing to a served model. make test: the tests. Both install what is missing, once.
# make test-slow: the tests that take minutes: whole runs of every page and every example, chaos, interrupted releases.
# make test-cluster: the tests that need a cluster, in a namespace of their own; tests/cluster/conftest.py says what to set.
# make chaos: 200 runs are killed, stopped and starved by seeded schedules, and must give the weights of undisturbed ones
#   (N=1000: so many. SEED=17: that one alone, with all that happens in it).
# make fuzz: what parses strangers' bytes meets generated ones, for a minute in all (SECONDS=3600: an hour. SEED=17: these).
# make mutants: a test must notice each small mistake that is made in what decides most (COUNT=80: of a target. SEED=17).
# make scan: checkov looks at all that is rendered, and at the Dockerfiles.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := uv==0.13.9
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export UV_PROJECT_ENVIRONMENT = $(VENV)

.PHONY: install run test test-slow test-cluster chaos check scan fuzz mutants clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml uv.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rekindle needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) what uv.lock lists (PyTorch is large: minutes, unless it is in uv's cache)"
	@test -x $(BIN)/uv || $(BIN)/pip install --quiet $(UV)
	@$(BIN)/uv sync --quiet --locked --inexact --extra dev
	@touch $@

run: install
	@$(BIN)/rekindle run configs/demo.yaml

# many tests wait more than they compute: four processes keep two cores busy
test: install
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

test-slow: install
	@$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder

test-cluster: install
	@$(BIN)/python -m pytest -m cluster tests/cluster

chaos: install
	@$(BIN)/python -m tests.chaos $(if $(SEED),$(SEED) --story,--count $(or $(N),200))

check: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/bandit --quiet --configfile pyproject.toml --recursive argolocal rekindle pipelines steps template

# checkov has 70 dependencies: uv gives it an environment of its own
scan: install
	@$(BIN)/python -m tests.scan

fuzz: install
	@$(BIN)/python -m tests.fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED))

mutants: install
	@$(BIN)/python -m tests.mutation $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

clean:
	@test ! -x $(BIN)/rekindle || $(BIN)/rekindle down
	@rm -rf $(VENV)
