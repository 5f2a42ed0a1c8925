# Everything a newcomer needs: `make demo` and `make test`. Each sets up what it needs.
.DEFAULT_GOAL := help
.PHONY: help venv demo test test-slow test-all lint types format bench clean

# The first Python from 3.11 to 3.14 that can make environments; PYTHON=... chooses another.
SUPPORTED := import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python3.14,\
	$(shell $(p) -c '$(SUPPORTED)' >/dev/null 2>&1 && echo $(p))))
# Empty for CPU; cuda13, cuda12 or tpu for the accelerator build of the same jax.
JAX ?=
# Processes of the test suite.
JOBS ?= 2

VENV := .venv
HEAVY := .venv-heavy
FOREIGN := .venv-foreign
PIP = -m pip install --quiet --disable-pip-version-check
STAMPS := requirements/runtime.txt Makefile

help:
	@echo 'make demo       train a small language model on this machine (2 minutes on 2 cores)'
	@echo 'make demo JAX=cuda13   the same on a GPU; JAX=tpu on a TPU'
	@echo 'make test       the test suite, light (no torch)'
	@echo 'make test-slow  the wide sweeps'
	@echo 'make test-all   the suite with PyTorch as a reference (installs some 6 GB)'
	@echo 'make lint types format bench clean'

$(VENV)/runtime$(JAX): $(STAMPS)
	$(call make-env,$(VENV))
	$(VENV)/bin/python $(PIP) -r requirements/runtime.txt
	$(if $(JAX),$(VENV)/bin/python $(PIP) "jax[$(JAX)]==$$(sed -n 's/^jax==//p' requirements/runtime.txt)")
	@touch $@

$(VENV)/test: requirements/test.txt $(VENV)/runtime$(JAX)
	$(VENV)/bin/python $(PIP) -r requirements/test.txt
	@touch $@

$(VENV)/lint: requirements/lint.txt $(VENV)/runtime$(JAX)
	$(VENV)/bin/python $(PIP) -r requirements/lint.txt
	@touch $@

$(HEAVY)/all: $(STAMPS) requirements/test.txt requirements/heavy.txt requirements/no-deps.txt
	$(call make-env,$(HEAVY))
	$(HEAVY)/bin/python $(PIP) -r requirements/runtime.txt -r requirements/test.txt -r requirements/heavy.txt
	$(HEAVY)/bin/python $(PIP) --no-deps -r requirements/no-deps.txt
	@touch $@

$(FOREIGN)/all: requirements/foreign.txt Makefile
	$(call make-env,$(FOREIGN))
	$(FOREIGN)/bin/python $(PIP) -r requirements/foreign.txt
	@touch $@

# An environment made by another Python than the one chosen is used as it is.
define make-env
	@test -n '$(PYTHON)' || { echo 'No Python from 3.11 to 3.14 with venv was found: install one, or name it with make PYTHON=...'; exit 1; }
	@test -x $(1)/bin/python || { echo "Making $(1) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(1); }
endef

venv: $(VENV)/runtime$(JAX)

demo: $(VENV)/runtime$(JAX)
	$(VENV)/bin/python -m algorithms.lm.train $(ARGS)

test: $(VENV)/test
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile $(ARGS)

test-slow: $(VENV)/test
	$(VENV)/bin/python -m pytest -n $(JOBS) --dist loadfile -m slow $(ARGS)

test-all: $(HEAVY)/all $(FOREIGN)/all
	$(HEAVY)/bin/python -m pytest -n $(JOBS) --dist loadfile -m heavy $(ARGS)
	$(FOREIGN)/bin/python -m pytest -m foreign tests/core/rules/test_foreign.py

lint: $(VENV)/lint
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/ruff check .

types: $(VENV)/lint
	$(VENV)/bin/mypy core algorithms

format: $(VENV)/lint
	$(VENV)/bin/ruff format .
	$(VENV)/bin/ruff check --fix .

bench: $(VENV)/runtime$(JAX)
	$(VENV)/bin/python -m benchmarks.overhead
	$(VENV)/bin/python -m benchmarks.checkpoint

clean:
	rm -rf $(VENV) $(HEAVY) $(FOREIGN)
