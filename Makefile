# Everything that people and CI run. `make` alone lists the targets.
# The environment in .venv is made once and again when pyproject.toml or constraints.txt change; the package is
# installed editable, so edits need no reinstall. PYTHON= picks the interpreter, ARGS= adds flags.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install --quiet -c constraints.txt
DEFAULT_MODEL := smollm2
BROWSERS := chromium chromium-browser google-chrome chrome
# Bytecode is kept, whatever the environment says: pytest rewrites the assertions of every file of tests that has none,
# which takes half of its collection.
export PYTHONDONTWRITEBYTECODE :=
# One process of tests per core, but no more than 4 (each loads torch), and one thread in each: they fill the cores, and
# tests that wait for servers cost no time. Tests that want more threads have more than there are cores: those that wait
# must not spin.
PARALLEL := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n logical --maxprocesses 4 --dist loadfile
# The fast unit tests run in two processes instead, each of which imports and collects its own half: that is half of what
# they cost, and pytest-xdist collects everything in every process.
# The first has all that load models or ask transformers for one, so that the second does without most of transformers.
NETWORK := tests/unit/model tests/unit/worker tests/unit/engine tests/unit/artifacts tests/unit/catalog tests/unit/test_launch.py
# Tests write thousands of small files, which on a disk cost seconds, most of them when pytest deletes those of earlier
# runs: in memory where there is room and libraries may be loaded from, which only keeps what failed.
IN_MEMORY := $(shell df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 2000000 { print "/dev/shm" }')
IN_MEMORY := $(if $(IN_MEMORY),$(shell grep -q '^[^ ]* /dev/shm .*noexec' /proc/mounts || echo $(IN_MEMORY)))
QUICK := $(if $(IN_MEMORY),PYTEST_DEBUG_TEMPROOT=$(IN_MEMORY) )OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest $(if $(IN_MEMORY),-o tmp_path_retention_policy=failed -o tmp_path_retention_count=1 )-m "not (slow or model or browser or gpu or conformance or nightly)" --hypothesis-profile=quick
# A half in which ARGS select nothing is no failure.
NONE_SELECTED := [ $$? -eq 5 ]

.PHONY: help run test test-gpu nightly faults fuzz-api clients wheel wheel-test check lint static unit unit-network unit-serving conformance bench-smoke docs format clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
	  printf '  make %-13s %s\n' "$$name" "$$text"; done

run: $(VENV)/.stamp-run ## serve the default model on http://127.0.0.1:8000 (ARGS="--port 9000 ...")
	$(BIN)/python -m pagemill.artifacts.fetch $(DEFAULT_MODEL)
	$(BIN)/python -m pagemill.model.kernels.build
	exec $(BIN)/pagemill serve $(ARGS)

test: $(VENV)/.stamp-dev ## every test but the GPU's and those that take minutes
	$(BIN)/python -m pagemill.artifacts.fetch $(DEFAULT_MODEL)
	@for name in $(BROWSERS); do if command -v $$name >/dev/null; then exit 0; fi; done; \
	  echo "NOTE: no Chromium on this machine: the browser tests of the playground are skipped (Debian: apt-get install chromium)"
	$(PARALLEL) -m "not gpu and not conformance and not faults and not nightly" $(ARGS)

test-gpu: ## tests that need a GPU, with $(PYTHON) as it is: nothing is installed (docs/gpu.md)
	PYTHONPATH=$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH} $(PYTHON) -m pytest tests/gpu -m gpu -W default $(ARGS)

nightly: $(VENV)/.stamp-dev ## 100,000 random steps of scheduler and KV cache, others every day (SOUNDNESS_SEED= repeats a day); all schemas, twice; the GPU kernels compiled
	SOUNDNESS_STEPS=$(or $(SOUNDNESS_STEPS),100000) SOUNDNESS_SEED=$(or $(SOUNDNESS_SEED),$(shell date +%Y%m%d)) \
	  $(BIN)/pytest tests/unit/engine/test_soundness_random.py -s $(ARGS)
	$(BIN)/python -m pagemill.artifacts.fetch $(DEFAULT_MODEL)
	$(BIN)/pytest tests/conformance/test_structured_corpus.py -m "not gpu" $(ARGS)
	$(BIN)/pytest tests -m nightly $(ARGS)

