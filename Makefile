# make install | demo | test | lint | bench. `make` alone lists them.
#
# PYTHON=python3.12         the Python (3.10 or newer) that the virtual environment is made from
# TORCH_INDEX=URL           where torch comes from, if not from pip's usual index. For the CPU build, which is
#                           all that demo and tests need: https://download.pytorch.org/whl/cpu
# PINNED=yes                everything else in the versions, and with the hashes, of tests/requirements.txt
# PYTEST_FLAGS='-k wire'    passed to pytest; DEMO_FLAGS, BENCH_FLAGS, MATRIX_FLAGS and MUTATION_FLAGS likewise
# TEST_WORKERS=3            so many tests run at the same time, but for those that measure time
# TEST_LIMIT=90m            each of the two parts of the tests is ended after this long

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c

PYTHON ?= python3
TORCH ?= torch==2.13.0
TORCH_INDEX ?=
PLAYWRIGHT ?= playwright==1.65.2
PINNED ?=
PYTEST_FLAGS ?=
TEST_WORKERS ?= 3
TEST_LIMIT ?= 90m
# For both parts: a test process that has to be ended is replaced by another.
TEST_FLAGS := --dist=loadfile --no-loadscope-reorder
SHORT ?= --short
DEMO_FLAGS ?=
BENCH_FLAGS ?=
MATRIX_FLAGS ?=
MUTATION_FLAGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install --progress-bar off --no-compile
BENCHMARKS := $(filter-out benchmarks/__init__.py benchmarks/common.py,$(wildcard benchmarks/*.py))
# What the test cluster's unprivileged user must be able to read. Never a run directory: it holds a secret.
CLOSED := ! -type l '(' ! -perm -o+r -o -type d ! -perm -o+x ')'

# Every run of the tests starts hundreds of interpreters; each would compile everything anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test test-all test-gpu lint bench mutations styles matrix docs man package
.DELETE_ON_ERROR:

help:
	@echo 'make install   create $(VENV) with everything the other targets need'
	@echo 'make demo      a training run on this machine that loses a node and goes on'
	@echo 'make test      the tests; as root on Debian or Ubuntu also those on a real Slurm cluster'
	@echo 'make test-all  and the long ones, which show nearly the same as others do'
	@echo 'make test-gpu  the tests that need an NVIDIA GPU (one is enough); elsewhere they are skipped'
	@echo 'make lint      ruff, mypy, and the layers of the imports'
	@echo 'make bench     all benchmarks'
	@echo 'make mutations  plants mistakes in the code, and says which tests and plans notice them; hours'
	@echo 'make styles    batch scripts in forty public styles, on a real Slurm cluster'
	@echo 'make matrix    the tests on several Pythons, torches, Debians and Slurms, as a table; hours'
	@echo 'make docs      the documents as a site, in dist/site'
	@echo 'make man       manual pages of all commands, in dist/man'
	@echo 'make package   a wheel and a source distribution with manual pages and completions, in dist'

install: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || \
	  { echo 'jurymast needs Python 3.10 or newer: make install PYTHON=...' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	  { echo '$(PYTHON) cannot make virtual environments; on Debian: apt-get install python3-venv' >&2; exit 1; }
	@# The test cluster runs jobs as another user, who must be able to read what is installed.
	umask 022; $(PYTHON) -m venv $(VENV)
	@# torch first and by itself: it may come from another index than everything else.
	@$(BIN)/python -c 'import torch' 2>/dev/null || \
	  { umask 022; set -x; $(PIP) '$(TORCH)' $(if $(TORCH_INDEX),--index-url '$(TORCH_INDEX)'); }
ifeq ($(PINNED),)
	umask 022; $(PIP) --editable '.[dev]'
else
	umask 022; $(PIP) --no-deps --require-hashes --only-binary=:all: --requirement tests/requirements.txt
	umask 022; $(PIP) --no-deps --no-build-isolation --editable .
	$(BIN)/python -m pip check
endif
	@# pip would use one processor; what does not compile is a template or for another Python.
	@umask 022; $(BIN)/python -m compileall -q -j 0 $(VENV)/lib >/dev/null 2>&1 || true
	@touch $@

demo: install
	@$(BIN)/jurymast demo $(DEMO_FLAGS)

test: install
	@if [[ $$EUID != 0 || ! -e /etc/debian_version ]]; then \
	  echo 'Not root on Debian or Ubuntu: tests that need a real Slurm cluster will be skipped.'; \
	else \
	  for where in '. -maxdepth 0' 'launcher slurm tests $(VENV)'; do \
	    if [[ -n $$(find $$where $(CLOSED) -print -quit) ]]; then \
	      echo "The test cluster's user must be able to read $${where%% -*}: chmod o+rX"; \
	      find $$where $(CLOSED) -exec chmod o+rX '{}' +; \
	    fi; \
	  done; \
	  PYTHONPATH=slurm $(BIN)/python -c 'from testcluster.software import ensure_packages as e; e("system", accounting=True)' || \
	    { echo "Slurm is missing. Without it: make test PYTEST_FLAGS=\"-m 'not slurm'\"" >&2; exit 1; }; \
	  { $(BIN)/python -c 'import playwright' 2>/dev/null || { umask 022; $(PIP) '$(PLAYWRIGHT)'; }; } && \
	  { command -v chromium >/dev/null || \
	    { apt-get -qq update && apt-get -qq install --no-install-recommends chromium >/dev/null; }; } || \
	    echo 'No browser could be installed: the tests of pages in one will be skipped.'; \
	  PYTHONPATH=slurm $(BIN)/python -c 'from testcluster.software import install_prometheus as i; i()' || \
	    echo 'Prometheus is missing: tests that need it will be skipped.' >&2; \
	fi
	@# Both parts always run, unless interrupted (2). No test at all (5) is a failure of all together only.
	@umask 022; worst=5; \
	for part in 'beside --numprocesses=$(TEST_WORKERS)' 'alone --numprocesses=1'; do \
	  code=0; timeout --foreground --signal=ABRT --kill-after=30 $(TEST_LIMIT) \
	    $(BIN)/python -m pytest --part=$$part $(TEST_FLAGS) $(SHORT) $(PYTEST_FLAGS) || code=$$?; \
	  if [[ $$code == 2 ]]; then exit 2; fi; \
	  if [[ $$code != 5 && ( $$code != 0 || $$worst == 5 ) ]]; then worst=$$code; fi; \
	done; \
	exit $$worst

test-all: SHORT :=
test-all: test

# It prints what saves and recoveries took there.
test-gpu: install
	@umask 022; $(BIN)/python -m pytest tests/gpu $(PYTEST_FLAGS)

lint: install
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: install
	@for benchmark in $(BENCHMARKS); do echo "== $$benchmark" >&2; $(BIN)/python $$benchmark $(BENCH_FLAGS); done

mutations: install
	@PYTHONPATH=tests $(BIN)/python -m mutations $(MUTATION_FLAGS)

# Of these `make test` runs a few.
styles: install
	@umask 022; JURYMAST_STYLES=all $(BIN)/python -m pytest tests/slurm/test_batch_scripts.py $(PYTEST_FLAGS)

matrix: install
	@PYTHONPATH=slurm $(BIN)/python .ci/matrix.py $(MATRIX_FLAGS)

docs: install
	@$(BIN)/python -c 'import mkdocs' 2>/dev/null || { umask 022; $(PIP) --editable '.[docs]'; }
	@$(BIN)/mkdocs build --strict --quiet --site-dir dist/site

man: install
	@$(BIN)/python .ci/manual.py dist/man

# Where shells and man look, below the environment into which the wheel is installed.
SHARE := dist/share
COMPLETIONS := bash-completion/completions/jurymast zsh/site-functions/_jurymast fish/vendor_completions.d/jurymast.fish

package: install
	@rm -rf $(SHARE) dist/jurymast-*.whl dist/jurymast-*.tar.gz && mkdir -p $(addprefix $(SHARE)/,$(dir $(COMPLETIONS)))
	@$(BIN)/python .ci/manual.py $(SHARE)/man/man1
	@for file in $(COMPLETIONS); do \
	  $(BIN)/jurymast completion "$${file%%[-/]*}" >$(SHARE)/$$file || exit; \
	done
	@$(BIN)/python -m hatchling build -d dist
