# Each tier is for a moment of a contributor's work; the minutes are budgets of what processes are seen to
# compute on two cores (tests/durations.json). docs/development.md has those that pass.
#
# check: before every commit, 2 minutes. Style, types and layers; beside them the tests of one process.
# test: before merging, 9 minutes. check, and one cell of each kind of behaviour that takes several processes: ranks on
#   every axis, Ray, syncs, deaths, whole runs that resume. tests/durations.json is its budget.
# test-engines: after a change of rlframe/rollout or of an engine's version. The same contract for the embedded engine,
#   vLLM and SGLang, which lies in the folder SGLANG (tests/requirements-sglang-cpu.txt) or is installed, and the main job
#   with vLLM.
# test-thorough: before a release. Further cells of what test has: sweeps, other layouts, other moments to die, and runs.
#   SGLang's too, if it is installed or lies in the folder SGLANG.
# test-megatron-newest: after a change of rlframe/megatron. What depends on Megatron-Core, and main jobs, on its newest
#   release, which needs Python 3.12 or newer: the environment in the folder NEWEST (docs/development.md).
# test-mutations: plants every fault of tests/mutations/catalogue; each must be noticed by its test.
# docs: builds the site of docs/ into build/site, strictly and without a network.
# durations: on a machine that does nothing else; runs the tests of `test` and writes what each file takes.
export OMP_NUM_THREADS ?= 1
# The tests start a hundred processes, which would all compile the package anew.
export PYTHONDONTWRITEBYTECODE =
SGLANG ?= .
NEWEST ?= .venv312

QUICK = tests/unit tests/contracts tests/meta
ALL = tests/multiprocess tests/e2e tests/gpu tests/campaigns tests/mutations $(QUICK)
# Tests wait for a part of their time, on pauses, limits and other processes, which a third file at a time uses. One that
# waits for what never comes ends after ten minutes, with the stacks of its process.
PYTEST = python -m pytest --dist loadfile --no-loadscope-reorder -n 3 \
	-o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true
MEGATRON = tests/unit/megatron tests/contracts/test_model_family.py tests/multiprocess/megatron tests/multiprocess/checkpoint \
	tests/multiprocess/runs/endings/test_resume.py tests/e2e/test_runs.py
OF_SGLANG = PYTHONPATH=$(abspath $(SGLANG)):$(CURDIR)/tests/sglang_on_cpu python -m pytest -n 2 --dist loadgroup -k sglang \
	tests/contracts/engines tests/unit/rollout/sglang
USUAL = -m "not thorough and not engine"
FIRST = -m "not thorough and not engine and not later"

.PHONY: check docs durations lint test test-all test-engines test-megatron-newest test-mutations test-quick test-sglang test-thorough

# What is checked by one process alone runs beside the tests.
check:
	$(MAKE) --jobs 2 lint test-quick

lint:
	ruff check .
	ruff format --check .
	lint-imports
	pyright

test:
	$(MAKE) --jobs 2 lint test-all

test-quick:
	$(PYTEST) $(FIRST) $(QUICK)

test-all:
	$(PYTEST) $(USUAL) $(ALL)

docs:
	NO_MKDOCS_2_WARNING=1 python -m mkdocs build --quiet --config-file docs/site/mkdocs.yml

durations:
	RLFRAME_TESTS_QUIET=1 $(PYTEST) $(USUAL) -p tests.durations $(ALL)

test-engines: test-sglang
	python -m pytest -n 2 --dist loadgroup -m "not thorough" -k "not sglang" tests/contracts/engines \
		tests/unit/rollout/vllm tests/unit/tools/test_plan_sync.py tests/e2e/test_vllm.py

test-sglang:
	$(OF_SGLANG) -m "not thorough"

test-megatron-newest:
	PATH=$(abspath $(NEWEST))/bin:$$PATH $(PYTEST) $(USUAL) $(MEGATRON)

test-thorough:
	python -m pytest -m thorough tests/multiprocess tests/e2e tests/campaigns tests/unit tests/contracts
	$(OF_SGLANG) -m thorough

test-mutations:
	python -m tests.mutations --jobs 2
