"""Errors of allocators and engines are recognised, in an exception or in the log of a process that started."""

import pickle
from pathlib import Path

import pytest
import torch

from rlframe.cluster import memory
from rlframe.utils.errors import DataError, OutOfMemory, WorkerDied


def real_error() -> RuntimeError:
    """The CPU allocator's own."""
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 50)
    return caught.value


def named(error: Exception, log: Path, *, call: str = "train", begin: int = 0) -> Exception:
    """What crosses to the driver."""
    return memory.named(error, role="policy", rank=3, call=call, log=log, begin=begin)


@pytest.mark.parametrize(
    "error", [real_error(), torch.OutOfMemoryError("CUDA out of memory."), MemoryError()], ids=repr
)
def test_an_allocators_error_becomes_one_that_names_role_rank_and_call(error: Exception, tmp_path: Path) -> None:
    found = named(error, tmp_path / "policy-3.log")
    assert isinstance(found, OutOfMemory) and isinstance(found, WorkerDied)
    assert str(found).startswith("policy rank 3 ran out of the memory of the host in train: ")
    assert str(pickle.loads(pickle.dumps(found))) == str(found)
    told = found.explained("predicted 3 GB")
    assert str(pickle.loads(pickle.dumps(told))).endswith("\npredicted 3 GB")


def test_other_errors_stay_what_they_are(tmp_path: Path) -> None:
    for error in (RuntimeError("shapes differ"), ValueError("no"), DataError("out of memory is a record's text")):
        assert named(error, tmp_path / "none.log") is error


def test_an_engine_that_does_not_start_for_lack_of_memory_is_known_by_its_log(tmp_path: Path) -> None:
    log, error = tmp_path / "rollout-0.log", RuntimeError("Engine core initialization failed. See root cause above.")
    sign = (
        "ValueError: Free memory on device (3.1/139.8 GiB) is less than desired GPU memory utilization (0.5, 69.9 GiB)"
    )
    log.write_text(f"torch.OutOfMemoryError: of an earlier process\n{sign}\nlater words\n")
    begin = log.read_text().index("ValueError")
    found = named(error, log, call="start", begin=begin)
    assert isinstance(found, OutOfMemory) and sign in str(found)
    assert named(error, log, call="generate") is error
    assert named(error, log, call="start", begin=log.stat().st_size) is error
