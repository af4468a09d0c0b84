# make demo   trains a real agent on two cores, in less than ten minutes (FAST=1: the same path in two to three; SEED=2; SANDBOX=docker)
# make test   sets everything up and runs every test
# make check  format, lint, types, layering, generated docs
# make docs   the documentation as a site
# make fast   the tests that need no heavy part
# make bench  what the gateway costs
# make soak   two hundred kills under load
# make gauntlet   puts Turngate and its peers through the Gauntlet (40 minutes; FAST=1: three minutes, and nothing is written)

PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# The extra `swe`, without what only its own harness needs (half a gigabyte).
PARSERS := swebench==5.0.2 unidiff==1.0.1

# The extra `local`: torch's build for CPUs, from where pip looks anyway or from torch's own index. "+cpu" cannot be the gigabytes for CUDA;
# a torch that is there already, with CUDA or without, is left alone.
TORCH := torch==2.13.0+cpu
GGUF := gguf==0.19.0 accelerate==1.15.0  # what reads the demo's model, which is a GGUF file on PyPI
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: setup demo test check format fast docs bench soak gauntlet parts clean

setup: $(READY)

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "Installing turngate and its development tools into .venv …"
	@$(BIN)/python -m pip install --quiet --editable '.[dev]' 2>&1 | grep -v -e '^WARNING: Location' -e '^$$' || true
	@$(BIN)/python -c 'import turngate, openai, anthropic, google.genai, e2b, renderers, pytest'
	@$(BIN)/python -c 'import torch, safetensors' 2> /dev/null \
		|| $(BIN)/python -m pip install --quiet '$(TORCH)' safetensors > .venv/torch.log 2>&1 \
		|| $(BIN)/python -m pip install --quiet --extra-index-url $(TORCH_INDEX) '$(TORCH)' safetensors >> .venv/torch.log 2>&1 \
		|| { echo "torch could not be installed: no local engine (.venv/torch.log says why)"; test "$$CI" != true; }
	@touch $@

demo: $(READY)
	@$(BIN)/python -c 'import gguf, accelerate' 2> /dev/null || $(BIN)/python -m pip install --quiet $(GGUF)
	@command -v bwrap > /dev/null || $(BIN)/python tools/base_image.py bubblewrap || true
	@$(BIN)/python examples/demo.py $(if $(FAST),--fast) $(if $(SEED),--seed $(SEED)) $(if $(SANDBOX),--sandbox $(SANDBOX))

# The heavy parts live in $$TURNGATE_CACHE and are made once. Where one cannot be made, CI fails; elsewhere its tests are skipped.
parts: $(READY)
	@$(BIN)/python tools/parts.py tokenizers vllm smollm2 tiny-qwen3 trl verifiers || test "$$CI" != true
	@$(BIN)/turngate agents install pi opencode codex claude-code gemini-cli qwen-code mini-swe-agent || test "$$CI" != true
	@$(BIN)/python tools/base_image.py docker bubblewrap chromium || test "$$CI" != true
	@$(BIN)/python -m pip install --quiet --no-deps $(PARSERS) || test "$$CI" != true
	@$(BIN)/python tools/swe_tasks.py --out .venv/swe.jsonl || test "$$CI" != true

# First what can run side by side, and whatever those tests record is proven; then what needs the machine for itself.
test: check parts
	@$(BIN)/python -m pytest -q -n 2 -m "not real" -p tests.verify.everywhere
	@$(BIN)/python -m pytest -q -n 2 --dist loadfile --no-loadscope-reorder -m "real and not alone" -p tests.verify.everywhere
	@$(BIN)/python -m pytest -q -m alone -p tests.verify.everywhere

check: $(READY)
	@$(BIN)/ruff format --check --quiet . || { echo "run: make format"; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy --no-error-summary
	@$(BIN)/lint-imports --no-cache > .venv/layers.log 2>&1 || { cat .venv/layers.log; exit 1; }
	@$(BIN)/python tools/make_docs.py --check
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "check: format, lint, types, layering and docs are in order"

format: $(READY)
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/python tools/make_docs.py

# The site; a broken link is an error.
docs: $(READY)
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet
	@echo "docs: $(CURDIR)/.venv/site/index.html"

fast: $(READY)
	@$(BIN)/python -m pytest -q -n 2 -m "not real"

bench: $(READY)
	@$(BIN)/python tools/parts.py tokenizers
	@$(BIN)/python bench/overhead.py

soak: $(READY)
	@$(BIN)/python -m tests.crash.storm --kills 200

# Peers are installed on first use, each into an environment of its own under $$TURNGATE_CACHE/gauntlet.
gauntlet: $(READY)
	@$(BIN)/python tools/parts.py tokenizers
	@$(BIN)/python -m gauntlet $(if $(FAST),--dialect chat --load 4x10 --repeats 1,--results docs/gauntlet-results.md --readme README.md)

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .hypothesis
