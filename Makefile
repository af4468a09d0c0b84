# make demo       run a real agent and show its tokens in the first minute, then train it on two cores, in about four minutes (FAST=1: two; SEED=2; SANDBOX=docker); MODEL=coder: train a coding model on a GPU of 48 GB
# make demo-cluster  run a batch on PostgreSQL and three Ray nodes of this machine, and kill a node in the middle
# make test       run all tests without heavy parts, and one real agent: ten minutes from a bare machine; no root, Docker or npm
# make test-real  run at least one test for every real part and every promise: six to nine minutes, once the parts are installed
# make test-all   run all tests but the repetitions of `make soak`: 22 to 30 minutes, once the parts are installed
# make soak       run the stress tests (random kills and injected faults) at full size, repetitions (such as every agent in every sandbox), and an hour of load
# make chaos      inject every kind of fault into live gateways and check that nothing is lost (FAST=1: a sample of them in three minutes; SEED=7; ROUNDS=3)
# make fuzz       fuzz the HTTP API, decoders, parsers, files and the store (SECONDS=60 per target; SEED=1; ONLY=http; RESULTS=FOLDER: all at the same time)
# make check      check format, lint, types, layering, names and generated docs
# make docs       build the documentation site
# make dist       build the wheel and the sdist, and try each in an empty environment (two minutes)
# make sbom       write a bill of materials of Turngate and its agents to dist/sbom.cdx.json (OSV=FOLDER: look up known vulnerabilities)
# make bench      measure the overhead of the gateway
# make gauntlet   put Turngate and its peers through the Gauntlet (over an hour; FAST=1: a few minutes, writes nothing; FEATURES=1: what rows carry)

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed
READY := .venv/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The tests start hundreds of Python processes: cache the bytecode.
unexport PYTHONDONTWRITEBYTECODE
# The `local` extra: torch's CPU build, from pip's configured index or torch's own. "+cpu" rules out the CUDA build, which takes gigabytes.
# An installed torch is kept, with or without CUDA.
TORCH := torch==2.13.0+cpu
GGUF := gguf==0.19.0 accelerate==1.15.0  # read the demo's model, a GGUF file on PyPI
TORCH_INDEX := https://download.pytorch.org/whl/cpu
PIP = $(BIN)/python -m pip install --quiet --no-compile
DEV := --editable '.[dev]'
CHECK_PYTHON = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }

.PHONY: help setup demo demo-cluster test test-real test-all check format docs dist sbom bench soak chaos fuzz gauntlet clean

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile

setup: $(READY)

$(INSTALLED): pyproject.toml
	@$(CHECK_PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing turngate into .venv …"
	@$(PIP) --editable .
	@touch $@

# One call of pip for everything is faster than several.
$(READY): pyproject.toml
	@$(CHECK_PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing turngate, the development tools and torch into .venv …"
	@$(PIP) --upgrade pip 2> /dev/null || true  # a current pip needs half the time
	@if $(BIN)/python -c 'import torch, safetensors' 2> /dev/null; then $(PIP) $(DEV); \
	elif ! $(PIP) $(DEV) '$(TORCH)' safetensors > .venv/torch.log 2>&1; then \
		$(PIP) $(DEV) && $(PIP) --extra-index-url $(TORCH_INDEX) '$(TORCH)' safetensors >> .venv/torch.log 2>&1 \
		|| { echo "torch could not be installed: no local engine (.venv/torch.log says why)"; test "$$CI" != true; }; \
	fi
	@$(BIN)/python -c 'import turngate, openai, anthropic, google.genai, e2b, renderers, pytest'
	@touch $(INSTALLED) $@

# A bare machine shows a first result with a scripted model before torch and the model are installed.
demo: $(INSTALLED)
	@test -e $(READY) || { $(BIN)/turngate run && $(BIN)/turngate show last --tokens; } || echo "The first run failed. The demo continues."
	@$(MAKE) --no-print-directory setup
	@$(BIN)/python -c 'import gguf, accelerate' 2> /dev/null || $(BIN)/python -m pip install --quiet $(GGUF)
	@command -v bwrap > /dev/null || $(BIN)/python tools/base_image.py bubblewrap || true
	@$(BIN)/python examples/demo.py $(if $(MODEL),--model $(MODEL)) $(if $(FAST),--fast) $(if $(SEED),--seed $(SEED)) $(if $(SANDBOX),--sandbox $(SANDBOX))

demo-cluster: $(READY)
	@$(BIN)/python examples/demo_cluster.py

# Test tiers. Heavy parts are installed into $$TURNGATE_CACHE on first use. Tests of a missing part fail in CI and are skipped elsewhere.
test test-real test-all: $(READY)
	@$(BIN)/python tools/tier.py $@ $(PYTEST)

check: $(READY)
	@$(BIN)/ruff format --check --quiet . || { echo "run: make format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache > .venv/layers.log 2>&1 || { cat .venv/layers.log; exit 1; }
	@$(BIN)/python tools/check_names.py
	@$(BIN)/python tools/make_docs.py --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "check: format, lint, types, layering, names and docs pass"

format: $(READY)
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/python tools/make_docs.py

# Build the site; a broken link is an error.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "docs: $(CURDIR)/.venv/site/index.html"

# Needs the package index, for the dependencies of the empty environments.
dist: $(READY)
	@$(BIN)/python tools/dist.py

sbom: $(READY)
	@$(BIN)/python tools/sbom.py $(if $(OSV),--advisories $(OSV))

bench: $(READY)
	@$(BIN)/python tools/parts.py tokenizers
	@$(BIN)/python bench/overhead.py

soak: $(READY)
	@$(BIN)/python tools/tier.py soak
	@$(BIN)/python bench/load.py --turns 50 --minutes 60 --max-growth 0.1

# Faults of the disk need root, and those of a cell need PostgreSQL.
chaos: $(READY)
	@$(BIN)/python -m tests.chaos $(if $(FAST),--fast) $(if $(SEED),--seed $(SEED)) $(if $(ROUNDS),--rounds $(ROUNDS))

fuzz: $(READY)
	@$(BIN)/python -m tests.fuzz --seconds $(or $(SECONDS),60) $(if $(SEED),--seed $(SEED)) $(if $(ONLY),--only $(ONLY)) $(if $(RESULTS),--results $(RESULTS))

# Peers are installed on first use, each into its own environment under $$TURNGATE_CACHE/gauntlet.
gauntlet: $(READY)
	@$(BIN)/python tools/parts.py tokenizers
	@$(BIN)/python -m gauntlet $(if $(FAST),--dialect chat --load 4x10 --repeats 1,$(if $(FEATURES),--only-features) --results docs/gauntlet-results.md --readme README.md)

clean:
	rm -rf .venv dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
