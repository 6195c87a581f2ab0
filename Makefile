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

test: lint
	python -m pytest tests
