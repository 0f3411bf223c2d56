# One-liners over fp8lab/bootstrap.py, which needs only Python itself. Without make:
# `python3 -m fp8lab lab`, `python3 -m fp8lab test`, and so on. PYTHON=python3.12 picks the Python
# a new environment is made from; ARGS="..." goes on to JupyterLab or pytest.
PYTHON ?= python3
FP8LAB := $(PYTHON) -m fp8lab

.PHONY: help lab test evidence vllm test-vllm test-browser lint format resolve clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1	/p' $(MAKEFILE_LIST)

lab:  ## JupyterLab on notebooks/ (HEADLESS=1: prove that it answers and that the quickstart runs)
	$(FP8LAB) lab $(if $(filter-out 0,$(HEADLESS)),--headless) $(ARGS)

test:  ## every test that needs neither a browser nor vLLM
	$(FP8LAB) test $(ARGS)

evidence:  ## the many-seed studies behind the shipped results (long)
	$(FP8LAB) evidence $(ARGS)

vllm:  ## .venv-vllm: this package beside the real vLLM engine, on CPUs (Linux)
	$(FP8LAB) vllm

test-vllm:  ## the tests that run the real vLLM engine, in .venv-vllm
	$(FP8LAB) test-vllm $(ARGS)

test-browser:  ## the notebooks in JupyterLab in Chromium: 00, 01, 06, 09 (ARGS=--all: each of them)
	$(FP8LAB) test-browser $(ARGS)

lint:  ## ruff: rules and format
	$(FP8LAB) lint

format:  ## ruff: rewrite the files
	$(FP8LAB) lint --fix

resolve:  ## would pip find a set for Python 3.12 and 3.13? (nothing is installed)
	mkdir -p build
	for version in 3.12 3.13; do \
	  $(PYTHON) -m pip install --dry-run --only-binary=:all: --quiet --python-version $$version \
	    --target build/resolve --report build/resolve-$$version.json \
	    -c tests/constraints-cpu.txt '.[lab,dev]' || exit 1; \
	  echo "Python $$version: resolved, see build/resolve-$$version.json"; done

clean:  ## remove the environments and all caches
	$(FP8LAB) clean
