# Two commands do everything: `make up` and `make test`. Needs git, make and python3 with venv; a C++ compiler makes it faster.
PYTHON  ?= python3
VENV    ?= .venv
PORT    ?= 8000
PREFILL ?= 1
DECODE  ?= 1
MODEL   ?= smollm2-135m
ARGS    ?=
SPLITS   ?= 1:1 0:1
WORKLOAD ?= mixed
USERS    ?= 5
DURATION ?= 60s

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help install up down chat ps doctor bench bench-engine bench-gpu bench-fabric bench-pd loadtest install-test test lint lm-eval clean

help:           ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

# A stamp is newer than what it was installed from, so a second run installs nothing.
$(VENV)/.made:
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.serve: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[worker,ucx,embedded-store]'
	@touch $@

$(VENV)/.test: $(VENV)/.made pyproject.toml constraints.txt
	$(PIP) install -c constraints.txt -e '.[worker,ucx,embedded-store,test]'
	@touch $@ $(VENV)/.serve

install: $(VENV)/.serve            ## the virtual environment with all that serving needs

up: $(VENV)/.serve                 ## start a fleet and serve until Ctrl-C (PORT, PREFILL, DECODE, MODEL, ARGS)
	@$(BIN)/baton up --port $(PORT) --prefill $(PREFILL) --decode $(DECODE) --model $(MODEL) $(ARGS)

down: $(VENV)/.serve               ## stop a fleet that runs in the background
	@$(BIN)/baton down $(ARGS)

chat: $(VENV)/.serve               ## talk to the running fleet
	@$(BIN)/baton chat $(ARGS)

ps: $(VENV)/.serve                 ## workers, requests in flight, block ownership
	@$(BIN)/baton ps $(ARGS)

doctor: $(VENV)/.serve             ## what works on this machine
	@$(BIN)/baton doctor $(ARGS)

bench: $(VENV)/.serve              ## measure the running fleet
	@$(BIN)/baton bench --url http://127.0.0.1:$(PORT) $(ARGS)

bench-engine: $(VENV)/.serve       ## one engine in one process against the limits of this machine (MODEL: a folder; ARGS)
	@$(BIN)/python -m bench.engine --model $(MODEL) $(ARGS)

bench-gpu: $(VENV)/.test             ## the Triton kernels on a GPU: correctness, bandwidth, cost of invariance (ARGS: --json FILE)
	@$(BIN)/python -m bench.gpu_kernels $(ARGS)

bench-fabric: $(VENV)/.serve       ## the KV fabric against memcpy and the bare transports (docs/fabric.md; ARGS)
	@$(BIN)/python -m bench.fabric $(ARGS)

bench-pd: $(VENV)/.serve           ## our topologies against peers, alternating (bench/README.md; ARGS)
	@$(BIN)/python -m bench.pd --model $(MODEL) $(ARGS)

$(VENV)/.loadtest: $(VENV)/.serve
	$(PIP) install -c constraints.txt -e '.[worker,ucx,embedded-store,loadtest]'
	@touch $@

loadtest: $(VENV)/.loadtest        ## locust against two splits of the cores (SPLITS, WORKLOAD, USERS, DURATION, MODEL, ARGS)
	@$(BIN)/python -m loadtest.compare --splits '$(SPLITS)' --workload $(WORKLOAD) --users $(USERS) --duration $(DURATION) --model '$(MODEL)' $(ARGS)

install-test: $(VENV)/.test        ## the same with all that the tests need

test: $(VENV)/.test                ## run the test suite (ARGS are passed to pytest)
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.test                ## formatting, lint, types, import contracts
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

$(VENV)-eval/.made:
	$(PYTHON) -m venv $(VENV)-eval
	$(VENV)-eval/bin/python -m pip --disable-pip-version-check install 'lm-eval[api]==0.4.13' 'transformers==5.24.0'
	@touch $@

lm-eval: $(VENV)/.test $(VENV)-eval/.made  ## lm-eval must score the same aggregated and disaggregated (three minutes)
	BATON_LM_EVAL=$(CURDIR)/$(VENV)-eval/bin/lm_eval $(BIN)/python -m pytest tests/lm_eval $(ARGS)

clean:          ## remove the environment and all caches in this folder
	rm -rf $(VENV) $(VENV)-eval build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
