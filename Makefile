# check: what every commit must pass, in about two minutes. test: check and everything that starts processes.
# test-mutations: plants every fault of tests/mutations/catalogue; each must be noticed by its test.
# test-sglang: what needs SGLang, which lies in the folder SGLANG (tests/requirements-sglang-cpu.txt), or is installed.
export OMP_NUM_THREADS ?= 1

.PHONY: check lint test test-mutations test-sglang test-thorough

check: lint
	python -m pytest tests/unit tests/contracts tests/meta

lint:
	ruff check .
	ruff format --check .
	pyright
	lint-imports

# Two files at a time, those that start processes first: they wait as much as they compute.
test: lint
	python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m "not thorough" \
		tests/multiprocess tests/e2e tests/gpu tests/campaigns tests/mutations tests/unit tests/contracts tests/meta

# Whole runs that are not in `test`.
test-thorough:
	python -m pytest -m thorough tests/multiprocess tests/e2e tests/campaigns tests/unit

test-mutations:
	python -m tests.mutations --jobs 2

test-sglang:
	PYTHONPATH=$(abspath $(SGLANG)):$(CURDIR)/tests/sglang_on_cpu python -m pytest -n 2 --dist loadfile -k sglang \
		tests/contracts/engines/test_sglang_engine.py tests/contracts/engines/test_rollout_engine.py
