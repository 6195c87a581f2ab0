"""Environment variables with which the processes of workers start.

A Ray that this program starts has them itself, and its workers inherit them. An actor with an environment of its own
costs 0.3 CPU seconds more: Ray asks an agent, and starts an interpreter that imports Ray only to set the variables.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rlframe.cluster.watch.flight import RING

FOR_WORKERS = {
    # Until the worker knows its own number; see `Worker`.
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Messages of Megatron and torch would otherwise be the last log lines that a failure shows.
    "PYTHONWARNINGS": "ignore",
    **RING,
}
"""Variables that every worker starts with."""


class _Inherited:
    """Variables that workers of the present Ray are known to start with."""

    variables: Mapping[str, str] = {}


def of_worker(own: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables that a worker's process would lack without being given them.

    Args:
        own: those that it needs besides FOR_WORKERS.
    """
    wanted = {**FOR_WORKERS, **own}
    return {name: value for name, value in wanted.items() if _Inherited.variables.get(name) != value}


@contextmanager
def inherited() -> Iterator[None]:
    """Gives FOR_WORKERS to the processes that are started inside the `with` block, and to theirs."""
    before = {name: os.environ.get(name) for name in FOR_WORKERS}
    os.environ |= FOR_WORKERS
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def known() -> Iterator[None]:
    """Records inside the `with` block that workers of the present Ray inherit FOR_WORKERS."""
    _Inherited.variables = FOR_WORKERS
    try:
        yield
    finally:
        _Inherited.variables = {}
