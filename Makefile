# The one door. Every target does its own set-up in .venv; nothing else on the machine is touched, but that `browser` and `tmux` ask apt for theirs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
SCALE := $(VENV)/.installed-scale

LIBLLAMA_WHEEL := $(shell sed -n 's/^WHEEL = "\(.*\)"/\1/p' src/everwarm/llama/abi.py)
LIBLLAMA_ARCHIVE := build/libllama-src/$(subst ==,-,$(LIBLLAMA_WHEEL)).tar.gz
checked = grep -qF "$$(sha256sum $(1) | cut -d ' ' -f 1)" requirements.lock || \
  { echo "$(1) is not the archive that requirements.lock names: remove it and try again" >&2; exit 1; }

.DEFAULT_GOAL := help
.PHONY: help setup lock fmt check test test-scale browser tmux docs agents templates compat campaign bench bench-parts bench-gpu demo dist libllama-cuda clean

help: ## what each target does
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

setup: $(STAMP) ## install everything into .venv

$(STAMP): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Everwarm needs Python 3.11 or newer, this is " + sys.version)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	@touch $@

lock: ## renew the locked requirements from pyproject.toml
	$(PYTHON) -m venv $(VENV)-lock
	$(VENV)-lock/bin/python -m pip install --quiet --disable-pip-version-check uv
	$(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes \
	  --no-header --no-annotate --extra dev pyproject.toml requirements.build.in -o requirements.lock
	$(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes -c requirements.lock \
	  --no-header --no-annotate --extra scale pyproject.toml -o requirements.scale.lock
	$(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes -c requirements.lock \
	  --no-header --no-annotate --extra docs pyproject.toml -o requirements.docs.lock
	$(VENV)-lock/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes -c requirements.lock \
	  --no-header --no-annotate --extra remote --extra otel pyproject.toml requirements.build.in -o deploy/requirements.lock
	rm -rf $(VENV)-lock

fmt: $(STAMP) ## format the code
	$(BIN)/ruff check --fix src tests bench docs
	$(BIN)/ruff format src tests bench docs

check: $(STAMP) ## what a reviewer should not have to say: style, types, structure
	$(BIN)/ruff check src tests bench docs
	$(BIN)/ruff format --check src tests bench docs
	$(BIN)/mypy
	$(BIN)/python docs/generate.py --check
	$(BIN)/python -m pytest tests/structure

# Three on two cores, because tests of servers wait a lot; in the order that tests/conftest.py says, because the longest files have few tests.
# Compiled modules are kept, also where the environment says otherwise: every worker imports every test, and every engine is a new process.
test: export PYTHONDONTWRITEBYTECODE :=
PARALLEL := -n 3 --dist loadfile --no-loadscope-reorder
test: $(STAMP) browser tmux ## all tests but those of `check`, under 10 minutes on two cores
	@$(MAKE) --silent templates 2>/dev/null || echo "no chat templates could be fetched: the tests that need them are skipped"
	@$(MAKE) --silent build/compat/.fetched >/dev/null 2>&1 || echo "llama-server's own tests could not be fetched: those that run some of them are skipped"
	$(BIN)/python -m pytest $(PARALLEL) --ignore tests/scale --ignore tests/structure --durations 20

test-scale: $(SCALE) ## several servers and a real object store
	$(BIN)/python -m pytest tests/scale

$(SCALE): requirements.scale.lock $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.scale.lock
	@touch $@

docs: $(DOCS_STAMP) ## the documentation as a site in build/site; what can be written from the code is written anew
	$(BIN)/python docs/generate.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet --strict
	@echo "build/site is ready; to look at it: $(BIN)/python -m http.server --directory build/site"

$(DOCS_STAMP): requirements.docs.lock $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r requirements.docs.lock
	@touch $@

browser: ## Chromium for the tests of the page, from apt where that is allowed; without it they are skipped
	@for name in chromium chromium-browser google-chrome; do command -v $$name >/dev/null && exit 0; done; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends chromium; } >/dev/null 2>&1 && exit 0; \
	fi; echo "Chromium is not here and could not be installed: the tests of the page will be skipped" >&2

tmux: ## a terminal for the tests of the chat, from apt where that is allowed; without it they are skipped
	@command -v tmux >/dev/null && exit 0; \
	if test "$$(id -u)" = 0 && command -v apt-get >/dev/null; then \
	  { apt-get update -qq && apt-get install -y -qq --no-install-recommends tmux; } >/dev/null 2>&1 && exit 0; \
	fi; echo "tmux is not here and could not be installed: the tests of the chat in a terminal will be skipped" >&2

agents: ## real agents from npm and PyPI into build/agents, for the tests that run them
	npm install --prefix build/agents --no-audit --no-fund --no-save opencode-ai@1.18.33 @openai/codex@0.166.0 @qwen-code/qwen-code@0.24.4
	test -x build/agents/aider/bin/python || $(PYTHON) -m venv build/agents/aider
	build/agents/aider/bin/python -m pip install --quiet --disable-pip-version-check aider-chat==0.86.2

templates: build/templates/.fetched ## real chat templates for tests, out of the source archive of the libllama wheel

build/templates/.fetched: | $(LIBLLAMA_ARCHIVE)
	@$(call checked,$(LIBLLAMA_ARCHIVE))
	@mkdir -p $(@D)
	tar -xzf $(LIBLLAMA_ARCHIVE) -C $(@D) --wildcards --strip-components 5 '*/models/templates/*.jinja'
	@touch $@

compat: $(STAMP) build/compat/.fetched ## llama-server's own tests against Everwarm, beside the same run on llama-server
	$(BIN)/python -m bench.compat.suite

build/compat/.fetched: | $(LIBLLAMA_ARCHIVE)
	@$(call checked,$(LIBLLAMA_ARCHIVE))
	@mkdir -p $(@D)
	tar -xzf $(LIBLLAMA_ARCHIVE) -C $(@D) --wildcards --strip-components 3 '*/llama.cpp/tools/server/tests/*' '*/llama.cpp/models/templates/*.jinja'
	@touch $@

campaign: $(SCALE) ## the long forms of the random tests
	EVERWARM_CAMPAIGN=1 $(BIN)/python -m pytest --timeout 7200

bench: $(STAMP) ## the same conversations on Everwarm and llama-server, and how costs grow; writes docs/benchmarks
	$(BIN)/python -m bench suite scaling

bench-parts: $(STAMP) ## every single measurement, beside llama-server
	$(BIN)/python -m bench

demo: $(STAMP) ## the main job on the embedded model, in under a minute
	$(BIN)/everwarm demo

dist: $(STAMP) ## the source archive and the wheel, with the embedded model inside, in dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation --outdir dist .

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
	PYTHONPATH=src $(BIN)/python -m everwarm.backend.source_archive $(@D)

bench-gpu: $(LIBLLAMA_ARCHIVE) ## measure a 27B-shaped model on this machine's GPU, beside llama-server (see docs/benchmarks/gpu.md)
	@$(call checked,$<)
	tar -xzf $< -C $(<D) --strip-components 1
	bench/gpu.sh $(<D)/thirdparty/llama.cpp

clean: ## remove what make made
	rm -rf $(VENV) build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
