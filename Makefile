# Everything runs in .venv, which the first target that needs it creates.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

# The interpreter for .venv, or for .venv-bench with `make bench PYTHON=...`.
ifdef PYTHON
BENCH_PYTHON ?= $(PYTHON)
else
BENCH_PYTHON ?= python3.12
# Run, not only found: the name may be there and the version behind it not.
PYTHON = $(shell for name in python3.11 python3; do \
	"$$name" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo "$$name" && break; done)
endif

VENV ?= .venv
RUN := $(VENV)/bin/python
PYTEST_ARGS ?= -n auto --maxprocesses 8 --dist worksteal
FUZZ ?= 100000

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: demo
demo: $(VENV)/stamp ## Build shards from ten photographs, index them, read them back
	$(RUN) examples/demo.py

.PHONY: demo-train
demo-train: $(VENV)-torch/stamp ## Train on the photographs, be killed, and go on with two processes and the same samples
	$(VENV)-torch/bin/python examples/train.py

.PHONY: test
test: $(VENV)/stamp programs ## Run every test, also in an empty environment and with the oldest dependencies
	$(RUN) -m pytest $(PYTEST_ARGS)
	@$(MAKE) --no-print-directory lower-bounds

.PHONY: check
check: lint programs ## Lint and run the fast tests: under a minute, before each commit
	SHARDSET_QUICK=1 $(RUN) -m pytest $(PYTEST_ARGS) -m 'not slow and not servers'

.PHONY: lint
lint: $(VENV)/stamp ## Check style, types, import directions and the generated docs
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports --no-logo
	@test ! -e src/shardset/cli/__init__.py || $(RUN) scripts/build_docs.py --check

.PHONY: lower-bounds
lower-bounds: $(VENV)-lower/stamp programs ## Run the fast tests with the oldest dependencies that pyproject.toml allows
	SHARDSET_QUICK=1 $(VENV)-lower/bin/python -m pytest $(PYTEST_ARGS) -m 'not slow'

.PHONY: test-torch
test-torch: $(VENV)-torch/stamp ffmpeg ## Train with the loader, and put pipelines into torch's loaders, in an environment of its own
	$(VENV)-torch/bin/python -m pytest $(PYTEST_ARGS) -o faulthandler_timeout=600 peers/test_with_torch.py peers/test_decoding_with_torch.py \
		peers/test_loader_with_torch.py peers/test_trainers.py peers/test_clips_with_torchcodec.py

.PHONY: test-webdataset
test-webdataset: $(VENV)-bench/stamp ## Exchange shards with webdataset itself (PYTHON=...: 3.12 or newer)
	$(VENV)-bench/bin/python -m pytest peers/test_with_webdataset.py

.PHONY: fuzz
fuzz: $(VENV)/stamp programs ## Run the property and mutation tests with FUZZ=100000 inputs each
	SHARDSET_FUZZ=$(FUZZ) $(RUN) -m pytest $(PYTEST_ARGS) -m fuzz -o faulthandler_timeout=0

.PHONY: bench
bench: $(VENV)-bench/stamp $(VENV)-tensorflow/stamp ## Measure beside the peers (PYTHON=...: 3.12 or newer, which webshart needs; ARGS=... for run.py)
	$(VENV)-bench/bin/python benchmarks/run.py $(ARGS)

.PHONY: bench-loading
bench-loading: $(VENV)-loading/stamp ## Measure the loader beside its peers, which take gigabytes of an environment (ARGS=... for run.py)
	SHARDSET_LOADING_PYTHON=$(VENV)-loading/bin/python $(VENV)-loading/bin/python benchmarks/run.py $(ARGS) loading

.PHONY: test-webshart
test-webshart: $(VENV)-bench/stamp ## Exchange indexes and states with webshart itself (PYTHON=...: 3.12 or newer)
	$(VENV)-bench/bin/python -m pytest peers/test_with_webshart.py

.PHONY: test-tensorflow
test-tensorflow: $(VENV)-tensorflow/stamp ## Exchange TFRecord files with TensorFlow itself, in an environment of its own
	$(VENV)-tensorflow/bin/python -m pytest peers/test_with_tensorflow.py

.PHONY: docs
docs: $(VENV)/stamp ## Write docs/cli.md from the commands' help texts and check the links
	$(RUN) scripts/build_docs.py

