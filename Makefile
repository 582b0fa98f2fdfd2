# Every target first sets up an environment with what it needs (tools/setup_env.py): runs use GPUs where there are any, in
# .venv-gpu, and CPUs in .venv elsewhere; tests and checks use CPUs everywhere. RELAY_DEVICE=cpu|gpu overrides for runs.
# ARGS is passed to the program: make sum-digits ARGS="--trainer.optimizer.lr 3e-4", make test ARGS="-k grpo".
# make bench BENCH=train_step ARGS=... runs one benchmark with any of its options; make bench-quick prints a table of all.
# PYTHON is the interpreter that creates the environments (3.11 or 3.12).

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && exit; done; echo python3)
ARGS ?=
BENCH ?= grpo_vs_trl busy startup async_overlap time_to_reward weight_sync generator_step batch_invariant train_step observability controller ledger adapters adapter_steps
SETUP := $(PYTHON) tools/setup_env.py
RUN_PYTHON = $(shell $(SETUP) --python)
# What reads a run needs no GPU builds: either environment will do.
ANY_PYTHON = $(or $(firstword $(wildcard $(RUN_PYTHON) .venv/bin/python .venv-gpu/bin/python)),$(RUN_PYTHON))
GROUPS := test trl tasks tinker sinks smollm2 torchstore
TEST_SETUP := RELAY_DEVICE=cpu $(SETUP)
TEST_PYTHON := .venv/bin/python
FAST := not medium and not slow and not browser and not rehearsal
# Number of test processes; 0 runs the tests in this process, for a debugger.
WORKERS ?= 2
SHARED := -n $(WORKERS)

# Images of containers often set this variable. Then each process would compile the modules of this tree again.
unexport PYTHONDONTWRITEBYTECODE

# No program here reads input. With a terminal as stdin, actors (background process groups) would be stopped
# when one of their libraries initializes readline.
NO_INPUT := < /dev/null

.DEFAULT_GOAL := help
.PHONY: help setup wheel sum-digits reverse-text alphabet-sort real-model doctor report curves tinker-cookbook agents-contract chaos attack mutants test test-fast test-slow test-long test-report gpu-rehearsal gpu-check lint format types check bench bench-quick golden hooks clean constraints docs docs-site size clean-venv

help: ## print this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

setup: ## create .venv with everything that tests need
	@$(TEST_SETUP) $(GROUPS)

wheel: setup ## build dist/relay_rl-<version>-py3-none-any.whl (docs/install.md)
	$(TEST_PYTHON) -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build/lib build/bdist.*

sum-digits: ## train a tiny model to add digits, with real actors, on this machine
	@$(SETUP)
	$(RUN_PYTHON) -m rl.simple_grpo_sum_digits $(ARGS) $(NO_INPUT)

reverse-text: ## train a tiny model to reverse words
	@$(SETUP)
	$(RUN_PYTHON) -m rl.train --module reverse_text --config tiny $(ARGS) $(NO_INPUT)

alphabet-sort: ## train a tiny model to keep a list sorted over three turns
	@$(SETUP)
	$(RUN_PYTHON) -m rl.train --module alphabet_sort --config tiny $(ARGS) $(NO_INPUT)

real-model: ## train SmolLM2-135M-Instruct, a pretrained model, on sums: installs 93 MB of weights
	@$(SETUP) smollm2 tasks
	$(RUN_PYTHON) -m rl.train --module smollm2 --config full $(ARGS) $(NO_INPUT)

doctor: ## show what the processes of RUN=outputs/<run> are doing, with their stacks
	@test "$(origin RUN)" = "command line" || { echo "usage: make doctor RUN=outputs/<run>"; exit 2; }
	@$(ANY_PYTHON) -m rl.doctor $(RUN) $(ARGS)

report: ## write report.html into RUN=outputs/<run>
	@test "$(origin RUN)" = "command line" || { echo "usage: make report RUN=outputs/<run>"; exit 2; }
	@$(ANY_PYTHON) -m rl.report $(RUN) $(ARGS)

curves: ## learning curves of reverse-text and alphabet-sort: two seeds and a control with random rewards
	@$(SETUP)
	$(RUN_PYTHON) -m benchmarks.curves --dump_folder outputs/curves $(ARGS) $(NO_INPUT)

tinker-cookbook: ## run the Tinker cookbook's recipes, unmodified, against this project's server
	@$(SETUP) tinker smollm2
	$(RUN_PYTHON) -m tools.tinker_cookbook.main $(ARGS) $(NO_INPUT)

test: setup ## run all tests except the slow ones: up to 14 minutes on 2 cores
	$(TEST_PYTHON) -m pytest $(SHARED) -m "not slow and not browser and not rehearsal" $(ARGS) $(NO_INPUT)

