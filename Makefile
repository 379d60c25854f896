# Every target works on a fresh clone: it makes .venv and installs into it when pyproject.toml changed.

PYTHON ?= python3
# PyPI's Linux wheels of torch bring CUDA along. For a small CPU install:
#   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make run TORCH=torch==2.13.0+cpu
TORCH ?= torch==2.13.0
CONFIG ?= configs/products.toml
# Empty: what CONFIG says.
NUMERICS ?=
STEPS ?=
REPLICAS ?=
PYTEST_ARGS ?=
COMPOSE ?= docker-compose

BIN := .venv/bin
INSTALLED := .venv/installed-$(TORCH)

.DEFAULT_GOAL := help
.PHONY: help install run test test-all format protos docs check-deploy clean

help:
	@echo "make run            train SmolLM2-135M on one-digit products here (CONFIG= NUMERICS= STEPS= REPLICAS=)"
	@echo "make test           ruff, mypy and every test that fits in ten minutes on two cores"
	@echo "make test-all       the slow tests too"
	@echo "make format         ruff format and the fixes that ruff makes by itself"
	@echo "make protos         regenerate shared/wire/pb from protos/"
	@echo "make docs           regenerate docs/configuration.md, tables, plots and the Grafana dashboard from the code"
	@echo "make check-deploy   the deploy folder under docker-compose, promtool and the compose schema"
	@echo "make clean          remove .venv and every cache"

install: $(INSTALLED)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "timzero needs Python 3.11 or newer; '$(PYTHON) --version' says: $$($(PYTHON) --version 2>&1). Name another one: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' has no venv module. On Debian: apt-get install python3-venv"; exit 1; }
	$(PYTHON) -m venv .venv

$(INSTALLED): pyproject.toml | $(BIN)/python
	@echo "installing into .venv"
	@rm -f .venv/installed-*
	@$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)" --editable '.[all,dev]'
	@touch $@

run: $(INSTALLED)
	$(BIN)/timzero model get smollm2-135m-instruct
	$(BIN)/timzero train $(CONFIG) --local \
	  $(if $(NUMERICS),--numerics $(NUMERICS)) $(if $(STEPS),--steps $(STEPS)) $(if $(REPLICAS),--replicas $(REPLICAS))

test: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/pytest -n auto --maxprocesses 4 --dist loadfile $(PYTEST_ARGS)

test-all: PYTEST_ARGS += -m 'not gpu'
test-all: test

format: $(INSTALLED)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: $(INSTALLED)
	$(BIN)/python -m grpc_tools.protoc -Ishared/wire/pb=protos --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto

docs: $(INSTALLED)
	$(BIN)/python docs/generate_configuration.py
	$(BIN)/python docs/generate_correction_plots.py
	$(BIN)/python docs/generate_scaling.py
	$(BIN)/python docs/generate_performance.py
	$(BIN)/python deploy/grafana/generate_dashboard.py

# docker-compose and promtool are not pip packages (Debian: docker-compose, prometheus), so `make test` checks the same
# files with the compose schema and a PromQL parser instead.
check-deploy: $(INSTALLED)
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec deploy/compose/compose.yaml
	GATEWAY_KEY=name:digest:scopes $(COMPOSE) --env-file deploy/compose/.env.example --file deploy/compose/compose.yaml config --quiet
	cd deploy/prometheus && promtool check config prometheus.yml && promtool test rules rules_test.yml

clean:
	rm -rf .venv .pytest_cache .ruff_cache .mypy_cache .hypothesis .schemathesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