.PHONY: clean
clean: ## Remove the environments and all caches
	rm -rf $(VENV) $(VENV)-lower $(VENV)-bench $(VENV)-loading $(VENV)-tensorflow $(VENV)-torch build dist tests/servers/node_modules
	rm -rf .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find src tests scripts examples -name __pycache__ -type d -prune -exec rm -rf {} +

# Cleared first: what pyproject.toml no longer names, or an interrupted run left, must not stay.
$(VENV)/stamp: pyproject.toml
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	$(RUN) -m pip install --quiet --upgrade 'pip>=25.1'
	$(RUN) -m pip install --quiet --editable '.[images,audio,cloud,fsspec,gzip,arrays,lmdb]' --group dev
	@touch $@

$(VENV)-lower/stamp: pyproject.toml scripts/lower_bounds.py
	@test -n "$(PYTHON)" || { echo "Python 3.11 is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)-lower
	$(VENV)-lower/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(PYTHON) scripts/lower_bounds.py > $(VENV)-lower/pins.txt
	$(VENV)-lower/bin/python -m pip install --quiet --editable '.[all]' --group test -c $(VENV)-lower/pins.txt
	@touch $@

$(VENV)-bench/stamp: pyproject.toml benchmarks/requirements.txt
	@$(BENCH_PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null || { \
		echo "$(BENCH_PYTHON) is no Python 3.12 or newer, which webshart needs. Name one:" >&2; \
		echo "  pyenv:  make $(or $(MAKECMDGOALS),bench) PYTHON=\"\$$(ls -d \"\$$(pyenv root)\"/versions/3.12*/bin/python | tail -n 1)\"" >&2; \
		echo "          (pyenv install 3.12 brings one)" >&2; \
		echo "  uv:     make $(or $(MAKECMDGOALS),bench) PYTHON=\"\$$(uv python find 3.12)\"   (uv python install 3.12 brings one)" >&2; \
		exit 1; }
	$(BENCH_PYTHON) -m venv --clear $(VENV)-bench
	$(VENV)-bench/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)-bench/bin/python -m pip install --quiet --editable '.[images,cloud,fast]' -r benchmarks/requirements.txt
	@touch $@

$(VENV)-loading/stamp: pyproject.toml benchmarks/requirements-loading.txt | ffmpeg
	@test -n "$(PYTHON)" || { echo "Python 3.11 is needed: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)-loading
	$(VENV)-loading/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)-loading/bin/python -m pip install --quiet --editable '.[images]' -r benchmarks/requirements-loading.txt
	@touch $@

$(VENV)-torch/stamp: pyproject.toml peers/requirements-torch.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 is needed: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)-torch
	$(VENV)-torch/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)-torch/bin/python -m pip install --quiet --editable '.[images,video,audio]' -r peers/requirements-torch.txt
	@touch $@

$(VENV)-tensorflow/stamp: pyproject.toml benchmarks/requirements-tensorflow.txt
	@test -n "$(PYTHON)" || { echo "Python 3.11 is needed: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)-tensorflow
	$(VENV)-tensorflow/bin/python -m pip install --quiet --upgrade 'pip>=25.1'
	$(VENV)-tensorflow/bin/python -m pip install --quiet --editable '.[gzip]' -r benchmarks/requirements-tensorflow.txt
	@touch $@

# Installs what is missing of some programs, given as PROGRAM:DEBIAN-PACKAGE.
define install_programs
	@for pair in $(1); do \
		program=$${pair%%:*} package=$${pair##*:}; \
		PATH="$$PATH:/usr/sbin" command -v "$$program" >/dev/null && continue; \
		if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
			echo "installing $$package"; \
			apt-get update -qq; \
			DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends "$$package" >/dev/null; \
		else \
			echo "$$program is needed: install the package $$package and run make again." >&2; exit 1; \
		fi; \
	done
endef

.PHONY: programs
programs: tests/servers/node_modules/.stamp ## Install the programs that the tests compare with and read from, and servers that come from npm
	$(call install_programs,bsdtar:libarchive-tools nginx:nginx-light xz:xz-utils bzip2:bzip2 zstd:zstd lz4:lz4)

.PHONY: ffmpeg
ffmpeg: # Its libraries are what torchcodec and one of the loader's peers decode with.
	$(call install_programs,ffmpeg:ffmpeg)

tests/servers/node_modules/.stamp: tests/servers/package.json tests/servers/package-lock.json
	@command -v npm >/dev/null || { echo "The tests need servers that npm installs: install Node.js 20 with npm." >&2; exit 1; }
	npm ci --prefix tests/servers --no-audit --no-fund --silent
	@touch $@