test-fast: setup ## run the tests that start no engine and no actor: 2 to 4 minutes
	$(TEST_PYTHON) -m pytest $(SHARED) -m "$(FAST)" $(ARGS) $(NO_INPUT)

test-slow: setup ## run the slow tests, such as whole runs: up to 11 minutes
	$(TEST_PYTHON) -m pytest $(SHARED) -m "slow and not long" $(ARGS) $(NO_INPUT)

test-long: setup ## run the longest tests: more layouts, crashes, stops and resumes
	$(TEST_PYTHON) -m pytest -m long $(ARGS) $(NO_INPUT)

gpu-rehearsal: ## run the GPU builds on a GPU that is not there (docs/gpu.md): 8.5 GB of packages
	@RELAY_DEVICE=gpu $(SETUP) test
	.venv-gpu/bin/python -m pytest -m rehearsal $(ARGS) tests/rehearsal $(NO_INPUT)

gpu-check: ## check this machine's GPUs in eleven steps: at most 11 minutes (docs/gpu.md)
	@RELAY_DEVICE=gpu $(SETUP)
	.venv-gpu/bin/python -m tools.gpu_check $(ARGS) $(NO_INPUT)

test-report: ## test the report in a headless browser, installed if missing: at most 5 minutes
	@$(TEST_SETUP) test report
	@$(TEST_PYTHON) -m tools.browser
	$(TEST_PYTHON) -m pytest -m browser $(ARGS) tests/reporting $(NO_INPUT)

agents-contract: setup ## run packages that agents are made of, unmodified, against the endpoint of agents
	$(TEST_PYTHON) -m tools.agents_contract $(ARGS) $(NO_INPUT)

chaos: setup ## kill each role in each phase of a short run; print a table of recoveries
	$(TEST_PYTHON) -m tools.chaos $(ARGS) $(NO_INPUT)

attack: setup ## attack a Tinker server on loopback with 100,000 requests; print what became of them
	$(TEST_PYTHON) -m tools.attack $(ARGS) $(NO_INPUT)

mutants: setup ## plant 168 one-line faults in a copy of the tree and see which the tests catch: about 15 minutes
	$(TEST_PYTHON) -m tools.mutants $(ARGS) $(NO_INPUT)

lint: setup ## check rules and format with ruff
	$(TEST_PYTHON) -m ruff check .
	$(TEST_PYTHON) -m ruff format --check .

format: setup ## fix rules and format with ruff
	$(TEST_PYTHON) -m ruff check --fix .
	$(TEST_PYTHON) -m ruff format .

types: setup ## check types with mypy
	$(TEST_PYTHON) -m mypy

check: lint types test-fast ## lint, types, test-fast: must pass before a commit

bench: ## run all benchmarks, or BENCH=<file of benchmarks/>
	@$(SETUP) $(GROUPS)
	@set -e; for name in $(BENCH); do (set -x; $(RUN_PYTHON) -m benchmarks.$$name $(ARGS) $(NO_INPUT)); done

bench-quick: ## run all benchmarks in short and print a table of their ratios: at most 15 minutes
	@$(SETUP) $(GROUPS)
	$(RUN_PYTHON) -m benchmarks.table $(BENCH) $(ARGS) $(NO_INPUT)

golden: setup ## renew the golden losses of the tiny config for this machine; print old and new
	$(TEST_PYTHON) -m tests.training.test_golden

hooks: ## install git hooks: lint and types before a commit, fast tests before a push
	@$(TEST_SETUP) $(GROUPS) hooks
	$(TEST_PYTHON) -m pre_commit install --hook-type pre-commit --hook-type pre-push

clean: ## remove caches and build files; keep outputs/ and environments
	rm -rf .mypy_cache .ruff_cache .pytest_cache .venv.lock .venv-gpu.lock build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.venv*/*' -prune -exec rm -rf {} +

docs: setup ## generate docs/options.md, docs/known_names.md and docs/agent_fields.md
	$(TEST_PYTHON) -m tools.options
	$(TEST_PYTHON) -m tools.agent_fields

docs-site: ## build the site of docs/ into build/site
	@$(TEST_SETUP) docs
	NO_MKDOCS_2_WARNING=1 $(TEST_PYTHON) -m mkdocs build --strict --quiet $(ARGS)
	@echo build/site/index.html

size: ## print files, lines and code lines by folder
	@$(PYTHON) -m tools.size

constraints: setup ## resolve tools/constraints-*.txt, the versions that the set-up installs
	$(TEST_PYTHON) -m tools.resolve_constraints

clean-venv: ## remove the environments; the next target creates them again
	rm -rf .venv .venv.lock .venv-gpu .venv-gpu.lock .venv-cookbook .venv-cookbook.lock .venv-agents
