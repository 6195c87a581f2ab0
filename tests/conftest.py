"""What every test shares: one thread per process, long files first, and no GPU test where there is no GPU."""

import json
import os

# Before torch is imported: the suite shares its cores with worker processes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from tests.durations import RECORD


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets workers of pytest-xdist begin with the files that take longest, so that none is left with one at the end.
    Skips tests marked `gpu` on a machine without a CUDA device."""
    if "PYTEST_XDIST_WORKER" in os.environ and RECORD.exists():
        seconds = json.loads(RECORD.read_text())["cpu_s"]
        files = [item.nodeid.partition("::")[0] for item in items]
        order = sorted(range(len(items)), key=lambda index: (-seconds.get(files[index], 0.0), files[index], index))
        items[:] = [items[index] for index in order]
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
