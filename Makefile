# `make` alone lists the targets; those that need .venv make it first if it is missing.

PYTHON ?= python3
BIN := .venv/bin
# Where PYTHONDONTWRITEBYTECODE is set, each worker, and each process of pytest, would compile it all.
COMPILED := $(BIN)/python -m tests.compiled
INSTALLED := .venv/installed
DIST ?= dist
# Of three processes one has a Ray cluster (tests/selection.py). 0: one test after another.
PROCESSES ?= 3
PARALLEL = -n $(PROCESSES) --dist loadfile

.PHONY: help run test test-fast test-slow test-all test-oldest test-newest test-real test-gpu check fix compile docs dist bench bench-gpu compared clean

help:  ## what make can do; the target without a name
	@awk -F ':.*##' '/^[a-z-]+:.*##/ { printf "make %-12s%s\n", $$1, $$2 }' Makefile

run: $(INSTALLED)  ## train the example on two CPU workers; kill one of them (ARGS=--strike: it does so itself)
	$(BIN)/chorusline run examples/stdlib_gpt.py $(ARGS)

test: $(INSTALLED)  ## the whole test suite but for what is marked slow
	$(COMPILED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not slow" $(ARGS)

test-fast: $(INSTALLED)  ## in seconds: decisions, names, and ranks on shared memory; no Ray
	$(COMPILED)
	$(BIN)/python -m pytest -n 2 --dist loadfile -m fast $(ARGS)

test-slow: $(INSTALLED)  ## the tests that take longer than the suite allows, and more drawn examples
	$(COMPILED)
	$(BIN)/python -m pytest $(PARALLEL) -m "slow or hypothesis" --hypothesis-profile=many $(ARGS)

test-all: $(INSTALLED)  ## all that needs no GPU, slow or not; SHARD="join zero": of these folders of tests/
	$(COMPILED)
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu" --hypothesis-profile=many $(addprefix tests/,$(SHARD)) $(ARGS)

test-oldest:  ## the fast tests on the oldest torch and Ray that pyproject.toml allows, in .venv-oldest
	test -x .venv-oldest/bin/python || $(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c constraints-oldest.txt -e '.[test]'
	.venv-oldest/bin/python -m pytest -m "not slow" $(ARGS)

test-newest:  ## the same on the newest that pip finds, without constraints, in .venv-newest; and torchft over our groups
	test -x .venv-newest/bin/python || $(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[test]' torchft-nightly
	.venv-newest/bin/python -m pytest -m "not slow" $(ARGS)
	.venv-newest/bin/python -m pytest tests/torch/test_torchft.py $(ARGS)

test-real: $(INSTALLED)  ## models, optimizers and trackers of other libraries, which it installs
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[real]'
	$(BIN)/python -m pytest tests/real_models tests/commands/test_plain_scripts.py tests/commands/test_last_step.py tests/repository/documentation/test_examples.py tests/tracking tests/checkpoint/test_safetensors.py tests/data/fetching/test_libraries.py $(ARGS)

test-gpu: $(INSTALLED)  ## the tests that need a GPU; installs CuPy and NCCL; writes out/test-gpu.json
	$(BIN)/python -m benchmarks.speed.gpu_machine --install
	$(BIN)/python -m tests.on_gpu --out out/test-gpu.json $(ARGS)

check: $(INSTALLED)  ## lint, format and types; with actionlint, where it is installed, the workflow
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	@PATH="$(BIN):$$PATH"; if command -v actionlint; then actionlint .github/workflows/*.yml; fi

fix: $(INSTALLED)  ## what ruff can correct by itself, and the format
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

compile: $(INSTALLED)  ## again the C of shared memory, which an installation compiles (after a change of ticks.c)
	$(BIN)/python -c 'import setuptools; setuptools.setup()' --quiet build_ext --inplace

docs: $(INSTALLED)  ## the documentation site, in site/; broken links and undocumented names fail
	$(BIN)/properdocs build
	@echo "written: site/index.html (the search needs a server: python -m http.server -d site)"

dist: $(INSTALLED)  ## a wheel and an sdist, in dist/
	$(BIN)/python -m pip install --quiet --disable-pip-version-check 'build>=1.2'
	$(BIN)/python -m build --outdir $(DIST)

bench: $(INSTALLED)  ## every benchmark, as tables
	$(BIN)/python -m benchmarks.speed.collectives
	$(BIN)/python -m benchmarks.speed.step
	$(BIN)/python -m benchmarks.speed.input
	$(BIN)/python -m benchmarks.speed.steps_cost
	$(BIN)/python -m benchmarks.speed.recorder
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.speed.recovery
	$(BIN)/python -m benchmarks.speed.bucket_order
	$(BIN)/python -m benchmarks.speed.checkpoint
	$(BIN)/python -m benchmarks.speed.torch_backend

bench-gpu: $(INSTALLED)  ## ours against torch's NCCL, DDP, ZeRO and FSDP2; writes out/bench-gpu.json
	$(BIN)/python -m benchmarks.speed.gpu_machine --install
	$(BIN)/python -m benchmarks.speed.gpu --out out/bench-gpu.json $(ARGS)

compared: $(INSTALLED)  ## the tables of docs/performance.md: three runs of what they quote, two hours
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[bench]'
	$(BIN)/python -m benchmarks.speed.compared $(ARGS)

clean:  ## remove what make has made, and the environments
	rm -rf .venv .venv-oldest out site dist build .mypy_cache .ruff_cache .pytest_cache *.egg-info

# The stamp is newer than what says what to install, or everything is installed again.
$(INSTALLED): pyproject.toml constraints.txt
	@echo "installing into .venv, once: PyTorch, Ray, and the tools of tests and docs; it takes minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $(INSTALLED)
