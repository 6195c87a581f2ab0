# check: what every commit must pass, in about two minutes. test: check and everything that starts processes.
export OMP_NUM_THREADS ?= 1

.PHONY: check lint test

check: lint
	python -m pytest tests/unit tests/contracts tests/meta

lint:
	ruff check .
	ruff format --check .
	pyright
	lint-imports

# Two files at a time, those that start processes first: they wait as much as they compute.
test: lint
	python -m pytest -n 2 --dist loadfile tests/multiprocess tests/e2e tests/gpu tests/unit tests/contracts tests/meta