wheel: $(VENV)/.stamp-run ## wheels with the kernels compiled, for x86_64 and aarch64 as far as compilers are here, in dist/
	$(BIN)/python tools/build_wheel.py --into dist

wheel-test: $(VENV)/.stamp-run ## build this machine's wheel, install it into a fresh environment without a compiler, and generate
	$(BIN)/python tools/build_wheel.py --into build/wheels --only $$(uname -m)
	$(BIN)/python tools/try_wheel.py build/wheels

faults: $(VENV)/.stamp-dev ## the fault lab with its large counts: processes killed, stopped and flooded (many minutes)
	FAULTS=long $(BIN)/pytest tests/integration/faults -s $(ARGS)

fuzz-api: $(VENV)/.stamp-dev ## the HTTP API against its OpenAPI document, by schemathesis (many minutes)
	$(BIN)/python -m tests.integration.api.fuzz_api $(ARGS)

clients: $(VENV)/.stamp-dev ## other people's clients against a server, each in an environment of its own (ARGS="--only NAME")
	$(BIN)/python -m pagemill.artifacts.fetch $(DEFAULT_MODEL)
	PYTHONPATH=$(CURDIR) $(BIN)/python benchmarks/clients/run.py $(ARGS)

check: $(VENV)/.stamp-dev ## the inner loop, under a minute on two cores: lint, types, contracts, budgets, fast unit tests
	@$(MAKE) --no-print-directory --jobs 3 --output-sync=target unit-network unit-serving static

lint: static ## format, lint, types, import contracts, size budgets, places of tests, generated docs
	$(BIN)/python tools/gen_docs.py --check

# What `make check` runs besides the tests, one of which (tests/unit/test_docs.py) compares the generated docs.
static: $(VENV)/.stamp-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_budgets.py
	$(BIN)/python tools/check_tests.py

unit: $(VENV)/.stamp-dev
	@$(MAKE) --no-print-directory --jobs 2 --output-sync=target unit-network unit-serving

unit-network: $(VENV)/.stamp-dev
	$(QUICK) $(NETWORK) $(ARGS) || $(NONE_SELECTED)

unit-serving: $(VENV)/.stamp-dev
	$(QUICK) tests/unit $(NETWORK:%=--ignore=%) $(ARGS) || $(NONE_SELECTED)

conformance: $(VENV)/.stamp-dev ## the long comparison with transformers (many minutes)
	$(BIN)/python -m pagemill.artifacts.fetch $(DEFAULT_MODEL)
	$(BIN)/python -m tests.conformance.fetch_gemma
	$(BIN)/python -m tests.conformance.fetch_minilm
	$(BIN)/pytest tests/conformance -m "not gpu" -v -s $(ARGS)

bench-smoke: $(VENV)/.stamp-run ## a short throughput run: shows that the benchmark works, not how fast we are
	$(BIN)/pagemill bench throughput --model $(DEFAULT_MODEL) --num-prompts 8 --input-len 32 --output-len 16 $(ARGS)

docs: $(VENV)/.stamp-dev ## write the generated docs (docs/reference, the tree in ARCHITECTURE.md)
	$(BIN)/python tools/gen_docs.py

format: $(VENV)/.stamp-dev ## format the code and apply safe lint fixes
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean: ## remove the environment, caches and build output; downloaded models stay
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find pagemill tests tools -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.stamp-venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is not Python 3.11 or newer: set PYTHON=, as in 'make run PYTHON=python3.12'" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

# setuptools comes first, pinned, so that building the package needs no environment (and no download) of its own.
$(VENV)/.stamp-run: pyproject.toml constraints.txt $(VENV)/.stamp-venv
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e .
	@touch $@

$(VENV)/.stamp-dev: pyproject.toml constraints.txt $(VENV)/.stamp-venv
	$(PIP) setuptools
	$(PIP) --no-build-isolation -e '.[dev]'
	@touch $(VENV)/.stamp-run $@
