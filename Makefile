# Every target sets up what it needs first: .venv, made and filled by tools/setup_env.py.
# ARGS goes to the program: make sum-digits ARGS="--trainer.optimizer.lr 3e-4", make test ARGS="-k grpo".
# make bench BENCH=train_step runs one benchmark alone, ARGS then being any of its options.
# PYTHON names the Python that .venv is made from (3.11 or 3.12).

SUPPORTED := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))
PYTHON ?= $(shell for p in python3 python3.12 python3.11; do $$p -c '$(SUPPORTED)' 2>/dev/null && echo $$p && exit; done; echo python3)
ARGS ?=
BENCH ?= grpo_vs_trl async_overlap time_to_reward weight_sync generator_step batch_invariant train_step observability
SETUP := $(PYTHON) tools/setup_env.py
RUN := .venv/bin/python
FAST := not medium and not slow and not browser
# Tests are shared by so many processes; 0, with which a debugger works, is this one alone.
WORKERS ?= 2
SHARED := -n $(WORKERS)

# No program here asks anything. A terminal as stdin would stop actors, which are background process
# groups, when a library of theirs initialises readline.
NO_INPUT := < /dev/null

.DEFAULT_GOAL := help
.PHONY: help setup sum-digits reverse-text alphabet-sort doctor report curves tinker-cookbook chaos test test-fast test-slow test-long test-report lint format types check bench golden hooks clean constraints docs clean-venv

help: ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

setup: ## .venv with everything that runs and tests need
	@$(SETUP) test trl tasks tinker sinks

sum-digits: ## train a tiny model on the digit-sum task, with real actors, on this machine
	@$(SETUP)
	$(RUN) -m rl.simple_grpo_sum_digits $(ARGS) $(NO_INPUT)

reverse-text: ## the same on reversing words
	@$(SETUP)
	$(RUN) -m rl.train --module reverse_text --config tiny $(ARGS) $(NO_INPUT)

alphabet-sort: ## the same on keeping a list sorted, three turns each
	@$(SETUP)
	$(RUN) -m rl.train --module alphabet_sort --config tiny $(ARGS) $(NO_INPUT)

doctor: ## what a run (RUN=outputs/<run>) is doing, whether it moves, and the stacks of its processes
	@test "$(origin RUN)" = "command line" || { echo "usage: make doctor RUN=outputs/<run>"; exit 2; }
	@.venv/bin/python -m rl.doctor $(RUN) $(ARGS)

report: ## the story of a run (RUN=outputs/<run>) as one HTML file, report.html in its folder
	@test "$(origin RUN)" = "command line" || { echo "usage: make report RUN=outputs/<run>"; exit 2; }
	@.venv/bin/python -m rl.report $(RUN) $(ARGS)

curves: ## both of these for two seeds and a control with a reward of noise: what was learnt, in a table
	@$(SETUP)
	$(RUN) -m benchmarks.curves --dump_folder outputs/curves $(ARGS) $(NO_INPUT)

tinker-cookbook: ## the Tinker cookbook's own recipes, unmodified, against this project's server: what each shows, in a table
	@$(SETUP) tinker
	$(RUN) -m tools.tinker_cookbook.main $(ARGS) $(NO_INPUT)

test: setup ## all tests but the slow ones: at most 15 minutes on 2 cores
	$(RUN) -m pytest $(SHARED) -m "not slow and not browser" $(ARGS) $(NO_INPUT)

test-fast: setup ## the tests that start no engine and no actor: at most 2 minutes
	$(RUN) -m pytest $(SHARED) -m "$(FAST)" $(ARGS) $(NO_INPUT)

test-slow: setup ## the slow tests, whole runs among them: at most 35 minutes
	$(RUN) -m pytest -m "slow and not long" $(ARGS) $(NO_INPUT)

test-long: setup ## slow tests that are not in it: more ways to lose a process, to be stopped and to go on
	$(RUN) -m pytest -m long $(ARGS) $(NO_INPUT)

test-report: ## the report in a headless browser, which is installed where there is none: at most 5 minutes
	@$(SETUP) test report
	@$(RUN) -m tools.browser
	$(RUN) -m pytest -m browser $(ARGS) tests/reporting $(NO_INPUT)

chaos: setup ## kill a process in each phase of a short run: recovered or not, how fast, numbers equal or not, in a table
	$(RUN) -m tools.chaos $(ARGS) $(NO_INPUT)

lint: setup ## ruff: rules and format
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

format: setup ## let ruff mend what it can
	$(RUN) -m ruff check --fix .
	$(RUN) -m ruff format .

types: setup ## mypy over everything
	$(RUN) -m mypy

check: lint types test-fast ## what has to be clean before a commit

bench: setup ## speed: whole steps beside TRL, sync and async, time to a reward, weights, generator steps, batch invariance, training steps, the cost of observability
	@set -e; for name in $(BENCH); do (set -x; $(RUN) -m benchmarks.$$name $(ARGS) $(NO_INPUT)); done

golden: setup ## losses of ten steps of the tiny config, renewed for this machine: old and new side by side
	$(RUN) -m tests.training.golden

hooks: ## git hooks: lint and types before a commit, fast tests before a push
	@$(SETUP) test trl tasks tinker sinks hooks
	$(RUN) -m pre_commit install --hook-type pre-commit --hook-type pre-push

clean: ## caches and build leftovers; runs in outputs/ and .venv stay
	rm -rf .mypy_cache .ruff_cache .pytest_cache .venv.lock build dist *.egg-info
	find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +

docs: setup ## docs/options.md, from the config classes
	$(RUN) -m tools.options

constraints: setup ## the versions that the set-up installs, resolved anew into tools/constraints-*.txt
	.venv/bin/python -m tools.resolve_constraints

clean-venv: ## the environments; the next target makes them anew
	rm -rf .venv .venv.lock .venv-cookbook .venv-cookbook.lock
